"""Element-wise ops: every dim is a factor, aligned from the right; size-1 dims broadcast.

Most carry no partial sums. The table below says in which operands an op is linear, and so may be partial.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.rules.factors import Dims, Factors, factor_rows
from meshwright.planner.rules.registry import POINTWISE, Rows, rule

Groups = list[tuple[int, ...]]


def _each_or_first(op: Op) -> Groups:
    """Bilinear: ``mul(P, R)``, ``mul(R, P)``, ``mul(P, 2.0)``."""
    return [(i,) for i in range(len(op.ins))]


def _together(op: Op) -> Groups:
    """Jointly linear: ``add(P, P)``; adding a number is not linear."""
    return [(0, 1)] if len(op.ins) == 2 else []


def _numerator(op: Op) -> Groups:
    """``div(P, R)``, exact division only."""
    return [(0,)] if isinstance(op.arg(0), Value) and op.kwarg("rounding_mode") is None else []


def _first(op: Op) -> Groups:
    return [(0,)]


def _branches(op: Op) -> Groups:
    """``where(R, P, P)``, or one partial branch beside the number zero."""
    if len(op.ins) == 3:
        return [(1, 2)]
    number = op.arg(2) if isinstance(op.arg(1), Value) else op.arg(1)
    return [(1,)] if len(op.ins) == 2 and number == 0 else []


def _fill_zero(op: Op) -> Groups:
    return [(0,)] if op.arg(2) == 0 else []


def _cast(op: Op) -> Groups:
    """Casts to floating or wider integer types keep sums; to booleans or from floats to integers they do not."""
    src, dst = op.ins[0].dtype, op.outs[0].dtype  # type: ignore[union-attr]
    return [(0,)] if dst.is_floating_point or dst.is_complex or not src.is_floating_point else []


LINEAR: dict[str, Callable[[Op], Groups]] = {
    "aten.add.Tensor": _together,
    "aten.sub.Tensor": _together,
    "aten.mul": _each_or_first,
    "aten.div.Tensor": _numerator,
    "aten.div.Scalar": _numerator,
    "aten.neg.default": _first,
    "aten.positive.default": _first,
    "aten.clone.default": _first,
    "aten.alias.default": _first,
    "aten.detach.default": _first,
    "aten.contiguous.default": _first,
    "aten.lift_fresh_copy.default": _first,
    "aten._to_copy.default": _cast,
    "aten.copy.default": lambda op: [(1,)],
    "aten.where": _branches,
    "aten.masked_fill.Scalar": _fill_zero,
    "aten.addcmul.default": lambda op: [(0, 1), (0, 2)],
    "aten.addcdiv.default": lambda op: [(0, 1)],
    "aten.lerp.Scalar": _together,
    "aten.lerp.Tensor": _together,
    **dict.fromkeys(
        [
            f"aten.{name}_backward"
            for name in [
                "threshold",
                "gelu",
                "silu",
                "mish",
                "tanh",
                "sigmoid",
                "hardtanh",
                "hardswish",
                "hardsigmoid",
                "leaky_relu",
                "elu",
                "softplus",
                "logit",
            ]
        ],
        _first,
    ),
}
"""Target (or packet) to the groups of inputs in which it is linear. A ``*_backward`` is linear in the gradient."""

IDENTITIES = (
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten._to_copy.default",
    "aten.contiguous.default",
)
"""Also hold where pieces are uneven: they may stand between a parameter at rest and its gather."""

UNTAGGED = (
    "aten.elu_backward",
    "aten.hardtanh_backward",
    "aten.hardswish_backward",
    "aten.hardsigmoid_backward",
    "aten.leaky_relu_backward",
    "aten.softplus_backward",
    "aten.logit_backward",
    "aten.mish_backward",
    "aten.floor_divide",
    "aten.lift_fresh_copy",
    "aten.copy",
    "aten.fill",
    "aten._log_sigmoid_backward",
    "aten.gelu",
    "aten.leaky_relu",
    "aten.elu",
    "aten.hardtanh",
    "aten.hardswish",
    "aten.hardsigmoid",
    "aten.softplus",
    "aten.mish",
    "aten.logit",
    "aten._conj",
    "aten.where",
    "aten.masked_fill",
)
"""Element-wise, but without torch's ``pointwise`` tag in some release."""


@rule(POINTWISE, *UNTAGGED, *LINEAR)
def pointwise(op: Op) -> Rows | None:
    """``mul [B,S,H],[H]``: ``S(0),R -> S(0)``, ``S(1),R -> S(1)``, ``S(2),S(0) -> S(2)``, ``P,R -> P``, ``R,P -> P``."""
    made = [v for v in op.outs if v is not None]
    if not made or any(v.shape != made[0].shape for v in made):
        return None
    shape = made[0].shape
    groups = LINEAR.get(op.target) or LINEAR.get(op.target.rpartition(".")[0])
    ndim = len(shape)
    if any(len(v.shape) > ndim for v in op.ins):
        return None
    factors = Factors(
        tuple(aligned(v.shape, shape) for v in op.ins),
        tuple(None if v is None else aligned(v.shape, shape) for v in op.outs),
        dict(enumerate(shape)),
    )
    linear = groups(op) if groups else []
    return factor_rows(op, factors, contract=None, linear=linear, uneven=op.target in IDENTITIES)


def aligned(shape: tuple[int, ...], to: tuple[int, ...]) -> Dims:
    """Dims of ``shape`` named by the dims of ``to`` that they face; broadcast dims stay whole."""
    offset = len(to) - len(shape)
    return tuple((offset + d,) if n == to[offset + d] else () for d, n in enumerate(shape))


@rule("aten.bucketize.Tensor", "aten.searchsorted.Tensor")
def lookup(op: Op) -> Rows | None:
    """``bucketize(x, boundaries)``: every dim of ``x`` with the whole boundaries."""
    x, table = (op.ins[0], op.ins[1]) if op.target.startswith("aten.bucketize") else (op.ins[1], op.ins[0])
    if len(op.ins) != 2 or len(table.shape) != 1:
        return None
    names: Dims = tuple((d,) for d in range(len(x.shape)))
    whole: Dims = ((),)
    ins = (names, whole) if op.ins[0] is x else (whole, names)
    return factor_rows(op, Factors(ins, (names,), dict(enumerate(x.shape))))


@rule("aten.isin.Tensor_Tensor")
def isin(op: Op) -> Rows:
    """``isin(x, tests)``: every dim of ``x`` with the whole tests."""
    names: Dims = tuple((d,) for d in range(len(op.ins[0].shape)))
    whole: Dims = ((),) * len(op.ins[1].shape)
    return factor_rows(op, Factors((names, whole), (names,), dict(enumerate(op.ins[0].shape))))
