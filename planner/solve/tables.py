"""From clusters to the problem: classes, their candidates and costs, and the flows of values between them.

Tied clusters make one choice. Their values make one flow where they are read alike: the result of every middle layer by
the next layer, that of the last one by the final norm, so one class may have several flows for one result, each counted
as often as it occurs. That keeps folded costs exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from meshwright.planner.cost.compute import Priced
from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements
from meshwright.planner.solve.candidates import Candidate, Edges
from meshwright.planner.solve.combine import expand_all, table_of
from meshwright.planner.solve.expanded import Expanded
from meshwright.planner.solve.flows import Flows
from meshwright.planner.solve.keep import Gathers, StepCosts, kept_unit, root_of, with_kept
from meshwright.planner.solve.layout import Layout, Reader, layout_of
from meshwright.planner.solve.memory import Trained, resting_units
from meshwright.planner.solve.network import PlacementNetwork
from meshwright.planner.solve.problem import SEGMENTS, Choice, Problem
from meshwright.planner.solve.program import NetworkCache
from meshwright.planner.solve.rows import MemoryRows, Sizes


class Costs(Protocol):
    """What planning needs of the cost model."""

    def cluster_costs(self, cluster: Cluster, candidates: Sequence[tuple[ClusterRow, ...]]) -> np.ndarray: ...

    def clusters_costs(self, parts: Sequence[tuple[Cluster, Priced]]) -> list[np.ndarray]: ...

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]: ...

    def steps_s(self, steps: Steps) -> tuple[np.ndarray, np.ndarray]: ...

    def sort_of(self, value: Value) -> object: ...

    @property
    def once(self) -> StepCosts: ...

    @property
    def overlaps(self) -> bool: ...


@dataclass(frozen=True)
class Tables:
    """The problem and what its numbers mean.

    Attributes:
        graph: the program.
        clusters: its clusters.
        mesh: the logical mesh.
        class_of: choice of every cluster.
        members: choice to its clusters' indices.
        expanded: choice to its candidates.
        values: flow to the names of its values.
        networks: flow to its network of placements.
        readers: flow to its demands' readers.
        result_readers: the reader that each result of the graph is, in the graph's order; None where there is no tensor.
        problem: the numbers.
        costs: what they were made with.
        points: memory at the points of a step.
        cache: reduced networks, shared by all solves of the problem.
    """

    graph: OpGraph
    clusters: ClusterGraph
    mesh: MeshShape
    class_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    expanded: tuple[Expanded, ...]
    values: tuple[tuple[str, ...], ...]
    networks: tuple[PlacementNetwork, ...]
    readers: tuple[tuple[Reader, ...], ...]
    result_readers: tuple[Reader | None, ...]
    problem: Problem
    costs: Costs
    points: MemoryRows
    cache: NetworkCache = field(default_factory=NetworkCache)

    @cached_property
    def candidates(self) -> tuple[Sequence[Candidate], ...]:
        """Choice to its candidates, each made when it is asked for."""
        return tuple([e.candidates for e in self.expanded])

    def first(self, choice: int) -> Cluster:
        """The first cluster of a class."""
        return self.clusters.clusters[self.members[choice][0]]

    def sources(self, role: str) -> list[int]:
        """Choices that are placeholders of a role."""
        return [g for g in range(len(self.members)) if (s := self.first(g).source) is not None and s.role == role]


def build_tables(
    graph: OpGraph,
    clusters: ClusterGraph,
    class_of: Sequence[int],
    mesh: MeshShape,
    costs: Costs,
    *,
    trained: Trained,
    memory_limit_bytes: int | None,
    precision: str | None = None,
    allowed: Sequence[Sequence[frozenset[Edges] | None]] = (),
) -> Tables:
    """Expand candidates, price them, and lay out the flows.

    Args:
        graph: the program.
        clusters: its clusters.
        class_of: class of every cluster, any labels.
        mesh: the mesh.
        costs: seconds of clusters and steps.
        trained: what training holds per parameter element.
        memory_limit_bytes: limit per device, or None.
        precision: of the capture; see :mod:`meshwright.planner.solve.precision`.
        allowed: per axis and cluster, the rows that it may take there, or None for all.
    """
    layout = layout_of(graph, clusters, class_of)
    classes = _classes(layout, clusters, mesh, costs, allowed)
    sizes = Sizes([c.expanded for c in classes], mesh.sizes)
    points = MemoryRows(graph, clusters, layout, sizes)
    memory = _memory(layout, clusters, sizes, trained, points)
    hidden = layout.hidden if costs.overlaps else frozenset[tuple[str, str]]()
    choices = [_choice(layout, clusters, g, c, memory[g], hidden) for g, c in enumerate(classes)]
    unreduced = layout.unreduced if precision == "bf16-mixed" else frozenset[str]()
    made = Flows(layout, clusters, [c.expanded for c in classes], mesh, unreduced, hidden, costs)
    peaks = (*points.peaks(), made.gathered())
    return Tables(
        graph,
        clusters,
        mesh,
        layout.class_of,
        layout.members,
        tuple([c.expanded for c in classes]),
        tuple([group.names for group in made.groups]),
        tuple(made.networks),
        tuple([group.readers for group in made.groups]),
        layout.results,
        Problem(
            tuple(choices),
            tuple(made.flows),
            tuple(p for p in peaks if p.terms),
            {},
            memory_limit_bytes,
            _tie_memory(choices),
        ),
        costs,
        points,
    )


@dataclass(frozen=True)
class _Class:
    """Tied clusters on a mesh.

    Attributes:
        first: the first of them.
        expanded: their candidates.
        seconds: of one cluster by candidate.
        gather_s: seconds of gathering what a candidate keeps; None where none does.
    """

    first: Cluster
    expanded: Expanded
    seconds: np.ndarray
    gather_s: np.ndarray | None


def _classes(
    layout: Layout,
    clusters: ClusterGraph,
    mesh: MeshShape,
    costs: Costs,
    allowed: Sequence[Sequence[frozenset[Edges] | None]],
) -> list[_Class]:
    """Expand and price the candidates of all classes; of those with one signature only the fastest is kept."""
    firsts = [clusters.clusters[group[0]] for group in layout.members]
    wanted = [[_union([rows[i] for i in group]) for rows in allowed] for group in layout.members]
    expanded = expand_all([table_of(first) for first in firsts], mesh.sizes, wanted)
    gathers, known = dict[int, tuple[float, ...]](), Gathers()
    longer: dict[int, tuple[Expanded, tuple[float, ...]]] = {}
    for g, first in enumerate(firsts):
        if first.source is not None and first.source.value.name in layout.with_gradient:
            own = id(expanded[g])
            if own not in longer:
                longer[own] = with_kept(expanded[g], mesh.sizes, costs.once, known)
            expanded[g], gathers[g] = longer[own]
    seconds = costs.clusters_costs([(first, e.priced) for first, e in zip(firsts, expanded, strict=True)])
    fastest: dict[tuple[int, int], tuple[Expanded, np.ndarray, np.ndarray | None]] = {}
    found = []
    for g, (first, e, s) in enumerate(zip(firsts, expanded, seconds, strict=True)):
        key = id(e), id(s)
        if key not in fastest:
            fastest[key] = _fastest(e, s, gathers.get(g, ()))
        found.append(_Class(first, *fastest[key]))
    return found


def _fastest(e: Expanded, seconds: np.ndarray, gathers: Sequence[float]) -> tuple[Expanded, np.ndarray, np.ndarray | None]:
    """Of candidates with one signature the fastest, their seconds, and those of gathering what they keep; classes that are alike share them."""
    kept = e.cheapest_of_equals(seconds)
    taken, gather_s = e.taken(kept), np.array(gathers)[list(kept)] if any(gathers) else None
    seconds = seconds[list(kept)]
    seconds.setflags(write=False)
    return taken, seconds, gather_s


def _choice(
    layout: Layout,
    clusters: ClusterGraph,
    g: int,
    tied: _Class,
    memory: Mapping[str, np.ndarray],
    hidden: frozenset[tuple[str, str]],
) -> Choice:
    root = None if tied.gather_s is None else root_of(tied.first)
    segment, count = SEGMENTS.index(tied.first.phase), sum(clusters.weights[i] for i in layout.members[g])
    if root is None:
        return Choice(tied.first.name, count, segment, tied.seconds, memory)
    is_hidden = (root.value.name, "forward") in hidden
    return Choice(tied.first.name, count, segment, tied.seconds, memory, tied.gather_s, is_hidden)


def _memory(
    layout: Layout, clusters: ClusterGraph, sizes: Sizes, trained: Trained, points: MemoryRows
) -> list[dict[str, np.ndarray]]:
    """Per class, category to bytes by candidate: what rests, what is kept, and what is held at the base."""

    def units() -> list[tuple[dict[str, int], int]]:
        members = [[clusters.clusters[i] for i in group] for group in layout.members]
        return [(resting_units(layout.with_gradient, m, trained, clusters.times), kept_unit(m, clusters.times)) for m in members]

    at_base, found = points.at_base(), []
    for g, (rest, kept) in enumerate(layout.once(f"units of memory, {trained}", units)):
        memory = {category: sizes.at_rest(g) * unit for category, unit in rest.items()}
        if kept and (copies := sizes.kept(g)).any():
            memory["kept"] = copies * kept
        found.append(_added(memory, at_base.get(g, {})))
    return found


def _added(a: dict[str, np.ndarray], b: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**a, **{k: a[k] + v if k in a else v for k, v in b.items()}}


def _union(kept: Sequence[frozenset[Edges] | None]) -> frozenset[Edges] | None:
    """Rows that any of several clusters may take; None for all."""
    sets = [k for k in kept if k is not None]
    if len(sets) < len(kept):
        return None
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


def _tie_memory(choices: Sequence[Choice]) -> float:
    """Seconds per byte such that all static memory together weighs 1e-6 of the compute."""
    medians = {key: _median(seconds) for key, seconds in {id(c.compute_s): c.compute_s for c in choices}.items()}
    compute = sum(c.count * medians[id(c.compute_s)] for c in choices)
    totals = [c.static_bytes for c in choices if c.memory_bytes]
    starts = np.cumsum([0, *map(len, totals[:-1])])
    static = float(np.maximum.reduceat(np.concatenate(totals), starts).sum()) if totals else 0.0
    return 1e-6 * compute / static if static else 0.0


def _median(numbers: np.ndarray) -> float:
    """``np.median``, which takes ten times as long for a few numbers."""
    ordered, half = np.sort(numbers), len(numbers) // 2
    return float(ordered[half]) if len(numbers) % 2 else float(ordered[half - 1] + ordered[half]) / 2
