"""Search: from a captured program and the logical meshes that devices can make to a plan.

The program is fused and folded once. A mesh is solved only if its bounds leave room for a better plan: its compute alone (no
tables), then what is foreseen without a solver, then its relaxation, from the lowest bound on. A bound excludes a
mesh from within the gap on, so the plan's own gap holds over all of them. The named strategies are solved on the meshes that suit them
and stand beside the plan, which is spelled out and priced again by walking the graph.

Where a program can be had with different recomputation, all that is done for one choice after the other
(:mod:`~meshwright.planner.levels`), each with the best plan so far to beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner import levels
from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Alternative, MeshTried, Plan, Prediction
from meshwright.planner.ir.recompute import LEVELS, Recompute
from meshwright.planner.levels import Recomputable, Tried
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.on_mesh import Found, OnMesh, rows_of
from meshwright.planner.options import Clock, Options
from meshwright.planner.program import Program
from meshwright.planner.race import Race, most_promising
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.optimise import Effort
from meshwright.planner.solve.strategies import STRATEGIES, axis_name_rules, strategy_named
from meshwright.planner.spell import checked_plan, told

__all__ = ["STRATEGIES", "Beaten", "Options", "make_plan", "search_plan", "search_unless_beaten", "strategy_named"]

# What the strategies beside the plan are worth: they are for comparison, and stop at a wider gap.
_COMPARED = Effort(gap=5e-2, nodes=20, prices=4, foreseen=1.0)
# Mixtures are tried near the memory limit, where proofs are dear, and several of them: a plan is enough, nothing is split.
_MIXED = Effort(gap=3e-2, nodes=20, time_limit_s=10.0, rounds=3, columns=0)

# Meshes are excluded from exactly the gap on.
_ROUNDED = 1 + 1e-6

Finer = Callable[[LogicalMesh], Sequence[LogicalMesh]]


def make_plan(
    source: Capture | Recomputable, mesh: MeshShape, hardware: Hardware, options: Options | None = None, **keywords: Any
) -> Plan:
    """Find the best plan on one logical mesh.

    Args:
        source: the program; one that can be had with different recomputation is planned with the best.
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
    return search_plan(source, (LogicalMesh(mesh, hardware, rules, "the axis names"),), options)


@dataclass(frozen=True)
class Beaten:
    """That no plan can beat what is known otherwise.

    Attributes:
        bound_s: what any plan takes at least, on any of the meshes.
        alternatives: the named strategies.
    """

    bound_s: float
    alternatives: tuple[Alternative, ...]


def search_plan(
    source: Capture | Recomputable, meshes: Sequence[LogicalMesh], options: Options, finer: Finer | None = None
) -> Plan:
    """Find the best plan over several logical meshes of the same devices.

    Args:
        source: the program; one that can be had with different recomputation is planned with the best.
        meshes: at least one; the one that devices are given in first.
        options: what to search for.
        finer: the meshes that split an axis of one; those of the best mesh are tried too, with the rows of the plans that are
            known by then. None: look at ``meshes`` alone.

    Raises:
        MeshwrightError: as :func:`make_plan`.
    """
    if not isinstance(source, Capture):
        plan = _Levels(source, meshes, options).plan(finer)
        assert isinstance(plan, Plan)
        return plan
    search = _Search(Program.of(source, meshes[0].hardware, options), meshes)
    return search.plan(search.race(), finer)


def search_unless_beaten(
    source: Recomputable, meshes: Sequence[LogicalMesh], options: Options, finer: Finer | None, beats: Callable[[float], float]
) -> Plan | Beaten:
    """As :func:`search_plan`, unless something else is known that no plan can beat.

    Args:
        source, meshes, options, finer: as of :func:`search_plan`.
        beats: what any plan must take at least for something else to be clearly better, given about what plans take; infinite where nothing
            else is known. Asked once, and only where memory makes all plans slower.
    """
    return _Levels(source, meshes, options, beats).plan(finer)


