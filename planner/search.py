"""Search: from a captured program and the logical meshes that devices can make to a plan.

The program is fused and folded once. Meshes are then looked at from the cheapest to solve on; each of the others is solved only
if its bounds leave room for a better plan: its compute alone (no tables), then its relaxations. A bound excludes a mesh from
within the gap on, so the plan's own gap holds over all of them. The named strategies are solved on the meshes that suit them
and stand beside the plan, which is spelled out and priced again by walking the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Alternative, MeshTried, Plan
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.on_mesh import Found, OnMesh, Program
from meshwright.planner.options import Options
from meshwright.planner.solve.optimise import Effort, Excluded
from meshwright.planner.solve.strategies import STRATEGIES, axis_name_rules, strategy_named
from meshwright.planner.spell import checked_plan

__all__ = ["STRATEGIES", "Options", "make_plan", "search_plan", "strategy_named"]

# What the strategies beside the plan are worth: they are for comparison, and stop at a wider gap.
_COMPARED = Effort(gap=3e-2, nodes=20)

Finer = Callable[[LogicalMesh], tuple[LogicalMesh, ...]]


def make_plan(capture: Capture, mesh: MeshShape, hardware: Hardware, options: Options | None = None, **keywords: Any) -> Plan:
    """Find the best plan on one logical mesh.

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
    rules = axis_name_rules(mesh) if options.respect_axis_names else ()
    return search_plan(capture, (LogicalMesh(mesh, hardware, rules, "the axis names"),), options)


def search_plan(capture: Capture, meshes: Sequence[LogicalMesh], options: Options, finer: Finer | None = None) -> Plan:
    """Find the best plan over several logical meshes of the same devices.

    Args:
        capture: the program.
        meshes: at least one; the one that devices are given in first.
        options: what to search for.
        finer: the meshes that split an axis of one; None: look at ``meshes`` alone.

    Raises:
        MeshwrightError: as :func:`make_plan`.
    """
    program = Program.of(capture, meshes[0].hardware, options)
    return _Search(program, [OnMesh(program, where) for where in meshes], finer or (lambda where: ())).plan()


@dataclass
class _Race:
    """One strategy on several meshes: the best plan so far, and what became of each mesh.

    Attributes:
        name: of the strategy.
        effort: of the solver.
        best: the best plan so far.
        tried: what became of each mesh, in the order looked at.
        refused: the error of the first mesh that the batch or a pin does not suit.
    """

    name: str
    effort: Effort
    best: Found | None = None
    tried: list[tuple[OnMesh, MeshTried]] = field(default_factory=list)
    refused: InputError | None = None

    def run(self, meshes: Iterable[OnMesh]) -> _Race:
        for on in meshes:
            self._look_at(on)
        return self

    @property
    def beat_s(self) -> float:
        """What a plan must cost less than to be of interest."""
        return float("inf") if self.best is None else self.best.objective_s * (1 - self.effort.gap)

    def _look_at(self, on: OnMesh) -> None:
        if self.best is not None and on.floor_s >= self.beat_s:
            self._say(on, "excluded", on.floor_s, reason="compute alone takes that long")
            return
        try:
            found = on.solve(self.name, effort=self.effort, beat_s=self.beat_s)
        except InputError as e:
            self.refused = self.refused or e
            self._say(on, "impossible", None, reason=str(e))
            return
        if found is None:
            self._say(on, "infeasible", None, reason="nothing fits")
        elif isinstance(found, Excluded):
            self._say(on, "excluded", found.bound_s, reason="its relaxation takes that long")
        else:
            self._say(on, "slower", found.bound_s, found.outcome.step_time_s)
            if self.best is None or found.objective_s < self.best.objective_s:
                self.best = found

    def _say(self, on: OnMesh, verdict: str, bound_s: float | None, step_s: float | None = None, reason: str = "") -> None:
        mesh, links = on.where.mesh, tuple(link.name for link in on.where.hardware.links)
        self.tried.append((on, MeshTried(mesh.sizes, mesh.names, links, verdict, bound_s, step_s, reason)))

    def bound_s(self) -> float:
        """Lower bound of any plan on any of the meshes."""
        return min(t.bound_s for _, t in self.tried if t.bound_s is not None)

    def on_infeasible(self) -> list[OnMesh]:
        return [on for on, t in self.tried if t.verdict == "infeasible"]


