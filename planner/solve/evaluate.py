"""Price a finished plan by walking the graph: independent of the problem's tables, so that the two check each other.

Also prices plans written by hand. What a plan does within a cluster may then change placements; such a cluster is priced
op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.planner.cost.compute import Columns, Priced
from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Op, OpGraph, Value
from meshwright.planner.ir.plan import Collective, Plan
from meshwright.planner.ir.redistribute import COLLECTIVES
from meshwright.planner.ir.spec import Placements, Row
from meshwright.planner.ir.verify import PlannedStep, made_placements, parameter_behind, planned_steps
from meshwright.planner.solve.alive import peak_of
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.price import Outcome
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.tables import Costs

# Categories that do not change over a step. The others the tables know at few points and without copies.
_AT_REST = frozenset({"parameters", "optimizer", "accumulated", "buffers", "inputs"})
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs.

    Attributes:
        outcome: time and memory.
        collectives: those of one step, equal ones counted, sorted.
        cluster_s: seconds of each cluster, in order.
        peak_at: the op that runs when most memory is in use.
    """

    outcome: Outcome
    collectives: tuple[Collective, ...]
    cluster_s: tuple[float, ...]
    peak_at: str


def evaluate(plan: Plan, graph: OpGraph, clusters: ClusterGraph, costs: Costs, trained: Trained) -> Evaluation:
    """Time, memory and collectives of a legal plan.

    Args:
        plan: the plan; only what it does is read, not what it predicts.
        graph: the program.
        clusters: its clusters.
        costs: seconds of clusters and steps.
        trained: what training holds per parameter element.
    """
    walk = _Walk(plan, graph, clusters, costs)
    seconds = walk.cluster_seconds()
    compute = [0.0] * len(SEGMENTS)
    for cluster, s, times in zip(clusters.clusters, seconds, clusters.weights, strict=True):
        compute[SEGMENTS.index(cluster.phase)] += s * times
    found = walk.collectives()
    comm = {(hidden, phase): 0.0 for hidden in (False, True) for phase in SEGMENTS}
    for (_, _, _, s, hidden, phase), n in found.items():
        comm[hidden, phase] += n * s
    peak = peak_of(plan, graph, clusters, walk.made, trained)
    outcome = Outcome(
        tuple(compute),
        tuple(comm[False, phase] for phase in SEGMENTS),
        tuple(comm[True, phase] for phase in SEGMENTS),
        peak.bytes,
    )
    return Evaluation(outcome, _grouped(found), tuple(seconds), peak.at)


def kernel_seconds(graph: OpGraph, clusters: ClusterGraph, cluster_s: Sequence[float]) -> dict[str, float]:
    """Seconds of each kernel (to three digits) by the name of its last op, where all that it reads has been made."""
    order = {op.name: i for i, op in enumerate(graph.ops)}
    found: dict[str, float] = {}
    for cluster, seconds in zip(clusters.clusters, cluster_s, strict=True):
        if cluster.ops and seconds > 0:
            found[max((op.name for op in cluster.ops), key=order.__getitem__)] = float(f"{seconds:.3g}")
    return found


# (kind, axis, bytes, seconds, hidden, phase)
_Step = tuple[str, int, int, float, bool, str]


def _grouped(found: Mapping[_Step, int]) -> tuple[Collective, ...]:
    counts: dict[tuple[str, int, int, float, bool], int] = {}
    for (kind, axis, size, seconds, hidden, _), n in found.items():
        if kind in COLLECTIVES:
            key = (kind, axis, size, seconds, hidden)
            counts[key] = counts.get(key, 0) + n
    return tuple(Collective(*key, n) for key, n in sorted(counts.items()))


