"""Reductions and scans: a sharded dim that is reduced leaves a partial result."""

from __future__ import annotations

from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.spec import Row
from meshwright.planner.rules.factors import Dims, Factors, factor_rows
from meshwright.planner.rules.registry import Rows, rule

REDUCTIONS: dict[str, str | None] = {
    "aten.sum.default": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.mean.default": "sum",
    "aten.mean.dim": "sum",
    "aten.amax.default": "max",
    "aten.amin.default": "min",
    "aten.max.default": "max",
    "aten.min.default": "min",
    **dict.fromkeys(
        (
            "aten.any.default",
            "aten.any.dim",
            "aten.any.dims",
            "aten.all.default",
            "aten.all.dim",
            "aten.all.dims",
            "aten.prod.default",
            "aten.prod.dim_int",
            "aten.logsumexp.default",
            "aten.linalg_vector_norm.default",
            "aten.var.correction",
            "aten.std.correction",
            "aten.var_mean.correction",
            "aten.argmax.default",
            "aten.argmin.default",
            "aten.max.dim",
            "aten.min.dim",
            "aten.median.dim",
            "aten.mode.default",
            "aten.count_nonzero.dim_IntList",
        )
    ),
}
"""Target to the operation that completes its pieces; None where nothing does (reduced dims then stay whole).

A mean's piece is scaled to be an addend: local sum / global count."""

LINEAR = ("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")

DIMS_AT = {"aten.linalg_vector_norm.default": 2}
"""Position of the reduced dims among the arguments, where it is not 1."""


@rule(*REDUCTIONS)
def reduction(op: Op) -> Rows:
    """``sum [A, B] over 1``: ``S(0) -> S(0)``, ``S(1) -> P``, ``P -> P``; ``amax`` likewise with ``P(max)``."""
    shape = op.ins[0].shape
    reduced = reduced_dims(op)
    src: Dims = tuple((d,) for d in range(len(shape)))
    outs = tuple(None if v is None else _kept(src, reduced, len(v.shape)) for v in op.outs)
    linear = [(0,)] if op.target in LINEAR else []
    return factor_rows(op, Factors((src,), outs, dict(enumerate(shape))), contract=REDUCTIONS[op.target], linear=linear)


def reduced_dims(op: Op) -> set[int]:
    """The dims that a reduction removes; all of them where none is given."""
    ndim = len(op.ins[0].shape)
    dims = op.arg(DIMS_AT.get(op.target, 1), op.kwarg("dim"))
    if op.target.endswith(".default") and op.target.split(".")[1] in ("sum", "mean", "max", "min", "any", "all", "prod"):
        dims = None
    if dims is None or dims == ():
        return set(range(ndim))
    return {d % max(ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims)}


def _kept(src: Dims, reduced: set[int], ndim: int) -> Dims:
    """Dims of the result, with or without the reduced ones."""
    if ndim == len(src):
        return tuple(() if d in reduced else dim for d, dim in enumerate(src))
    return tuple(dim for d, dim in enumerate(src) if d not in reduced)


SCANS = {
    **dict.fromkeys(("aten.cumsum.default",), True),
    **dict.fromkeys(
        (
            "aten.cumprod.default",
            "aten.logcumsumexp.default",
            "aten.cummax.default",
            "aten.cummin.default",
            "aten.sort.default",
            "aten.argsort.default",
        ),
        False,
    ),
}
"""Ops along one dim that keep the shape, and whether they are linear."""


@rule(*SCANS, "aten.sort.stable", "aten.argsort.stable")
def scan(op: Op) -> Rows:
    """All dims but the one that is scanned or sorted."""
    keyword = op.target.endswith(".stable")
    dim = op.kwarg("dim", -1) if keyword else op.arg(1, -1)
    return along_dim(op, dim, linear=SCANS.get(op.target, False))


@rule("aten.topk.default", "aten.kthvalue.default")
def topk(op: Op) -> Rows:
    """All dims but the one that is searched."""
    return along_dim(op, op.arg(2, -1))


def along_dim(op: Op, dim: int, *, linear: bool = False) -> list[Row]:
    """Rows of an op that treats every line along ``dim`` by itself: all other dims."""
    shape = op.ins[0].shape
    dim = dim % max(len(shape), 1)
    src: Dims = tuple((d,) if d != dim else () for d in range(len(shape)))
    outs = tuple(None if v is None else (src if len(v.shape) == len(shape) else tuple(d for d in src if d)) for v in op.outs)
    return factor_rows(op, Factors((src,), outs, dict(enumerate(shape))), contract=None, linear=[(0,)] if linear else [])
