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
from meshwright.planner.solve.candidates import rows_on_axes


class Floors:
    """Least compute on meshes of one kind of device; keep one per program."""

    def __init__(self, clusters: ClusterGraph, device: Device):
        self._device = device
        self._known: dict[tuple[int, ...], float] = {}
        self._rows: dict[tuple[int, int], list[int]] = {}
        counts: dict[int, int] = {}
        for i, g in enumerate(clusters.class_of):
            counts[g] = counts.get(g, 0) + clusters.weights[i]
        first = {g: clusters.clusters[i] for i, g in reversed(list(enumerate(clusters.class_of)))}
        self._classes: list[tuple[Cluster, int]] = [(first[g], n) for g, n in counts.items()]

    def compute_s(self, sizes: Sequence[int]) -> float:
        """Seconds of compute below which no plan on a mesh of these sizes can be."""
        key = tuple(sorted(sizes))
        if key not in self._known:
            self._known[key] = sum(n * self._least(g, cluster, key) for g, (cluster, n) in enumerate(self._classes))
        return self._known[key]

    def _least(self, g: int, cluster: Cluster, sizes: tuple[int, ...]) -> float:
        new = [n for n in dict.fromkeys(sizes) if (g, n) not in self._rows]
        for n, rows in zip(new, rows_on_axes(cluster, new), strict=True):
            self._rows[g, n] = rows
        grids = np.meshgrid(*(np.array(self._rows[g, n]) for n in sizes), indexing="ij")
        index = np.stack([grid.ravel() for grid in grids], axis=1)
        return float(cluster_seconds(cluster, cluster.rows, index, sizes, self._device).min())
