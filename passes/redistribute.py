"""Emit one-axis changes of placement as collectives and layout ops.

``planner.ir.redistribute`` says which collective a step is; this file says how it is written. Functional collectives work
along dim 0, so a step on another dim is

```
S(1) -> R      [a, c]  -> all_gather [n*a, c] -> view [n, a, c] -> permute [a, n, c] -> [a, n*c]
P    -> S(1)   [a, n*c] -> view [a, n, c] -> permute [n, a, c] -> reduce_scatter [1, a, c] -> [a, c]
S(0) -> S(1)   both: spread the new dim, all_to_all, join the old one
```

A grouped shard ``S(d;k)`` does the same inside its groups. Uneven pieces are padded to the chunk of their group of ranks
and cut again afterwards. Every rank emits the same text: only integer constants differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.planner.ir.redistribute import step_axis, step_kind
from meshwright.planner.ir.spec import Placements, R, chunk_bounds, divides, local_shape, max_local_shape

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Call = Callable[..., Any]  # call(overload, *args, **kwargs): emits (or runs) one op and returns its result


@dataclass(frozen=True, slots=True)
class Cut:
    """How one mesh axis cuts one dim of what the other axes left.

    Attributes:
        dim: tensor dim.
        parts: axis size.
        groups: consecutive groups of the dim, each of which is cut.
        span: length of one group before the cut.
        own: length of this rank's piece of one group.
        even: whether all pieces are equal, on every rank of the mesh.
    """

    dim: int
    parts: int
    groups: int
    span: int
    own: int
    even: bool

    @property
    def chunk(self) -> int:
        """Length of the longest piece of one group: what pieces are padded to."""
        return -(-self.span // self.parts)

    @property
    def leads(self) -> bool:
        """Whether rank order is memory order: dim 0, one group."""
        return self.dim == 0 and self.groups == 1


@dataclass(frozen=True, slots=True)
class Step:
    """One change of placement over one mesh axis, as one rank sees it.

    Attributes:
        shape: global shape of the value.
        dtype: element type.
        src: placements before; ``dst`` those after. They differ in one axis.
        sizes: mesh axis sizes.
        coordinate: this rank's.
        group: name of this rank's process group along the axis.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Placements
    dst: Placements
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    group: str

    @property
    def axis(self) -> int:
        return step_axis(self.src, self.dst)

    @property
    def parts(self) -> int:
        return self.sizes[self.axis]

    @property
    def kind(self) -> str:
        kind = step_kind(self.src[self.axis], self.dst[self.axis])
        assert kind is not None, (self.src, self.dst)
        return kind

    @property
    def reduce_op(self) -> str:
        return self.src[self.axis].op

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of the largest local input: equal on all ranks."""
        return max_local_shape(self.shape, self.src, self.sizes)

    @property
    def buffer_numel(self) -> int:
        """Elements of the largest local input."""
        return math.prod(self.buffer_shape)

    @property
    def result_bytes(self) -> int:
        """Bytes of the largest local result: equal on all ranks."""
        return math.prod(max_local_shape(self.shape, self.dst, self.sizes)) * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes of the larger of the largest local input and result."""
        return max(self.result_bytes, self.buffer_numel * self.dtype.itemsize)

    def cut(self, placements: Placements) -> Cut:
        """How the axis cuts, in ``placements`` (``src`` or ``dst``)."""
        axis, p = self.axis, placements[self.axis]
        whole = (*placements[:axis], R, *placements[axis + 1 :])
        on_dim = [q if q.is_shard and q.dim == p.dim else R for q in placements]
        plain = math.prod(n for q, n in zip(whole, self.sizes, strict=True) if q.is_shard and q.dim == p.dim and q.split == 1)
        groups = 1 if p.split == 1 else p.split // plain
        span = local_shape(self.shape, whole, self.sizes, self.coordinate)[p.dim] // groups
        start, end = chunk_bounds(span, self.parts, self.coordinate[axis])
        return Cut(p.dim, self.parts, groups, span, end - start, divides(self.shape, on_dim, self.sizes))


def unpermuted(step: Step, order: Sequence[int]) -> Step:
    """The same step on the tensor whose permutation by ``order`` (non-negative) is ``step``'s value."""
    shape = [0] * len(order)
    for d, source in enumerate(order):
        shape[source] = step.shape[d]
    src, dst = (tuple(replace(p, dim=order[p.dim]) if p.is_shard else p for p in side) for side in (step.src, step.dst))
    return replace(step, shape=tuple(shape), src=src, dst=dst)


