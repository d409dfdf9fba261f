"""The flows of values between classes: what each needs of a network, and where in it the classes' candidates make and want it.

Groups of values between classes that are alike are made and wanted alike (:class:`Use`), on one mesh and mostly on the next one too: that is
worked out once per program. What remains for each flow is to put it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placements, R
from meshwright.planner.solve.candidates import even, piece_bytes, storable
from meshwright.planner.solve.expanded import Expanded, Placed
from meshwright.planner.solve.layout import Group, Layout, Reader
from meshwright.planner.solve.memory import GATHERED_COPIES
from meshwright.planner.solve.network import PlacementNetwork, StepCosts, Wish, networks_of
from meshwright.planner.solve.problem import SEGMENTS, Demand, Flow, Peak

_REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Use:
    """How candidates make and want a value.

    Attributes:
        used: placements in which it is made or wanted, each once: the first nodes of its network.
        matters: whether any choice could need a step.
        supply: node at which each candidate makes it, int64 [candidates].
        wanted: per reader, the node that each of its candidates wants, int64 [candidates]; of a result that must be whole, the node of
            that; None of a result that may be as it is.
        partial: per axis, whether every reader can read it as it is before a reduction over that axis.
        of: the candidates that this was worked out from.
    """

    used: tuple[Placements, ...]
    matters: bool
    supply: np.ndarray
    wanted: tuple[np.ndarray | None, ...]
    partial: tuple[bool, ...]
    of: tuple[Expanded | None, ...]

    @classmethod
    def work_out(cls, own: Expanded, slot: int, readers: Sequence[tuple[str, Expanded | None, int]]) -> Use:
        """Of the candidates that make it as their result ``slot``, and of readers: kind, candidates if it has some, and slot."""
        made, num_axes = own.placed("out", slot), own.index.shape[1]
        whole = Placed.of([(R,) * num_axes])
        read = [
            (expanded.placed("in", at) if kind == "in" else expanded.placed("rest"))
            if expanded is not None
            else whole
            if kind == "whole"
            else None
            for kind, expanded, at in readers
        ]
        node = {p: n for n, p in enumerate(made.distinct)}
        for each in read:
            for p in each.distinct if each is not None else ():
                node.setdefault(p, len(node))
        return cls(
            tuple(node),
            len(node) > 1 or any(p.is_partial for ps in made.distinct for p in ps),
            made.number,
            tuple([None if each is None else _nodes(node, each) for each in read]),
            tuple(
                [all(each is not None and any(p[a].is_partial for p in each.distinct) for each in read) for a in range(num_axes)]
            ),
            (own, *[expanded for _, expanded, _ in readers]),
        )


def _nodes(node: dict[Placements, int], placed: Placed) -> np.ndarray:
    found = np.array([node[p] for p in placed.distinct], dtype=np.int64)[placed.number]
    found.setflags(write=False)  # several flows have it
    return found


class Flows:
    """Makes a flow of each group of values that could need a step.

    Args:
        layout: the classes.
        clusters: the program.
        expanded: candidates of every class.
        mesh: the mesh.
        unreduced: values that must not be reduced.
        hidden: (value, phase) whose redistribution can hide.
        costs: of steps.

    Attributes:
        groups: the values of each flow.
        networks: the network of each.
        flows: the flows.
    """

    def __init__(
        self,
        layout: Layout,
        clusters: ClusterGraph,
        expanded: Sequence[Expanded],
        mesh: MeshShape,
        unreduced: frozenset[str],
        hidden: frozenset[tuple[str, str]],
        costs: StepCosts,
    ):
        self._expanded, self._sizes, self._unreduced, self._hidden = expanded, mesh.sizes, unreduced, hidden
        self._firsts = [clusters.clusters[group[0]] for group in layout.members]
        self._allowed_in: dict[tuple[int, tuple[bool, ...] | None], np.ndarray] = {}
        known = layout.once("uses", dict[tuple, Use])
        pairs = [(group, self._use(group, known)) for group in layout.groups]
        pairs = [(group, use) for group, use in pairs if use.matters]
        self.groups = [group for group, _ in pairs]
        self.networks = self._networks(pairs, costs)
        self.flows = [self._flow(*pair, network) for pair, network in zip(pairs, self.networks, strict=True)]

    def _use(self, group: Group, known: dict[tuple, Use]) -> Use:
        own = self._expanded[group.supply]
        readers = [(kind, self._expanded[g] if kind in ("in", "grad") else None, at) for kind, g, at in group.readers]
        key = (id(own), group.slot, *[(kind, id(expanded), at) for kind, expanded, at in readers])
        use = known.get(key)
        if use is None:
            use = known[key] = Use.work_out(own, group.slot, readers)
        return use

    def _cluster(self, group: Group) -> Cluster:
        return self._firsts[group.supply]

    def _networks(self, pairs: Sequence[tuple[Group, Use]], costs: StepCosts) -> list[PlacementNetwork]:
        wishes: dict[tuple, Wish] = {}
        keys = []
        for group, use in pairs:
            cluster = self._cluster(group)
            value = cluster.outs[group.slot]
            keys.append((id(use), value.shape, value.dtype, costs.sort_of(value), cluster.source is not None))
            if keys[-1] not in wishes:
                is_parameter = cluster.source is not None and cluster.source.role == "parameter"
                uneven = is_parameter or any(kind == "grad" for kind, _, _ in group.readers)
                wishes[keys[-1]] = Wish(value, use.used, uneven)
        found = dict(zip(wishes, networks_of(list(wishes.values()), costs, self._sizes), strict=True))
        return [found[key] for key in keys]

    def _flow(self, group: Group, use: Use, network: PlacementNetwork) -> Flow:
        value = self._cluster(group).outs[group.slot]
        return Flow(
            value.name,
            group.count,
            SEGMENTS.index(group.phase),
            (group.names[0], group.phase) in self._hidden,
            network.network,
            self._allowed(group, use, network),
            group.supply,
            use.supply,
            tuple([self._demand(r, nodes, network, value) for r, nodes in zip(group.readers, use.wanted, strict=True)]),
        )

    def _demand(self, reader: Reader, nodes: np.ndarray | None, network: PlacementNetwork, value: Value) -> Demand:
        kind, choice, _ = reader
        if nodes is None:
            accepted = [n for p, n in network.index.items() if self._presentable(value, p)]
            return Demand(None, np.array(accepted, dtype=np.int64))
        return Demand(None if kind == "whole" else choice, nodes)

    def _presentable(self, value: Value, placements: Placements) -> bool:
        """Whether a user output may have these placements as a DTensor."""
        return not any(p.is_partial for p in placements) and storable(placements) and even(value.shape, placements, self._sizes)

    def _allowed(self, group: Group, use: Use, network: PlacementNetwork) -> np.ndarray:
        """All arcs; for a low-precision partial gradient only those that leave it partial, where its readers can read that."""
        partial = use.partial if group.names[0] in self._unreduced else None
        key = id(network), partial
        if key not in self._allowed_in:
            allowed = np.ones(network.network.num_arcs, dtype=bool)
            for axis, size in enumerate(self._sizes if partial is not None else ()):
                if size > 1 and partial is not None and partial[axis]:
                    allowed &= ~network.are([axis], _REDUCTIONS)
            allowed.setflags(write=False)  # several flows have it
            self._allowed_in[key] = allowed
        return self._allowed_in[key]

    def gathered(self) -> Peak:
        """Copies of parameters larger than the piece they are made from."""
        terms = []
        sizes: dict[int, np.ndarray] = {}
        for flow, network, group in zip(self.flows, self.networks, self.groups, strict=True):
            cluster = self._cluster(group)
            if cluster.source is None or cluster.source.role != "parameter":
                continue
            if id(network) not in sizes:
                value = cluster.outs[group.slot]
                sizes[id(network)] = np.array([float(piece_bytes(value, p, self._sizes)) for p in network.nodes])
            size = sizes[id(network)]
            for demand in flow.demands:
                if demand.choice is not None and demand.choice != flow.supply:
                    terms.append(((demand.choice, size[demand.nodes]), (flow.supply, -size[flow.supply_nodes])))
        return Peak("gathered", float(GATHERED_COPIES), tuple(terms))
