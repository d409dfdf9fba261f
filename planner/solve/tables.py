"""From clusters to the problem: classes, their candidates and costs, and the flows of values between them.

Tied clusters make one choice. Their values make one flow where they are read alike: the result of every middle layer by
the next layer, that of the last one by the final norm, so one class may have several flows for one result, each counted
as often as it occurs. That keeps folded costs exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from meshwright.planner.cost.compute import Priced
from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.solve.candidates import Candidate, Edges, even, piece_bytes, storable
from meshwright.planner.solve.combine import Expanded, expand_all, table_of
from meshwright.planner.solve.keep import Gathers, StepCosts, kept_unit, root_of, with_kept
from meshwright.planner.solve.layout import Group, Layout, Reader, layout_of
from meshwright.planner.solve.memory import GATHERED_COPIES, Trained, resting_units
from meshwright.planner.solve.network import PlacementNetwork, Wish, networks_of
from meshwright.planner.solve.problem import SEGMENTS, Choice, Demand, Flow, Peak, Problem
from meshwright.planner.solve.program import NetworkCache
from meshwright.planner.solve.rows import MemoryRows, Sizes

_REDUCTIONS = ("all_reduce", "reduce_scatter")


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
        candidates: choice to its candidates.
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
    candidates: tuple[tuple[Candidate, ...], ...]
    values: tuple[tuple[str, ...], ...]
    networks: tuple[PlacementNetwork, ...]
    readers: tuple[tuple[Reader, ...], ...]
    result_readers: tuple[Reader | None, ...]
    problem: Problem
    costs: Costs
    points: MemoryRows
    cache: NetworkCache = field(default_factory=NetworkCache)

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
    memory, hidden = (
        _memory(layout, clusters, sizes, trained, points),
        layout.hidden if costs.overlaps else frozenset[tuple[str, str]](),
    )
    choices = [_choice(layout, clusters, g, c, memory[g], hidden) for g, c in enumerate(classes)]
    unreduced = layout.unreduced if precision == "bf16-mixed" else frozenset[str]()
    made = _Flows(layout, clusters, [c.expanded for c in classes], mesh, unreduced, hidden)
    groups = [group for group in layout.groups if made.matters(group)]
    networks = networks_of([made.wish(group) for group in groups], costs, mesh.sizes)
    flows = [made.flow(group, network) for group, network in zip(groups, networks, strict=True)]
    peaks = (*points.peaks(), *_gathered(flows, networks, groups, clusters, layout, mesh))
    return Tables(
        graph,
        clusters,
        mesh,
        layout.class_of,
        layout.members,
        tuple(c.expanded.candidates for c in classes),
        tuple(group.names for group in groups),
        tuple(networks),
        tuple(group.readers for group in groups),
        layout.results,
        Problem(
            tuple(choices),
            tuple(flows),
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
    compute = sum(c.count * _median(c.compute_s) for c in choices)
    static = sum(float(np.sum(list(c.memory_bytes.values()), axis=0).max()) for c in choices if c.memory_bytes)
    return 1e-6 * compute / static if static else 0.0


def _median(numbers: np.ndarray) -> float:
    """``np.median``, which takes ten times as long for a few numbers."""
    ordered, half = np.sort(numbers), len(numbers) // 2
    return float(ordered[half]) if len(numbers) % 2 else float(ordered[half - 1] + ordered[half]) / 2


class _Flows:
    """Makes a flow of each group of values."""

    def __init__(
        self,
        layout: Layout,
        clusters: ClusterGraph,
        expanded: Sequence[Expanded],
        mesh: MeshShape,
        unreduced: frozenset[str],
        hidden: frozenset[tuple[str, str]],
    ):
        self._layout, self._clusters, self._expanded = layout, clusters, expanded
        self._sizes, self._unreduced, self._hidden = mesh.sizes, unreduced, hidden
        self._whole = ((R,) * mesh.num_axes,)

    def _wanted(self, reader: Reader) -> tuple[Placements, ...]:
        """What the candidates of the reading class want, each once; for results of the graph what they accept, if fixed."""
        kind, choice, slot = reader
        if kind == "in":
            return self._expanded[choice].distinct("in", slot)
        if kind == "grad":
            return self._expanded[choice].distinct("rest")
        return self._whole if kind == "whole" else ()

    def matters(self, group: Group) -> bool:
        """Whether any choice could need a step."""
        made = self._expanded[group.supply].distinct("out", group.slot)
        if len(made) > 1:
            return True
        return any(p not in made for r in group.readers for p in self._wanted(r)) or any(p.is_partial for ps in made for p in ps)

    def _cluster(self, group: Group) -> Cluster:
        return self._clusters.clusters[self._layout.members[group.supply][0]]

    def wish(self, group: Group) -> Wish:
        """The network that a flow needs."""
        source, made = self._cluster(group).source, self._expanded[group.supply].distinct("out", group.slot)
        used = dict.fromkeys(made)
        for reader in group.readers:
            used.update(dict.fromkeys(self._wanted(reader)))
        uneven = (source is not None and source.role == "parameter") or any(kind == "grad" for kind, _, _ in group.readers)
        return Wish(self._cluster(group).outs[group.slot], tuple(used), uneven)

    def flow(self, group: Group, network: PlacementNetwork) -> Flow:
        value = self._cluster(group).outs[group.slot]
        return Flow(
            value.name,
            group.count,
            SEGMENTS.index(group.phase),
            (group.names[0], group.phase) in self._hidden,
            network.network,
            self._allowed(group, network),
            group.supply,
            network.at(self._expanded[group.supply].placed("out", group.slot)),
            tuple(self._demand(reader, network, value) for reader in group.readers),
        )

    def _demand(self, reader: Reader, network: PlacementNetwork, value: Value) -> Demand:
        kind, choice, slot = reader
        if kind == "free":
            accepted = [n for p, n in network.index.items() if self._presentable(value, p)]
            return Demand(None, np.array(accepted, dtype=np.int64))
        if kind == "whole":
            return Demand(None, network.at(self._whole))
        return Demand(choice, network.at(self._expanded[choice].placed("in" if kind == "in" else "rest", slot)))

    def _presentable(self, value: Value, placements: Placements) -> bool:
        """Whether a user output may have these placements as a DTensor."""
        return not any(p.is_partial for p in placements) and storable(placements) and even(value.shape, placements, self._sizes)

    def _allowed(self, group: Group, network: PlacementNetwork) -> np.ndarray:
        """All arcs; for a low-precision partial gradient only those that leave it partial, where its readers can read that."""
        allowed = np.ones(network.network.num_arcs, dtype=bool)
        if group.names[0] not in self._unreduced:
            return allowed
        for axis, size in enumerate(self._sizes):
            readable = all(any(p[axis].is_partial for p in self._wanted(r)) for r in group.readers)
            if size > 1 and readable:
                allowed &= ~network.are([axis], _REDUCTIONS)
        return allowed


def _gathered(
    flows: Sequence[Flow],
    networks: Sequence[PlacementNetwork],
    groups: Sequence[Group],
    clusters: ClusterGraph,
    layout: Layout,
    mesh: MeshShape,
) -> tuple[Peak, ...]:
    """Copies of parameters larger than the piece they are made from."""
    terms = []
    for flow, network, group in zip(flows, networks, groups, strict=True):
        cluster = clusters.clusters[layout.members[group.supply][0]]
        if cluster.source is None or cluster.source.role != "parameter":
            continue
        size = np.array([float(piece_bytes(cluster.outs[group.slot], p, mesh.sizes)) for p in network.nodes])
        for demand in flow.demands:
            if demand.choice is not None and demand.choice != flow.supply:
                terms.append(((demand.choice, size[demand.nodes]), (flow.supply, -size[flow.supply_nodes])))
    return (Peak("gathered", float(GATHERED_COPIES), tuple(terms)),)
