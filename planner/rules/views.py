"""Ops that move elements without changing them: views, joins, cuts. Partial sums pass through all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import P, Placement, R, Row, S
from meshwright.planner.rules.factors import Dims, Factors, factor_rows, linear_rows, summable
from meshwright.planner.rules.registry import Rows, rule

Shape = tuple[int, ...]


def _out(op: Op) -> Value:
    value = op.outs[0]
    assert value is not None
    return value


def _norm(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


# --- regrouping ---------------------------------------------------------------------------------------------------


@rule(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.flatten",
    "aten.unflatten",
    "aten.squeeze",
    "aten.unsqueeze.default",
)
def view(op: Op) -> Rows:
    """Dims merged or split: the factors of both shapes.

    ``[B, S, H] -> [B*S, H]``: ``S(0) -> S(0)``, ``S(1) -> S(0;B)``, ``S(2) -> S(1)``.
    """
    src, dst = op.ins[0].shape, _out(op).shape
    factors, outer = regroup(src, dst)
    uneven = all(len(dim) <= 1 for dims in (*factors.ins, *factors.outs) for dim in dims or ())
    extra = [Row((S(i),), (S(j),)) for i, j in outer]
    return [*factor_rows(op, factors, uneven=uneven), *extra, *linear_rows(op, [(0,)])]


def regroup(src: Shape, dst: Shape) -> tuple[Factors, list[tuple[int, int]]]:
    """Common factors of two shapes of equal element order.

    >>> factors, _ = regroup((6, 4), (2, 12))
    >>> factors.ins, factors.outs, factors.sizes
    (((((0, 0), (0, 1)), ((0, 2),)),), ((((0, 0),), ((0, 1), (0, 2))),), {(0, 0): 2, (0, 1): 3, (0, 2): 4})

    Returns:
        The factors, and pairs of dims (of ``src``, of ``dst``) that begin runs without common factors
        (``[4, 3] -> [6, 2]``): such a pair may be sharded plainly by an axis that divides both.
    """
    ins: list[tuple[tuple[int, int], ...]] = [()] * len(src)
    outs: list[tuple[tuple[int, int], ...]] = [()] * len(dst)
    sizes: dict[tuple[int, int], int] = {}
    outer: list[tuple[int, int]] = []
    for run, (left, right) in enumerate(_runs(src, dst)):
        bounds = sorted(set(_suffix_products(src, left)) | set(_suffix_products(dst, right)), reverse=True)
        if any(a % b for a, b in itertools.pairwise(bounds)):
            outer.append((left[0], right[0]))
            continue
        edges = list(itertools.pairwise(bounds))
        sizes.update({(run, i): a // b for i, (a, b) in enumerate(edges)})
        for dims, shape, chosen in ((ins, src, left), (outs, dst, right)):
            ends = _suffix_products(shape, chosen)
            for d, (high, low) in zip(chosen, itertools.pairwise(ends), strict=True):
                dims[d] = tuple((run, i) for i, (a, b) in enumerate(edges) if a <= high and b >= low)
    return Factors((tuple(ins),), (tuple(outs),), sizes), outer


def _runs(src: Shape, dst: Shape) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims of equal product, from the left; dims of size 1 are left out."""
    left = [d for d, n in enumerate(src) if n != 1]
    right = [d for d, n in enumerate(dst) if n != 1]
    if math.prod(src) == 0:
        return []
    runs, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start = (i, j)
        a, b = src[left[i]], dst[right[j]]
        while a != b:
            if a < b:
                i += 1
                a *= src[left[i]]
            else:
                j += 1
                b *= dst[right[j]]
        i, j = i + 1, j + 1
        runs.append((left[start[0] : i], right[start[1] : j]))
    return runs


def _suffix_products(shape: Shape, dims: Sequence[int]) -> list[int]:
    """``[2, 3, 4]``: ``[24, 12, 4, 1]``."""
    return [math.prod(shape[d] for d in dims[i:]) for i in range(len(dims) + 1)]


# --- one dim to one dim -------------------------------------------------------------------------------------------


def dims_kept(op: Op, src: Sequence[object], dst: Sequence[object], *, uneven: bool = False) -> list[Row]:
    """Rows of an op whose single input has dims named ``src`` and whose result has ``dst`` (None: stays whole)."""
    shape = op.ins[0].shape
    sizes = {name: n for name, n in zip(src, shape, strict=True) if name is not None}
    sizes.update({name: n for name, n in zip(dst, _out(op).shape, strict=True) if name is not None})

    def dims(names: Sequence[object]) -> Dims:
        return tuple(() if n is None else (n,) for n in names)

    return factor_rows(op, Factors((dims(src),), (dims(dst),), sizes), linear=[(0,)], uneven=uneven)