class _Levels:
    """One call of :func:`search_plan` for a program that can be had with different recomputation."""

    def __init__(
        self,
        source: Recomputable,
        meshes: Sequence[LogicalMesh],
        options: Options,
        beats: Callable[[float], float] = lambda bound_s: math.inf,
    ):
        self.source, self.meshes, self.options = source, meshes, options
        self._beats, self._bounds = beats, dict[Recompute, float]()
        self.clock = Clock(options.progress)
        self.limit_bytes = options.memory_limit(meshes[0].hardware)
        self.best: Tried[_Search] | None = None
        self.by_program: dict[str, Tried[_Search]] = {}
        self.by_graph: dict[str, Recompute] = {}
        self.searches: dict[Recompute, _Search | Tried[_Search]] = {}
        self.prices: dict[str, Prices] = {}

    def plan(self, finer: Finer | None) -> Plan | Beaten:
        """Try the choices, and spell out the best."""
        if self.options.recompute is not None:
            tried = [self._attempt(Recompute(self.options.recompute))]
        else:
            asks = levels.Asks(self._attempt, self._promise, self._is_hurt, self._beats)
            tried = levels.best(self.source, self.limit_bytes, asks, training=self.source.capture_at(Recompute()).training)
        if not tried:
            return Beaten(min(self._bounds.values()), self._alternatives())
        found = [t.found for t in tried if t.found is not None]
        search = found[0] if found[0].raced.best is not None else found[-1]
        plan = search.plan(search.raced, finer)
        return replace(plan, notes=(*plan.notes, *_recompute_note(tried[1:])))

    def _promise(self, recompute: Recompute, enough_s: float, close: float) -> tuple[float, float]:
        search = self._search(recompute)
        promised = (math.inf, math.inf) if isinstance(search, Tried) else search.bounds_s(enough_s, close)
        self._bounds[recompute] = promised[0]
        return promised

    def _is_hurt(self, recompute: Recompute, few: int, part: float) -> bool:
        search = self._search(recompute)
        return isinstance(search, Tried) or search.is_hurt(few, part)

    def _alternatives(self) -> tuple[Alternative, ...]:
        """The named strategies with the most recomputation that can be had."""
        searches = [s for s in (self._search(Recompute(level)) for level in reversed(LEVELS)) if isinstance(s, _Search)]
        return searches[0].alternatives(self.options.strategy)[0] if searches else ()

    def _attempt(self, recompute: Recompute) -> Tried[_Search]:
        search = self._search(recompute)
        if isinstance(search, Tried):
            return search
        tried = search.attempt(math.inf if self.best is None or recompute.is_mixed else self.best.step_time_s)
        self.by_program[search.program.capture.graph.hash] = tried
        if self.best is None or tried.step_time_s < self.best.step_time_s:
            self.best = tried
        return tried

    def _search(self, recompute: Recompute) -> _Search | Tried[_Search]:
        """The search with a choice of recomputation, prepared once; or what is known of it without one."""
        if recompute not in self.searches:
            self.searches[recompute] = self._prepared(recompute)
        search = self.searches[recompute]
        if isinstance(search, Tried):
            return search
        known = self.by_program.get(search.program.capture.graph.hash)
        return search if known is None else replace(known, recompute=recompute, found=None, step_time_s=math.inf)

    def _prepared(self, recompute: Recompute) -> _Search | Tried[_Search]:
        with self.clock.phase("recompute"):
            try:
                capture = self.source.capture_at(recompute)
            except Unlike as e:
                return _unlike(recompute, e)
        same = self.by_graph.setdefault(capture.graph.hash, recompute)
        if same != recompute and isinstance(self.searches[same], _Search):  # nothing of this level is worth computing again
            return self.searches[same]
        options = replace(self.options, effort=_MIXED) if recompute.is_mixed else self.options
        try:
            program = Program.of(capture, self.meshes[0].hardware, options, self.clock, recompute, self.prices)
        except Unlike as e:
            return _unlike(recompute, e)
        floor = program.floor_bytes(self.meshes[0].mesh.num_devices)
        if floor > self.limit_bytes and self.options.recompute is None and recompute.level != LEVELS[-1]:
            return Tried(recompute, None, math.inf, floor, math.inf, False)
        return _Search(program, self._meshes(recompute), self.meshes)

    def _meshes(self, recompute: Recompute) -> Sequence[LogicalMesh]:
        """All meshes for a level; for a mixture of two that on which one of them is best."""
        found = None if self.best is None or self.best.found is None else self.best.found.raced.best
        return self.meshes if found is None or not recompute.is_mixed else (found.on.where,)


def _unlike(recompute: Recompute, error: Unlike) -> Tried[_Search]:
    """What is said of a mixture that cannot be folded; a whole level must be."""
    if not recompute.is_mixed:
        raise error
    return Tried(recompute, None, math.inf, math.inf, math.inf, False)


def _recompute_note(others: Sequence[Tried[_Search]]) -> tuple[str, ...]:
    """What other choices of recomputation would give."""
    told = [
        f"{t.recompute}: " + (f"{t.step_time_s:.4g} s per step" if math.isfinite(t.step_time_s) else "no better plan was found")
        for t in others
    ]
    return (f"recomputation that was tried too: {'; '.join(told)}",) if told else ()


