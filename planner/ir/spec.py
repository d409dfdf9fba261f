"""Placements: where the pieces of one tensor lie on one mesh axis, and on all of them.

A value on a mesh has one placement per axis, written side by side: ``S(0)R`` is sharded along tensor dim 0 over mesh
axis 0 and replicated over axis 1.

======== ==========================================================================================
``R``      every rank has the whole tensor
``S(d)``   dim ``d`` is cut into consecutive pieces, one per rank
``S(d;k)`` dim ``d`` is ``k`` consecutive groups and *each group* is cut: a rank holds ``k`` pieces, joined. This is how
           a fused QKV weight (k = 3) or the merged dim of ``[B, S, H] -> [B*S, H]`` (k = B, sharded along S) shards
``P``      every rank has an addend of the whole shape; the tensor is their sum
``P(max)`` likewise with the element-wise maximum (``P(min)``: minimum)
======== ==========================================================================================

Several axes may shard one dim. Plain shards nest from the first axis to the last: in ``S(0)S(0)`` axis 1 cuts what axis
0 left. ``S(d;k)`` always counts its groups in the *global* dim, and cuts inside them; so ``S(0)S(0;k)`` and
``S(0;k)S(0)`` are the same pieces, provided that the plain shards of that dim divide ``k``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.ir.errors import InputError

if TYPE_CHECKING:
    import torch


_KNOWN: dict[tuple[str, int, int, str], Placement] = {}


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A tensor's placement over one mesh axis. Equal ones are one object: planning compares them by the million.

    Attributes:
        kind: ``"R"``, ``"S"`` or ``"P"``.
        dim: the sharded tensor dim (``S`` only).
        split: number of groups of which each is cut (``S`` only); 1 is a plain shard.
        op: the reduction that completes a partial value (``P`` only): ``sum``, ``max`` or ``min``.
    """

    kind: str
    dim: int = 0
    split: int = 1
    op: str = "sum"

    def __new__(cls, kind: str, dim: int = 0, split: int = 1, op: str = "sum") -> Placement:
        key = (kind, dim, split, op)
        return _KNOWN.get(key) or _KNOWN.setdefault(key, object.__new__(cls))

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Placement], tuple[str, int, int, str]]:
        return Placement, (self.kind, self.dim, self.split, self.op)

    def __str__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim})" if self.split == 1 else f"S({self.dim};{self.split})"
        if self.kind == "P":
            return "P" if self.op == "sum" else f"P({self.op})"
        return "R"

    __repr__ = __str__

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    @property
    def is_replicate(self) -> bool:
        return self.kind == "R"


Placements = tuple[Placement, ...]

R = Placement("R")
P = Placement("P")
P_MAX = Placement("P", op="max")
P_MIN = Placement("P", op="min")


def S(dim: int, split: int = 1) -> Placement:
    """A shard of tensor dim ``dim`` (non-negative), in ``split`` groups."""
    return Placement("S", dim=dim, split=split)


_TOKEN = re.compile(r"R|S\((\d+)(?:;(\d+))?\)|P(?:\((max|min|sum)\))?")


def parse_placements(text: str) -> Placements:
    """Read ``"S(0)R"`` back into placements.

    Raises:
        InputError: the text is not a sequence of placements.
    """
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise InputError(f"placement text {text!r} is wrong at {text[at:]!r}: expected R, S(dim), S(dim;groups), P or P(max)")
        if token.group(0)[0] == "S":
            found.append(S(int(token.group(1)), int(token.group(2) or 1)))
        elif token.group(0)[0] == "P":
            found.append(Placement("P", op=token.group(3) or "sum"))
        else:
            found.append(R)
        at = token.end()
    return tuple(found)


def format_placements(placements: Sequence[Placement]) -> str:
    """``(S(0), R)`` as ``"S(0)R"``."""
    return "".join(map(str, placements))


@dataclass(frozen=True, slots=True)
class Row:
    """One legal way to run an op over *one* mesh axis: what its inputs must be, what its results then are.

    ``mk,kn->mn`` with ``k`` sharded is ``S(1),S(0) -> P``.

    Attributes:
        ins: one placement per tensor input, in the order of ``Op.ins``.
        outs: one placement per result, in the order of ``Op.outs`` (None where the op does not make that result).
        uneven: True if the row also holds where the axis does not divide a sharded dim (views of parameters at rest).
    """

    ins: Placements
    outs: tuple[Placement | None, ...]
    uneven: bool = False

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ins))} -> {','.join('-' if p is None else str(p) for p in self.outs)}"


# --- shapes -------------------------------------------------------------------------------------------------------


def plain_factor(placements: Sequence[Placement], sizes: Sequence[int], dim: int) -> int:
    """Product of the axis sizes that shard ``dim`` plainly."""
    return math.prod(n for p, n in zip(placements, sizes, strict=True) if p == S(dim))


