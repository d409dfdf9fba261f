"""A tensor as this rank holds it: boxes of the whole tensor, each a view of the local one.

A plain shard is one box. A shard in groups (``S(0;3)``, a fused QKV weight) is one box per group, which
``torch.distributed.checkpoint`` cannot know of a DTensor: saving raises, and loading is silently wrong (torch 2.13). Everything
therefore goes through :class:`Piece`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.spec import Placements, chunk_bounds, plain_factor
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.mesh import coordinate_of, mesh_shape, our_placements

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor that a rank holds.

    Attributes:
        offsets: where it begins in the whole tensor.
        sizes: its shape.
        local: where it begins in the rank's local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


def boxes_of(shape: Sequence[int], placements: Placements, sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[Box, ...]:
    """The boxes of a tensor at ``coordinate`` of a mesh of ``sizes``: those of ``local_slice``; none for an empty piece.

    ``[12, 5]`` in ``S(0;3)`` on 2 ranks, rank 1: rows 2-3, 6-7 and 10-11.
    """
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    for axis, (p, n, i) in enumerate(zip(placements, sizes, coordinate, strict=True)):
        if p.is_shard:
            groups = 1 if p.split == 1 else p.split // plain_factor(placements[:axis], sizes[:axis], p.dim)
            runs[p.dim] = _cut(runs[p.dim], groups, n, i)
    if 0 in shape:
        return (Box((0,) * len(shape), tuple(shape), (0,) * len(shape)),)
    placed = [_with_starts(r) for r in runs]
    return tuple(
        Box(tuple(a for a, _, _ in at), tuple(b - a for a, b, _ in at), tuple(start for _, _, start in at))
        for at in itertools.product(*placed)
    )


def _cut(runs: list[Run], groups: int, parts: int, index: int) -> list[Run]:
    """Chunk ``index`` of each of ``groups`` equal groups of the rows in ``runs``."""
    each = sum(b - a for a, b in runs) // groups
    start, end = chunk_bounds(each, parts, index)
    found: list[Run] = []
    for group in range(groups):
        for run in _taken(runs, group * each + start, group * each + end):
            if found and found[-1][1] == run[0]:
                found[-1] = (found[-1][0], run[1])
            else:
                found.append(run)
    return found


def _taken(runs: list[Run], start: int, end: int) -> list[Run]:
    """Rows ``start`` to ``end`` of those in ``runs``, put one behind the other."""
    found, at = [], 0
    for a, b in runs:
        low, high = max(start, at), min(end, at + b - a)
        if low < high:
            found.append((a + low - at, a + high - at))
        at += b - a
    return found


def _with_starts(runs: list[Run]) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((b - a for a, b in runs), initial=0)
    return [(a, b, start) for (a, b), start in zip(runs, starts, strict=False)]


@dataclass(frozen=True, eq=False)
class Piece:
    """One tensor of a checkpoint as this rank holds it. Has what the planners of ``torch.distributed.checkpoint`` ask for.

    Attributes:
        shape: of the whole tensor.
        local: what this rank holds.
        boxes: which boxes of the whole those are.
    """

    shape: tuple[int, ...]
    local: torch.Tensor
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Piece:
        """A DTensor, or a plain tensor that every rank has whole."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.detach(), boxes_of(shape, (), (), ()))
        mesh, sizes = tensor.device_mesh, mesh_shape(tensor.device_mesh).sizes
        placements = our_placements(tensor.placements, sizes)
        return cls(shape, local_of(tensor).detach(), boxes_of(shape, placements, sizes, coordinate_of(mesh)))

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def view(self, offsets: Sequence[int]) -> torch.Tensor:
        """The box that begins at ``offsets``, in this rank's memory."""
        box = next(b for b in self.boxes if b.offsets == tuple(offsets))
        found = self.local
        for dim, (start, n) in enumerate(zip(box.local, box.sizes, strict=True)):
            found = found.narrow(dim, start, n)
        return found

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), TensorProperties(dtype=self.local.dtype), self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