def emit_step(step: Step, x: Any, call: Call) -> Any:
    """Emit one step: the local tensor ``x`` in ``step.src`` becomes the result in ``step.dst``."""
    if step.parts == 1:
        return x
    if step.kind == "slice":
        return _slice(step, x, call)
    as_bytes = step.dtype == torch.bool  # backends have no collectives on bool
    if as_bytes:
        x = call(aten.view.dtype, x, torch.uint8)
    y = _EMIT[step.kind](step, x, call)
    return call(aten.view.dtype, y, torch.bool) if as_bytes else y


def _local(step: Step, placements: Placements) -> list[int]:
    return list(local_shape(step.shape, placements, step.sizes, step.coordinate))


def _all_reduce(step: Step, x: Any, call: Call) -> Any:
    return call(c10d.wait_tensor.default, call(c10d.all_reduce.default, x, step.reduce_op, step.group))


def _all_gather(step: Step, x: Any, call: Call) -> Any:
    cut = step.cut(step.src)
    shape = _local(step, step.src)
    x = _pad(x, shape, cut, cut.chunk, call)
    x = call(aten.contiguous.default, x)
    y = call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, x, step.parts, step.group))
    return _join(y, shape, cut, call, joined=True)


def _reduce_scatter(step: Step, x: Any, call: Call) -> Any:
    cut = step.cut(step.dst)
    x = _spread(x, _local(step, step.src), cut, call)
    y = call(c10d.reduce_scatter_tensor.default, x, step.reduce_op, step.parts, step.group)
    return _take_own(call(c10d.wait_tensor.default, y), _local(step, step.dst), cut, call)


def _all_to_all(step: Step, x: Any, call: Call) -> Any:
    old, new = step.cut(step.src), step.cut(step.dst)
    if old.dim == new.dim:
        return _regroup(step, x, old, new, call)
    shape = _local(step, step.src)
    x = _pad(x, shape, old, old.chunk, call)
    shape[old.dim] = old.groups * old.chunk
    y = _exchange(step, _spread(x, shape, new, call), 1 if not new.leads else new.chunk, call)
    shape[new.dim] = new.groups * new.chunk
    y = _join(y, shape, old, call)
    shape[old.dim] = old.groups * old.span
    shape[new.dim] = new.groups * new.own
    return _take_own(y, shape, new, call)


def _slice(step: Step, x: Any, call: Call) -> Any:
    cut = step.cut(step.dst)
    start, end = chunk_bounds(cut.span, cut.parts, step.coordinate[step.axis])
    if cut.groups == 1:
        x = call(aten.slice.Tensor, x, cut.dim, start, end)
        return x if cut.dim == 0 else call(aten.contiguous.default, x)  # some kernels need it; and the whole can be freed
    shape = _local(step, step.src)
    x = call(aten.reshape.default, x, _divided(shape, cut.dim, cut.groups, cut.span))
    x = call(aten.slice.Tensor, x, cut.dim + 1, start, end)
    return call(aten.reshape.default, x, _with(shape, cut.dim, cut.groups * cut.own))


_EMIT = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


# --- layout -------------------------------------------------------------------------------------------------------


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


def _divided(shape: Sequence[int], dim: int, *lengths: int) -> list[int]:
    return [*shape[:dim], *lengths, *shape[dim + 1 :]]


def _pad(x: Any, shape: Sequence[int], cut: Cut, length: int, call: Call) -> Any:
    """Pad ``cut.dim`` to ``length`` where pieces are uneven (then there is one group)."""
    if cut.even:
        return x
    trailing = len(shape) - 1 - cut.dim
    return call(aten.constant_pad_nd.default, x, [0, 0] * trailing + [0, length - shape[cut.dim]])


def _spread(x: Any, shape: Sequence[int], cut: Cut, call: Call) -> Any:
    """``[.., groups*span, ..] -> [parts, .., groups*chunk, ..]``, contiguous; for dim 0 the first two dims are merged."""
    x = _pad(x, shape, cut, cut.parts * cut.chunk, call)
    if cut.leads:
        return call(aten.contiguous.default, x)
    x = call(aten.reshape.default, x, _divided(shape, cut.dim, cut.groups, cut.parts, cut.chunk))
    at = cut.dim + 1
    x = call(aten.permute.default, x, [at, *(d for d in range(len(shape) + 2) if d != at)])
    return call(aten.contiguous.default, x)


