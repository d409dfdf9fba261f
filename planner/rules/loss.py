"""Embedding tables and cross-entropy, cut over the vocabulary too: they decide whether tensor parallelism pays there."""

from __future__ import annotations

from typing import Any

from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.spec import R, Row
from meshwright.planner.rules.factors import Dims, Factors, factor_rows
from meshwright.planner.rules.registry import Rows, rule

MEAN = 1
SUM = 2


@rule("aten.embedding.default")
def embedding(op: Op) -> Rows:
    """``(weight [V,D], indices) -> out``: dims of the indices, ``D``, and ``V``: ``S(0),R -> P``; linear in the weight."""
    weight, indices = op.ins
    names: Dims = tuple((d,) for d in range(len(indices.shape)))
    sizes: dict[Any, int] = {**dict(enumerate(indices.shape)), "V": weight.shape[0], "D": weight.shape[1]}
    return factor_rows(op, Factors(((("V",), ("D",)), names), ((*names, ("D",)),), sizes), linear=[(0,)])


@rule("aten.embedding_dense_backward.default")
def embedding_backward(op: Op) -> Rows:
    """``(gout, indices) -> gweight [V,D]``: dims of the indices leave ``P``, ``V``: ``R,R -> S(0)``; linear in ``gout``."""
    gout, indices = op.ins
    names: Dims = tuple((d,) for d in range(len(indices.shape)))
    sizes: dict[Any, int] = {**dict(enumerate(indices.shape)), "V": op.args[2], "D": gout.shape[-1]}
    counts_in_batch = range(len(indices.shape)) if op.arg(4, False) else ()
    factors = Factors(((*names, ("D",)), names), ((("V",), ("D",)),), sizes)
    return factor_rows(op, factors, linear=[(0,)], whole=counts_in_batch)


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll(op: Op) -> Rows:
    """``(logp [N,C,...], target [N,...], weight?) -> loss, total weight`` (summed): positions and classes leave ``P,P``.

    A mean cannot be put together from pieces; capture takes it apart into sums. Unreduced, classes leave ``P``."""
    logp, target = op.ins[0].shape, op.ins[1].shape
    reduction = op.args[3]
    positions, classes = _names(logp)
    weights: tuple[Dims, ...] = (classes,)[: len(op.ins) - 2]
    factors = Factors(
        (_logp(logp), positions if target else (), *weights),
        (() if reduction == SUM else positions, ()),
        dict(enumerate(logp)),
    )
    rows = [] if reduction == MEAN else factor_rows(op, factors)
    return rows if reduction == SUM else [Row(r.ins, (r.outs[0], R)) for r in rows]


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_backward(op: Op) -> Rows:
    """``(gloss, logp, target, weight?, total weight) -> glogp``: positions and classes; linear in ``gloss``."""
    logp = op.ins[1].shape
    positions, classes = _names(logp)
    gloss: Dims = positions if op.ins[0].shape else ()
    weights: tuple[Dims, ...] = (classes,)[: len(op.ins) - 4]
    factors = Factors((gloss, _logp(logp), positions, *weights, ()), (_logp(logp),), dict(enumerate(logp)))
    return factor_rows(op, factors, linear=[(0,)])


def _names(logp: tuple[int, ...]) -> tuple[Dims, Dims]:
    """(dims of the target, dim of the class weights): ``[N, C, H, W]`` has positions N, H, W."""
    at = class_dim(len(logp))
    return tuple((d,) for d in range(len(logp)) if d != at), ((at,),)


def _logp(logp: tuple[int, ...]) -> Dims:
    return tuple((d,) for d in range(len(logp)))


def class_dim(ndim: int) -> int:
    """Which dim of the log-probabilities counts classes: ``[C]`` or ``[N, C, ...]``."""
    return 0 if ndim == 1 else 1
