"""A lower bound of a stage's work that needs no solver: every kernel at its fastest, at the size of a micro-batch.

Only the rows that a cluster may take over each axis are looked at, not whether they are legal together; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.solve.candidates import Edges, edges
from meshwright.planner.solve.combine import product_of, table_of
from meshwright.planner.solve.tables import Costs


class KernelFloors:
    """Least kernels on meshes of one program; keep one per program.

    Args:
        clusters: of the program.
    """

    def __init__(self, clusters: ClusterGraph):
        self._clusters = clusters
        self._members: dict[int, list[int]] = {}
        for i, g in enumerate(clusters.class_of):
            self._members.setdefault(g, []).append(i)
        self._rows: dict[tuple[int, int, str], list[int]] = {}

    def seconds(
        self, sizes: Sequence[int], follows: Sequence[str], allowed: Sequence[Sequence[frozenset[Edges] | None]], costs: Costs
    ) -> float:
        """Seconds of a step below which no plan can be.

        Args:
            sizes: of the mesh axes.
            follows: what computation follows over each; with the size, it says which rows are allowed.
            allowed: per axis and cluster, the rows that it may take there, or None for all.
            costs: seconds of clusters.
        """
        parts, counts = [], []
        for g, group in self._members.items():
            first = self._clusters.clusters[group[0]]
            if first.source is None:
                axes = zip(sizes, follows, allowed, strict=True)
                per_axis = [self._rows_over(g, size, follow, [rows[i] for i in group]) for size, follow, rows in axes]
                parts.append((first, table_of(first).priced(product_of(per_axis))))
                counts.append(sum(self._clusters.weights[i] for i in group))
        return sum(n * float(s.min()) for n, s in zip(counts, costs.clusters_costs(parts), strict=True))

    def _rows_over(self, g: int, size: int, follow: str, wanted: Sequence[frozenset[Edges] | None]) -> list[int]:
        """The rows that any cluster of a class may take over an axis; all that are legal where that leaves none."""
        key = g, size, follow
        if key not in self._rows:
            cluster = self._clusters.clusters[self._members[g][0]]
            legal = list(table_of(cluster).on(size))
            kept = [r for r in legal if any(w is None or edges(cluster.rows[r]) in w for w in wanted)]
            self._rows[key] = kept or legal
        return self._rows[key]
