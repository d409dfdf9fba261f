"""Kernels that read memory in one order whatever the strides say: their inputs are made dense first.

Found by proving every op on inputs with a reversed layout (torch 2.13, CPU): layer norm's backward, group norm's backward
and attention then give wrong numbers without an error. Autograd hands them dense tensors; a rewritten graph need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.planner.ir.graph import Op

DENSE: dict[str, tuple[int, ...]] = {
    "aten.native_layer_norm_backward.default": (2, 3),
    "aten.native_group_norm.default": (0,),
    "aten.native_group_norm_backward.default": (0, 1, 2, 3),
    "aten.nll_loss2d_backward.default": (1,),
}
"""Inputs that must be contiguous."""

_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

DENSE_ROWS: dict[str, tuple[int, ...]] = {
    **{f"aten._scaled_dot_product_{kernel}.default": (0, 1, 2) for kernel in _ATTENTION},
    **{f"aten._scaled_dot_product_{kernel}_backward.default": (0, 1, 2, 3, 4) for kernel in _ATTENTION},
}
"""Inputs whose last dim must have stride 1; other strides are free, and copying them would cost as much as the op reads."""


def dense_inputs(op: Op, inputs: Sequence[Any], call: Callable[..., Any]) -> tuple[Any, ...]:
    """The inputs, with those that the kernel would misread made contiguous (no copy where they are)."""
    always, rows = DENSE.get(op.target, ()), DENSE_ROWS.get(op.target, ())
    return tuple(
        call(torch.ops.aten.contiguous.default, x) if i in always or (i in rows and not _rows_are_dense(x)) else x
        for i, x in enumerate(inputs)
    )


def _rows_are_dense(x: Any) -> bool:
    """Whether the last dim is known to have stride 1 (a node's layout is that of its fake value)."""
    tensor = x.meta.get("val") if isinstance(x, fx.Node) else x
    return isinstance(tensor, torch.Tensor) and (tensor.dim() == 0 or tensor.stride(-1) == 1)
