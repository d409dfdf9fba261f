"""A lower bound of the step time that needs no solver: every cluster at its fastest, nothing communicated.

Only row combinations are looked at, not whether they are legal together, so the bound holds for the problem on that mesh,
whatever is demanded beside it. It depends on the sizes of the axes alone, not on their order or links.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.planner.cost.compute import cluster_seconds
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.hardware import Device
from meshwright.planner.solve.combine import table_of


class Floors:
    """Least compute on meshes of one kind of device; keep one per program.

    Attributes:
        counts: class to how many clusters of the model it stands for.
    """

    def __init__(self, clusters: ClusterGraph, device: Device):
        self._device = device
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}
        first: dict[int, Cluster] = {}
        self.counts: dict[int, int] = {}
        for cluster, g, weight in zip(clusters.clusters, clusters.class_of, clusters.weights, strict=True):
            first.setdefault(g, cluster)
            self.counts[g] = self.counts.get(g, 0) + weight
        self._first = first

    def compute_s(self, sizes: Sequence[int]) -> float:
        """Seconds of compute below which no plan on a mesh of these sizes can be."""
        return sum(self.class_s(g, sizes) for g in self.counts)

    def class_s(self, g: int, sizes: Sequence[int]) -> float:
        """Likewise of the clusters of one class, all of them together."""
        key = (g, tuple(sorted(sizes)))
        if key not in self._known:
            self._known[key] = self.counts[g] * self._least(self._first[g], key[1])
        return self._known[key]

    def _least(self, cluster: Cluster, sizes: tuple[int, ...]) -> float:
        grids = np.meshgrid(*(np.array(table_of(cluster).on(n)) for n in sizes), indexing="ij")
        index = np.stack([grid.ravel() for grid in grids], axis=1)
        return float(cluster_seconds(cluster, cluster.rows, index, sizes, self._device).min())