class _Search:
    """One call of :func:`search_plan`."""

    def __init__(self, program: Program, meshes: list[OnMesh], finer: Finer):
        self.program, self.options, self.clock = program, program.options, program.clock
        self.meshes = meshes
        self.finer = finer

    def plan(self) -> Plan:
        """Solve, compare, spell out, verify."""
        name = strategy_named(self.options.strategy).name
        race = _Race(name, self.options.effort).run(self._in_order())
        if race.best is None:
            raise self._why_none(race)
        race.run(OnMesh(self.program, where) for where in self.finer(race.best.on.where))
        best, alternatives = race.best, tuple[Alternative, ...]()
        if self.options.alternatives:
            with self.clock.phase("alternatives"):
                others = [self._alternative(other) for other in _others(name)]
            alternatives = tuple(a for a, _ in others)
            if name == "auto":
                best = _not_worse(best, [f for a, f in others if a.fits and f is not None])
        with self.clock.phase("check"):
            bound = min(race.bound_s(), best.objective_s)
            plan = checked_plan(self.program, name, best, bound, alternatives, _told(race, best))
        return replace(plan, solver=self._solver(best))

    def _solver(self, best: Found) -> dict[str, Any]:
        solution = best.solution
        return {**self.clock.seconds, "method": solution.method, "variables": solution.columns, "constraints": solution.rows}

    def _in_order(self) -> list[OnMesh]:
        """One axis first, because it is solved at once; then the mesh that was given; then the fastest compute."""
        if len(self.meshes) < 2:
            return self.meshes
        flat = [on for on in self.meshes if on.mesh.num_axes == 1]
        given = [on for on in self.meshes[:1] if on not in flat]
        rest = [on for on in self.meshes if on not in flat and on not in given]
        return [*flat, *given, *sorted(rest, key=lambda on: on.floor_s)]

    def _why_none(self, race: _Race) -> Exception:
        """The error of the mesh on which the least is missing."""
        infeasible = race.on_infeasible()
        if not infeasible:
            assert race.refused is not None
            return race.refused
        errors: list[InfeasibleError] = [on.why_infeasible(race.name) for on in infeasible]
        return min(errors, key=lambda e: e.needed_bytes or float("inf"))

    # --- the named strategies beside the plan ---

    def _natural(self, name: str) -> list[OnMesh]:
        """The meshes that a named strategy is used on: all devices in one axis, or as they are given; tensor parallelism inside
        nodes, and over everything."""
        if strategy_named(name).model is None:
            return [on for k, on in enumerate(self.meshes) if k == 0 or on.mesh.num_axes == 1]
        inner = [on for k, on in enumerate(self.meshes) if k == 0 or on.where.is_inner or on.mesh.num_axes == 1]
        return sorted(inner, key=lambda on: -on.mesh.sizes[-1])

    def _alternative(self, name: str) -> tuple[Alternative, Found | None]:
        """A named strategy on the mesh that is best for it; where it fits on none, what it needs on the one it needs least on."""
        race = _Race(name, _COMPARED).run(self._natural(name))
        if race.best is not None:
            outcome = race.best.outcome
            sizes = race.best.on.mesh.sizes
            return Alternative(name, True, outcome.step_time_s, outcome.peak_memory_bytes, mesh=sizes), race.best
        if not race.on_infeasible():
            return Alternative(name, False, None, None, str(race.refused)), None
        return self._unfitting(name, race.on_infeasible()), None

    def _unfitting(self, name: str, meshes: Sequence[OnMesh]) -> Alternative:
        solved = (on.solve(name, limited=False, effort=_COMPARED) for on in meshes)
        found = [f for f in solved if isinstance(f, Found)]
        if not found:
            return Alternative(name, False, None, None, "it contradicts the pins or what the axes are for")
        least = min(found, key=lambda f: (f.outcome.peak_memory_bytes, f.outcome.step_time_s))
        needed, sizes = least.outcome.peak_memory_bytes, least.on.mesh.sizes
        reason = f"needs {needed} bytes per device, {self.program.limit_bytes} are allowed"
        return Alternative(name, False, least.outcome.step_time_s, needed, reason, sizes)


def _others(name: str) -> list[str]:
    """The other named strategies."""
    return [other for other in dict.fromkeys(s.name for s in STRATEGIES.values()) if other not in ("auto", name)]


def _not_worse(best: Found, others: Sequence[Found]) -> Found:
    """The plan found, or a named strategy's that is faster: possible where the solver stopped at a gap, or by a tie-break."""
    fastest = min(others, key=lambda f: f.outcome.step_time_s, default=best)
    return fastest.on.freed(fastest) if fastest.outcome.step_time_s < best.outcome.step_time_s else best


def _told(race: _Race, best: Found) -> tuple[MeshTried, ...]:
    """The meshes that were considered: the chosen one, then the others by what can be had on them."""
    chosen = [
        replace(
            t,
            verdict="chosen",
            bound_s=t.bound_s if t.bound_s is None else min(t.bound_s, best.objective_s),
            step_time_s=best.outcome.step_time_s,
            reason="",
        )
        for on, t in race.tried
        if on is best.on
    ]
    others = [t for on, t in race.tried if on is not best.on]
    return (*chosen, *sorted(others, key=lambda t: (t.bound_s is None, t.step_time_s or t.bound_s or 0.0)))
