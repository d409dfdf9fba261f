"""Gather, scatter and indexing by tensors.

Expert parallelism would be rows of the ops by which tokens go to experts and come back: tokens cut on one side, experts on the
other, and an all-to-all with sizes known only as it runs between them.
"""

from __future__ import annotations

from typing import Any

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import P, R, Row, S
from meshwright.planner.rules.factors import Dims, Factors, factor_rows, linear_rows, summable
from meshwright.planner.rules.registry import Rows, rule


@rule("aten.gather.default")
def gather(op: Op) -> Rows:
    """``(x, dim, index) -> x[index]`` along one dim: other dims of equal size; the index's own dim with ``x`` whole there;
    and ``x`` cut along ``dim``, each rank adding what it holds: ``S(dim),R -> P``."""
    x, index = op.ins[0].shape, op.ins[1].shape
    dim = op.args[1] % max(len(x), 1)
    names = _shared(dim, x, index)
    named = tuple(("i",) if d == dim else n for d, n in enumerate(names))
    sizes: dict[Any, int] = {**dict(enumerate(index)), "i": index[dim] if index else 1}
    rows = factor_rows(op, Factors((names, named), (named,), sizes), linear=[(0,)])
    return rows + ([Row((S(dim), R), (P,))] if x and x[dim] > 1 and summable(op.ins[0]) else [])


@rule("aten.scatter.src", "aten.scatter.reduce", "aten.scatter_reduce.two")
def scatter(op: Op) -> list[Row]:
    """``(x, dim, index, src) -> x`` with some elements replaced: other dims of equal size; replacing is linear in both."""
    shapes = [v.shape for v in op.ins]
    names = _shared(op.args[1] % max(len(shapes[0]), 1), *shapes)
    factors = Factors((names,) * len(op.ins), (names,), dict(enumerate(shapes[0])))
    return factor_rows(op, factors, linear=[(0, 2)] if op.target == "aten.scatter.src" else [])


@rule("aten.scatter.value")
def scatter_value(op: Op) -> Rows:
    """As ``scatter``; writing the number zero is linear."""
    return scatter(op) + linear_rows(op, [(0,)] if op.args[3] == 0 else [])


@rule("aten.scatter_add.default")
def scatter_add(op: Op) -> Rows:
    """As ``scatter``; and each rank adds its part of the updates along ``dim`` to its addend: ``P,S(dim),S(dim) -> P``."""
    x, index, src = op.ins
    dim = op.args[1] % max(len(x.shape), 1)
    in_parts = index.shape == src.shape and index.shape and index.shape[dim] > 1 and summable(x)
    parts = [Row((P, S(dim), S(dim)), (P,))] if in_parts else []
    return [*scatter(op), *linear_rows(op, [(0, 2)]), *parts]


def _shared(dim: int, *shapes: tuple[int, ...]) -> Dims:
    """Dims other than ``dim`` that all shapes have alike."""
    return tuple((d,) if d != dim and len({s[d] for s in shapes}) == 1 else () for d in range(len(shapes[0])))


@rule("aten.index_select.default")
def index_select(op: Op) -> Rows:
    """``(x, dim, index)``: other dims of ``x``, and the index with ``x`` whole along ``dim``; linear in ``x``."""
    x = op.ins[0].shape
    dim = op.args[1] % max(len(x), 1)
    names: Dims = tuple((d,) if d != dim else () for d in range(len(x)))
    chosen: Dims = (("i",),) if op.ins[1].shape else ((),) * len(op.ins[1].shape)
    out: Dims = tuple(("i",) if d == dim and op.ins[1].shape else n for d, n in enumerate(names))
    return factor_rows(op, Factors((names, chosen), (out,), {**dict(enumerate(x)), "i": op.ins[1].numel}), linear=[(0,)])


@rule("aten.index_add.default", "aten.index_copy.default")
def index_add(op: Op) -> Rows:
    """``(x, dim, index, source) -> x``: dims other than ``dim``; linear in ``x`` and ``source`` together."""
    x = op.ins[0].shape
    dim = op.args[1] % max(len(x), 1)
    names: Dims = tuple((d,) if d != dim else () for d in range(len(x)))
    whole: Dims = ((),) * len(op.ins[1].shape)
    return factor_rows(op, Factors((names, whole, names), (names,), dict(enumerate(x))), linear=[(0, 2)])


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(op: Op) -> Rows:
    """``x[:, i, j]``: dims of ``x`` that are not indexed, dims of the indices with ``x`` whole; linear in ``x``."""
    if _has_mask(op):
        return []
    x, picked, result, sizes = _indexed(op)
    return factor_rows(op, Factors((x, *picked), (result,), sizes), linear=[(0,)])


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(op: Op) -> Rows:
    """``x[:, i, j] = values`` (or ``+=``): dims that are not indexed; pieces of the updates onto partial addends."""
    if _has_mask(op):
        return []
    x, picked, result, sizes = _indexed(op)
    values = op.ins[-1].shape
    accumulate = bool(op.arg(3, False))
    facing = result[len(result) - len(values) :]
    given = tuple(name if name and sizes[name[0]] == n else () for name, n in zip(facing, values, strict=True))
    updates = {n[0] for n in result if n and isinstance(n[0], tuple)}
    rows = factor_rows(op, Factors((x, *picked, given), (x,), sizes), whole=updates, linear=[(0, len(op.ins) - 1)])
    if accumulate and summable(op.ins[0]):
        split = factor_rows(op, Factors((x, *picked, given), (x,), {u: sizes[u] for u in updates}))
        rows += [Row((P, *r.ins[1:]), (P,)) for r in split]
    return rows


def _has_mask(op: Op) -> bool:
    return any(isinstance(i, Value) and i.dtype.itemsize == 1 for i in op.args[1])


def _indexed(op: Op) -> tuple[Dims, list[Dims], Dims, dict[Any, int]]:
    """Factors of ``x``, of each index tensor and of ``x[indices]``.

    Dims of the broadcast indices are named ``("i", -1)``, ``("i", -2)``, ... from the right. They stand where the indexed
    dims stood if those are neighbours, else in front.
    """
    shape = op.ins[0].shape
    indices = [*op.args[1], *[None] * (len(shape) - len(op.args[1]))]
    at = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    ndim = max(len(t.shape) for t in tensors)
    broadcast = [max(t.shape[j] for t in tensors if len(t.shape) >= -j) for j in range(-ndim, 0)]
    sizes: dict[Any, int] = {d: n for d, n in enumerate(shape) if d not in at}
    sizes.update({("i", j): broadcast[j] for j in range(-ndim, 0)})
    x: Dims = tuple(() if d in at else (d,) for d in range(len(shape)))
    picked: list[Dims] = [
        tuple((("i", j),) if t.shape[j] == broadcast[j] else () for j in range(-len(t.shape), 0)) for t in tensors
    ]
    block: Dims = tuple((("i", j),) for j in range(-ndim, 0))
    rest = [(d,) for d in range(len(shape)) if d not in at]
    before = len([d for d in range(at[0]) if d not in at]) if at == list(range(at[0], at[-1] + 1)) else 0
    return x, picked, (*rest[:before], *block, *rest[before:]), sizes
