"""One op of a large program made small: the same call and placements, on tensors that fit a test bench.

    mm [8388608, 8192] x [8192, 28672], S(0)R,RS(1) on 2048 x 8  ->  mm [32, 8] x [8, 16], the same on 2 x 2

Equal sizes stay equal, larger ones larger, and every dim is divided by whatever the plan shards it by. Sizes of up to 8 stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.passes.local import run_local
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.rules.factors import Dims
from meshwright.planner.rules.views import regroup

KEPT = 8
"""Sizes up to this stay: they are groups, windows, numbers of pieces."""
_HUGE = 2**31
_MOST_ELEMENTS = 1 << 22
_REGROUPING = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_POSITIVE = 0.5
"""Random numbers are in [0.5, 1.5): whatever is divided by, or taken the root of, is none of the edge cases."""


@dataclass(frozen=True)
class SmallOp:
    """A small op, its inputs, and what the plan says of it.

    Attributes:
        op: the op, with small shapes.
        spec: its placements; groups are as many as the small sizes have.
        inputs: whole random tensors, in the order of ``op.ins``.
    """

    op: Op
    spec: OpSpec
    inputs: tuple[torch.Tensor, ...]


def small_mesh(mesh: MeshShape) -> MeshShape:
    """Every axis with as few ranks as keep its divisors: its smallest prime factor."""
    return replace(mesh, sizes=tuple(map(_smallest_factor, mesh.sizes)))


def _smallest_factor(n: int) -> int:
    return next((p for p in range(2, n + 1) if n % p == 0), 1)


def shrink(op: Op, spec: OpSpec, mesh: MeshShape) -> SmallOp | None:
    """The op on small tensors for ``mesh``, itself small; None where no way is found to make it so."""
    for change in _changes(op, spec, math.prod(mesh.sizes)):
        made = change()
        if made is None:
            continue
        small, placed = made
        if sum(v.numel for v in (*small.ins, *small.outs) if v is not None) > _MOST_ELEMENTS:
            continue
        for call in (_exact(small), small):
            inputs = tuple(_random(call, i) for i in range(len(call.ins)))
            if _gives_what_it_says(call, inputs):
                return SmallOp(call, placed, inputs)
    return None


def _exact(op: Op) -> Op:
    """The same call in double precision, so that what differs by more than a hair is wrong."""

    def exact(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype.is_floating_point else dtype

    kwargs = tuple((k, exact(a) if isinstance(a, torch.dtype) else a) for k, a in op.kwargs)
    args = tuple(exact(a) if isinstance(a, torch.dtype) else a for a in op.args)
    return _with_values(replace(op, args=args, kwargs=kwargs), lambda v: replace(v, dtype=exact(v.dtype)))


Change = Callable[[], tuple[Op, OpSpec] | None]


def _changes(op: Op, spec: OpSpec, unit: int) -> Iterator[Change]:
    if op.target in _REGROUPING:
        yield lambda: _regrouped(op, spec, unit)
    for table in (_multiples, _doubled, _proportional, _uncut):
        yield partial(_resized, op, spec, unit, table)
    yield lambda: (op, spec)


# --- sizes by value -----------------------------------------------------------------------------------------------


Table = dict[int, int]
"""Size to small size."""


def _resized(op: Op, spec: OpSpec, unit: int, table: Callable[[Op, int], Table]) -> tuple[Op, OpSpec] | None:
    """Every size by a table of sizes; every number of groups by one of its own."""
    groups = _group_table(spec)
    step = math.lcm(unit, max(groups.values(), default=1) * unit)
    sizes = table(op, _step(op, step))

    def place(p: Placement) -> Placement:
        return S(p.dim, groups[p.split]) if p.is_shard and p.split > 1 else p

    return _with_sizes(op, lambda n: sizes.get(n, n)), _placed(spec, lambda p, side, i: place(p))


def _group_table(spec: OpSpec) -> dict[int, int]:
    found = sorted({p.split for ps in (*spec.ins, *spec.outs) if ps is not None for p in ps if p.is_shard and p.split > 1})
    table: dict[int, int] = {}
    last = 1
    for k in found:
        last = k if k <= KEPT and k % last == 0 else 2 * last
        table[k] = last
    return table


def _tensors(op: Op) -> list[Value]:
    return [v for v in (*op.ins, *op.outs) if v is not None]


def _large(op: Op) -> list[int]:
    return sorted({n for v in _tensors(op) for n in v.shape if n > KEPT})


def _step(op: Op, step: int) -> int:
    """A multiple of ``step`` that the sizes that stay divide too, as groups of heads do."""
    common = math.lcm(step, *(n for v in _tensors(op) for n in v.shape if 1 < n <= KEPT))
    return common if common <= 8 * KEPT else step


def _multiples(op: Op, step: int) -> Table:
    """``64, 128, 4096 -> 16, 24, 32`` with step 8."""
    return {n: step * i for i, n in enumerate(_large(op), 1 + KEPT // step)}


def _doubled(op: Op, step: int) -> Table:
    """``64, 128, 4096 -> 16, 32, 64`` with step 8: each divides the next."""
    first = step * (1 + KEPT // step)
    return {n: first << i for i, n in enumerate(_large(op))}


def _proportional(op: Op, step: int) -> Table:
    """Sizes along the dims that are joined or cut keep their proportions, as do places in them."""
    along = _along_cuts(_tensors(op))
    if not along:
        return _multiples(op, step)
    numbers = {n for n in _numbers((op.args, op.kwargs)) if KEPT < n <= max(along)}
    common = math.gcd(*along)
    cut = along | {n for n in numbers if n % common == 0}
    return {**_multiples(op, step), **{n: n // common * step for n in cut}}


def _uncut(op: Op, step: int) -> Table:
    """Sizes along the dims that are joined or cut stay."""
    return {**_multiples(op, step), **{n: n for n in _along_cuts(_tensors(op))}}


def _along_cuts(values: Sequence[Value]) -> set[int]:
    """Sizes along the dims in which tensors of equal rank differ."""
    ranks = {len(v.shape) for v in values if v.shape}
    if len(values) < 2 or len(ranks) != 1:
        return set()
    columns = [{v.shape[d] for v in values if v.shape} - {1} for d in range(ranks.pop())]
    return {n for column in columns if len(column) > 1 for n in column}


def _numbers(arg: Any) -> Iterator[int]:
    if isinstance(arg, tuple):
        for a in arg:
            yield from _numbers(a)
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield arg


def _with_sizes(op: Op, size: Callable[[int], int]) -> Op:
    def number(n: int) -> int:
        return n if abs(n) <= KEPT or abs(n) >= _HUGE else size(n) if n > 0 else n

    return _with_values(op, lambda v: replace(v, shape=tuple(map(size, v.shape))), number)


def _with_values(op: Op, change: Callable[[Value], Value], number: Callable[[int], int] = lambda n: n) -> Op:
    """The call with other tensors and whole numbers."""
    ins = tuple(map(change, op.ins))
    left = iter(ins)

    def convert(arg: Any) -> Any:
        if isinstance(arg, Value):
            return next(left)
        if isinstance(arg, tuple):
            return tuple(map(convert, arg))
        return number(arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg

    args = convert(op.args)
    kwargs = tuple((k, convert(v)) for k, v in op.kwargs)
    outs = tuple(None if v is None else change(v) for v in op.outs)
    return replace(op, args=args, kwargs=kwargs, ins=ins, outs=outs)


def _placed(spec: OpSpec, place: Callable[[Placement, str, int], Placement]) -> OpSpec:
    def every(side: str, found: Sequence[Placements | None]) -> tuple[Any, ...]:
        return tuple(None if ps is None else tuple(place(p, side, i) for p in ps) for i, ps in enumerate(found))

    return OpSpec(every("ins", spec.ins), every("outs", spec.outs))


# --- dims merged and split ----------------------------------------------------------------------------------------


def _regrouped(op: Op, spec: OpSpec, unit: int) -> tuple[Op, OpSpec] | None:
    """Both shapes from common factors, each made small by itself: ``[B, S, H] -> [B*S, H]``."""
    result = op.outs[0]
    if result is None:
        return None
    factors, irregular = regroup(op.ins[0].shape, result.shape)
    if irregular or factors.outs[0] is None:
        return None
    small = {f: n if n <= KEPT else unit << (i % 2) for i, (f, n) in enumerate(factors.sizes.items())}
    dims: dict[str, Dims] = {"ins": factors.ins[0], "outs": factors.outs[0]}
    shapes = {side: tuple(math.prod(small[f] for f in dim) for dim in found) for side, found in dims.items()}
    moved = [_groups_of(p, dims[side], factors.sizes, small) for side, p in _shards(spec)]
    if any(p is None for p in moved):
        return None
    placed = _placed(spec, lambda p, side, i: _groups_of(p, dims[side], factors.sizes, small) or R)
    source, made = replace(op.ins[0], shape=shapes["ins"]), replace(result, shape=shapes["outs"])
    return replace(op, args=(source, shapes["outs"]), ins=(source,), outs=(made,)), placed


def _shards(spec: OpSpec) -> Iterator[tuple[str, Placement]]:
    for side, found in (("ins", spec.ins), ("outs", spec.outs)):
        for ps in found:
            yield from ((side, p) for p in ps or ())


def _groups_of(p: Placement, dims: Dims, sizes: Mapping[Any, int], small: Mapping[Any, int]) -> Placement | None:
    """The placement with as many groups as the small factors make; None where its groups are no product of factors."""
    if not p.is_shard or p.split == 1:
        return p
    dim = dims[p.dim] if p.dim < len(dims) else ()
    for n in range(len(dim) + 1):
        if math.prod(sizes[f] for f in dim[:n]) == p.split:
            return S(p.dim, math.prod(small[f] for f in dim[:n]))
    return None


# --- numbers ------------------------------------------------------------------------------------------------------


def _random(op: Op, index: int) -> torch.Tensor:
    """A whole tensor for input ``index``; equal for equal shapes, places and calls."""
    value = op.ins[index]
    generator = torch.Generator().manual_seed(1 + index)
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.dtype.is_floating_point:
        return (torch.rand(value.shape, generator=generator) + _POSITIVE).to(value.dtype)
    return torch.randint(0, _indices(op), value.shape, generator=generator).to(value.dtype)


def _indices(op: Op) -> int:
    """How many different indices a tensor of integers may hold."""
    if op.target == "aten.embedding.default":
        return op.ins[0].shape[0]
    if op.target == "aten.embedding_dense_backward.default":
        return int(op.args[2])
    if op.target.startswith("aten.nll_loss"):
        scores = next(v for v in op.ins if len(v.shape) > 1)
        return scores.shape[1]
    sizes = [n for v in op.ins if v.dtype.is_floating_point for n in v.shape if n > 1]
    return min(sizes, default=KEPT)


def _gives_what_it_says(op: Op, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the small call runs and makes results of the shapes that were made small with it."""
    replicated = OpSpec(((R,),) * len(op.ins), tuple(None if v is None else (R,) for v in op.outs))
    try:
        made = run_local(op, replicated, MeshShape.of(1), (0,), inputs, lambda f, *args, **kwargs: f(*args, **kwargs))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return False
    return all(v is None or (t is not None and tuple(t.shape) == v.shape) for v, t in zip(op.outs, made, strict=True))
