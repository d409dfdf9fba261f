"""From clusters to the problem: classes, their candidates and costs, and the flows of values between them.

Tied clusters make one choice. Their values make one flow where they are read alike: the result of every middle layer by
the next layer, that of the last one by the final norm, so one class may have several flows for one result, each counted
as often as it occurs. That keeps folded costs exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.solve.candidates import Candidate, Edges, cheapest_of_equals, even, expand, piece_bytes, storable
from meshwright.planner.solve.keep import StepCosts, kept_bytes, root_of, with_kept
from meshwright.planner.solve.memory import GATHERED_COPIES, parameters_with_gradient, resting
from meshwright.planner.solve.network import PlacementNetwork, Wish, networks_of
from meshwright.planner.solve.precision import unreduced_values
from meshwright.planner.solve.problem import SEGMENTS, Choice, Demand, Flow, Peak, Problem
from meshwright.planner.solve.program import NetworkCache
from meshwright.planner.solve.results import ends_free, has_loss, parameter_of, phase_of_result
from meshwright.planner.solve.rows import MemoryRows
from meshwright.planner.solve.segments import hidden_values

_REDUCTIONS = ("all_reduce", "reduce_scatter")

# A consumer of a value: ("in", class, slot), ("grad", class, 0), ("whole", 0, 0) or ("free", 0, 0).
Reader = tuple[str, int, int]


class Costs(Protocol):
    """What planning needs of the cost model."""

    def cluster_costs(self, cluster: Cluster, candidates: Sequence[tuple[ClusterRow, ...]]) -> np.ndarray: ...

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]: ...

    def steps_s(self, steps: Steps) -> tuple[np.ndarray, np.ndarray]: ...

    def sort_of(self, value: Value) -> object: ...

    @property
    def once(self) -> StepCosts: ...


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


@dataclass(frozen=True)
class _Group:
    """Values that make one flow."""

    supply: int
    slot: int
    phase: str
    readers: tuple[Reader, ...]
    names: tuple[str, ...]


def build_tables(
    graph: OpGraph,
    clusters: ClusterGraph,
    class_of: Sequence[int],
    mesh: MeshShape,
    costs: Costs,
    *,
    state_bytes: int,
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
        state_bytes: optimizer state per parameter element.
        memory_limit_bytes: limit per device, or None.
        precision: of the capture; see :mod:`meshwright.planner.solve.precision`.
        allowed: per axis and cluster, the rows that it may take there, or None for all.
    """
    labels = {label: g for g, label in enumerate(dict.fromkeys(class_of))}
    dense = tuple(labels[label] for label in class_of)
    members: list[list[int]] = [[] for _ in labels]
    for i, g in enumerate(dense):
        members[g].append(i)
    with_gradient = parameters_with_gradient(graph)
    choices, candidates, hidden = [], [], hidden_values(graph, clusters)
    for group in members:
        count = sum(clusters.weights[i] for i in group)
        tied = [clusters.clusters[i] for i in group]
        source = tied[0].source
        trained = source is not None and source.value.name in with_gradient
        wanted = [_union([rows[i] for i in group]) for rows in allowed]
        choice, kept = _choice(tied, count, mesh, costs, wanted, hidden if trained else None)
        rest = resting(with_gradient, tied, kept, mesh.sizes, state_bytes, clusters.times)
        choices.append(replace(choice, memory_bytes={**rest, **kept_bytes(tied, kept, mesh.sizes, clusters.times)}))
        candidates.append(kept)
    points = MemoryRows(graph, clusters, dense, candidates, mesh.sizes)
    choices = [replace(c, memory_bytes=_added(c.memory_bytes, points.at_base(g))) for g, c in enumerate(choices)]
    layout = _Flows(graph, clusters, dense, candidates, mesh, precision, hidden)
    groups = layout.groups()
    networks = networks_of([layout.wish(group) for group in groups], costs, mesh.sizes)
    flows = [(layout.flow(g, network), network, g) for g, network in zip(groups, networks, strict=True)]
    peaks = (*points.peaks(), *_gathered(flows, clusters, members, mesh))
    return Tables(
        graph,
        clusters,
        mesh,
        dense,
        tuple(map(tuple, members)),
        tuple(candidates),
        tuple(group.names for _, _, group in flows),
        tuple(network for _, network, _ in flows),
        tuple(group.readers for _, _, group in flows),
        tuple(layout.results),
        Problem(
            tuple(choices),
            tuple(flow for flow, _, _ in flows),
            tuple(p for p in peaks if p.terms),
            {},
            memory_limit_bytes,
            _tie_memory(choices),
        ),
        costs,
        points,
    )


