"""Search over pipelines: how many stages, on which logical mesh each, in how many micro-batches, by which schedule.

Every combination of pipeline degree, number of micro-batches and mesh inside a stage is a problem of its own: the whole program on
the devices of one stage, at the kernel sizes of a micro-batch, with the memory of one rank (:mod:`~meshwright.planner.solve.in_stages`). Where
strategy and mesh are free, the axes of a mesh have roles, ``dp`` x ``cp`` x ``tp``: computation follows the batch over the first and the
sequence over the second, which leaves few candidates, and anything goes over the third. The time divided by the degree, and the share
that the pipeline idles, bound a step and say what is expected of it. Both get better from the kernels of a micro-batch (all combinations
at once, :mod:`~meshwright.planner.stage_floor`) to what is foreseen without a solver to the solution; what promises most is worked on
next, until the bounds of all others are above a finished plan. Nothing is solved further than to show that it is no better.

Only a finished plan knows its memory: the stages are cut, every schedule is simulated, and micro-batches in flight are counted on every
rank. All that is found along the folded program and spread over the whole one (:mod:`~meshwright.planner.places`); only the plan that is
taken is spelled out. Where memory hurts, more recomputation is a combination of its own; what does not fit is solved again with less room. Between a level that fits and
one that does not, the integer program of :mod:`~meshwright.planner.solve.stages` says how many blocks must take which.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import LEVELS, Recompute
from meshwright.planner.levels import Recomputable
from meshwright.planner.micro_costs import MicroCosts
from meshwright.planner.on_mesh import Found
from meshwright.planner.options import Clock, Options
from meshwright.planner.pipelined import Lying, PipelineRequest, Uncut, too_large
from meshwright.planner.places import places_in_whole
from meshwright.planner.solve.in_stages import as_one_rank
from meshwright.planner.solve.optimise import Effort, NoPlanFoundError
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.solve.tables import Tables
from meshwright.planner.spell import checked_plan
from meshwright.planner.stage_chain import dealt
from meshwright.planner.stage_choices import schedules
from meshwright.planner.stage_learned import Learned
from meshwright.planner.stage_space import Devices, Space
from meshwright.planner.stage_tries import SIMPLER, Finished, Try, alike, best_of, sizes_of

ROOMS = 3
"""How often a combination is solved with less room than the last time, where its plan does not fit as it is cut; ``_TIGHTER``: by how
much less than what it was over."""

_TIGHTER = 0.97

FINISHED, SOLVED, LOOKED_AT = 8, 48, 400
"""Plans that are cut and simulated at most; problems that are solved, and that are looked at, at most once one is. Counts, not times."""

BESIDE, BESIDE_LOOKED, BESIDE_CANDIDATES, BESIDE_FINISHED = 8, 24, 10_000, 3
"""Problems that are solved and looked at at most, candidates of all those that are looked at, and plans that are cut, where a plan without
stages is known already: it is planning time that a user who asks for no stages does not expect."""

_HURTS, _HARD = 0.02, 1.1
"""Memory hurts where it raises what is foreseen by more than this part: then more recomputation is tried beside. Where no plan was met that
fits, so many times the bound is expected."""

_FINEST = 1.1
"""Stages per part of the model at most, beside two per rank: finer ones are too unequal."""

_BOUND = "kernels alone bound all plans in stages on the meshes that are searched (dp x cp x tp, unless they are given), so the gap is wide"

_MISSED = 1.03
"""A simulated step over what the solver said from which on the combination is solved once more with what is done once per step hidden."""

_ROUGH = Effort(gap=3e-2, nodes=8, rounds=6, time_limit_s=5.0, columns=40_000, prices=4)
"""What the plan inside a stage is worth: what the cuts and the schedule cost beside it is simulated anyway."""

Whole = Callable[[Plan], tuple[Plan, OpGraph, Mapping[str, str] | None]]
"""A plan of the program that was searched, said of the whole one; and the names in the former of what the latter has, if they differ."""


class StageSearch:
    """One search.

    Args:
        source: the program.
        devices: what stages are cut from.
        whole: the searched program's plan said of the whole program.
        options: what to search for; the memory limit is that of a device.
        asked: what is fixed; ``degree`` is one of ``degrees``.
        degrees: pipeline degrees to look at.
    """

    def __init__(
        self,
        source: Recomputable,
        devices: Devices,
        whole: Whole,
        options: Options,
        asked: PipelineRequest,
        degrees: Sequence[int],
    ):
        self.source, self.whole, self.asked = source, whole, asked
        self.options, self.clock = options, Clock(options.progress)
        self.space = Space(source, devices, options, asked, degrees, self.clock)
        self.name = self.space.name
        self._learned = Learned()
        self._begin()

    def _begin(self) -> None:
        """Nothing is worked on yet."""
        self._heap: list[Try] = []
        self._looked, self._solves, self._candidates, self._is_known = 0, 0, 0, False
        self._unsolved: list[Try] = []
        self.finished: list[Finished] = []

    # --- the search ---

    def plan(self, bar_s: float = math.inf) -> Plan | None:
        """The best plan; None where none is faster than ``bar_s``. May be asked several times: combinations, and what was
        foreseen of them, are known then.

        Raises:
            InputError: the batch, the program or the strategy cannot be had so at all.
            InfeasibleError: nothing fits, and nothing else was known (``bar_s`` infinite).
        """
        self._begin()
        self._heap = [item for item in self.space.combinations() if item.bound_s < bar_s]
        heapq.heapify(self._heap)
        best, self._is_known = None, math.isfinite(bar_s)
        while self._heap and not self._is_enough():
            item, enough_s = heapq.heappop(self._heap), bar_s * (1 - _ROUGH.gap)
            if item.bound_s >= enough_s or (item.on is None and (self._has_looked_enough() or self._is_idle(item, enough_s))):
                continue
            done = self._work_on(item, enough_s)
            if done is not None and done.fits and done.seconds < bar_s:
                best, bar_s = done, done.seconds
                self._other_counts(done.item)
        if best is not None:
            return self._told(best)
        if self._is_known:
            return None
        raise self._why_none()

    def _is_enough(self) -> bool:
        """Whether the counts of what was tried are used up."""
        if self._is_known and (self._solves >= BESIDE or len(self.finished) >= BESIDE_FINISHED):
            return True
        many = self._solves >= SOLVED or self._looked >= LOOKED_AT
        return len(self.finished) >= FINISHED or (many and bool(self.finished))

    def _has_looked_enough(self) -> bool:
        """Whether only what was looked at already is worked on, where a plan without stages is known."""
        return self._is_known and (self._looked >= BESIDE_LOOKED or self._candidates >= BESIDE_CANDIDATES)

    def _is_idle(self, item: Try, enough_s: float) -> bool:
        """Whether a combination need not be looked at, or not now: by what others showed it promises less than it did."""
        self.space.bound(item, self._learned.least_work_s(item))
        if item.bound_s >= enough_s:
            return True
        likely_s = self._learned.likely_s(item)
        if likely_s <= item.seconds:
            return False
        item.seconds = likely_s
        heapq.heappush(self._heap, item)
        return True

    def _work_on(self, item: Try, enough_s: float) -> Finished | None:
        """Work a combination out one step further, as far as it can take less than ``enough_s``: what can be foreseen, its solution, its
        stages."""
        if item.on is None:
            self._look_at(item, enough_s)
        elif item.found is None:
            self._solve(item, enough_s)
        else:
            return self._finish(item)
        return None

    def _look_at(self, item: Try, enough_s: float) -> None:
        """What can be foreseen."""
        try:
            item.on = self.space.build(item)
            item.task = item.on.foresee_changed(self.name, self._in_stages(item), _ROUGH, enough_s / self.space.least_share(item))
        except InputError as e:
            self.space.refused = self.space.refused or e
            return
        ahead, share = item.task.ahead, self.space.share(item)
        self._looked += 1
        self._candidates += sum(c.num_candidates for c in item.task.problem.choices)
        self._learned.add(item, share, ahead.free_bound_s, ahead.bound_s)
        if ahead.bound_s > ahead.free_bound_s * (1 + _HURTS):
            self._with_less(item, max(ahead.free_bound_s, 0.0))
        self.space.bound(item, ahead.bound_s)
        if math.isfinite(ahead.bound_s):
            item.seconds = max(item.seconds, min(ahead.about_s, _HARD * ahead.bound_s) * share)
            heapq.heappush(self._heap, item)
        else:
            self._nothing_fits(item)

    def _solve(self, item: Try, enough_s: float) -> None:
        assert item.on is not None and item.task is not None
        self._solves += 1
        try:
            found = item.on.solve_task(self.name, item.task, _ROUGH, enough_s / self.space.least_share(item))
        except NoPlanFoundError:
            found = None  # memory is so short that the little effort of this search finds nothing: more recomputation comes next
        if isinstance(found, Found):
            item.found = found
            self.space.bound(item, found.solution.objective_s)
            item.seconds = found.solution.objective_s * self.space.share(item)
            heapq.heappush(self._heap, item)
        elif found is None:
            self._nothing_fits(item)

    def _nothing_fits(self, item: Try) -> None:
        self._unsolved.append(item)
        if self.name != "auto":  # a stage's devices may not be able to share such small micro-batches as the strategy demands
            self._fewer_micro_batches(item)
        self._with_less(item, 0.0)

    def _in_stages(self, item: Try, objective: str = "time") -> Callable[[Tables], Problem]:
        """The problem with the memory that one rank has; that of the least memory has no limit."""
        limit = int(self.options.memory_limit(item.where.hardware) * item.room) if objective == "time" else None
        whole = item.micro_batches > 1 and (self.name == "auto" or strategy_named(self.name).whole_gradients)
        busy = 1 / (self.space.share(item) * item.degree)

        def change(tables: Tables) -> Problem:
            assert item.on is not None
            costs = item.on.costs
            is_once = costs.time.is_once if isinstance(costs, MicroCosts) else _never
            once = None if item.hides else is_once
            count = item.degree, item.micro_batches
            return as_one_rank(tables, *count, whole_sums=whole, limit_bytes=limit, once=once, busy=busy)

        return change

    def _solved(self, item: Try, effort: Effort, objective: str = "time") -> Found | None:
        """The best plan, or that of the least memory."""
        assert item.on is not None
        try:
            return item.on.solve_changed(self.name, self._in_stages(item, objective), effort, objective)
        except NoPlanFoundError:
            return None

    # --- more combinations ---

    def _push_like(self, item: Try, work_s: float = 0.0, **changed: Any) -> None:
        """A combination once more, with something else; it takes at least ``work_s``."""
        again = replace(item, order=next(self.space.numbers), on=None, task=None, found=None, bound_s=0.0, seconds=0.0, **changed)
        self.space.bound_by_kernels([again])
        self.space.bound(again, work_s)
        heapq.heappush(self._heap, again)

    def _other_counts(self, best: Try) -> None:
        """The best combination so far, in other numbers of micro-batches."""
        for count in self.space.counts.pop(best.degree, ()):
            if count != best.micro_batches:
                self._push_like(best, micro_batches=count, tries=0, room=1.0, less=False)

    def _fewer_micro_batches(self, item: Try) -> None:
        """The same with larger micro-batches, whose kernels are faster."""
        smaller = [n for n in self.space.counts.get(item.degree, ()) if n < item.micro_batches]
        if smaller:
            self._push_like(item, micro_batches=max(smaller), tries=0, room=1.0, less=False)

    def _with_less(self, item: Try, work_s: float) -> None:
        """The same with more recomputation, once."""
        level = self.space.next_level(item.recompute)
        if level is not None and not item.less:
            item.less = True
            self._push_like(item, work_s, recompute=level, room=1.0, tries=0, less=False)

    # --- stages ---

    def _finish(self, item: Try) -> Finished | None:
        """Cut and simulate; what does not fit goes on with dearer memory and with more recomputation."""
        assert item.on is not None and item.found is not None
        done = self._cut(item, self._uncut(item))
        if done is None:
            return None
        self.finished.append(done)
        if done.seconds > item.found.solution.objective_s * self.space.share(item) * _MISSED and not item.hides:
            self._push_like(item, hides=True)
        if done.fits:
            return self._less_recomputation(done) or done
        rescued = self._balanced(done)
        if rescued is None or not rescued.fits:
            self._go_on(done)
        return rescued or done

    def _go_on(self, done: Finished) -> None:
        """The same with less memory: more recomputation, less room for the solver."""
        assert done.item.found is not None, "a finished combination has been solved"
        work_s = done.item.found.solution.objective_s
        self._with_less(done.item, 0.0)
        if done.item.tries < ROOMS:
            over = done.plan.predicted.peak_memory_bytes / done.uncut.limit_bytes
            self._push_like(done.item, work_s, room=done.item.room / over * _TIGHTER, tries=done.item.tries + 1)

    def _cut(self, item: Try, uncut: Uncut) -> Finished | None:
        """The fastest schedule that fits; where none does, the one that needs the least."""
        with self.clock.phase("stages"):
            return self._cut_best(item, uncut)

    def _cut_best(self, item: Try, uncut: Uncut) -> Finished | None:
        requests, found, best_s = list(self._requests(item)), dict[int, Finished](), math.inf
        least = [self._least_s(uncut, request) for request in requests]
        for k in sorted(range(len(requests)), key=lambda k: (least[k], k)):
            if least[k] >= best_s * (1 + SIMPLER):
                break
            done = self._try(item, uncut, requests[k])
            if done is not None:
                found[k] = done
                best_s = min(best_s, done.seconds if done.fits else math.inf)
        return best_of([found[k] for k in sorted(found)])

    def _least_s(self, uncut: Uncut, request: PipelineRequest) -> float:
        try:
            return uncut.least_s(request)
        except InputError as e:
            self.space.refused = self.space.refused or e
            return math.inf

    def _uncut(self, item: Try) -> Uncut:
        assert item.on is not None and item.found is not None
        program = item.on.program
        with self.clock.phase("check"):
            spelled = checked_plan(program, self.name, item.found, item.found.bound_s, (), ())
        graph, repeats = program.capture.graph, program.capture.repeats
        lying = Lying(program.times, hidden_values(graph, program.clusters))
        sums = True if self.name == "auto" else None
        rest = (item.micro_batches, item.where.hardware, item.link, self.options.memory_limit(item.where.hardware), sums)
        places = places_in_whole(graph, repeats)
        if places is not None:
            uncut = Uncut(spelled, graph, lying, *rest, places=places)
            return replace(uncut, clusters=program.clusters, whole_graph=lambda: self.whole(spelled)[1])
        with self.clock.phase("stages"):
            plan, whole, names = self.whole(spelled)
            return Uncut(plan, whole, lying if names is None else lying.of_copies(whole, names), *rest)

    def _try(self, item: Try, uncut: Uncut, request: PipelineRequest) -> Finished | None:
        try:
            return Finished(item, uncut, request, uncut.cut(request))
        except InputError as e:
            self.space.refused = self.space.refused or e
            return None

    def _requests(self, item: Try) -> Iterator[PipelineRequest]:
        is_free = self.asked.schedule is None and self.asked.stages_per_rank is None
        for name, each in schedules(item.degree, item.micro_batches, self.asked):
            if is_free and each > 2 and item.degree * each > _FINEST * self.source.num_parts:
                continue
            yield PipelineRequest(item.degree, name, item.micro_batches, each, self.asked.homes)

    def _balanced(self, done: Finished) -> Finished | None:
        """The same plan cut so that the fullest rank holds less, if that fits."""
        with self.clock.phase("stages"):
            found = None if done.request.homes is not None else dealt((done.uncut,), done.request)
            if found is None:
                return None
            again = replace(done, plan=done.uncut.cut_at(done.request, found.cuts))
            return again if again.fits else None

    def _less_recomputation(self, done: Finished) -> Finished | None:
        """With the level before in as many blocks as memory allows, if that is faster."""
        level = done.item.recompute
        before = [f for f in self.finished if not f.fits and alike(f.item, done.item)]
        counts = list(self.source.counts)
        if not before or level.is_mixed or not counts or done.request.homes is not None or self.options.recompute is not None:
            return None
        lower = max(before, key=lambda f: LEVELS.index(f.item.recompute.level))
        found = dealt((done.uncut, replace(lower.uncut, sums_whole=done.uncut.sums_whole)), done.request)
        if found is None or not 0 < found.dear < found.blocks:
            return None
        wanted = math.ceil(found.dear * self.source.num_parts / found.blocks)
        blocks = next((n for n in sorted(counts) if n >= wanted), None)
        if blocks is None:
            return None
        mixed = replace(
            done.item,
            recompute=Recompute(level.level, blocks, lower.item.recompute.level),
            on=None,
            task=None,
            found=None,
            seconds=0.0,
        )
        return self._mixture(mixed, done, found.cuts)

    def _mixture(self, mixed: Try, done: Finished, cuts: tuple[str, ...]) -> Finished | None:
        try:
            mixed.on = self.space.build(mixed)
            mixed.found = self._solved(mixed, self.options.effort)
        except (Unlike, InputError):
            return None
        if mixed.found is None:
            return None
        uncut = self._uncut(mixed)
        tried = (self._cut(mixed, uncut), self._cut_as(mixed, replace(uncut, sums_whole=done.uncut.sums_whole), done, cuts))
        found = [f for f in tried if f is not None and f.fits]
        best = best_of(found) if found else None
        return best if best is not None and best.seconds < done.seconds else None

    def _cut_as(self, mixed: Try, uncut: Uncut, done: Finished, cuts: tuple[str, ...]) -> Finished | None:
        """A mixture cut where the integer program says."""
        if not set(cuts) <= set(uncut.profile.names):
            return None
        return Finished(mixed, uncut, done.request, uncut.cut_at(done.request, cuts))

    # --- what is said ---

    def _told(self, best: Finished) -> Plan:
        others = {}
        for f in self.finished:
            if f.item is not best.item:
                others[
                    f"pp {f.item.degree} x {f.item.where.mesh}, {f.item.micro_batches} micro-batches, {f.request.schedule}"
                ] = f
        told = "; ".join(f"{k}: {f.seconds:.4g} s" + ("" if f.fits else ", does not fit") for k, f in others.items())
        note = f"pipelines that were tried too: {told}" if told else ""
        plan = replace(self._spelled_out(best), solver={**self.clock.seconds, **sizes_of(best.item.found)})
        step_s = plan.predicted.step_time_s
        bound_s = min(step_s, self.space.least_s if self.name == "auto" else 0.0)
        gap = (step_s - bound_s) / step_s if step_s else 0.0
        notes = (*plan.notes, *((note,) if note else ()), _BOUND)
        return replace(plan, notes=notes, objective_s=step_s, bound_s=bound_s, gap=gap)

    def _spelled_out(self, best: Finished) -> Plan:
        """The plan of the whole program."""
        with self.clock.phase("expand"):
            if best.plan.graph_hash != best.uncut.graph.hash or best.uncut.places is None:
                return best.plan
            plan, whole, names = self.whole(best.plan)
            times = best.uncut.lying.times if names is None else best.uncut.lying.of_copies(whole, names).times
            assert plan.pipeline is not None
            return replace(plan, pipeline=replace(plan.pipeline, inputs=times.inputs, ops=times.ops))

    def _why_none(self) -> Exception:
        if not self.finished and self._unsolved:
            item = self._unsolved[-1]
            item.found = self._solved(item, _ROUGH, "memory")
            smallest = None if item.found is None else self._cut(item, self._uncut(item))
            self.finished += [] if smallest is None else [smallest]
        if self.finished:
            least = min(self.finished, key=lambda f: f.plan.predicted.peak_memory_bytes)
            return too_large(least.uncut, least.plan)
        return self.space.refused or InfeasibleError(
            "no plan in stages satisfies strategy and pins", binding=f"strategy {self.name!r}"
        )


def _never(value: str) -> bool:
    return False