def _join(y: Any, piece: Sequence[int], cut: Cut, call: Call, *, joined: bool = False) -> Any:
    """``parts`` pieces one after the other -> ``[.., groups*span, ..]``.

    Args:
        y: what was received, contiguous.
        piece: shape of one piece (its length along ``cut.dim`` is taken from the cut).
        cut: the cut that is undone.
        call: emitter.
        joined: whether ``y`` already has the shape of pieces joined along dim 0.
    """
    if not cut.leads:
        y = call(aten.reshape.default, y, [cut.parts, *_divided(piece, cut.dim, cut.groups, cut.chunk)])
        at = cut.dim + 1  # of the parts, behind the groups
        y = call(aten.permute.default, y, [*range(1, at + 1), 0, *range(at + 1, len(piece) + 2)])
    if not (cut.leads and joined):
        y = call(aten.reshape.default, y, _with(piece, cut.dim, cut.groups * cut.parts * cut.chunk))
    return y if cut.even else call(aten.slice.Tensor, y, cut.dim, 0, cut.span)


def _take_own(y: Any, shape: Sequence[int], cut: Cut, call: Call) -> Any:
    """This rank's piece of ``shape`` out of what a scatter left: drops the padding and the leading dim of 1."""
    if not cut.leads:
        y = call(aten.reshape.default, y, _with(shape, cut.dim, cut.groups * cut.chunk))
    return y if cut.even else call(aten.slice.Tensor, y, cut.dim, 0, cut.own)


def _exchange(step: Step, x: Any, rows: int, call: Call) -> Any:
    splits = [rows] * step.parts
    return call(c10d.wait_tensor.default, call(c10d.all_to_all_single.default, x, splits, splits, step.group))


# --- one dim, other groups ------------------------------------------------------------------------------------------


def _regroup(step: Step, x: Any, old: Cut, new: Cut, call: Call) -> Any:
    """``S(d;k) -> S(d;l)``: equal exchanges where one grouping is coarse enough to be seen from both sides, else runs."""
    n, shape = step.parts, _local(step, step.src)
    if old.groups % n == 0 and new.groups == 1:
        send = replace(old, groups=1, span=shape[old.dim])
        join = replace(old, groups=old.groups // n)
    elif new.groups % n == 0 and old.groups == 1:
        send = replace(new, groups=new.groups // n)
        join = replace(old, span=shape[old.dim])
    else:
        return _regroup_by_runs(step, x, old, new, call)
    y = _exchange(step, _spread(x, shape, send, call), send.chunk if send.leads else 1, call)
    piece = _with(shape, old.dim, shape[old.dim] // n)
    return _join(y, piece, join, call)


def _regroup_by_runs(step: Step, x: Any, old: Cut, new: Cut, call: Call) -> Any:
    """Exchange unequal runs of elements: for groups that do not divide by the axis (a fused QKV weight over two ranks)."""
    n, me, shape, dim = step.parts, step.coordinate[step.axis], _local(step, step.src), old.dim
    held, wanted = [_elements(old, r) for r in range(n)], [_elements(new, r) for r in range(n)]
    parts = [[[e for e in wanted[j] if e in set(held[i])] for j in range(n)] for i in range(n)]  # [from][to]
    sends = [_runs([held[i].index(e) for j in range(n) for e in parts[i][j]]) for i in range(n)]
    arrived = [[e for i in range(n) for e in parts[i][j]] for j in range(n)]
    takes = [_runs([arrived[j].index(e) for e in wanted[j]]) for j in range(n)]
    order = [dim, *(d for d in range(len(shape)) if d != dim)]
    x = _pick(call(aten.permute.default, x, order), sends, me, call)
    x = call(aten.contiguous.default, x)
    sizes_out, sizes_in = [len(parts[i][me]) for i in range(n)], [len(parts[me][j]) for j in range(n)]
    y = call(c10d.wait_tensor.default, call(c10d.all_to_all_single.default, x, sizes_out, sizes_in, step.group))
    y = _pick(y, takes, me, call)
    return call(aten.permute.default, y, [order.index(d) for d in range(len(shape))])


def _elements(cut: Cut, rank: int) -> list[int]:
    """Positions along the dim that ``rank`` holds, in its order."""
    start, end = chunk_bounds(cut.span, cut.parts, rank)
    return [g * cut.span + e for g in range(cut.groups) for e in range(start, end)]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """``[0, 1, 4, 5, 6] -> [(0, 2), (4, 7)]``."""
    runs: list[tuple[int, int]] = []
    for p in positions:
        if runs and runs[-1][1] == p:
            runs[-1] = (runs[-1][0], p + 1)
        else:
            runs.append((p, p + 1))
    return runs


def _pick(x: Any, runs_of: Sequence[list[tuple[int, int]]], me: int, call: Call) -> Any:
    """Rows of ``x`` in the order of this rank's runs; as many slices on every rank, empty ones last."""
    most = max(map(len, runs_of))
    if most == 1:
        return x
    mine = [*runs_of[me], *[(0, 0)] * (most - len(runs_of[me]))]
    return call(aten.cat.default, [call(aten.slice.Tensor, x, 0, start, end) for start, end in mine])
