"""The program on one logical mesh: how fast it can be at most, and the best plan of a strategy.

The search over meshes asks three things of a mesh, from cheap to dear: :attr:`OnMesh.floor_s` (compute alone, no tables),
:meth:`OnMesh.solve` with something to beat (stops at the first relaxation that cannot), and the solution itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.planner.cost import CostModel
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.errors import InfeasibleError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.micro_costs import MicroCosts
from meshwright.planner.program import Program
from meshwright.planner.solve.candidates import Edges, edges
from meshwright.planner.solve.diagnose import ROW_MARGIN, explain_infeasible
from meshwright.planner.solve.follow import rows_following_batch
from meshwright.planner.solve.foresight import Foresight
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.micro_batches import restrict_to_micro_batches
from meshwright.planner.solve.optimise import (
    Effort,
    Excluded,
    Solution,
    Unlimited,
    optimise,
    optimise_below,
    settled_ahead,
)
from meshwright.planner.solve.pins import Pin, find_pins, restrict_to_pins
from meshwright.planner.solve.price import Outcome, memory_of, objective_s, price
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.restrict import followed, replicated_under, restrict
from meshwright.planner.solve.rows import with_points
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.solve.tables import Tables, build_tables


@dataclass(frozen=True)
class Found:
    """One strategy solved on one mesh.

    Attributes:
        on: where.
        tables: the problem.
        solution: what is chosen, and how it was found.
        outcome: what that costs.
        objective_s: the solver's objective for it: its time and the tie-breaks.
        bound_s: proved lower bound of the objective on this mesh.
        notes: sentences for the plan.
    """

    on: OnMesh
    tables: Tables
    solution: Solution
    outcome: Outcome
    objective_s: float
    bound_s: float
    notes: tuple[str, ...]


def rows_of(known: Sequence[Found], num_clusters: int) -> list[frozenset[Edges]]:
    """Per cluster, the rows that any of several plans takes over any axis."""
    rows: list[set[Edges]] = [set() for _ in range(num_clusters)]
    for found in known:
        for i, g in enumerate(found.tables.class_of):
            candidate = found.tables.candidates[g][found.solution.chosen[g]]
            taken = candidate.rows
            if candidate.kept is not None:
                rests = {row.rest for row in taken}
                taken = tuple(row for row in found.tables.clusters.clusters[i].rows if row.rest in rests)
            rows[i].update(map(edges, taken))
    return [frozenset(r) for r in rows]


def _costs(program: Program, where: LogicalMesh) -> CostModel | MicroCosts:
    count = program.options.micro_batches
    if count == 1:
        return CostModel(where.hardware, where.mesh, program.shared)
    return MicroCosts(where.hardware, where.mesh, program.time_rows, program.shared)


@dataclass(frozen=True)
class Task:
    """A strategy's problem on a mesh.

    Attributes:
        tables: what it is made of.
        problem: the numbers.
        restriction: what the strategy, pins and axes take away.
        ahead: what is known before it is solved.
    """

    tables: Tables
    problem: Problem
    restriction: Restriction
    ahead: Foresight


class OnMesh:
    """A program on one logical mesh.

    Attributes:
        program: what is planned.
        where: the mesh.
        rows: per cluster, the only rows that it may take over any axis; None for all. Bounds then hold for those alone.
        costs: seconds on it.
        unlimited: what the last solution under the limit showed of the problem without one.
        points: ops at which the solver looks at memory, beside the points that it looks at by itself, with the bytes held there that it
            does not see.
    """

    def __init__(self, program: Program, where: LogicalMesh, rows: Sequence[frozenset[Edges]] | None = None):
        self.program, self.where, self.rows = program, where, rows
        self.unlimited = Unlimited()
        self.points: dict[str, int] = {}
        self.costs = _costs(program, where)
        self._built: dict[tuple[str, ...], Tables] = {}
        self._tasks: dict[tuple[str, bool], Task] = {}

    @property
    def mesh(self) -> MeshShape:
        return self.where.mesh

    @cached_property
    def floor_s(self) -> float:
        """Lower bound of any plan's time here: compute alone."""
        with self.program.clock.phase("bound"):
            return self.program.floors.compute_s(self.mesh.sizes)

    @property
    def known_s(self) -> float:
        """Lower bound of any plan's time here, as far as it is known already: compute alone, and what was found of all plans together."""
        task = self._tasks.get(("auto", True))
        return self.floor_s if task is None else max(self.floor_s, task.ahead.bound_s)

    @cached_property
    def pins(self) -> dict[int, tuple[Pin, ...]]:
        """The pins of every cluster that has some.

        Raises:
            InputError: a pin that matches nothing or does not suit the mesh.
        """
        return find_pins(self.program.pins, self.program.capture.graph, self.program.clusters, self.mesh)

    @cached_property
    def _class_of(self) -> list[int]:
        """Class of every cluster; those that are pinned differently are not tied."""
        labels = [(c, tuple(p.key for p in self.pins.get(i, ()))) for i, c in enumerate(self.program.clusters.class_of)]
        numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
        return [numbers[label] for label in labels]

    def tables_for(self, name: str) -> Tables:
        """The problem of a strategy: where all that computes follows the batch over an axis, with those rows alone there."""
        follows = self._follows(name)
        if follows not in self._built:
            with self.program.clock.phase("build"):
                self._built[follows] = self._tables(self.program.clusters, self._class_of, self._following(follows))
        return self._built[follows]

    def _follows(self, name: str) -> tuple[str, ...]:
        """What computation follows over every axis, for a strategy and for what the axes are for."""
        follows = tuple(rule.compute for rule in strategy_named(name).rules(self.mesh, self.where.rules))
        uses = tuple(rule.compute for rule in self.where.rules) or follows
        return tuple(use if follow == "free" else follow for follow, use in zip(follows, uses, strict=True))

    def _following(self, follows: Sequence[str]) -> list[list[frozenset[Edges] | None]]:
        """The rows kept where what computes follows the batch or the sequence: that one alone."""
        clusters = self.program.clusters
        free: list[frozenset[Edges] | None] = [*self.rows] if self.rows else [None] * len(clusters.clusters)
        kept = [list(free) for _ in follows]
        for axis, (follow, size) in enumerate(zip(follows, self.mesh.sizes, strict=True)):
            along = followed(self.program.capture.graph, follow)
            if along is not None and size > 1:
                rows = rows_following_batch(clusters, along[1], size, along[0])
                kept[axis] = [
                    None if c.source is not None else frozenset((edges(row),))
                    for c, row in zip(clusters.clusters, rows, strict=True)
                ]
        return kept

    def _tables(
        self, clusters: ClusterGraph, class_of: Sequence[int], kept: Sequence[Sequence[frozenset[Edges] | None]] = ()
    ) -> Tables:
        capture = self.program.capture
        return build_tables(
            capture.graph,
            clusters,
            class_of,
            self.mesh,
            self.costs,
            trained=self.trained,
            memory_limit_bytes=self._limit_bytes,
            precision=capture.precision,
            allowed=kept,
        )

    @property
    def _limit_bytes(self) -> int:
        """What the solver may use."""
        return int(self.program.limit_bytes * (1 - ROW_MARGIN))

    def bound_s(self, name: str, beat_s: float, effort: Effort | None = None) -> float:
        """A better lower bound of a strategy's plans than :attr:`floor_s`; infinite where its demands contradict each other. The
        search for a higher one stops at ``beat_s``.

        Raises:
            InputError: the strategy cannot be had of this batch, or a pin does not suit.
        """
        return max(self.floor_s, self._task(name, limited=True, beat_s=beat_s, effort=effort).ahead.bound_s)

    def is_foreseen(self, name: str) -> bool:
        """Whether :meth:`bound_s` met a plan on the way that is about as good as the bound says."""
        ahead = self._task(name, limited=True, beat_s=0.0).ahead
        return ahead.about_s <= ahead.bound_s * (1 + self.program.options.effort.gap)

    def is_usual(self, name: str) -> bool:
        """Whether :meth:`bound_s` showed what memory is worth, if anything."""
        return self._task(name, limited=True, beat_s=0.0).ahead.is_usual

    def is_limited(self, name: str) -> bool:
        """Whether any plan is larger than the memory limit."""
        look = self._task(name, limited=True, beat_s=0.0).ahead.look
        return look is None or look.is_limited

    def _task(self, name: str, *, limited: bool, beat_s: float, effort: Effort | None = None) -> Task:
        """A strategy's problem, and what is known of it; computed once, and further where a bound was once high enough that is not now."""
        known = self._tasks.get((name, limited))
        if known is None:
            self._tasks[name, limited] = known = self._new_task(name, limited, beat_s, effort or self.program.options.effort)
        elif known.ahead.is_short and known.ahead.look is not None and known.ahead.bound_s < beat_s:
            with self.program.clock.phase("bound"):
                self._tasks[name, limited] = known = replace(known, ahead=known.ahead.look.until(beat_s))
        else:
            return known
        if limited:
            self.unlimited.bound_s = max(self.unlimited.bound_s, known.ahead.free_bound_s)
        before = self.program.prices.get(name)
        if known.ahead.chosen is not None or (
            known.ahead.is_usual and (before is None or not before.is_for(self.tables_for(name).problem))
        ):
            self.program.prices[name] = known.ahead.prices
        return known

    def _new_task(self, name: str, limited: bool, beat_s: float, effort: Effort) -> Task:
        tables = self.tables_for(name)
        with self.program.clock.phase("bound"):
            whole = self._whole(name, tables)
            problem = replace(tables.problem, memory_limit_bytes=self._limit_bytes if limited else None)
            likely = self.program.prices.get(name)
            return Task(tables, problem, *settled_ahead(problem, whole, tables.cache, effort, beat_s, likely))

    @property
    def trained(self) -> Trained:
        """What training holds per parameter element."""
        return self.program.options.trained

    def _parts(self, name: str, tables: Tables) -> list[tuple[str, Restriction]]:
        """What is demanded, by name: the strategy, the pins, what the axes are for."""
        parts, strategy = [], strategy_named(name)
        if strategy.name != "auto":
            parts.append(
                (f"strategy {strategy.name!r}", restrict(tables, strategy.rules(self.mesh, self.where.rules), strategy.name))
            )
        by_pattern: dict[str, dict[int, tuple[Pin, ...]]] = {}
        for cluster, pins in self.pins.items():
            for pin in pins:
                by_pattern.setdefault(pin.pattern, {})[cluster] = (pin,)
        parts += [(f"pin {pattern!r}", restrict_to_pins(tables, pins)) for pattern, pins in by_pattern.items()]
        if self.program.options.micro_batches > 1:
            times, count = self.program.times, self.program.options.micro_batches
            parts.append((f"{count} micro-batches", restrict_to_micro_batches(tables, times.inputs, times.ops, count)))
        if self.where.rules:  # the tables have no other rows than those that follow already
            uses = [replace(rule, compute="free") for rule in self.where.rules]
            parts.append((self.where.demand, restrict(tables, uses, self.where.demand)))
        return parts

    def _whole(self, name: str, tables: Tables) -> Restriction:
        whole = Restriction()
        for _, part in self._parts(name, tables):
            whole = whole.merged(part)
        return whole

    def solve(
        self, name: str, *, limited: bool = True, effort: Effort | None = None, beat_s: float = float("inf")
    ) -> Found | Excluded | None:
        """A strategy's best plan here.

        Args:
            name: of the strategy.
            limited: whether the memory limit holds.
            effort: of the solver; that of the options by default.
            beat_s: what a plan must cost less than to be of interest.

        Returns:
            The plan; or a bound that shows that none is of interest; or None where no plan fits.

        Raises:
            InputError: the strategy cannot be had of this batch, or a pin does not suit.
        """
        task = self._task(name, limited=limited, beat_s=beat_s, effort=effort)
        with self.program.clock.phase("solve"):
            tables, whole = task.tables, task.restriction
            problem = with_points(tables, task.problem, self.points) if limited else task.problem
            unlimited, effort = Unlimited(), effort or self.program.options.effort
            solution = optimise_below(problem, whole, tables.cache, effort, beat_s, unlimited=unlimited, ahead=task.ahead)
            self.unlimited = unlimited if limited else self.unlimited
            if solution is None or isinstance(solution, Excluded):
                return solution
            if solution.weights is not None:  # a good start for the next time, here or on another mesh
                prices = replace(task.ahead.prices, weights=np.array(solution.weights))
                self._tasks[name, limited] = replace(task, ahead=replace(task.ahead, prices=prices))
                self.program.prices[name] = prices
            return self._found(name, tables, problem, whole, solution)

    def solve_changed(
        self, name: str, change: Callable[[Tables], Problem], effort: Effort, objective: str = "time"
    ) -> Found | None:
        """A strategy's best plan here of a problem that ``change`` makes of the usual one: with another memory, or another limit; None
        where nothing fits, or its demands contradict each other. What the plan costs is told as without the change.

        Raises:
            InputError: the strategy cannot be had of this batch, or a pin does not suit.
        """
        tables = self.tables_for(name)
        with self.program.clock.phase("solve"):
            whole, problem = self._whole(name, tables), replace(tables.problem, memory_limit_bytes=None)
            solution = optimise(change(tables), whole, tables.cache, effort, objective=objective)
            return None if solution is None else self._found(name, tables, problem, whole, solution)

    def foresee_changed(self, name: str, change: Callable[[Tables], Problem], effort: Effort, beat_s: float) -> Task:
        """What is known of a problem that ``change`` makes of a strategy's usual one, before it is solved; see :meth:`solve_task`. The
        search for a higher bound stops at ``beat_s``.

        Raises:
            InputError: the strategy cannot be had of this batch, or a pin does not suit.
        """
        tables = self.tables_for(name)
        with self.program.clock.phase("bound"):
            whole, problem = self._whole(name, tables), change(tables)
            key = f"{name} in stages"
            task = Task(
                tables, problem, *settled_ahead(problem, whole, tables.cache, effort, beat_s, self.program.prices.get(key))
            )
            self.program.prices[key] = task.ahead.prices
            return task

    def solve_task(self, name: str, task: Task, effort: Effort, beat_s: float) -> Found | Excluded | None:
        """The best plan of a problem that :meth:`foresee_changed` has looked at, of those that cost less than ``beat_s``; what it costs is
        told as without the change. None where nothing fits."""
        with self.program.clock.phase("solve"):
            tables, whole = task.tables, task.restriction
            solution = optimise_below(task.problem, whole, tables.cache, effort, beat_s, ahead=task.ahead)
            if solution is None or isinstance(solution, Excluded):
                return solution
            return self._found(name, tables, replace(tables.problem, memory_limit_bytes=None), whole, solution)

    def _found(self, name: str, tables: Tables, problem: Problem, whole: Restriction, solution: Solution) -> Found:
        """A solution with what it costs and what is to be said of it."""
        outcome = price(problem, whole, solution.chosen)
        objective = objective_s(problem, outcome, solution.chosen)
        notes = whole.notes + replicated_under(tables, whole, solution.chosen, name)
        return Found(self, tables, solution, outcome, objective, min(objective, solution.bound_s), notes)

    def seen_bytes(self, found: Found, op: str) -> int:
        """Memory of a plan while an op runs, as the solver counts it if it looks there."""
        most = 1 << 50  # so much at that point makes it the highest
        problem = with_points(found.tables, found.tables.problem, {op: most})
        return sum(memory_of(problem, found.solution.chosen).values()) - most

    def free_peak_bytes(self) -> float:
        """Memory of about the best plan without a limit; infinite where none was met."""
        task = self._task("auto", limited=False, beat_s=math.inf)
        chosen = task.ahead.chosen
        return math.inf if chosen is None else float(sum(memory_of(task.problem, chosen).values()))

    def freed(self, found: Found) -> Found:
        """A strategy's plan on this mesh as one of the free search: its paths may be better ones."""
        tables = self.tables_for("auto")
        whole, problem = self._whole("auto", tables), tables.problem
        of_signature = [{c.signature: k for k, c in enumerate(candidates)} for candidates in tables.candidates]
        taken = [found.tables.candidates[g][k].signature for g, k in enumerate(found.solution.chosen)]
        chosen = tuple(index[signature] for index, signature in zip(of_signature, taken, strict=True))
        outcome = price(problem, whole, chosen)
        objective = objective_s(problem, outcome, chosen)
        solution, bound = replace(found.solution, chosen=chosen), min(found.bound_s, objective)
        return Found(self, tables, solution, outcome, objective, bound, whole.notes)

    def smallest(self, name: str) -> Found | None:
        """A strategy's plan of least memory here, as the solver sees it; None where its demands contradict each other."""
        tables = self.tables_for(name)
        whole = self._whole(name, tables)
        solution = optimise(tables.problem, whole, tables.cache, objective="memory")
        if solution is None:
            return None
        outcome = price(tables.problem, whole, solution.chosen)
        return Found(self, tables, solution, outcome, objective_s(tables.problem, outcome, solution.chosen), 0.0, whole.notes)

    def why_infeasible(self, name: str, memory_bytes: Mapping[str, int] | None) -> InfeasibleError:
        """The error for a strategy that has no plan here; ``memory_bytes``: what :meth:`smallest` needs, by category."""
        tables = self.tables_for(name)
        parts, recompute = self._parts(name, tables), str(self.program.recompute)
        return explain_infeasible(tables, parts, self.program.limit_bytes, memory_bytes, recompute)