@rule("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default", "aten.mT.default")
def permute(op: Op) -> Rows:
    """``permute [A, B, C] by (2, 0, 1)``: ``S(0) -> S(1)``, ``S(1) -> S(2)``, ``S(2) -> S(0)``."""
    order = permutation(op)
    return dims_kept(op, range(len(order)), order, uneven=True)


def permutation(op: Op) -> list[int]:
    """For each dim of the result, the dim of the input."""
    ndim = len(op.ins[0].shape)
    order = list(range(ndim))
    if op.target == "aten.permute.default":
        return [_norm(d, ndim) for d in op.args[1]]
    if ndim < 2:
        return order
    if op.target == "aten.numpy_T.default":
        return order[::-1]
    a, b = (op.args[1], op.args[2]) if op.target == "aten.transpose.int" else (-2, -1)
    order[a], order[b] = order[b], order[a]
    return order


@rule("aten.expand.default")
def expand(op: Op) -> Rows:
    """New and widened dims may be made already sharded: ``[1, S] -> [B, S]``: ``R -> S(0)``, ``S(1) -> S(1)``."""
    src, dst = op.ins[0].shape, _out(op).shape
    offset = len(dst) - len(src)
    return dims_kept(op, [offset + d if n == dst[offset + d] else None for d, n in enumerate(src)], range(len(dst)))


@rule("aten.select.int", "aten.select_backward.default")
def select(op: Op) -> Rows:
    """One index of a dim: all other dims."""
    backward = op.target == "aten.select_backward.default"
    full = _out(op).shape if backward else op.ins[0].shape
    dim = _norm(op.args[2] if backward else op.args[1], len(full))
    whole: list[object] = [None if d == dim else d for d in range(len(full))]
    picked = [d for d in range(len(full)) if d != dim]
    return dims_kept(op, picked, whole) if backward else dims_kept(op, whole, picked)


