"""A lower bound of a stage's work that needs no solver: every kernel at its fastest, at the size of a micro-batch.

Only the rows that a cluster may take over each axis are looked at, not whether they are legal together; nothing is communicated, and
what is done once for all micro-batches does not count. All meshes and numbers of micro-batches are bounded at once: a kernel
sees in how many pieces the batch is cut, not how many of them come one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.cost.compute import seconds_by_size
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Device
from meshwright.planner.solve.candidates import edges
from meshwright.planner.solve.combine import RowTable, look_up_rows, product_of, table_of
from meshwright.planner.solve.follow import rows_following_batch
from meshwright.planner.solve.restrict import followed

_BATCH, _SEQUENCE = "follows batch", "follows sequence"


@dataclass(frozen=True)
class Shape:
    """How a program is cut: a mesh, and micro-batches.

    Attributes:
        batch: pieces of the batch, those that come one after the other among them.
        sequence: pieces of the sequence.
        free: sizes of the axes over which anything may happen.
        count: number of micro-batches.
    """

    batch: int
    sequence: int
    free: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, sizes: Sequence[int], follows: Sequence[str], count: int) -> Shape:
        """From the sizes of mesh axes and what computation follows over each."""
        cut = {kind: int(np.prod([n for n, f in zip(sizes, follows, strict=True) if f == kind])) for kind in (_BATCH, _SEQUENCE)}
        free = tuple(n for n, f in zip(sizes, follows, strict=True) if f not in cut and n > 1)
        return cls(count * cut[_BATCH], cut[_SEQUENCE], free, count)


class KernelFloors:
    """Least kernels of one program; keep one per program.

    Args:
        graph: the program.
        clusters: of it.
        device: that its kernels run on.
    """

    def __init__(self, graph: OpGraph, clusters: ClusterGraph, device: Device):
        self._graph, self._clusters, self._device = graph, clusters, device
        self._rows: dict[tuple[int, int, str, tuple[int, ...]], tuple[int, ...]] = {}
        self._kinds = self._alike()

    def _alike(self) -> list[tuple[Cluster, RowTable, Mapping[int, int]]]:
        """Clusters that cost the same: one of them, its rows, and how often each of them runs, by number."""
        found: dict[int, tuple[Cluster, RowTable, dict[int, int]]] = {}
        for i, cluster in enumerate(self._clusters.clusters):
            if cluster.source is None:
                table = table_of(cluster)
                found.setdefault(id(table), (cluster, table, {}))[2][i] = self._clusters.weights[i]
        return list(found.values())

    def seconds(self, shapes: Sequence[Shape], late: frozenset[str] = frozenset()) -> np.ndarray:
        """Seconds of a step below which no plan can be, for each of some shapes with equally many free axes, float64 [shapes].

        Args:
            shapes: to bound.
            late: values that are known only when all micro-batches have run: what makes them runs once, and does not count.
        """
        cuts = np.array([(s.batch, s.sequence, *s.free) for s in shapes], dtype=np.int64)
        sizes, at = np.unique(cuts, axis=0, return_inverse=True)
        total = np.zeros(len(sizes))
        for cluster, table, runs in self._kinds:
            counted = {i: n for i, n in runs.items() if not self._is_late(i, late)}
            if counted:
                total += sum(counted.values()) * self._least(cluster, table, tuple(counted), sizes)
        return total[at.reshape(-1)] * np.array([s.count for s in shapes])

    def _is_late(self, i: int, late: frozenset[str]) -> bool:
        outs = self._clusters.clusters[i].outs
        return bool(outs) and all(v.name in late for v in outs)

    def _least(self, cluster: Cluster, table: RowTable, members: tuple[int, ...], sizes: np.ndarray) -> np.ndarray:
        """Seconds of a kernel under the best of its rows, float64 [sizes]."""
        codes, rows_of = np.zeros(len(sizes), dtype=np.int64), list[list[tuple[int, ...]]]()
        for cut, follow in zip(sizes.T, (_BATCH, _SEQUENCE, *[""] * (sizes.shape[1] - 2)), strict=True):
            values, at = np.unique(cut, return_inverse=True)
            rows = [self._rows_over(table, members, n, follow) for n in values.tolist()]
            rows_of.append(list(dict.fromkeys(rows)))
            codes = codes * len(rows_of[-1]) + np.array([rows_of[-1].index(r) for r in rows])[at]
        found = np.zeros(len(sizes))
        for code in np.unique(codes).tolist():
            group = np.flatnonzero(codes == code)
            index = product_of(_taken(rows_of, code))
            candidates = np.tile(index, (len(group), 1))
            on = np.repeat(sizes[group], len(index), axis=0)
            seconds = seconds_by_size(cluster, table.priced(candidates), on, self._device)
            found[group] = seconds.reshape(len(group), len(index)).min(axis=1)
        return found

    def _rows_over(self, table: RowTable, members: tuple[int, ...], size: int, follow: str) -> tuple[int, ...]:
        """The rows that any of some clusters may take over an axis; all that are legal where that leaves none."""
        key = id(table), size, follow, members
        if key not in self._rows:
            look_up_rows([table], [size])
            legal = tuple(table.on(size))
            along = followed(self._graph, follow) if size > 1 else None
            if along is not None:
                taken = rows_following_batch(self._clusters, along[1], size, along[0])
                wanted = {edges(taken[i]) for i in members}
                legal = tuple(r for r in legal if edges(table.rows[r]) in wanted) or legal
            self._rows[key] = legal
        return self._rows[key]


def by_number_of_axes(shapes: Sequence[Shape]) -> list[list[int]]:
    """Numbers of the shapes that have equally many free axes."""
    order = sorted(range(len(shapes)), key=lambda k: (len(shapes[k].free), k))
    return [list(group) for _, group in itertools.groupby(order, key=lambda k: len(shapes[k].free))]


def _taken(rows_of: Sequence[Sequence[tuple[int, ...]]], code: int) -> list[tuple[int, ...]]:
    """The rows over each axis that a number stands for."""
    found = []
    for rows in reversed(rows_of):
        code, k = divmod(code, len(rows))
        found.append(rows[k])
    return found[::-1]
