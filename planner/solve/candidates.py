"""Candidates of a cluster on a mesh: its one-axis rows combined over all axes, where every piece is even.

``mk,kn->mn`` on a 2x2 mesh: ``m`` over axis 0 and ``k`` over axis 1 is ``S(0)S(1), RS(0) -> S(0)P``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.planner.ir.cluster import Cluster, ClusterRow
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
    def of(cls, rows: tuple[ClusterRow, ...]) -> Candidate:
        return cls(
            rows,
            tuple(zip(*(r.ins for r in rows), strict=True)),
            tuple(zip(*(r.outs for r in rows), strict=True)),
            None if rows[0].rest is None else tuple(r.rest or R for r in rows),
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


def expand(cluster: Cluster, sizes: tuple[int, ...], wanted: Sequence[frozenset[Edges] | None] = ()) -> tuple[Candidate, ...]:
    """All legal combinations of the cluster's rows; the one that replicates everything is among them.

    Args:
        cluster: the cluster.
        sizes: mesh axis sizes; over an axis of size 1 everything is ``R``.
        wanted: per axis, the rows to keep by what they read and make, or None for all. Where they allow nothing, all are kept.

    Returns:
        Candidates in the order of their rows' product.
    """
    values, placed = _placed(cluster)
    per_axis = [_rows_on_axis(cluster, values, placed, n) for n in sizes]
    if any(w is not None for w in wanted):
        kept = [
            rows if w is None else [r for r in rows if edges(cluster.rows[r]) in w]
            for rows, w in zip(per_axis, wanted, strict=True)
        ]
        found = _combined(cluster, values, placed, kept, sizes)
        if found:
            return found
    return _combined(cluster, values, placed, per_axis, sizes)


def _combined(
    cluster: Cluster,
    values: list[Value],
    placed: list[list[Placement]],
    per_axis: list[list[int]],
    sizes: tuple[int, ...],
) -> tuple[Candidate, ...]:
    return tuple(
        Candidate.of(tuple(cluster.rows[r] for r in combo))
        for combo in itertools.product(*per_axis)
        if _legal_together(cluster, values, placed, combo, sizes)
    )


def rows_on_axes(cluster: Cluster, sizes: Sequence[int]) -> list[list[int]]:
    """Per axis size, the indices of the cluster's rows that are legal over one axis of that size alone."""
    values, placed = _placed(cluster)
    return [_rows_on_axis(cluster, values, placed, n) for n in sizes]


def _placed(cluster: Cluster) -> tuple[list[Value], list[list[Placement]]]:
    """Every value inside or at the edge of the cluster, and its placement in each row."""
    values: dict[str, Value] = {}
    columns: list[list[Placement]] = []
    for value, placement_in in _occurrences(cluster):
        if value.name not in values:
            values[value.name] = value
            columns.append([placement_in(row) for row in cluster.rows])
    return list(values.values()), [list(row) for row in zip(*columns, strict=True)]


def _occurrences(cluster: Cluster) -> Iterator[tuple[Value, Callable[[ClusterRow], Placement]]]:
    """(value, row -> its placement) for the placeholder, inputs, results and all members' results."""
    if cluster.source is not None:
        yield cluster.source.value, lambda row: row.rest or R
    for k, value in enumerate(cluster.ins):
        yield value, lambda row, k=k: row.ins[k]  # type: ignore[misc]
    for k, value in enumerate(cluster.outs):
        yield value, lambda row, k=k: row.outs[k]  # type: ignore[misc]
    for m, op in enumerate(cluster.ops):
        for k, out in enumerate(op.outs):
            if out is not None:
                yield out, lambda row, m=m, k=k: row.members[m].outs[k] or R  # type: ignore[misc]


def _rows_on_axis(cluster: Cluster, values: list[Value], placed: list[list[Placement]], size: int) -> list[int]:
    """Rows legal over one axis of ``size`` devices, as indices."""
    whole = [i for i, ps in enumerate(placed) if all(p == R for p in ps)]
    if size == 1 or (cluster.source is not None and cluster.source.role in WHOLE_ROLES):
        return whole[:1]
    return [i for i, row in enumerate(cluster.rows) if _legal_row(cluster, row, values, placed[i], size)]


def _legal_row(cluster: Cluster, row: ClusterRow, values: list[Value], placed: list[Placement], size: int) -> bool:
    if row.rest is not None and row.rest.is_partial:
        return False
    if all(even(v.shape, (p,), (size,)) for v, p in zip(values, placed, strict=True)):
        return True
    return (
        _may_be_uneven(cluster)
        and row.uneven
        and all(pieces_exist(v.shape, (p,), (size,)) for v, p in zip(values, placed, strict=True))
    )


def _may_be_uneven(cluster: Cluster) -> bool:
    return cluster.source is not None and cluster.source.role == "parameter"


def _legal_together(
    cluster: Cluster, values: list[Value], placed: list[list[Placement]], combo: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Whether rows that are legal one by one are legal on all axes at once: only dims cut twice need a look."""
    uneven = _may_be_uneven(cluster)
    for k, value in enumerate(values):
        vector = tuple(placed[r][k] for r in combo)
        dims = [p.dim for p in vector if p.is_shard]
        if len(dims) == len(set(dims)) or even(value.shape, vector, sizes):
            continue
        rows_uneven = all(cluster.rows[r].uneven for r in combo if placed[r][k].is_shard)
        if not (uneven and rows_uneven and pieces_exist(value.shape, vector, sizes)):
            return False
    if not uneven:
        return True
    assert cluster.source is not None
    return storable(tuple(cluster.rows[r].rest or R for r in combo))


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


def cheapest_of_equals(candidates: Sequence[Candidate], seconds: np.ndarray) -> list[int]:
    """Indices of the candidates that remain when of several with one signature only the fastest is kept."""
    best: dict[tuple, int] = {}
    for i, candidate in enumerate(candidates):
        rival = best.get(candidate.signature)
        if rival is None or seconds[i] < seconds[rival]:
            best[candidate.signature] = i
    return sorted(best.values())