class _Search:
    """A program on several meshes.

    Attributes:
        raced: what :meth:`race` found.
        is_free: whether the memory limit makes its plan no slower, as far as is known.
    """

    raced: Race
    is_free: bool = False

    def __init__(self, program: Program, meshes: Sequence[LogicalMesh], others: Sequence[LogicalMesh] = ()):
        """``others``: meshes that only named strategies are tried on."""
        self.program, self.options, self.clock = program, program.options, program.clock
        self.meshes = [OnMesh(program, where) for where in meshes]
        self._plans: dict[tuple[str, int, tuple[int, ...]], tuple[OnMesh, Plan]] = {}
        self._named = [*self.meshes, *(OnMesh(program, where) for where in others if where not in meshes)]

    def race(self, known_s: float = math.inf) -> Race:
        """Solve on the meshes, as far as a plan can be faster than one that is known."""
        name = strategy_named(self.options.strategy).name
        self.raced = Race(name, self.options.effort, known_s, peak_of=self._peak)
        return self.raced.run(self.meshes)

    def _smallest_that_fits(self) -> Found | None:
        """The fastest of the meshes' smallest plans, if it fits: the solver's rows may ask for a little more than a plan needs."""
        smallest = [f for on in self.meshes if (f := self._smallest(on, self.raced.name)) is not None]
        fitting = [f for f in smallest if self._peak(f)[0] <= self.program.limit_bytes]
        return min(fitting, key=lambda f: f.objective_s, default=None)

    def _smallest(self, on: OnMesh, name: str) -> Found | None:
        try:
            return on.smallest(name)
        except InputError:
            return None

    def _peak(self, found: Found) -> tuple[int, str]:
        """What the finished plan holds at its peak, and the op that runs then."""
        predicted = self._predicted(found)
        return predicted.peak_memory_bytes, predicted.peak_at

    def _if_it_fits(self, found: Found, best: Found) -> Found:
        """A plan that should be better, unless its peak says otherwise."""
        return found if found is best or self._peak(found)[0] <= self.program.limit_bytes else best

    def _predicted(self, found: Found) -> Prediction:
        """What the finished plan will take."""
        return self._checked(self.raced.name, found).predicted

    def _checked(self, name: str, found: Found) -> Plan:
        """The plan of a solution, spelled out and priced again once."""
        key = (name, id(found.on), found.solution.chosen)
        if key not in self._plans:
            with self.clock.phase("check"):
                self._plans[key] = found.on, checked_plan(self.program, name, found, found.bound_s, (), ())
        return self._plans[key][1]

    def bounds_s(self, enough_s: float, close: float) -> tuple[float, float]:
        """As :meth:`Race.bounds_s`."""
        return self._new_race().bounds_s(self.meshes, enough_s, close)

    def is_hurt(self, few: int, part: float) -> bool:
        """As :meth:`Race.is_hurt`, on the first few meshes."""
        return self._new_race().is_hurt(most_promising(self.meshes)[:few], part)

    def _new_race(self) -> Race:
        return Race(strategy_named(self.options.strategy).name, self.options.effort)

    def attempt(self, known_s: float) -> Tried[_Search]:
        """What :meth:`race` finds, as one choice of recomputation."""
        race = self.race(known_s)
        best_s = race.known_s if race.best is None else race.best.objective_s
        is_free = math.isfinite(best_s) and best_s - race.free_bound_s() <= self.options.effort.gap * best_s * _ROUNDED
        on = min((on for on, _ in race.tried), key=lambda on: on.floor_s) if race.best is None else race.best.on
        time_s = math.inf if race.best is None else race.best.outcome.step_time_s
        self.is_free = is_free
        free_peak = race.best.outcome.peak_memory_bytes if is_free and race.best is not None else on.free_peak_bytes()
        floor = self.program.floor_bytes(self.meshes[0].mesh.num_devices)
        return Tried(self.program.recompute, self, time_s, floor, free_peak, is_free)

    def plan(self, race: Race, finer: Finer | None = None) -> Plan:
        """Compare, split the best mesh, spell out, verify.

        Raises:
            MeshwrightError: no mesh has a plan.
        """
        name = race.name
        race.best = race.best or self._smallest_that_fits()
        if race.best is None:
            raise self._why_none(race)
        best = race.best
        alternatives, others, fitting = self.alternatives(name)
        if name == "auto":
            best = self._if_it_fits(_not_worse(best, fitting), best)
        known = [race.best, *others]
        if name == "auto" and finer is not None and not self.options.pins:
            best = self._finer(race, best, known, finer(best.on.where))
        best = self._polished(race, best)
        bound = min(race.bound_s(), best.objective_s, *([best.on.floor_s] if best.on.rows else []))
        plan = told(self._checked(name, best), self.program, best, bound, alternatives, _meshes_tried(race, best))
        return replace(plan, solver=self._solver(best))

    def _solver(self, best: Found) -> dict[str, Any]:
        solution = best.solution
        said = {
            "method": solution.method,
            "variables": solution.columns,
            "constraints": solution.rows,
            "limit_binds": not self.is_free,
        }
        return {**self.clock.seconds, **said}

    def _why_none(self, race: Race) -> Exception:
        """The error of the mesh on which the least is missing."""
        infeasible = race.on_infeasible()
        if not infeasible and race.refused is not None:
            return race.refused
        if not infeasible:
            return InfeasibleError(
                f"no plan was found that fits {self.program.limit_bytes} bytes per device once copies of activations are counted: "
                "more devices, a smaller batch, or more recomputation",
                binding="memory",
            )
        errors: list[InfeasibleError] = []
        for on in infeasible:
            smallest = on.smallest(race.name)
            errors.append(on.why_infeasible(race.name, None if smallest is None else self._predicted(smallest).memory_bytes))
        return min(errors, key=lambda e: e.needed_bytes or float("inf"))

    def _finer(self, race: Race, best: Found, known: Sequence[Found], meshes: Sequence[LogicalMesh]) -> Found:
        """The best plan on a mesh that splits an axis of the best one, if that is better; from the rows that known plans take."""
        race.beat(best)
        rows = rows_of(known, len(self.program.clusters.clusters))
        race.refine([OnMesh(self.program, where, rows) for where in meshes])
        assert race.best is not None
        return race.best

    def _polished(self, race: Race, best: Found) -> Found:
        """The plan of the race with more effort; others, which were found otherwise, as they are."""
        if best is not race.best:
            return best
        race.polish()
        assert race.best is not None
        return race.best

    # --- the named strategies beside the plan ---

    def alternatives(self, name: str) -> tuple[tuple[Alternative, ...], list[Found], list[Found]]:
        """All others than that of the plan, if they are asked for; their plans, and those of them that fit."""
        if not self.options.alternatives:
            return (), [], []
        with self.clock.phase("alternatives"):
            others = [self._alternative(other) for other in _others(name)]
        found = [f for _, f in others if f is not None]
        return tuple(a for a, _ in others), found, [f for a, f in others if a.fits and f is not None]

    def _natural(self, name: str) -> list[OnMesh]:
        """The meshes that a named strategy is used on: all devices in one axis, or as they are given; tensor parallelism inside
        nodes."""
        if strategy_named(name).model is None:
            return [on for k, on in enumerate(self._named) if k == 0 or on.mesh.num_axes == 1]
        inner = [on for k, on in enumerate(self._named) if k == 0 or on.where.is_inner]
        return sorted(inner, key=lambda on: -on.mesh.sizes[-1])

    def _alternative(self, name: str) -> tuple[Alternative, Found | None]:
        """A named strategy on the mesh that is best for it; where it fits on none, what it needs on the one it needs least on."""
        natural = self._natural(name)
        race = Race(name, _COMPARED).run(natural)
        if race.best is None:  # everything in one axis takes the least memory
            race.run([on for on in self._named if on.mesh.num_axes == 1 and on not in natural])
        if race.best is not None:
            outcome = race.best.outcome
            sizes = race.best.on.mesh.sizes
            return Alternative(name, True, outcome.step_time_s, outcome.peak_memory_bytes, mesh=sizes), race.best
        if not race.on_infeasible():
            return Alternative(name, False, None, None, str(race.refused)), None
        return self._unfitting(name, race.on_infeasible())

    def _unfitting(self, name: str, meshes: Sequence[OnMesh]) -> tuple[Alternative, Found | None]:
        solved = (on.solve(name, limited=False, effort=_COMPARED) for on in meshes)
        found = [f for f in solved if isinstance(f, Found)]
        if not found:
            return Alternative(name, False, None, None, "it contradicts the pins or what the axes are for"), None
        least = min(found, key=lambda f: (f.outcome.peak_memory_bytes, f.outcome.step_time_s))
        needed, sizes = least.outcome.peak_memory_bytes, least.on.mesh.sizes
        reason = f"needs {needed} bytes per device, {self.program.limit_bytes} are allowed"
        return Alternative(name, False, least.outcome.step_time_s, needed, reason, sizes), least


def _others(name: str) -> list[str]:
    """The other named strategies that are compared."""
    return [other for other in dict.fromkeys(s.name for s in STRATEGIES.values() if s.compared) if other not in ("auto", name)]


def _not_worse(best: Found, others: Sequence[Found]) -> Found:
    """The plan found, or a named strategy's that is faster: possible where the solver stopped at a gap, or by a tie-break."""
    fastest = min(others, key=lambda f: f.outcome.step_time_s, default=best)
    return fastest.on.freed(fastest) if fastest.outcome.step_time_s < best.outcome.step_time_s else best


def _meshes_tried(race: Race, best: Found) -> tuple[MeshTried, ...]:
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
