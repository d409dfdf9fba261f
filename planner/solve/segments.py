"""Which communication can hide behind compute: it can be issued ahead, and something long runs meanwhile.

* A parameter's gather, for one phase or kept for the step, can be issued ahead, except one that is needed before the phase's first heavy kernel.
* A gradient's reduction can run while the backward goes on, except one that begins after the last heavy kernel.
* All else is on the way of the compute and exposed.

```
forward   [gather embedding][kernels .......................]
backward                    [kernels .......................][reduce embedding]
           exposed           gathers and reductions hide here  exposed
```
"""

from __future__ import annotations

from collections import Counter

from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.heavy import HEAVY
from meshwright.planner.solve.keep import root_of
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.results import parameter_of


def hidden_values(graph: OpGraph, clusters: ClusterGraph) -> frozenset[tuple[str, str]]:
    """(value, phase) whose redistribution can hide.

    Values of tied clusters are decided alike: what is alone at an end is exposed, what repeats hides.
    """
    return _ahead(graph, clusters) - _at_the_ends(graph, clusters)


def _ahead(graph: OpGraph, clusters: ClusterGraph) -> frozenset[tuple[str, str]]:
    """What can be issued ahead or finished late: parameters, and what is only a parameter's gradient."""
    found = {(name, phase) for name in _parameter_values(clusters) for phase in SEGMENTS}
    read_in_backward = {v.name for op in graph.ops if op.phase == "backward" for v in op.ins}
    parameters = parameter_of(graph)
    ends: dict[str, bool] = {}
    for o in graph.outputs_of("gradient"):
        if o.value is not None:
            ends[o.value.name] = ends.get(o.value.name, True) and o.name in parameters
    found.update((name, "backward") for name, alone in ends.items() if alone and name not in read_in_backward)
    return frozenset(found)


def _parameter_values(clusters: ClusterGraph) -> list[str]:
    sources = (c for c in clusters.clusters if c.source is not None and c.source.role == "parameter")
    return [v.name for c in sources for v in (*c.outs, *_kept(c))]


def _kept(cluster: Cluster) -> tuple[Value, ...]:
    """What can be kept of a parameter, where it is not read outside itself."""
    root = root_of(cluster)
    return () if root is None or root.value in cluster.outs else (root.value,)


def _at_the_ends(graph: OpGraph, clusters: ClusterGraph) -> set[tuple[str, str]]:
    position = {op.name: i for i, op in enumerate(graph.ops)}
    heavy = {p: [position[op.name] for op in graph.ops if op.phase == p and op.target in HEAVY] for p in SEGMENTS}
    members = Counter(clusters.class_of)
    found: set[tuple[str, str]] = set()
    inside = {op.name for c in clusters.clusters if c.source is not None for op in c.ops}
    first_read: dict[str, int] = {}
    for op in graph.ops:
        for v in op.ins if op.phase == "forward" and op.name not in inside else ():
            first_read.setdefault(v.name, position[op.name])
    for i, cluster in enumerate(clusters.clusters):
        if members[clusters.class_of[i]] > 1 or clusters.weights[i] > 1:
            continue
        root = root_of(cluster)
        first = min((first_read.get(v.name, len(position)) for v in cluster.outs), default=len(position))
        if root is not None and heavy["forward"] and first < heavy["forward"][0]:
            found.add((root.value.name, "forward"))
        for v in cluster.outs:
            if cluster.source is not None:
                if heavy["forward"] and first_read.get(v.name, len(position)) < heavy["forward"][0]:
                    found.add((v.name, "forward"))
            elif heavy["backward"] and max(position[op.name] for op in cluster.ops) > heavy["backward"][-1]:
                found.add((v.name, "backward"))
    return found