@dataclass
class _Walk:
    plan: Plan
    graph: OpGraph
    clusters: ClusterGraph
    costs: Costs
    made: dict[str, Placements] = field(init=False)

    def __post_init__(self) -> None:
        self.made = made_placements(self.plan, self.graph)

    # --- compute ---

    def cluster_seconds(self) -> list[float]:
        """Seconds of each cluster; clusters of one class that do the same are priced once, and all at once."""
        keys = [self._key(i, cluster) for i, cluster in enumerate(self.clusters.clusters)]
        first = dict(zip(reversed(keys), reversed(self.clusters.clusters), strict=True))
        parts = [(key, part) for key, cluster in first.items() for part in self._parts(cluster)]
        rows = [self._rows(part) for _, part in parts]
        index = np.arange(self.plan.mesh.num_axes)[None]
        priced = [(part, Priced(Columns(part, r), r, index)) for (_, part), r in zip(parts, rows, strict=True)]
        found = dict.fromkeys(first, 0.0)
        for (key, _), seconds in zip(parts, self.costs.clusters_costs(priced), strict=True):
            found[key] += float(seconds[0])
        return [found[key] for key in keys]

    def _key(self, i: int, cluster: Cluster) -> tuple:
        rest = self.plan.inputs[cluster.source.value.name] if cluster.source else None
        return self.clusters.class_of[i], rest, *[self.plan.ops[op.name] for op in cluster.ops]

    def _parts(self, cluster: Cluster) -> list[Cluster]:
        """What is priced as one kernel: the cluster, or each of its ops where a value changes its placement inside."""
        return [cluster] if self._consistent(cluster) else [_alone(op) for op in cluster.ops]

    def _consistent(self, cluster: Cluster) -> bool:
        """Whether no value changes its placement inside the cluster."""
        read: dict[str, Placements] = {v.name: self.made[v.name] for op in cluster.ops for v in op.outs if v is not None}
        if cluster.source is not None:
            read[cluster.source.value.name] = self.made[cluster.source.value.name]
        return all(read.setdefault(v.name, p) == p for op in cluster.ops for v, p in self._ins(op))

    def _ins(self, op: Op) -> Iterable[tuple[Value, Placements]]:
        return zip(op.ins, self.plan.ops[op.name].ins, strict=True)

    def _rows(self, cluster: Cluster) -> tuple[ClusterRow, ...]:
        wanted = {v.name: p for op in cluster.ops for v, p in self._ins(op)}
        rest = None if cluster.source is None else self.plan.inputs[cluster.source.value.name]
        return tuple(
            ClusterRow(
                tuple(wanted[v.name][axis] for v in cluster.ins),
                tuple(self.made[v.name][axis] for v in cluster.outs),
                tuple(self._row(op, axis) for op in cluster.ops),
                None if rest is None else rest[axis],
            )
            for axis in range(self.plan.mesh.num_axes)
        )

    def _row(self, op: Op, axis: int) -> Row:
        spec = self.plan.ops[op.name]
        return Row(tuple(p[axis] for p in spec.ins), tuple(None if p is None else p[axis] for p in spec.outs))

    # --- communication ---

    def collectives(self) -> dict[_Step, int]:
        """How often each step is taken, slices included."""
        hides = hidden_values(self.graph, self.clusters) if self.costs.overlaps else frozenset()
        counts: dict[_Step, int] = {}
        for step in planned_steps(self.plan, self.graph):
            key = (*self._priced(step), (step.value.name, step.phase) in hides, step.phase)
            name = parameter_behind(self.graph, step.value.name) if step.kept else step.value.name
            counts[key] = counts.get(key, 0) + self.clusters.times(name)
        return counts

    def _priced(self, step: PlannedStep) -> tuple[str, int, int, float]:
        costs = self.costs.once if step.kept else self.costs
        kind, size, seconds = costs.step_s(step.value, step.src, step.axis, step.dst[step.axis])
        return kind, step.axis, size, seconds


def _alone(op: Op) -> Cluster:
    ins = {v.name: v for v in op.ins}
    return Cluster(op.name, op.phase, None, (op,), tuple(ins.values()), tuple(v for v in op.outs if v is not None), ())


def require_equal(tables: Outcome, walked: Outcome, listed: Sequence[Collective], counted: Sequence[Collective]) -> None:
    """Check the problem's price of a plan against the walk over the graph.

    Raises:
        VerifyError: they differ (a bug).
    """
    for what in ("compute_s", "exposed_s", "hidden_s"):
        for phase, a, b in zip(SEGMENTS, getattr(tables, what), getattr(walked, what), strict=True):
            if abs(a - b) > _TOLERANCE * max(a, b, 1e-9):
                raise VerifyError(f"{what} of the {phase} is {a!r} by the problem's tables, {b!r} by walking the graph")
    for category in sorted(_AT_REST):
        a, b = tables.memory_bytes.get(category, 0), walked.memory_bytes.get(category, 0)
        if abs(a - b) > 1 + _TOLERANCE * max(a, b):
            raise VerifyError(f"memory of {category} is {a} bytes by the problem's tables, {b} by walking the graph")
    if _without_times(listed) != _without_times(counted):
        raise VerifyError(f"the plan lists collectives {listed}, walking the graph finds {counted}")


def _without_times(found: Sequence[Collective]) -> dict[Collective, int]:
    counts: dict[Collective, int] = {}
    for c in found:
        key = replace(c, time_s=0.0, count=1)
        counts[key] = counts.get(key, 0) + c.count
    return counts
