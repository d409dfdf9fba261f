"""Price a finished plan by walking the graph: independent of the problem's tables, so that the two check each other.

Also prices plans written by hand. What a plan does within a cluster may then change placements; such a cluster is priced
op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Op, OpGraph, Value
from meshwright.planner.ir.plan import Collective, Plan
from meshwright.planner.ir.redistribute import COLLECTIVES
from meshwright.planner.ir.spec import Placements, Row
from meshwright.planner.ir.verify import PlannedStep, made_placements, planned_steps
from meshwright.planner.solve.candidates import piece_bytes, piece_numel
from meshwright.planner.solve.memory import GATHERED_COPIES, parameters_with_gradient, rest_bytes
from meshwright.planner.solve.price import Outcome
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.tables import Costs

# Categories that are maxima over classes: the tables may overestimate them slightly where tied clusters differ.
_PEAKS = frozenset({"working", "gathered"})
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs.

    Attributes:
        outcome: time and memory.
        collectives: those of one step, equal ones counted, sorted.
        cluster_s: seconds of each cluster, in order.
    """

    outcome: Outcome
    collectives: tuple[Collective, ...]
    cluster_s: tuple[float, ...]


def evaluate(plan: Plan, graph: OpGraph, clusters: ClusterGraph, costs: Costs, state_bytes: int) -> Evaluation:
    """Time, memory and collectives of a legal plan.

    Args:
        plan: the plan; only what it does is read, not what it predicts.
        graph: the program.
        clusters: its clusters.
        costs: seconds of clusters and steps.
        state_bytes: optimizer state per parameter element.
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
    outcome = Outcome(
        tuple(compute),
        tuple(comm[False, phase] for phase in SEGMENTS),
        tuple(comm[True, phase] for phase in SEGMENTS),
        walk.memory(state_bytes),
    )
    return Evaluation(outcome, _grouped(found), tuple(seconds))


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
    _seconds: dict[tuple, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.made = made_placements(self.plan, self.graph)

    # --- compute ---

    def cluster_seconds(self) -> list[float]:
        return [self._cluster_s(i, cluster) for i, cluster in enumerate(self.clusters.clusters)]

    def _cluster_s(self, i: int, cluster: Cluster) -> float:
        key = (self.clusters.class_of[i], self.plan.inputs[cluster.source.value.name] if cluster.source else None)
        key += tuple(self.plan.ops[op.name] for op in cluster.ops)  # type: ignore[assignment]
        if key not in self._seconds:
            parts = [cluster] if self._consistent(cluster) else [_alone(op) for op in cluster.ops]
            self._seconds[key] = sum(float(self.costs.cluster_costs(part, [self._rows(part)])[0]) for part in parts)
        return self._seconds[key]

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
        hides = hidden_values(self.graph, self.clusters)
        counts: dict[_Step, int] = {}
        for step in planned_steps(self.plan, self.graph):
            key = (*self._priced(step), (step.value.name, step.phase) in hides, step.phase)
            counts[key] = counts.get(key, 0) + self.clusters.times(step.value.name)
        return counts

    def _priced(self, step: PlannedStep) -> tuple[str, int, int, float]:
        kind, size, seconds = self.costs.step_s(step.value, step.src, step.axis, step.dst[step.axis])
        return kind, step.axis, size, seconds

    # --- memory ---

    def memory(self, state_bytes: int) -> dict[str, int]:
        total: dict[str, int] = {}
        sizes = self.plan.mesh.sizes
        with_gradient = parameters_with_gradient(self.graph)
        for source in self.graph.inputs:
            numel = piece_numel(source.value.shape, self.made[source.value.name], sizes)
            for category, size in rest_bytes(source, numel, state_bytes, source.value.name in with_gradient).items():
                total[category] = total.get(category, 0) + size * self.clusters.times(source.value.name)
        saved = self.graph.saved
        if saved:
            total["activations"] = sum(piece_bytes(v, self.made[v.name], sizes) * self.clusters.times(v.name) for v in saved)
        working = max((self._working(c, {v.name for v in saved}) for c in self.clusters.clusters if c.source is None), default=0)
        return {**total, "working": working, "gathered": GATHERED_COPIES * self._largest_gathered()}

    def _working(self, cluster: Cluster, saved: set[str]) -> int:
        placeholders = self._placeholders()
        sizes = self.plan.mesh.sizes
        wanted = {v.name: p for op in cluster.ops for v, p in self._ins(op)}
        ins = sum(piece_bytes(v, wanted[v.name], sizes) for v in cluster.ins if v.name not in placeholders)
        return ins + sum(piece_bytes(v, self.made[v.name], sizes) for v in cluster.outs if v.name not in saved)

    def _placeholders(self) -> frozenset[str]:
        return frozenset(i.value.name for i in self.graph.inputs)

    def _largest_gathered(self) -> int:
        """Largest copy of a parameter, less the piece it is made from."""
        own = {v.name for c in self.clusters.clusters if c.source is not None and c.source.role == "parameter" for v in c.outs}
        inside = {op.name for c in self.clusters.clusters if c.source is not None for op in c.ops}
        sizes = self.plan.mesh.sizes
        return max(
            (
                piece_bytes(v, p, sizes) - piece_bytes(v, self.made[v.name], sizes)
                for op in self.graph.ops
                if op.name not in inside
                for v, p in self._ins(op)
                if v.name in own
            ),
            default=0,
        )


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
    for category in sorted({*tables.memory_bytes, *walked.memory_bytes}):
        a, b = tables.memory_bytes.get(category, 0), walked.memory_bytes.get(category, 0)
        if (b > a or category not in _PEAKS) and abs(a - b) > 1 + _TOLERANCE * max(a, b):
            raise VerifyError(f"memory of {category} is {a} bytes by the problem's tables, {b} by walking the graph")
    if _without_times(listed) != _without_times(counted):
        raise VerifyError(f"the plan lists collectives {listed}, walking the graph finds {counted}")


def _without_times(found: Sequence[Collective]) -> dict[Collective, int]:
    counts: dict[Collective, int] = {}
    for c in found:
        key = replace(c, time_s=0.0, count=1)
        counts[key] = counts.get(key, 0) + c.count
    return counts
