"""How many clusters and values of the model each of a folded capture stands for, and which clusters it ties.

A capture with :class:`~meshwright.planner.ir.graph.Repeat` records holds block 1 and a copy of it, in a chain
``0, 1, 1', last`` that stands for ``0, 1, 1, ..., 1, last`` with ``K`` copies:

===================== ======= ====== ==================================================
where                 block 1 copy   why
===================== ======= ====== ==================================================
forward, recomputed   K       1      K results go to a further copy, one to the last block
backward              1       K      K gradients come from a copy, one goes to block 0
===================== ======= ====== ==================================================

A cluster across two blocks stands for their junctions: 1 to 1' for K, the others for one. Either way the two of a pair
stand for ``K + 1``, which is checked, and have one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.blocks import colours
from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import Op, Repeat


def original(op: Op) -> str:
    """Name of the op, or of the forward op that it computes again."""
    return op.recompute_of or op.name


def is_forward(op: Op) -> bool:
    """Whether an op belongs to the forward chain of blocks: computed there, or again."""
    return op.phase == "forward" or op.recompute_of is not None


class _Weights:
    def __init__(self, graph: ClusterGraph, repeat: Repeat):
        self.repeat = repeat
        self.first, self.copy = repeat.position, repeat.position + 1
        self.cluster_of = {op.name: i for i, c in enumerate(graph.clusters) for op in c.ops}
        self.clusters = graph.clusters
        self.weight = [1] * len(graph.clusters)
        self.value_weight: dict[str, int] = {}

    def run(self) -> None:
        for i, cluster in enumerate(self.clusters):
            found = sorted(self._instances(cluster))
            if self.first in found or self.copy in found:
                self._weigh(i, cluster, found)

    def _instances(self, cluster: Cluster) -> set[int]:
        names = [original(op) for op in cluster.ops] + ([cluster.source.value.name] if cluster.source else [])
        return {self.repeat.instance[n] for n in names if n in self.repeat.instance}

    def _weigh(self, i: int, cluster: Cluster, found: list[int]) -> None:
        if len(found) > 2 or found[-1] - found[0] > 1:
            raise Unlike(f"cluster {cluster.name} spans blocks {found}")
        if len(found) == 2:
            times = self.repeat.copies if found == [self.first, self.copy] else 1
            self.weight[i] = times
            self.value_weight.update((v.name, times) for op in cluster.ops for v in op.outs if v is not None)
            return
        forward = cluster.source is not None or is_forward(cluster.ops[0])
        self.weight[i] = self._alone(found[0], forward)
        if cluster.source is not None:
            self.value_weight[cluster.source.value.name] = self.weight[i]
        for op in cluster.ops:
            self.value_weight.update((v.name, self._alone(found[0], is_forward(op))) for v in op.outs if v is not None)

    def _alone(self, at: int, forward: bool) -> int:
        return self.repeat.copies if (at == self.first) == forward else 1

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Clusters of block 1 with those of its copy."""
        sources = {c.source.value.name: i for i, c in enumerate(self.clusters) if c.source is not None}
        for name in self.repeat.names:
            mine, other = self.repeat.planned(name), self.repeat.planned(name, 1)
            for where, ending in ((self.cluster_of, ""), (self.cluster_of, "_r"), (sources, "")):
                a, b = where.get(mine + ending), where.get(other + ending)
                if (a is None) != (b is None):
                    raise Unlike(f"{mine}{ending} has no equal in the copy of its block")
                if a is not None and b is not None:
                    yield a, b

    def check(self, pairs: list[tuple[int, int]], colour: list[int]) -> None:
        for a, b in pairs:
            if colour[a] != colour[b]:
                raise Unlike(f"cluster {self.clusters[a].name} and that of the block's copy, {self.clusters[b].name}, differ")
            if self.weight[a] + self.weight[b] != self.repeat.copies + 1:
                raise Unlike(f"cluster {self.clusters[a].name} ends at another place than {self.clusters[b].name}")


def weigh(graph: ClusterGraph, repeats: tuple[Repeat, ...]) -> ClusterGraph:
    """The clusters of a folded capture with their weights, those of block 1 tied to those of its copy.

    Args:
        graph: clusters with their classes.
        repeats: of the capture.

    Raises:
        Unlike: the clusters of a block and its copy differ, so that the capture does not stand for the whole model.
    """
    colour = colours(graph, 0) if repeats else []
    weight = [1] * len(graph.clusters)
    values: dict[str, int] = {}
    class_of = list(graph.class_of)
    for repeat in repeats:
        work = _Weights(graph, repeat)
        work.run()
        pairs = list(dict.fromkeys(work.pairs()))
        work.check(pairs, colour)
        if any(w > 1 and other > 1 for w, other in zip(work.weight, weight, strict=True)):
            raise Unlike("a cluster spans blocks of two lists")
        weight = [max(w, other) for w, other in zip(work.weight, weight, strict=True)]
        values.update({k: v for k, v in work.value_weight.items() if v != 1})
        class_of = _tied(class_of, pairs)
    return replace(graph, class_of=tuple(class_of), weight=tuple(weight), value_weight=values, repeats=repeats)


def _tied(class_of: list[int], pairs: list[tuple[int, int]]) -> list[int]:
    """Classes with those of each pair made one, numbered in order of appearance."""
    parent = {c: c for c in class_of}

    def root(c: int) -> int:
        while parent[c] != c:
            c = parent[c]
        return c

    for a, b in pairs:
        parent[root(class_of[b])] = root(class_of[a])
    number: dict[int, int] = {}
    return [number.setdefault(root(c), len(number)) for c in class_of]