def divides(shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Whether ``placements`` cut ``shape`` into equal pieces.

    All groups of one dim must have the same ``split``, which the plain shards of that dim must divide.
    """
    left = list(shape)
    splits: dict[int, int] = {}
    for p, n in zip(placements, sizes, strict=True):
        if not p.is_shard:
            continue
        if p.dim >= len(left) or left[p.dim] % n:
            return False
        left[p.dim] //= n
        if p.split > 1 and splits.setdefault(p.dim, p.split) != p.split:
            return False
    for dim, split in splits.items():
        plain = plain_factor(placements, sizes, dim)
        inner = math.prod(n for p, n in zip(placements, sizes, strict=True) if p.is_shard and p.dim == dim and p.split > 1)
        if split % plain or shape[dim] % split or (shape[dim] // split) % inner:
            return False
    return True


def even_local_shape(shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]) -> tuple[int, ...]:
    """The piece's shape where every axis divides (see :func:`divides`)."""
    left = list(shape)
    for p, n in zip(placements, sizes, strict=True):
        if p.is_shard:
            left[p.dim] //= n
    return tuple(left)


def max_local_shape(shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]) -> tuple[int, ...]:
    """The largest piece's shape: uneven dims are rounded up, as torch's chunking does."""
    left = list(shape)
    for p, n in zip(placements, sizes, strict=True):
        if p.is_shard:
            left[p.dim] = -(-left[p.dim] // n)
    return tuple(left)


def local_shape(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the very piece at ``coordinate``, uneven pieces included: that of :func:`local_slice`."""
    left = list(shape)
    for axis, (p, n, i) in enumerate(zip(placements, sizes, coordinate, strict=True)):
        if p.is_shard:
            groups = 1 if p.split == 1 else _local_groups(placements, sizes, axis)
            start, end = chunk_bounds(left[p.dim] // groups, n, i)
            left[p.dim] = groups * (end - start)
    return tuple(left)


def local_numel(shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]) -> int:
    """Elements of the largest piece."""
    return math.prod(max_local_shape(shape, placements, sizes))


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, end)`` of chunk ``index``: chunks of ``ceil(length / parts)``, the last ones shorter or empty.

    Source: ``torch.chunk`` semantics, as used by DTensor for uneven shards.
    """
    size = -(-length // parts)
    return min(size * index, length), min(size * (index + 1), length)


# --- data ---------------------------------------------------------------------------------------------------------


def _local_groups(placements: Sequence[Placement], sizes: Sequence[int], axis: int) -> int:
    """Groups of ``placements[axis]`` in a piece already cut by the axes before it."""
    p = placements[axis]
    return p.split // plain_factor(placements[:axis], sizes[:axis], p.dim)


def local_slice(
    whole: torch.Tensor, placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """The piece of ``whole`` that lies at ``coordinate`` of a mesh of ``sizes`` (``P`` is read as ``R``).

    Uneven plain shards follow :func:`chunk_bounds`. A view where possible.
    """
    piece = whole
    for axis, (p, n, i) in enumerate(zip(placements, sizes, coordinate, strict=True)):
        if not p.is_shard:
            continue
        if p.split == 1:
            start, end = chunk_bounds(piece.shape[p.dim], n, i)
            piece = piece.narrow(p.dim, start, end - start)
            continue
        groups = _local_groups(placements, sizes, axis)
        grouped = piece.unflatten(p.dim, (groups, -1))
        start, end = chunk_bounds(grouped.shape[p.dim + 1], n, i)
        piece = grouped.narrow(p.dim + 1, start, end - start).flatten(p.dim, p.dim + 1)
    return piece


def join_shards(
    pieces: dict[tuple[int, ...], torch.Tensor], placements: Sequence[Placement], sizes: Sequence[int]
) -> torch.Tensor:
    """The whole tensor from every coordinate's piece; the inverse of :func:`local_slice`, and it completes ``P``."""
    import torch

    reduce: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    for axis in reversed(range(len(sizes))):
        p, n = placements[axis], sizes[axis]
        merged: dict[tuple[int, ...], torch.Tensor] = {}
        for head in {c[:axis] for c in pieces}:
            parts = [pieces[(*head, i)] for i in range(n)]
            if p.is_replicate:
                merged[head] = parts[0]
            elif p.is_partial:
                total = parts[0]
                for part in parts[1:]:
                    total = reduce[p.op](total, part)
                merged[head] = total
            elif p.split == 1:
                merged[head] = torch.cat(parts, p.dim)
            else:
                groups = _local_groups(placements, sizes, axis)
                grouped = [part.unflatten(p.dim, (groups, -1)) for part in parts]
                merged[head] = torch.cat(grouped, p.dim + 1).flatten(p.dim, p.dim + 1)
        pieces = merged
    return pieces[()]
