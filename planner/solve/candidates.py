"""Candidates of a cluster on a mesh: its one-axis rows combined over all axes, where every piece is even (:mod:`.combine`).

``mk,kn->mn`` on a 2x2 mesh: ``m`` over axis 0 and ``k`` over axis 1 is ``S(0)S(1), RS(0) -> S(0)P``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.planner.ir.cluster import ClusterRow
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.spec import Placement, Placements, R, divides, local_numel

# Placeholders that every rank holds whole. Batch inputs may rest in any placement because slicing them is free.
WHOLE_ROLES = frozenset({"buffer", "tangent", "constant", "seed"})

even = lru_cache(maxsize=1 << 16)(divides)
piece_numel = lru_cache(maxsize=1 << 16)(local_numel)


def piece_bytes(value: Value, placements: Placements, sizes: tuple[int, ...]) -> int:
    """Bytes of the largest piece of ``value``."""
    return piece_numel(value.shape, placements, sizes) * value.dtype.itemsize


@dataclass(frozen=True)
class Candidate:
    """One way to run a cluster on the whole mesh.

    Attributes:
        rows: one row of the cluster per mesh axis.
        ins: placements of each of ``Cluster.ins``.
        outs: placements of each of ``Cluster.outs``.
        rest: placements at rest, for a placeholder's cluster.
        kept: for a parameter of which a gathered copy is kept (see :mod:`meshwright.planner.solve.keep`), the placements that the
            copy passes through, the last one kept.
    """

    rows: tuple[ClusterRow, ...]
    ins: tuple[Placements, ...]
    outs: tuple[Placements, ...]
    rest: Placements | None
    kept: tuple[Placements, ...] | None = None

    @classmethod
    def of(cls, rows: tuple[ClusterRow, ...], kept: tuple[Placements, ...] | None = None) -> Candidate:
        """What some rows make together, with the path of a kept copy."""
        return cls(
            rows,
            tuple(zip(*[r.ins for r in rows], strict=True)),
            tuple(zip(*[r.outs for r in rows], strict=True)),
            None if rows[0].rest is None else tuple([r.rest or R for r in rows]),
            kept,
        )

    @property
    def signature(self) -> tuple:
        """What the rest of the program sees of it."""
        return self.ins, self.outs, self.rest, self.kept


# What a row reads, makes, and how its placeholder rests.
Edges = tuple[Placements, Placements, Placement | None]


def edges(row: ClusterRow) -> Edges:
    """A row as the rest of the program sees it."""
    return row.ins, row.outs, row.rest


def storable(rest: Placements) -> bool:
    """Whether DTensor stores these placements right: per dim at most one strided shard, no plain one after it.

    Source: measured on torch 2.13: ``full_tensor`` of ``S(0;3)S(0;3)`` is silently wrong, of ``S(0;4)S(0)`` raises.
    """
    for axis, p in enumerate(rest):
        if p.is_shard and p.split > 1 and any(q.is_shard and q.dim == p.dim for q in rest[axis + 1 :]):
            return False
    return True


def pieces_exist(shape: Sequence[int], placements: Placements, sizes: Sequence[int]) -> bool:
    """Whether uneven chunks leave every rank at least one element; strided shards must be even.

    Chunks are of ``ceil(length / parts)``: 5 rows on 4 ranks leave the last one empty.
    """
    if any(p.is_shard and p.split > 1 for p in placements):
        return divides(shape, placements, sizes)
    lengths = [{n} for n in shape]
    for p, n in zip(placements, sizes, strict=True):
        if not p.is_shard:
            continue
        lengths[p.dim] = {m for length in lengths[p.dim] for m in _chunk_lengths(length, n)}
        if min(lengths[p.dim]) <= 0:
            return False
    return True


def _chunk_lengths(length: int, parts: int) -> tuple[int, int]:
    """Length of all chunks but the last, and of the last (not positive where chunks run out before ranks do)."""
    size = math.ceil(length / parts)
    return size, length - (parts - 1) * size