def _choice(
    members: Sequence[Cluster],
    count: int,
    mesh: MeshShape,
    costs: Costs,
    wanted: Sequence[frozenset[Edges] | None],
    hidden: frozenset[tuple[str, str]] | None,
) -> tuple[Choice, tuple[Candidate, ...]]:
    """``hidden``: which gathers hide, for a parameter with a gradient, of which a copy may be kept; else None."""
    first = members[0]
    expanded = expand(first, mesh.sizes, wanted)
    gathers: tuple[float, ...] = (0.0,) * len(expanded)
    if hidden is not None:
        expanded, gathers = with_kept(first, expanded, mesh.sizes, costs.once)
    seconds = np.asarray(costs.cluster_costs(first, [c.rows for c in expanded]), dtype=float)
    kept = cheapest_of_equals(expanded, seconds)
    candidates = tuple(expanded[i] for i in kept)
    choice, root = Choice(first.name, count, SEGMENTS.index(first.phase), seconds[kept]), root_of(first)
    if any(gathers) and root is not None and hidden is not None:
        choice = replace(choice, gather_s=np.array(gathers)[kept], gather_hidden=(root.value.name, "forward") in hidden)
    return choice, candidates


def _added(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**a, **{k: a[k] + v if k in a else v for k, v in b.items()}}


def _union(kept: Sequence[frozenset[Edges] | None]) -> frozenset[Edges] | None:
    """Rows that any of several clusters may take; None for all."""
    sets = [k for k in kept if k is not None]
    return frozenset().union(*sets) if len(sets) == len(kept) else None


def _tie_memory(choices: Sequence[Choice]) -> float:
    """Seconds per byte such that all static memory together weighs 1e-6 of the compute."""
    compute = sum(c.count * float(np.median(c.compute_s)) for c in choices)
    static = sum(float(np.sum(list(c.memory_bytes.values()), axis=0).max()) for c in choices if c.memory_bytes)
    return 1e-6 * compute / static if static else 0.0


