"""Ops with sizes or counts among their arguments: these become the piece's."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshwright.passes.local.piece import Piece, form

aten = torch.ops.aten
Results = tuple[Any | None, ...]

SHAPE_AT = {
    "aten.expand.default": 1,
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.new_full.default": 1,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 1,
    "aten.select_backward.default": 1,
    "aten.upsample_nearest1d_backward.default": 2,
    "aten.upsample_nearest2d_backward.default": 2,
    "aten.upsample_linear1d_backward.default": 2,
    "aten.upsample_bilinear2d_backward.default": 2,
    "aten.upsample_bicubic2d_backward.default": 2,
}
"""Position of the argument that is the result's shape."""


@form(*SHAPE_AT)
def sized(piece: Piece) -> Results:
    """``expand(x, [8, 4])`` with dim 0 cut in 2: ``expand(x, [4, 4])``."""
    args = list(piece.args)
    args[SHAPE_AT[piece.op.target]] = list(piece.out_shape())
    return piece.default(args=args)


@form("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.squeeze", "aten.view_as")
def reshaped(piece: Piece) -> Results:
    """Always ``reshape`` to the piece's shape: after a redistribution the layout need not allow a view."""
    return (piece.call(aten.reshape.default, piece.inputs[0], list(piece.out_shape())),)


@form("aten.slice.Tensor", "aten.slice_backward.default")
def sliced(piece: Piece) -> Results:
    """A dim cut in groups gives each rank its part of the one group that the slice takes."""
    backward = piece.op.target == "aten.slice_backward.default"
    args = list(piece.args)
    at = 2 if backward else 1
    args += [0, None, None, 1][len(args) - at :] if len(args) < at + 4 else []
    full = piece.op.outs[0] if backward else piece.op.ins[0]
    full_placements = piece.spec.outs[0] if backward else piece.spec.ins[0]
    part_shape = piece.in_shape() if backward else piece.out_shape()
    assert full is not None and full_placements is not None
    dim = args[at] % len(full.shape)
    ways = piece.ways(full_placements, dim)
    if backward:
        args[1] = list(piece.out_shape())
    if ways > 1:
        start = args[at + 1] or 0
        start = (start + full.shape[dim] if start < 0 else start) // ways
        args[at + 1], args[at + 2] = start, start + part_shape[dim]
    return piece.default(args=args)


@form("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def split(piece: Piece) -> Results:
    """Lengths of the local pieces."""
    dim = piece.op.arg(2, 0)
    lengths = [piece.out_shape(i)[dim] for i in range(len(piece.op.outs))]
    made = piece.call(aten.split_with_sizes.default, piece.inputs[0], lengths, dim)
    return piece.results(made)


@form("aten.native_group_norm.default")
def group_norm(piece: Piece) -> Results:
    """``N``, ``C`` and the number of groups are the piece's."""
    (n, c, *_), groups = piece.in_shape(0), piece.out_shape(1)[1]
    args = list(piece.args)
    args[3], args[4], args[6] = n, c, groups
    return piece.default(args=args)


@form("aten.native_group_norm_backward.default")
def group_norm_backward(piece: Piece) -> Results:
    """``N``, ``C`` and the number of groups are the piece's."""
    (n, c, *_), groups = piece.in_shape(0), piece.in_shape(2)[1]
    args = list(piece.args)
    args[5], args[6], args[8] = n, c, groups
    return piece.default(args=args)


@form("aten.convolution.default")
def convolution(piece: Piece) -> Results:
    """Groups cut with the channels leave each rank its part of them."""
    args = list(piece.args)
    if args[8] > 1:
        args[8] //= piece.ways(piece.spec.ins[0], 1)
    return piece.default(args=args)


@form("aten.convolution_backward.default")
def convolution_backward(piece: Piece) -> Results:
    """Groups as in the forward; the bias is as long as the local result channels."""
    args = list(piece.args)
    if args[9] > 1:
        args[9] //= piece.ways(piece.spec.ins[0], 1)
    if args[3] is not None:
        args[3] = [piece.in_shape(0)[1]]
    return piece.default(args=args)


@form("aten.mean.default", "aten.mean.dim")
def mean(piece: Piece) -> Results:
    """An addend of the mean: the local mean times the local share of what is averaged."""
    (made,) = piece.default()
    whole, local = _averaged(piece, piece.op.ins[0].shape), _averaged(piece, piece.in_shape())
    return (made if whole == local else piece.call(aten.mul.Tensor, made, local / whole),)


def _averaged(piece: Piece, shape: tuple[int, ...]) -> int:
    dims = piece.op.arg(1) if piece.op.target == "aten.mean.dim" else None
    if dims is None or dims == ():
        return math.prod(shape)
    return math.prod(shape[d] for d in ((dims,) if isinstance(dims, int) else dims))
