"""Ops whose result depends on which piece a rank has: the rank's offset enters as a constant."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.passes.local.piece import Piece, form
from meshwright.planner.ir.spec import format_placements

aten = torch.ops.aten
Results = tuple[Any | None, ...]

OUTSIDE = -100
"""Class number that stands for "not in this shard": negative, so that it is no class."""


@form("aten.embedding.default")
def embedding(piece: Piece) -> Results:
    """A vocabulary shard looks up its own rows and leaves zeros for the rest: an addend of the result."""
    if piece.ways(piece.spec.ins[0], 0) == 1:
        return piece.default()
    weight, indices = piece.inputs
    start, length = piece.span(piece.spec.ins[0], 0, piece.op.ins[0].shape[0])
    local, outside = _rebased(piece, indices, start, length)
    local = piece.call(aten.masked_fill.Scalar, local, outside, 0)
    rows = piece.call(aten.embedding.default, weight, local)
    outside = piece.call(aten.unsqueeze.default, outside, -1)
    return (piece.call(aten.masked_fill.Scalar, rows, outside, 0),)


@form("aten.embedding_dense_backward.default")
def embedding_backward(piece: Piece) -> Results:
    """A vocabulary shard sums the gradients of its own rows; all others go to one spare row that is cut off."""
    placements = piece.spec.outs[0]
    assert placements is not None
    if piece.ways(placements, 0) == 1:
        return piece.default()
    gout, indices, num_weights, padding, by_frequency = piece.args
    start, length = piece.span(placements, 0, num_weights)
    local, outside = _rebased(piece, indices, start, length)
    if padding >= 0:  # also where another rank holds that row, so that all ranks run the same ops
        outside = piece.call(aten.logical_or.default, outside, piece.call(aten.eq.Scalar, indices, padding))
    local = piece.call(aten.masked_fill.Scalar, local, outside, length)
    rows = piece.call(aten.embedding_dense_backward.default, gout, local, length + 1, -1, by_frequency)
    return (piece.call(aten.slice.Tensor, rows, 0, 0, length),)


@form("aten.gather.default")
def gather(piece: Piece) -> Results:
    """A piece of the dim that is gathered from gives what it holds and zeros for the rest: an addend of the result."""
    shape = piece.op.ins[0].shape
    dim = piece.op.args[1] % max(len(shape), 1)
    if piece.ways(piece.spec.ins[0], dim) == 1:
        return piece.default()
    x, indices = piece.inputs
    local, outside = _rebased(piece, indices, *piece.span(piece.spec.ins[0], dim, shape[dim]))
    local = piece.call(aten.masked_fill.Scalar, local, outside, 0)
    found = piece.call(aten.gather.default, x, dim, local)
    return (piece.call(aten.masked_fill.Scalar, found, outside, 0),)


def _rebased(piece: Piece, indices: Any, start: int, length: int) -> tuple[Any, Any]:
    """Indices counted from ``start``, and which of them lie outside ``[0, length)``."""
    local = piece.call(aten.sub.Tensor, indices, start)
    below, above = piece.call(aten.lt.Scalar, local, 0), piece.call(aten.ge.Scalar, local, length)
    return local, piece.call(aten.logical_or.default, below, above)


@form("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll(piece: Piece) -> Results:
    """A class shard counts the targets of its own classes."""
    return _nll(piece, logp=0, target=1, ignore=4)


@form("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_backward(piece: Piece) -> Results:
    """A class shard fills in the targets of its own classes."""
    return _nll(piece, logp=1, target=2, ignore=5)


def _nll(piece: Piece, *, logp: int, target: int, ignore: int) -> Results:
    """Map targets outside this shard, and those to ignore, to one class number that is ignored."""
    shape = piece.op.ins[logp].shape
    dim = 0 if len(shape) == 1 else 1
    placements = piece.spec.ins[logp]
    if piece.ways(placements, dim) == 1:
        return piece.default()
    args = list(piece.args)
    start, length = piece.span(placements, dim, shape[dim])
    local, outside = _rebased(piece, args[target], start, length)
    ignored = piece.call(aten.eq.Scalar, args[target], args[ignore])
    outside = piece.call(aten.logical_or.default, outside, ignored)
    args[target] = piece.call(aten.masked_fill.Scalar, local, outside, OUTSIDE)
    args[ignore] = OUTSIDE
    return piece.default(args=args)


@form("aten.arange")
def arange(piece: Piece) -> Results:
    """``arange(0, 8)`` at piece 1 of 2: ``arange(4, 8)``."""
    out, placements = piece.op.outs[0], piece.spec.outs[0]
    assert out is not None and placements is not None
    if piece.ways(placements, 0) == 1:
        return piece.default()
    given = [*piece.op.args]
    first, step = (0, 1) if len(given) == 1 else (given[0], given[2] if len(given) > 2 else 1)
    start, length = piece.span(placements, 0, out.shape[0])
    bounds = first + start * step, first + (start + length) * step, step
    kwargs = {"dtype": out.dtype, **{k: v for k, v in piece.kwargs.items() if k != "dtype"}}
    return (piece.call(aten.arange.start_step, *bounds, **kwargs),)


@form("meshwright.uniform.default")
def uniform(piece: Piece) -> Results:
    """The op itself draws the piece, given where it lies."""
    placements = piece.spec.outs[0]
    assert placements is not None
    if not any(p.is_shard for p in placements):
        return piece.default()
    args = list(piece.args)
    args[3:6] = format_placements(placements), list(piece.sizes), list(piece.coordinate)
    return piece.default(args=args)
