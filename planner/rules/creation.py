"""Ops that make tensors from nothing: each rank may make just its piece."""

from __future__ import annotations

from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.spec import P, R, Row, S
from meshwright.planner.rules.factors import summable
from meshwright.planner.rules.registry import Rows, rule

CONSTANT = (
    "aten.full.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.empty.memory_format",
    "aten.scalar_tensor.default",
)
LIKE = ("aten.full_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.empty_like.default")
NEW = ("aten.new_full.default", "aten.new_zeros.default", "aten.new_ones.default", "aten.new_empty.default")


@rule(*CONSTANT)
def constant(op: Op) -> Rows:
    """``-> S(d)`` for every dim, ``-> P`` for zeros."""
    return [*(Row((), (S(d),)) for d in _dims(op)), *([Row((), (P,))] if is_zero(op) else [])]


@rule(*LIKE)
def like(op: Op) -> Rows:
    """``S(d) -> S(d)``, ``P -> R`` (the input's values are not read), ``P -> P`` for zeros."""
    rows = [Row((S(d),), (S(d),)) for d in _dims(op)]
    rows.append(Row((P,), (R,)))
    return [*rows, *(Row((p,), (P,)) for p in (P, R) if is_zero(op))]


@rule(*NEW)
def new(op: Op) -> Rows:
    """Any placement of the input, whose values are not read, to any of the result."""
    ins = [R, P, *(S(d) for d, n in enumerate(op.ins[0].shape) if n > 1)]
    outs = [R, *(S(d) for d in _dims(op)), *([P] if is_zero(op) else [])]
    return [Row((i,), (o,)) for i in ins for o in outs]


@rule("meshwright.uniform.default", "aten.arange")
def positional(op: Op) -> Rows:
    """``seed: R -> S(d)``: what each element is depends on its place, which the local form is told."""
    return [Row((R,) * len(op.ins), (S(d),)) for d in _dims(op)]


def _dims(op: Op) -> list[int]:
    out = op.outs[0]
    assert out is not None
    return [d for d, n in enumerate(out.shape) if n > 1]


def is_zero(op: Op) -> bool:
    """Whether the op makes zeros, which are a sum of zeros."""
    out = op.outs[0]
    if out is None or not summable(out):
        return False
    fill = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(op.target.split(".")[1])
    return "zeros" in op.target or (fill is not None and op.arg(fill) == 0)
