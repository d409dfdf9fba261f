"""Search: from a captured program, a mesh and hardware to a plan.

Fuse and fold, expand and price candidates, solve, spell the plan out, and price it again by walking the graph: the two
prices must agree. The named strategies are solved on the same tables and stand beside the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.planner import blocks, fuse, rules
from meshwright.planner.correspond import Unlike
from meshwright.planner.cost import CostModel
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.errors import InputError, NoRuleError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Alternative, Fallback, Plan, Prediction
from meshwright.planner.ir.spec import Placements
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.solve.diagnose import ROW_MARGIN, explain_infeasible
from meshwright.planner.solve.evaluate import Evaluation, evaluate, require_equal
from meshwright.planner.solve.extract import collectives, extract
from meshwright.planner.solve.memory import RESERVE, optimizer_bytes
from meshwright.planner.solve.optimise import Effort, Solution, optimise
from meshwright.planner.solve.pins import Pin, find_pins, restrict_to_pins
from meshwright.planner.solve.price import Outcome, objective_s, price
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.strategies import (
    STRATEGIES,
    axis_name_rules,
    batch_size,
    replicated_under,
    restrict,
    strategy_named,
)
from meshwright.planner.solve.tables import Tables, build_tables
from meshwright.planner.weights import weigh

__all__ = ["STRATEGIES", "Options", "make_plan", "strategy_named"]

_ON_MISSING_RULE = ("replicate", "error")
# What the strategies beside the plan are worth: they are for comparison, and stop at a wider gap.
_COMPARED = Effort(gap=3e-2, nodes=20)


@dataclass(frozen=True)
class Options:
    """What to search for.

    Attributes:
        strategy: ``"auto"`` or the name of a strategy.
        memory_limit_bytes: bytes per device; None: the device's memory less a reserve (``memory.RESERVE``).
        optimizer: name of the optimizer whose state is counted, or its bytes per parameter element.
        pins: name pattern to placements; see :mod:`meshwright.planner.solve.pins`.
        on_missing_rule: ``"replicate"`` ops that have no rule, or ``"error"``.
        respect_axis_names: whether axes named ``dp``, ``fsdp``, ``data``, ``tp``, ``model`` are used only for that.
        alternatives: whether to solve the named strategies too, for comparison. With them ``"auto"`` is never slower than a named
            one that fits; without them only within the gap.
        model: the model's class name, for people.
        progress: called with the name of each phase as it begins.
        effort: gap and limits of the solver.
    """

    strategy: str = "auto"
    memory_limit_bytes: int | None = None
    optimizer: str | int = "adamw"
    pins: Mapping[str, str | Placements] = field(default_factory=dict)
    on_missing_rule: str = "replicate"
    respect_axis_names: bool = False
    alternatives: bool = True
    model: str = ""
    progress: Callable[[str], None] | None = None
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        strategy_named(self.strategy)
        optimizer_bytes(self.optimizer)
        if self.on_missing_rule not in _ON_MISSING_RULE:
            raise InputError(f"on_missing_rule is {self.on_missing_rule!r}: use one of {', '.join(_ON_MISSING_RULE)}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise InputError(f"the memory limit is {self.memory_limit_bytes} bytes: it must be positive")


class _Clock:
    """Seconds per phase."""

    def __init__(self, progress: Callable[[str], None] | None):
        self.seconds: dict[str, float] = {}
        self._tell = progress or (lambda phase: None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._tell(name)
        start = time.perf_counter()
        yield
        self.seconds[f"{name.replace(' ', '_')}_s"] = time.perf_counter() - start


@dataclass(frozen=True)
class _Found:
    """One strategy solved."""

    solution: Solution
    outcome: Outcome
    objective_s: float
    bound_s: float
    notes: tuple[str, ...]

    @property
    def gap(self) -> float:
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s) if self.objective_s else 0.0


def make_plan(capture: Capture, mesh: MeshShape, hardware: Hardware, options: Options | None = None, **keywords: Any) -> Plan:
    """Find the best plan.

    Args:
        capture: the program.
        mesh: the logical mesh.
        hardware: device, and one link per mesh axis.
        options: what to search for.
        **keywords: fields of :class:`Options`, over those of ``options``.

    Raises:
        InputError: options, pins or batch that cannot be used.
        NoRuleError: an op has no rule and ``on_missing_rule="error"``.
        InfeasibleError: nothing fits the memory limit, or pins and strategy contradict each other.
        VerifyError: the plan's two prices disagree (a bug).
    """
    options = replace(options or Options(), **keywords)
    if len(hardware.links) != mesh.num_axes:
        raise InputError(
            f"hardware has {len(hardware.links)} links, but mesh {mesh} has {mesh.num_axes} axes: give one link per axis"
        )
    return _Search(capture, mesh, hardware, options).plan()


class _Search:
    """One call of :func:`make_plan`."""

    def __init__(self, capture: Capture, mesh: MeshShape, hardware: Hardware, options: Options):
        self.capture, self.mesh, self.hardware, self.options = capture, mesh, hardware, options
        self.clock = _Clock(options.progress)
        self.costs = CostModel(hardware, mesh)
        self.limit = options.memory_limit_bytes or int(hardware.device.memory_bytes * (1 - RESERVE))
        self.clusters = self._clusters()
        self.pins = find_pins(options.pins, capture.graph, self.clusters, mesh)
        with self.clock.phase("build"):
            self.tables = self._tables()
        self.demands = self._demands()

    def _clusters(self) -> ClusterGraph:
        """Fused and folded clusters. Where a kernel would span several copies of a block, values between blocks stay apart."""
        repeats = self.capture.repeats
        apart = frozenset[str]().union(*(r.apart for r in repeats))
        try:
            return self._clusters_apart(apart)
        except Unlike:
            return self._clusters_apart(apart.union(*(r.crossing for r in repeats)))

    def _clusters_apart(self, apart: frozenset[str]) -> ClusterGraph:
        with self.clock.phase("fuse"):
            clusters = fuse.fuse(self.capture.graph, rules.rows_for, apart)
        if self.options.on_missing_rule == "error":
            _require_rules(clusters)
        with self.clock.phase("fold"):
            return weigh(blocks.fold(clusters), self.capture.repeats)

    def _tables(self) -> Tables:
        labels = [(c, tuple(p.key for p in self.pins.get(i, ()))) for i, c in enumerate(self.clusters.class_of)]
        numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
        return build_tables(
            self.capture.graph,
            self.clusters,
            [numbers[label] for label in labels],
            self.mesh,
            self.costs,
            state_bytes=self._state_bytes(),
            memory_limit_bytes=int(self.limit * (1 - ROW_MARGIN)),
            precision=self.capture.precision,
        )

    def _state_bytes(self) -> int:
        return optimizer_bytes(self.options.optimizer)

    def _demands(self) -> list[tuple[str, Restriction]]:
        """What the user demands beside the strategy, by name."""
        by_pattern: dict[str, dict[int, tuple[Pin, ...]]] = {}
        for cluster, pins in self.pins.items():
            for pin in pins:
                by_pattern.setdefault(pin.pattern, {})[cluster] = (pin,)
        demands = [(f"pin {pattern!r}", restrict_to_pins(self.tables, pins)) for pattern, pins in by_pattern.items()]
        if self.options.respect_axis_names:
            demands.append(("the axis names", restrict(self.tables, axis_name_rules(self.mesh), "respect_axis_names")))
        return demands

    # --- solving ---

    def _parts(self, name: str) -> list[tuple[str, Restriction]]:
        """All demands of a strategy's problem."""
        strategy = strategy_named(name)
        if strategy.name == "auto":
            return self.demands
        return [(f"strategy {strategy.name!r}", restrict(self.tables, strategy.rules(self.mesh), strategy.name)), *self.demands]

    def _solve(self, name: str, *, limited: bool = True, effort: Effort | None = None) -> _Found | None:
        """The strategy's best plan; None where none fits."""
        whole = Restriction()
        for _, part in self._parts(name):
            whole = whole.merged(part)
        problem = self.tables.problem if limited else replace(self.tables.problem, memory_limit_bytes=None)
        solution = optimise(problem, whole, self.tables.cache, effort or self.options.effort)
        if solution is None:
            return None
        outcome = price(problem, whole, solution.chosen)
        objective = objective_s(problem, outcome, solution.chosen)
        notes = whole.notes + replicated_under(self.tables, whole, solution.chosen, name)
        return _Found(solution, outcome, objective, min(objective, solution.bound_s), notes)

    def plan(self) -> Plan:
        """Solve, compare, spell out, verify."""
        name = strategy_named(self.options.strategy).name
        with self.clock.phase("solve"):
            found = self._solve(name)
        if found is None:
            raise explain_infeasible(self.tables, self._parts(name), self.limit)
        alternatives: tuple[Alternative, ...] = ()
        if self.options.alternatives:
            with self.clock.phase("alternatives"):
                others = self._others(name)
            alternatives = tuple(a for a, _ in others)
            if name == "auto":
                found = self._not_worse(found, [f for a, f in others if a.fits and f is not None])
        with self.clock.phase("check"):
            plan = self._checked(name, found, alternatives)
        return replace(plan, solver=self._solver(found))

    def _others(self, name: str) -> list[tuple[Alternative, _Found | None]]:
        """The other named strategies, each solved as well as it can be."""
        return [
            self._alternative(other)
            for other in dict.fromkeys(s.name for s in STRATEGIES.values())
            if other not in ("auto", name)
        ]

    def _alternative(self, name: str) -> tuple[Alternative, _Found | None]:
        try:
            found = self._solve(name, effort=_COMPARED)
            fits = found is not None
            found = found or self._solve(name, limited=False, effort=_COMPARED)
        except InputError as e:
            return Alternative(name, False, None, None, str(e)), None
        if found is None:
            return Alternative(name, False, None, None, "it contradicts the pins or axis names"), None
        needed = found.outcome.peak_memory_bytes
        reason = "" if fits else f"needs {needed} bytes per device, {self.limit} are allowed"
        return Alternative(name, fits, found.outcome.step_time_s, needed, reason), found

    def _not_worse(self, found: _Found, others: list[_Found]) -> _Found:
        """The plan found, or a named strategy's that is faster: possible where the solver stopped at a gap, or by a tie-break."""
        best = min(others, key=lambda f: f.outcome.step_time_s, default=found)
        if best.outcome.step_time_s >= found.outcome.step_time_s:
            return found
        free = Restriction()
        for _, part in self.demands:
            free = free.merged(part)
        outcome = price(self.tables.problem, free, best.solution.chosen)
        objective = objective_s(self.tables.problem, outcome, best.solution.chosen)
        chosen = replace(found.solution, chosen=best.solution.chosen)
        return replace(found, solution=chosen, outcome=outcome, objective_s=objective, bound_s=min(found.bound_s, objective))

    # --- the plan ---

    def _checked(self, name: str, found: _Found, alternatives: tuple[Alternative, ...]) -> Plan:
        """The plan, priced again by walking the graph."""
        plan = self._spelled_out(name, found, alternatives)
        verify_plan(plan, self.capture.graph)
        walked = evaluate(plan, self.capture.graph, self.clusters, self.costs, self._state_bytes())
        require_equal(found.outcome, walked.outcome, plan.collectives, walked.collectives)
        return replace(plan, fallbacks=_fallbacks(self.clusters, walked))

    def _spelled_out(self, name: str, found: _Found, alternatives: tuple[Alternative, ...]) -> Plan:
        graph, outcome = self.capture.graph, found.outcome
        layout = extract(self.tables, found.solution.chosen, outcome)
        return Plan(
            graph_hash=graph.hash,
            model=self.options.model,
            mesh=self.mesh,
            device=self.hardware.device.name,
            links=tuple(link.name for link in self.hardware.links),
            memory_limit_bytes=self.limit,
            strategy=name,
            precision=self.capture.precision,
            optimizer=str(self.options.optimizer),
            training=self.capture.training,
            inputs=layout.inputs,
            ops=layout.ops,
            outputs=layout.outputs,
            redistributions=layout.redistributions,
            collectives=collectives(self.tables, outcome),
            predicted=Prediction(
                sum(outcome.compute_s),
                sum(outcome.exposed_s),
                sum(outcome.hidden_s),
                outcome.step_time_s,
                dict(sorted(outcome.memory_bytes.items())),
            ),
            objective_s=found.objective_s,
            bound_s=found.bound_s,
            gap=found.gap,
            alternatives=alternatives,
            folded=blocks.summary(self.clusters),
            notes=self._notes(found),
        )

    def _solver(self, found: _Found) -> dict[str, Any]:
        return {
            **self.clock.seconds,
            "method": found.solution.method,
            "variables": found.solution.columns,
            "constraints": found.solution.rows,
        }

    def _notes(self, found: _Found) -> tuple[str, ...]:
        notes = list(found.notes)
        if self.options.memory_limit_bytes is None:
            notes.append(f"memory limit: the device's memory less a reserve of {RESERVE:.0%}")
        if found.solution.method.endswith("limit"):
            notes.append(
                f"the solver stopped after {self.options.effort.nodes} nodes, before a gap of {self.options.effort.gap:.1%}: {found.gap:.2%}"
            )
        batch = batch_size(self.tables)
        if batch is not None and batch[1] % self.mesh.num_devices:
            notes.append(f"the batch of {batch[1]} does not divide over all {self.mesh.num_devices} devices")
        return tuple(notes)


def _require_rules(clusters: ClusterGraph) -> None:
    """Raise NoRuleError if an op has no rule."""
    missing = {op.target: op for c in clusters.clusters for op in c.ops if op.target in c.fallback}
    if missing:
        listed = "; ".join(f"{target} ({op.source or op.name})" for target, op in missing.items())
        raise NoRuleError(
            f"no sharding rule for {listed}: add one with meshwright.rule, or use on_missing_rule='replicate' to run these ops replicated"
        )


def _fallbacks(clusters: ClusterGraph, walked: Evaluation) -> tuple[Fallback, ...]:
    """Ops without a rule, by target, with what they cost replicated."""
    found: dict[str, Fallback] = {}
    for cluster, seconds, times in zip(clusters.clusters, walked.cluster_s, clusters.weights, strict=True):
        for target in dict.fromkeys(cluster.fallback):
            size = sum(v.size_bytes for op in cluster.ops if op.target == target for v in op.outs if v is not None)
            before = found.get(target, Fallback(target, 0, 0.0, 0))
            count = sum(op.target == target for op in cluster.ops)
            found[target] = Fallback(
                target, before.count + times * count, before.time_s + times * seconds, before.bytes + times * size
            )
    return tuple(found.values())
