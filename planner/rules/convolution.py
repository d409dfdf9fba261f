"""Convolutions, pooling and resampling: samples and channels; spatial dims stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import P, Placement, R, Row, S
from meshwright.planner.rules.factors import Dims, Factors, factor_rows, linear_rows
from meshwright.planner.rules.registry import Rows, rule


@rule("aten.convolution.default")
def convolution(op: Op) -> Rows:
    """``(x [N,I,...], w [O,I,...], bias?) -> y [N,O,...]``: ``N``, ``O``, and ``I`` leaving a partial result.

    A transposed convolution has ``w [I,O,...]``. With groups only ``N`` and, for one channel per group, the groups.
    Spatial dims shard where patches do not overlap.
    """
    groups, transposed, bias = op.args[8], op.args[6], len(op.ins) == 3
    w_in, w_out = (0, 1) if transposed else (1, 0)
    rows = [Row((S(0), R, R)[: len(op.ins)], (S(0),))]
    if groups == 1:
        rows += [Row((R, S(w_out), S(0))[: len(op.ins)], (S(1),)), Row((S(1), S(w_in), P)[: len(op.ins)], (P,))]
    elif one_channel_per_group(op, groups, 0, 1):
        rows.append(Row((S(1), S(0), S(0))[: len(op.ins)], (S(1),)))
    rows += [Row((S(d), R, R)[: len(op.ins)], (S(d),)) for d in patch_dims(op.ins[0], op.ins[1], op.args[3:8])]
    linear = [(0, 2), (1, 2)] if bias else [(0,), (1,)]
    return [*rows, *linear_rows(op, linear)]


@rule("aten.convolution_backward.default")
def convolution_backward(op: Op) -> Rows:
    """``(gy, x, w) -> gx, gw, gb``: ``N`` (``gw``, ``gb`` partial), ``O`` (``gx`` partial), ``I``; linear in ``gy``."""
    groups, transposed = op.args[9], op.args[7]
    w_in, w_out = (0, 1) if transposed else (1, 0)
    rows = [_made(op, (S(0), S(0), R), (S(0), P, P)), _made(op, (P, R, R), (P, P, P))]
    if groups == 1:
        rows += [_made(op, (S(1), R, S(w_out)), (P, S(w_out), S(0))), _made(op, (R, S(1), S(w_in)), (S(1), S(w_in), R))]
    elif one_channel_per_group(op, groups, 1, 0):
        rows.append(_made(op, (S(1), S(1), S(0)), (S(1), S(0), S(0))))
    patches = patch_dims(op.ins[1], op.ins[2], op.args[4:9])
    return rows + [_made(op, (S(d), S(d), R), (S(d), P, P)) for d in patches]


def _made(op: Op, ins: tuple[Placement, ...], outs: tuple[Placement, ...]) -> Row:
    """A row without the results that are masked out."""
    return Row(ins, tuple(None if v is None else p for v, p in zip(op.outs, outs, strict=True)))


def patch_dims(x: Value, w: Value, geometry: Sequence[Any]) -> list[int]:
    """Spatial dims that are cut into patches without overlap or rest (a vision transformer's embedding).

    Args:
        x: the image.
        w: the kernel.
        geometry: stride, padding, dilation, transposed, output padding; the numbers by spatial dim, or one for all of them.
    """
    *numbers, transposed, _ = geometry
    if transposed:
        return []
    sides = range(2, len(x.shape))
    stride, padding, dilation = (list(n) * len(sides) if len(n) == 1 else n for n in numbers)
    return [
        d
        for d, s, p, gap in zip(sides, stride, padding, dilation, strict=True)
        if s == w.shape[d] and p == 0 and (gap == 1 or s == 1) and x.shape[d] % s == 0
    ]


def one_channel_per_group(op: Op, groups: int, x: int, y: int) -> bool:
    """Whether the channel count of input or result is the number of groups, so that dividing it divides the groups."""
    channels = [op.ins[x].shape[1]]
    other = op.ins[0] if y == 0 else op.outs[0]
    return groups > 1 and groups in (*channels, other.shape[1] if other is not None else 0)


PER_CHANNEL = {
    **dict.fromkeys(
        (
            "aten.max_pool2d_with_indices.default",
            "aten.max_pool2d_with_indices_backward.default",
            "aten.max_pool3d_with_indices.default",
            "aten.avg_pool1d.default",
            "aten.avg_pool2d.default",
            "aten.avg_pool2d_backward.default",
            "aten._adaptive_avg_pool2d.default",
            "aten._adaptive_avg_pool2d_backward.default",
            "aten.adaptive_max_pool2d.default",
            "aten.adaptive_max_pool2d_backward.default",
            "aten.upsample_nearest2d",
            "aten.upsample_nearest2d_backward.default",
            "aten.upsample_bilinear2d",
            "aten.upsample_bilinear2d_backward.default",
            "aten.upsample_bicubic2d",
            "aten.upsample_bicubic2d_backward.default",
            "aten._upsample_bilinear2d_aa",
            "aten.reflection_pad2d.default",
            "aten.replication_pad2d.default",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "aten.upsample_nearest1d",
            "aten.upsample_nearest1d_backward.default",
            "aten.upsample_linear1d",
            "aten.upsample_linear1d_backward.default",
            "aten.reflection_pad1d.default",
        ),
        1,
    ),
}
"""Ops that work on each image of each channel by itself, and how many spatial dims they have."""

NOT_LINEAR = ("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default", "aten.adaptive_max_pool2d.default")


@rule(*PER_CHANNEL)
def per_channel(op: Op) -> Rows:
    """Every dim before the spatial ones: ``S(0) -> S(0)``, ``S(1) -> S(1)``; linear in the first input unless a maximum."""
    spatial = PER_CHANNEL.get(op.target) or PER_CHANNEL[op.target.rpartition(".")[0]]
    shape = op.ins[0].shape
    leading = len(shape) - spatial

    def dims(ndim: int) -> Dims:
        return tuple((d,) if d < leading else () for d in range(ndim))

    factors = Factors(
        tuple(dims(len(v.shape)) for v in op.ins),
        tuple(None if v is None else dims(len(v.shape)) for v in op.outs),
        {d: shape[d] for d in range(leading)},
    )
    return factor_rows(op, factors, linear=[] if op.target in NOT_LINEAR else [(0,)])
