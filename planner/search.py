"""Search: from a captured program and the logical meshes that devices can make to a plan.

The program is fused and folded once. One axis is solved at once; each other mesh only if its bounds leave room for a better plan:
its compute alone (no tables), then its repeated block alone, then its relaxation, from the lowest bound on. A bound excludes a
mesh from within the gap on, so the plan's own gap holds over all of them. The named strategies are solved on the meshes that suit them
and stand beside the plan, which is spelled out and priced again by walking the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.planner.ir.errors import InfeasibleError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Alternative, MeshTried, Plan
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.on_mesh import Found, OnMesh, Program
from meshwright.planner.options import Options
from meshwright.planner.race import Race
from meshwright.planner.solve.optimise import Effort
from meshwright.planner.solve.strategies import STRATEGIES, axis_name_rules, strategy_named
from meshwright.planner.spell import checked_plan

__all__ = ["STRATEGIES", "Options", "make_plan", "search_plan", "strategy_named"]

# What the strategies beside the plan are worth: they are for comparison, and stop at a wider gap.
_COMPARED = Effort(gap=3e-2, nodes=20)


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


def search_plan(capture: Capture, meshes: Sequence[LogicalMesh], options: Options) -> Plan:
    """Find the best plan over several logical meshes of the same devices.

    Args:
        capture: the program.
        meshes: at least one; the one that devices are given in first.
        options: what to search for.

    Raises:
        MeshwrightError: as :func:`make_plan`.
    """
    program = Program.of(capture, meshes[0].hardware, options)
    return _Search(program, [OnMesh(program, where) for where in meshes]).plan()


class _Search:
    """One call of :func:`search_plan`."""

    def __init__(self, program: Program, meshes: list[OnMesh]):
        self.program, self.options, self.clock = program, program.options, program.clock
        self.meshes = meshes

    def plan(self) -> Plan:
        """Solve, compare, spell out, verify."""
        name = strategy_named(self.options.strategy).name
        race = Race(name, self.options.effort).run(self.meshes)
        if race.best is None:
            raise self._why_none(race)
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

    def _why_none(self, race: Race) -> Exception:
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
        race = Race(name, _COMPARED).run(self._natural(name))
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


def _told(race: Race, best: Found) -> tuple[MeshTried, ...]:
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