class _Flows:
    """Groups values by who reads them, and makes a flow of each group."""

    def __init__(
        self,
        graph: OpGraph,
        clusters: ClusterGraph,
        class_of: Sequence[int],
        candidates: Sequence[Sequence[Candidate]],
        mesh: MeshShape,
        precision: str | None,
        hidden: frozenset[tuple[str, str]],
    ):
        self._clusters = clusters
        self._class_of = class_of
        self._candidates = candidates
        self._sizes = mesh.sizes
        self._unreduced = unreduced_values(graph) if precision == "bf16-mixed" else frozenset()
        self._readers: dict[tuple[str, str], dict[Reader, None]] = {}
        self._hidden = hidden
        self.results: list[Reader | None] = []
        for i, cluster in enumerate(clusters.clusters):
            for slot, value in enumerate(cluster.ins):
                self._read(value.name, cluster.phase, ("in", class_of[i], slot))
        self._read_results(graph)

    def _read(self, value: str, phase: str, reader: Reader) -> None:
        self._readers.setdefault((value, phase), {})[reader] = None

    def _read_results(self, graph: OpGraph) -> None:
        placeholder, loss = parameter_of(graph), has_loss(graph)
        source_class = {
            c.source.value.name: self._class_of[i] for i, c in enumerate(self._clusters.clusters) if c.source is not None
        }
        for output in graph.outputs:
            if output.value is None:
                self.results.append(None)
                continue
            reader: Reader = ("free" if ends_free(output, loss) else "whole", 0, 0)
            if output.role == "gradient" and output.name in placeholder:
                if placeholder[output.name] not in source_class:  # clusters are a part of the program, and this is outside
                    self.results.append(None)
                    continue
                reader = ("grad", source_class[placeholder[output.name]], 0)
            self._read(output.value.name, phase_of_result(output), reader)
            self.results.append(reader)

    def groups(self) -> list[_Group]:
        """Values by producing class, result, phase and readers, in execution order."""
        found: dict[tuple[int, int, str, tuple[Reader, ...]], list[str]] = {}
        for i, cluster in enumerate(self._clusters.clusters):
            for slot, value in enumerate(cluster.outs):
                for phase in SEGMENTS:
                    readers = self._readers.get((value.name, phase))
                    if readers:
                        key = (self._class_of[i], slot, phase, tuple(sorted(readers)))
                        found.setdefault(key, []).append(value.name)
        return [
            _Group(supply, slot, phase, readers, tuple(names))
            for (supply, slot, phase, readers), names in found.items()
            if self._matters(supply, slot, readers)
        ]

    def _made(self, supply: int, slot: int) -> list[Placements]:
        return [c.outs[slot] for c in self._candidates[supply]]

    def _wanted(self, reader: Reader) -> list[Placements]:
        """What each candidate of the reading class wants; for results of the graph what they accept, if fixed."""
        kind, choice, slot = reader
        if kind == "in":
            return [c.ins[slot] for c in self._candidates[choice]]
        if kind == "grad":
            return [c.rest or () for c in self._candidates[choice]]
        return [(R,) * len(self._sizes)] if kind == "whole" else []

    def _matters(self, supply: int, slot: int, readers: tuple[Reader, ...]) -> bool:
        """Whether any choice could need a step."""
        made = set(self._made(supply, slot))
        if len(made) > 1:
            return True
        return any(set(self._wanted(r)) - made for r in readers) or any(p.is_partial for ps in made for p in ps)

    def _cluster(self, group: _Group) -> Cluster:
        return self._clusters.clusters[self._class_of.index(group.supply)]

    def wish(self, group: _Group) -> Wish:
        """The network that a flow needs."""
        source = self._cluster(group).source
        used = dict.fromkeys((*self._made(group.supply, group.slot), *(p for r in group.readers for p in self._wanted(r))))
        uneven = (source is not None and source.role == "parameter") or any(kind == "grad" for kind, _, _ in group.readers)
        return Wish(self._cluster(group).outs[group.slot], tuple(used), uneven)

    def flow(self, group: _Group, network: PlacementNetwork) -> Flow:
        value = self._cluster(group).outs[group.slot]
        return Flow(
            value.name,
            sum(map(self._clusters.times, group.names)),
            SEGMENTS.index(group.phase),
            (group.names[0], group.phase) in self._hidden,
            network.network,
            self._allowed(group, network),
            group.supply,
            np.array([network.index[p] for p in self._made(group.supply, group.slot)], dtype=np.int64),
            tuple(self._demand(reader, network.index, value) for reader in group.readers),
        )

    def _demand(self, reader: Reader, index: Mapping[Placements, int], value: Value) -> Demand:
        kind, choice, _ = reader
        if kind == "free":
            accepted = [n for p, n in index.items() if self._presentable(value, p)]
            return Demand(None, np.array(accepted, dtype=np.int64))
        nodes = np.array([index[p] for p in self._wanted(reader)], dtype=np.int64)
        return Demand(None if kind == "whole" else choice, nodes)

    def _presentable(self, value: Value, placements: Placements) -> bool:
        """Whether a user output may have these placements as a DTensor."""
        return not any(p.is_partial for p in placements) and storable(placements) and even(value.shape, placements, self._sizes)

    def _allowed(self, group: _Group, network: PlacementNetwork) -> np.ndarray:
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
    flows: Sequence[tuple[Flow, PlacementNetwork, _Group]],
    clusters: ClusterGraph,
    members: Sequence[Sequence[int]],
    mesh: MeshShape,
) -> tuple[Peak, ...]:
    """Copies of parameters larger than the piece they are made from."""
    terms = []
    for flow, network, group in flows:
        cluster = clusters.clusters[members[group.supply][0]]
        if cluster.source is None or cluster.source.role != "parameter":
            continue
        size = np.array([float(piece_bytes(cluster.outs[group.slot], p, mesh.sizes)) for p in network.nodes])
        for demand in flow.demands:
            if demand.choice is not None and demand.choice != flow.supply:
                terms.append(((demand.choice, size[demand.nodes]), (flow.supply, -size[flow.supply_nodes])))
    return (Peak("gathered", float(GATHERED_COPIES), tuple(terms)),)
