"""Random inputs for one op, as its kernel accepts them: indices in range, positive numbers where logarithms are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.planner.ir.graph import Op, Value

Tensors = tuple[torch.Tensor, ...]


def random_inputs(op: Op, seed: int = 0) -> Tensors:
    """One random tensor per ``op.ins``; a value that occurs twice gets one tensor.

    Floats are of order 1, integers small and positive, booleans fair coins; indices are in range for the ops of
    :data:`INDICES`.
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for i, value in enumerate(op.ins):
        if value.name not in made:
            made[value.name] = _random(op, i, value, generator)
    return tuple(made[v.name] for v in op.ins)


def in_double(op: Op) -> Op:
    """The op with every floating type float64, so that rounding hides no wrong row and fails no right one."""

    def convert(arg: Any) -> Any:
        if isinstance(arg, Value):
            return replace(arg, dtype=convert(arg.dtype))
        if isinstance(arg, tuple):
            return tuple(map(convert, arg))
        return torch.float64 if isinstance(arg, torch.dtype) and arg.is_floating_point else arg

    return replace(op, args=convert(op.args), kwargs=convert(op.kwargs), ins=convert(op.ins), outs=convert(op.outs))


def _random(op: Op, index: int, value: Value, generator: torch.Generator) -> torch.Tensor:
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.dtype.is_floating_point:
        x = torch.randn(value.shape, generator=generator).to(value.dtype)
        return x.abs() + 0.1 if _positive(op, index) else x
    limit = INDICES.get(op.target, {}).get(index)
    low, high = (1, 6) if limit is None else (0, limit(op))
    return torch.randint(low, high, value.shape, generator=generator).to(value.dtype)


POSITIVE: dict[str, tuple[int, ...]] = {
    "aten.log.default": (0,),
    "aten.log2.default": (0,),
    "aten.log1p.default": (0,),
    "aten.sqrt.default": (0,),
    "aten.rsqrt.default": (0,),
    "aten.pow.Tensor_Scalar": (0,),
    "aten.pow.Tensor_Tensor": (0,),
    "aten.div.Tensor": (1,),
    "aten.reciprocal.default": (0,),
    "aten.native_group_norm_backward.default": (3,),
    "aten.native_layer_norm_backward.default": (3,),
    "aten.nll_loss_forward.default": (2,),
    "aten.nll_loss_backward.default": (3, 4),
}
"""Which inputs must be positive."""


def _positive(op: Op, index: int) -> bool:
    return index in POSITIVE.get(op.target, ())


def _rows(op: Op) -> int:
    return op.ins[0].shape[0]


def _classes(op: Op) -> int:
    shape = next(v.shape for v in op.ins if v.dtype.is_floating_point and len(v.shape) > 0)
    return shape[0 if len(shape) == 1 else 1]


def _along_dim(op: Op) -> int:
    shape = op.ins[0].shape
    return shape[op.args[1] % len(shape)]


def _indexed(op: Op) -> int:
    """The smallest indexed dim, which every index tensor is then in range for."""
    return min(n for n, i in zip(op.ins[0].shape, op.args[1], strict=False) if i is not None)


def _pooled(op: Op) -> int:
    """Positions of one image, for the indices that a pooling remembers."""
    return op.ins[1].shape[-1] * op.ins[1].shape[-2]


_EVERY_INDEX = dict.fromkeys(range(1, 8), _indexed)

INDICES: dict[str, Mapping[int, Callable[[Op], int]]] = {
    "aten.embedding.default": {1: _rows},
    "aten.embedding_dense_backward.default": {1: lambda op: op.args[2]},
    "aten.nll_loss_forward.default": {1: _classes},
    "aten.nll_loss_backward.default": {2: _classes},
    "aten.nll_loss2d_forward.default": {1: _classes},
    "aten.nll_loss2d_backward.default": {2: _classes},
    "aten.gather.default": {1: _along_dim},
    "aten.scatter.src": {1: _along_dim},
    "aten.scatter.value": {1: _along_dim},
    "aten.scatter_add.default": {1: _along_dim},
    "aten.index_select.default": {1: _along_dim},
    "aten.index_add.default": {1: _along_dim},
    "aten.index.Tensor": _EVERY_INDEX,
    "aten._unsafe_index.Tensor": _EVERY_INDEX,
    "aten.index_put.default": _EVERY_INDEX,
    "aten._unsafe_index_put.default": _EVERY_INDEX,
    "aten.max_pool2d_with_indices_backward.default": {2: _pooled},
}
"""Target to (input index to the exclusive limit of its values)."""
