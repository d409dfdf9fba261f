"""A lower bound of the step time that needs no solver: every cluster at its fastest, nothing communicated.

Only row combinations are looked at, not whether they are legal together, so the bound holds for the problem on that mesh,
whatever is demanded beside it. It depends on the sizes of the axes alone, not on their order or links.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.cost.compute import Priced, clusters_seconds
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.hardware import Device
from meshwright.planner.solve.combine import RowTable, look_up_rows, product_of, table_of


class Floors:
    """Least compute on meshes of one kind of device; keep one per program.

    Attributes:
        counts: class to how many clusters of the model it stands for.
    """

    def __init__(self, clusters: ClusterGraph, device: Device):
        self._device = device
        self._known: dict[tuple[int, ...], float] = {}
        first: dict[int, Cluster] = {}
        self.counts: dict[int, int] = {}
        for cluster, g, weight in zip(clusters.clusters, clusters.class_of, clusters.weights, strict=True):
            first.setdefault(g, cluster)
            self.counts[g] = self.counts.get(g, 0) + weight
        self._first = first

    def compute_s(self, sizes: Sequence[int]) -> float:
        """Seconds of compute below which no plan on a mesh of these sizes can be."""
        key = tuple(sorted(sizes))
        if key not in self._known:
            tables = {g: table_of(first) for g, first in self._first.items()}
            look_up_rows(list(tables.values()), key)
            alike = {id(table): (self._first[g], table) for g, table in tables.items()}
            seconds = clusters_seconds([(first, _combined(table, key)) for first, table in alike.values()], key, self._device)
            least = {table: float(s.min()) for table, s in zip(alike, seconds, strict=True)}
            self._known[key] = sum(self.counts[g] * least[id(table)] for g, table in tables.items())
        return self._known[key]


def _combined(table: RowTable, sizes: tuple[int, ...]) -> Priced:
    """All combinations of rows that are legal over each axis alone."""
    return table.priced(product_of([table.on(n) for n in sizes]))
