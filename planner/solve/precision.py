"""Gradients that must not be reduced before they are cast to float32.

``precision="bf16-mixed"`` promises gradient sums in float32: ``mm -> [bfloat16, partial] -> cast -> [float32, partial] ->
reduce_scatter``. Reducing the bfloat16 value instead would move half the bytes and add in bfloat16, so the plan may not.
"""

from __future__ import annotations

import torch

from meshwright.planner.ir.graph import Op, OpGraph

# Ops through which a gradient passes unchanged (or is added up) on its way to the cast.
_CARRIERS = frozenset(
    {
        "aten.permute.default",
        "aten.reshape.default",
        "aten.view.default",
        "aten.t.default",
        "aten.transpose.int",
        "aten.add.Tensor",
    }
)
_CAST = "aten._to_copy.default"


def unreduced_values(graph: OpGraph) -> frozenset[str]:
    """Values below float32 that only lead to parameters' float32 gradients, through a cast."""
    gradients = {o.value.name for o in graph.outputs_of("gradient") if o.value is not None}
    carried = set(gradients)
    found: set[str] = set()
    for op in reversed(graph.ops):
        for out in op.outs:
            readers = graph.consumers.get(out.name, ()) if out is not None else ()
            if out is None or not readers or out.name in gradients:
                continue
            if not _low(out.dtype):
                if all(_carries(reader, carried) for reader in readers):
                    carried.add(out.name)
            elif all(_carries(reader, found) or _casts(reader, carried) for reader in readers):
                found.add(out.name)
    return frozenset(found)


def _low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _carries(reader: Op, into: set[str]) -> bool:
    """Whether ``reader`` passes the value on to one of ``into``."""
    return reader.target in _CARRIERS and reader.outs[0] is not None and reader.outs[0].name in into


def _casts(reader: Op, into: set[str]) -> bool:
    """Whether ``reader`` casts the value up to one of ``into``."""
    out = reader.outs[0]
    return reader.target == _CAST and out is not None and not _low(out.dtype) and out.name in into