@rule("aten.slice.Tensor", "aten.slice_backward.default")
def slice_rule(op: Op) -> Rows:
    """A stretch of one dim: all other dims; one of k equal parts also in groups: ``S(d;k) -> S(d)``."""
    backward = op.target == "aten.slice_backward.default"
    full, part = (_out(op), op.ins[0]) if backward else (op.ins[0], _out(op))
    dim, start, step = slice_arguments(op)
    names = [None if d == dim else d for d in range(len(full.shape))]
    rows = dims_kept(op, names, names)
    length, size = part.shape[dim], full.shape[dim]
    if step == 1 and 0 < length < size and size % length == 0 and start % length == 0:
        many, one = S(dim, size // length), S(dim)
        rows.append(Row((one,), (many,)) if backward else Row((many,), (one,)))
    return rows


def slice_arguments(op: Op) -> tuple[int, int, int]:
    """(dim, start, step) of a slice or of its backward, non-negative."""
    backward = op.target == "aten.slice_backward.default"
    shape = _out(op).shape if backward else op.ins[0].shape
    dim = _norm(op.arg(2 if backward else 1, 0), len(shape))
    start = op.arg(3 if backward else 2) or 0
    step = op.arg(5 if backward else 4, 1)
    start = start + shape[dim] if start < 0 else start
    return dim, min(max(start, 0), shape[dim]), step


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def overwritten(op: Op) -> Rows:
    """``(x, src, dim, ...)``: ``x`` with a stretch or one index of a dim replaced; all other dims; linear in both."""
    shape = op.ins[0].shape
    dim = _norm(op.arg(2, 0), len(shape))
    x: Dims = tuple(() if d == dim else (d,) for d in range(len(shape)))
    src = x if op.target == "aten.slice_scatter.default" else tuple(n for n in x if n)
    return factor_rows(op, Factors((x, src), (x,), dict(enumerate(shape))), linear=[(0, 1)])


@rule("aten.flip.default", "aten.roll.default")
def dims_named(op: Op) -> Rows | None:
    """Reversed or rotated dims stay whole."""
    ndim = len(op.ins[0].shape)
    dims = op.args[1] if op.target == "aten.flip.default" else op.arg(2, ())
    if not dims:
        return linear_rows(op, [(0,)])
    moved = {_norm(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims)}
    names = [None if d in moved else d for d in range(ndim)]
    return dims_kept(op, names, names)


@rule("aten.tril.default", "aten.triu.default")
def triangle(op: Op) -> Rows:
    """The last two dims stay whole."""
    ndim = len(op.ins[0].shape)
    names = [d if d < ndim - 2 else None for d in range(ndim)]
    return dims_kept(op, names, names)


@rule("aten.constant_pad_nd.default")
def pad(op: Op) -> Rows:
    """Padded dims stay whole; partial sums pass where the padding is zero."""
    ndim, amounts = len(op.ins[0].shape), op.args[1]
    padded = {ndim - 1 - i // 2 for i, n in enumerate(amounts) if n != 0}
    names = [None if d in padded else d for d in range(ndim)]
    rows = dims_kept(op, names, names)
    return [r for r in rows if r.ins[0] != P or op.arg(2, 0) == 0]


@rule("aten.repeat.default")
def repeat(op: Op) -> Rows:
    """``[A, B].repeat(2, 1, 3)``: dim 1 is ``A`` again, dim 2 is 3 groups of ``B``: ``S(1) -> S(2;3)``."""
    src, times = op.ins[0].shape, op.args[1]
    offset = len(times) - len(src)
    ins = tuple((offset + d,) for d in range(len(src)))
    outs = tuple((("times", d), d) if d >= offset else () for d in range(len(times)))
    sizes = {offset + d: n for d, n in enumerate(src)} | {("times", d): n for d, n in enumerate(times)}
    return factor_rows(op, Factors((ins,), (outs,), sizes), linear=[(0,)], whole=[("times", d) for d in range(len(times))])


@rule("aten.unfold.default", "aten.diagonal.default", "aten.unbind.int")
def dims_consumed(op: Op) -> Rows:
    """Dims that are windowed, paired or taken apart stay whole; each result has the others in order."""
    ndim = len(op.ins[0].shape)
    used = {
        "aten.unfold.default": lambda: [op.args[1]],
        "aten.diagonal.default": lambda: [op.arg(2, 0), op.arg(3, 1)],
        "aten.unbind.int": lambda: [op.arg(1, 0)],
    }[op.target]()
    gone = {_norm(d, ndim) for d in used}
    src = tuple(() if d in gone else (d,) for d in range(ndim))
    kept: Dims = src if op.target == "aten.unfold.default" else tuple(d for d in src if d)
    dst = kept + ((),) * (len(_out(op).shape) - len(kept))
    factors = Factors((src,), (dst,) * len(op.outs), dict(enumerate(op.ins[0].shape)))
    return factor_rows(op, factors, contract=None, linear=[(0,)])


# --- cuts and joins -----------------------------------------------------------------------------------------------


@rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def split(op: Op) -> Rows:
    """Other dims; and the dim itself in as many groups as there are equal pieces: ``S(d;3) -> S(d),S(d),S(d)``."""
    dim = _norm(op.arg(2, 0), len(op.ins[0].shape))
    lengths = [v.shape[dim] for v in op.outs if v is not None]
    return _pieces(op, dim, lengths, joined=op.ins[0], join=False)


@rule("aten.cat.default")
def cat(op: Op) -> Rows:
    """As the split, backwards: ``S(d),S(d),S(d) -> S(d;3)`` of equal pieces.

    An empty 1-D tensor may be joined to anything (a cache that holds nothing yet) and stays whole.
    """
    out = _out(op)
    dim = _norm(op.arg(1, 0), len(out.shape))
    full = [v.shape != (0,) for v in op.ins]
    lengths = [v.shape[dim] for v, is_full in zip(op.ins, full, strict=True) if is_full]
    rows = _pieces(op, dim, lengths, joined=out, join=True)
    return [Row(tuple(r.ins[0] if is_full else R for is_full in full), r.outs) for r in rows]


def _pieces(op: Op, dim: int, lengths: list[int], *, joined: Value, join: bool) -> list[Row]:
    count = len(lengths)

    def row(whole: Placement, piece: Placement) -> Row:
        return Row((piece,) * count, (whole,)) if join else Row((whole,), (piece,) * count)

    rows = [row(S(d), S(d)) for d, n in enumerate(joined.shape) if d != dim and n > 1]
    if len(set(lengths)) == 1 and lengths[0] > 1:
        rows.append(row(S(dim, count), S(dim)))
    if all(summable(v) for v in (*op.ins, *op.outs) if v is not None):
        rows.append(row(P, P))
    return rows


@rule("aten.stack.default")
def stack(op: Op) -> Rows:
    """Every dim of the pieces; the new dim stays whole."""
    out = _out(op)
    dim = _norm(op.arg(1, 0), len(out.shape))
    ins = tuple((d,) for d in range(len(out.shape)) if d != dim)
    outs = tuple(() if d == dim else (d,) for d in range(len(out.shape)))
    return factor_rows(
        op, Factors((ins,) * len(op.ins), (outs,), dict(enumerate(out.shape))), linear=[tuple(range(len(op.ins)))], whole=[dim]
    )
