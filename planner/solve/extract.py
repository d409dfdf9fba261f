"""From chosen candidates to what a plan says: specs of ops, placements of inputs and results, paths, collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.plan import KEPT, Collective, OpSpec, Redistribution
from meshwright.planner.ir.redistribute import COLLECTIVES
from meshwright.planner.ir.spec import Placements, R
from meshwright.planner.solve.candidates import Candidate
from meshwright.planner.solve.keep import gathers_of, root_of
from meshwright.planner.solve.paths import tree_path
from meshwright.planner.solve.price import Outcome
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.results import phase_of_result
from meshwright.planner.solve.tables import Tables


@dataclass(frozen=True)
class Layout:
    """What a plan does, without times: see the fields of the same names of :class:`~meshwright.planner.ir.plan.Plan`."""

    inputs: Mapping[str, Placements]
    ops: Mapping[str, OpSpec]
    outputs: tuple[Placements | None, ...]
    redistributions: tuple[Redistribution, ...]
    kept: Mapping[str, Placements]

    @property
    def paths(self) -> dict[tuple[str, str, Placements], tuple[Placements, ...]]:
        """(value, phase, wanted placements) to the listed path."""
        return {(r.value, r.phase, r.path[-1]): r.path for r in self.redistributions}


def extract(tables: Tables, chosen: Sequence[int], outcome: Outcome) -> Layout:
    """Spell the choice out for every op, input, result and value of the graph."""
    picked = [tables.candidates[g][chosen[g]] for g in tables.class_of]
    specs = {name: spec for cluster, c in zip(tables.clusters.clusters, picked, strict=True) for name, spec in _specs(cluster, c)}
    inputs = {
        cluster.source.value.name: c.rest
        for cluster, c in zip(tables.clusters.clusters, picked, strict=True)
        if cluster.source is not None and c.rest is not None
    }
    paths = _paths(tables, chosen, outcome)
    return Layout(
        {i.value.name: inputs[i.value.name] for i in tables.graph.inputs},
        {op.name: specs[op.name] for op in tables.graph.ops},
        _outputs(tables, picked, paths),
        _redistributions(tables, picked, paths),
        {name: path[-1] for name, path in _kept(tables, picked).items()},
    )


def _specs(cluster: Cluster, candidate: Candidate) -> list[tuple[str, OpSpec]]:
    return [(op.name, _spec(candidate, m)) for m, op in enumerate(cluster.ops)]


def _spec(candidate: Candidate, m: int) -> OpSpec:
    members = [row.members[m] for row in candidate.rows]
    ins = tuple(zip(*(row.ins for row in members), strict=True))
    outs = (None if None in column else column for column in zip(*(row.outs for row in members), strict=True))
    return OpSpec(ins, tuple(outs))


# (value, phase) to the path of each reader, in the readers' order.
_Paths = dict[tuple[str, str], list[tuple[Placements, ...]]]


def _paths(tables: Tables, chosen: Sequence[int], outcome: Outcome) -> _Paths:
    found: _Paths = {}
    for index, flow in enumerate(tables.problem.flows):
        nodes = tables.networks[index].nodes
        root = int(flow.supply_nodes[chosen[flow.supply]])
        paths = []
        for demand in flow.demands:
            accepted = demand.nodes.tolist() if demand.choice is None else [int(demand.nodes[chosen[demand.choice]])]
            path = tree_path(flow.network, outcome.trees[index], root, frozenset(accepted))
            assert path is not None, f"the tree of {flow.name} misses a reader"
            paths.append(tuple(nodes[n] for n in path))
        for name in tables.values[index]:
            found[name, SEGMENTS[flow.segment]] = paths
    return found


def _kept(tables: Tables, picked: Sequence[Candidate]) -> dict[str, tuple[Placements, ...]]:
    """What is kept for the whole step, and the path there."""
    found: dict[str, tuple[Placements, ...]] = {}
    for cluster, candidate in zip(tables.clusters.clusters, picked, strict=True):
        root = root_of(cluster)
        if root is not None and candidate.kept is not None:
            found[root.value.name] = candidate.kept
    return found


def _redistributions(tables: Tables, picked: Sequence[Candidate], paths: _Paths) -> tuple[Redistribution, ...]:
    """Every path with a step, each once, in the order in which values are made."""
    listed: dict[Redistribution, None] = {}
    for name, kept in _kept(tables, picked).items():
        listed[Redistribution(name, KEPT, kept)] = None
    for cluster in tables.clusters.clusters:
        for value in cluster.outs:
            for phase in SEGMENTS:
                for path in paths.get((value.name, phase), ()):
                    if len(path) > 1:
                        listed[Redistribution(value.name, phase, path)] = None
    return tuple(listed)


def _outputs(tables: Tables, picked: Sequence[Candidate], paths: _Paths) -> tuple[Placements | None, ...]:
    made = {
        v.name: c.outs[k] for cluster, c in zip(tables.clusters.clusters, picked, strict=True) for k, v in enumerate(cluster.outs)
    }
    readers = {(name, SEGMENTS[f.segment]): i for i, f in enumerate(tables.problem.flows) for name in tables.values[i]}
    whole = (R,) * tables.mesh.num_axes
    ends: list[Placements | None] = []
    for reader, output in zip(tables.result_readers, tables.graph.outputs, strict=True):
        if output.value is None or reader is None:
            ends.append(None)
            continue
        key = (output.value.name, phase_of_result(output))
        if key in paths:
            slot = tables.readers[readers[key]].index(reader)
            ends.append(paths[key][slot][-1])
        else:
            ends.append(made.get(output.value.name, whole))
    return tuple(ends)


def collectives(tables: Tables, chosen: Sequence[int], outcome: Outcome) -> tuple[Collective, ...]:
    """The collectives of one step, equal ones counted, by kind, axis and size."""
    counts: dict[tuple[str, int, int, float, bool], int] = {}
    for index, flow in enumerate(tables.problem.flows):
        for arc in outcome.trees[index]:
            axis, kind, size = tables.networks[index].arcs[arc]
            if kind in COLLECTIVES:
                key = (kind, axis, size, float(flow.network.seconds[arc]), flow.hidden)
                counts[key] = counts.get(key, 0) + int(flow.count)
    for g, c in enumerate(chosen):
        for kind, axis, size, seconds in gathers_of(tables.first(g), tables.candidates[g][c], tables.costs.once):
            key = (kind, axis, size, seconds, tables.problem.choices[g].gather_hidden)
            counts[key] = counts.get(key, 0) + tables.problem.choices[g].count
    return tuple(Collective(*key, n) for key, n in sorted(counts.items()))
