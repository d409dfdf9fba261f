"""Find repeated blocks and decide them once.

Clusters that look alike, and whose surroundings look alike, get one class: colour refinement over the cluster graph.
The first colour of a cluster is what it computes; each round adds the colours of what it reads (by slot) and of what
reads it, a parameter counting as a reader of its gradient. Names of modules play no part. After a few rounds the layers
of a stack share their colours, but for the places where the first and the last ones meet something else: the number of
classes does not grow with depth.

Two clusters of one class have equal ins, outs and rows, in order, so giving them one candidate is always legal. Ties
only restrict the choice; that they lose nothing is measured, not proved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.kinds import signature_of

ROUNDS = 1
"""Rounds of refinement: how far, in clusters, the surroundings must look alike; placeholders look one further, past the
kernels that read them, so that the two weights of a square MLP are told apart.

Measured: one round and two gave the untied optimum to every digit shown (Llama-3-8B, 2 and 6 layers, 8x8)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated piece of the program.

    Attributes:
        times: how often it occurs.
        clusters: clusters in one occurrence (parameters included).
        parameters: parameters in one occurrence.
    """

    times: int
    clusters: int
    parameters: int


class _Colours:
    """Small integers for structures: equal structures, equal integers."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))


def _shape_key(cluster: Cluster, colour: _Colours, op_colours: dict[str, int]) -> Hashable:
    """What a cluster computes, up to names: its ops, how they are wired, what leaves it, its rows."""
    local: dict[str, int] = {}

    def number(name: str) -> int:
        return local.setdefault(name, len(local))

    source: Any = None
    if cluster.source is not None:
        s = cluster.source
        number(s.value.name)
        source = (s.role, s.trainable, len(s.aliases), s.value.shape, s.value.dtype)
    ops = []
    for op in cluster.ops:
        if op.name not in op_colours:
            op_colours[op.name] = colour(signature_of(op))
        ops.append(
            (
                op_colours[op.name],
                tuple(number(v.name) for v in op.ins),
                tuple(None if v is None else number(v.name) for v in op.outs),
            )
        )
    ins = tuple((number(v.name), v.shape, v.dtype) for v in cluster.ins)
    return (cluster.phase, source, tuple(ops), ins, tuple(number(v.name) for v in cluster.outs), id(cluster.rows))


def _wiring(
    graph: ClusterGraph,
) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int, int]]], list[list[tuple[int, str]]]]:
    """Per cluster: the makers of its ins (cluster, out slot), its readers (out slot, cluster, in slot), and its results
    (out slot, role). A parameter reads its gradient in slot -1."""
    makers = [[graph.producer[v.name] for v in c.ins] for c in graph.clusters]
    readers: list[list[tuple[int, int, int]]] = [[] for _ in graph.clusters]
    for i, sources in enumerate(makers):
        for slot, (j, k) in enumerate(sources):
            readers[j].append((k, i, slot))
    results: list[list[tuple[int, str]]] = [[] for _ in graph.clusters]
    parameter = {
        name: i
        for i, c in enumerate(graph.clusters)
        if c.source is not None and c.source.role == "parameter"
        for name in (c.source.name, *c.source.aliases)
    }
    for out in graph.outputs:
        if out.value is None:
            continue
        j, k = graph.producer[out.value.name]
        results[j].append((k, out.role))
        if out.role == "gradient" and out.name in parameter:
            p = parameter[out.name]
            readers[j].append((k, p, -1))
            makers[p].append((j, k))
    return makers, readers, results


def _rows_by_value(graph: ClusterGraph) -> dict[int, Hashable]:
    """``id`` of each cluster's rows to a key by value: equal rows that are different objects are one."""
    keys: dict[int, Hashable] = {}
    first: dict[Hashable, int] = {}
    for c in graph.clusters:
        if id(c.rows) not in keys:
            keys[id(c.rows)] = first.setdefault(c.rows, len(first))
    return keys


def colours(graph: ClusterGraph, rounds: int = ROUNDS) -> list[int]:
    """A colour per cluster: equal where clusters and their surroundings up to ``rounds`` away look alike."""
    colour = _Colours()
    op_colours: dict[str, int] = {}
    rows = _rows_by_value(graph)
    keys = [_shape_key(c, colour, op_colours) for c in graph.clusters]
    makers, readers, results = _wiring(graph)
    now = [
        colour((key[:-1] if isinstance(key, tuple) else key, rows[id(c.rows)], tuple(sorted(results[i]))))
        for i, (c, key) in enumerate(zip(graph.clusters, keys, strict=True))
    ]

    def refined(i: int) -> int:
        sources = tuple((now[j], k) for j, k in makers[i])
        return colour((now[i], sources, tuple(sorted(Counter((k, now[j], slot) for k, j, slot in readers[i]).items()))))

    for _ in range(rounds):
        now = [refined(i) for i in range(len(now))]
    now = [refined(i) if c.source is not None else now[i] for i, c in enumerate(graph.clusters)]
    return now


def fold(graph: ClusterGraph, rounds: int = ROUNDS) -> ClusterGraph:
    """Tie clusters that are the same place of repeated blocks.

    Args:
        graph: clusters, each in a class of its own.
        rounds: see ``ROUNDS``.

    Returns:
        The same clusters with ``class_of`` by colour, classes numbered in order of appearance.
    """
    number: dict[int, int] = {}
    return replace(graph, class_of=tuple(number.setdefault(c, len(number)) for c in colours(graph, rounds)))


def blocks(graph: ClusterGraph) -> tuple[Block, ...]:
    """The repeated pieces of a folded graph, most frequent work first: classes that occur equally often."""
    size: Counter[int] = Counter()
    for cls, weight in zip(graph.class_of, graph.weights, strict=True):
        size[cls] += weight
    members: dict[int, list[int]] = {}
    for cls, times in size.items():
        if times > 1:
            members.setdefault(times, []).append(cls)
    first = {cls: graph.clusters[graph.class_of.index(cls)] for cls in size}
    found = [
        Block(
            times,
            len(classes),
            sum((source := first[cls].source) is not None and source.role == "parameter" for cls in classes),
        )
        for times, classes in members.items()
    ]
    return tuple(sorted(found, key=lambda b: -b.times * b.clusters))


def summary(graph: ClusterGraph) -> dict[str, Any]:
    """What was decided once for many, for :attr:`Plan.folded`."""
    return {
        "clusters": sum(graph.weights),
        "classes": len(set(graph.class_of)),
        "blocks": [{"times": b.times, "clusters": b.clusters, "parameters": b.parameters} for b in blocks(graph)],
    }
