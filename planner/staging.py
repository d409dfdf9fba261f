"""Search over pipelines: how many stages, on which logical mesh each, in how many micro-batches, by which schedule.

Every combination of pipeline degree, number of micro-batches and mesh inside a stage is a problem of its own: the whole program on
the devices of one stage, at the kernel sizes of a micro-batch, with the memory of one rank (:mod:`~meshwright.planner.solve.in_stages`). Where
strategy and mesh are free, the axes of a mesh have roles, ``dp`` x ``cp`` x ``tp``: computation follows the batch over the first and the
sequence over the second, which leaves few candidates, and anything goes over the third. The time divided by the degree, and the share
that the pipeline idles, make an estimate. Estimates get better from the least compute to the kernels of a micro-batch to the whole
solution; the lowest is always worked on next, until a finished plan is lower than all others.

Only a finished plan knows its memory: the stages are cut, every schedule is simulated, and micro-batches in flight are counted on every
rank. All that is found along the folded program and spread over the whole one (:mod:`~meshwright.planner.places`); only the plan that is
taken is spelled out. What does not fit is solved again with less room, and with more recomputation; between a level that fits and
one that does not, the integer program of :mod:`~meshwright.planner.solve.stages` says how many blocks must take which.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import LEVELS, Recompute
from meshwright.planner.levels import Recomputable
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.micro import batch_length
from meshwright.planner.on_mesh import Found, OnMesh, Program
from meshwright.planner.options import Clock, Options
from meshwright.planner.pipelined import Lying, PipelineRequest, Uncut, too_large
from meshwright.planner.places import places_in_whole
from meshwright.planner.solve.in_stages import as_one_rank
from meshwright.planner.solve.optimise import Effort, NoPlanFoundError
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.strategies import followed, strategy_named
from meshwright.planner.solve.tables import Tables
from meshwright.planner.spell import checked_plan
from meshwright.planner.stage_chain import dealt
from meshwright.planner.stage_choices import STAGES_PER_RANK, micro_batch_counts, schedules
from meshwright.planner.stage_tries import Finished, Try, alike, best_of, sizes_of

FIRST_TRIED = 4
"""The number of them that is tried first; others only for what is best with it."""

ROOMS = 3
"""How often a combination is solved with less room than the last time, where its plan does not fit as it is cut; ``_TIGHTER``: by how
much less than what it was over."""

_TIGHTER = 0.97

FINISHED, SOLVED, LOOKED_AT = 8, 48, 400
"""Plans that are cut and simulated at most; problems that are solved, and that are bounded by their kernels, at most once one is. Counts, not
times."""

BESIDE, BESIDE_LOOKED, BESIDE_CANDIDATES = 8, 24, 12_000
"""Problems that are solved and bounded at most, and candidates of all those that are solved, where a plan without stages is known already:
it is planning time that a user who asks for no stages does not expect."""

_UNLIMITED = 1 << 60
_ROUGH = Effort(gap=2e-2, nodes=8, rounds=6, time_limit_s=5.0, columns=150_000, prices=4)
"""What the plan inside a stage is worth: what the cuts and the schedule cost beside it is simulated anyway."""

_SMALL_KERNELS = 1.1
"""Work over the least that kernels of the whole batch take, from which on larger micro-batches are tried too."""

_LITTLE = 0.03
"""Part of a step that what is done once in it may take on all ranks together before it is tried otherwise."""


@dataclass(frozen=True)
class Devices:
    """What stages are cut from.

    Attributes:
        count: of devices.
        inside: pipeline degree to the logical meshes of one stage's devices, and the link between neighbouring stages.
    """

    count: int
    inside: Callable[[int], tuple[Sequence[LogicalMesh], Link]]


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
        self.source, self.devices, self.whole, self.asked, self.degrees = source, devices, whole, asked, tuple(degrees)
        self.options, self.clock = options, Clock(options.progress)
        self.name = strategy_named(options.strategy).name
        self._programs: dict[Recompute, Program] = {}
        self._cut_programs: dict[tuple[Recompute, int, bool], Program] = {}
        self._counts: dict[int, tuple[int, ...]] = {}
        self._heap: list[Try] = []
        self._number = itertools.count()
        self._looked, self._solves, self._candidates, self._is_known = 0, 0, 0, False
        self._unsolved: list[Try] = []
        self.finished: list[Finished] = []
        self.refused: InputError | None = None

    # --- the search ---

    def plan(self, bar_s: float = math.inf) -> Plan | None:
        """The best plan; None where none is faster than ``bar_s``.

        Raises:
            InputError: the batch, the program or the strategy cannot be had so at all.
            InfeasibleError: nothing fits, and nothing else was known (``bar_s`` infinite).
        """
        for degree in self.degrees:
            self._start(degree)
        best: Finished | None = None
        self._is_known = math.isfinite(bar_s)
        while self._heap and not self._is_enough():
            item = heapq.heappop(self._heap)
            enough = (bar_s if best is None else best.seconds) * (1 - self.options.effort.gap)
            if item.seconds >= enough:
                break
            done = self._work_on(item)
            if done is not None and done.fits and done.seconds < min(bar_s, best.seconds if best else math.inf):
                best = done
                self._other_counts(done.item)
        if best is not None:
            return self._told(best)
        if math.isfinite(bar_s):
            return None
        raise self._why_none()

    def _is_enough(self) -> bool:
        """Whether the counts of what was tried are used up."""
        if self._is_known and not self.finished and (self._solves >= BESIDE or self._looked >= BESIDE_LOOKED):
            return True
        many = self._solves >= SOLVED or self._looked >= LOOKED_AT
        return len(self.finished) >= FINISHED or (many and bool(self.finished))

    def _start(self, degree: int) -> None:
        """The combinations of one degree, each at the least that its compute can take."""
        try:
            meshes, link = self.devices.inside(degree)
            counts = micro_batch_counts(self._graph, degree, self.asked, self.devices.count // degree)
        except InputError as e:
            self.refused = self.refused or e
            return
        if self.name == "auto":
            useful = [w for w in meshes if all(rule.compute == "free" or followed(self._graph, rule.compute) for rule in w.rules)]
            for where in useful or meshes:
                for count in counts:
                    if len(counts) == 1 or self._can_share(count, where):
                        self._push_least(degree, count, where, link)
            return
        self._counts[degree] = counts
        count = min(counts, key=lambda n: abs(n - FIRST_TRIED * degree))
        for where in meshes:
            self._push_least(degree, count, where, link)

    def _can_share(self, count: int, where: LogicalMesh) -> bool:
        """Whether the devices that share the batch have a piece of every micro-batch."""
        batch = batch_length(self._graph)
        parts = math.prod(where.mesh.sizes[axis] for axis, rule in enumerate(where.rules) if rule.compute == "follows batch")
        return batch % (count * parts) == 0

    def _push_least(self, degree: int, count: int, where: LogicalMesh, link: Link) -> None:
        level = self._least_level(degree, count)
        self._push(self._program(level).floors.compute_s(where.mesh.sizes), degree, count, where, link, level)

    def _least_level(self, degree: int, count: int) -> Recompute:
        """The least recomputation with which the first rank could hold its micro-batches in flight if all were sharded evenly."""
        if self.options.recompute is not None:
            return self._first_recompute
        devices = self.devices.count // degree
        for level in LEVELS[:-1]:
            program = self._program(Recompute(level))
            graph, times = program.capture.graph, program.clusters.times
            saved = sum(v.size_bytes * times(v.name) for v in graph.saved) / devices
            if saved / count * min(1.0, count / degree) <= self._limit_bytes:
                return Recompute(level)
        return Recompute(LEVELS[-1])

    @cached_property
    def _limit_bytes(self) -> int:
        meshes, _ = self.devices.inside(self.degrees[0])
        return self.options.memory_limit(meshes[0].hardware)

    def _other_counts(self, best: Try) -> None:
        """The best combination so far, in other numbers of micro-batches."""
        floor_s = self._program().floors.compute_s(best.where.mesh.sizes)
        for count in self._counts.pop(best.degree, ()):
            if count != best.micro_batches:
                assert best.found is not None, "a finished combination has been solved"
                work_s = best.found.outcome.step_time_s if count > best.micro_batches else floor_s
                self._push(work_s, best.degree, count, best.where, best.link, best.recompute)

    @property
    def _graph(self) -> OpGraph:
        return self._program().capture.graph

    @property
    def _first_recompute(self) -> Recompute:
        return Recompute(self.options.recompute or LEVELS[0])

    def _program(self, recompute: Recompute | None = None) -> Program:
        wanted = recompute or self._first_recompute
        if wanted not in self._programs:
            capture = self.source.capture_at(wanted)
            meshes, _ = self.devices.inside(self.degrees[0])
            options = replace(self.options, memory_limit_bytes=_UNLIMITED, alternatives=False)
            self._programs[wanted] = Program.of(capture, meshes[0].hardware, options, self.clock, wanted)
        return self._programs[wanted]

    def _push(
        self,
        work_s: float,
        degree: int,
        count: int,
        where: LogicalMesh,
        link: Link,
        recompute: Recompute,
    ) -> None:
        seconds = work_s / degree * (1 + self._idle(degree, count))
        order = next(self._number)
        heapq.heappush(self._heap, Try(seconds, order, degree, count, where, link, recompute))

    def _push_like(self, item: Try, **changed: Any) -> None:
        """A combination once more, with something else; it is no faster."""
        heapq.heappush(self._heap, replace(item, order=next(self._number), on=None, found=None, **changed))

    def _work_on(self, item: Try) -> Finished | None:
        """Work a combination out one step further: its block, its solution, its stages."""
        if item.on is None:
            self._look_at(item)
        elif item.found is None:
            self._solve(item)
        else:
            return self._finish(item)
        return None

    def _idle(self, degree: int, micro_batches: int) -> float:
        """Seconds that a pipeline idles per second of work, as far as several stages per rank can help it."""
        each = self.asked.stages_per_rank or (1 if self.asked.schedule in ("naive", "gpipe", "1f1b") else 0)
        each = each or max(1, min(STAGES_PER_RANK[-1], self.source.num_parts // degree))
        return (degree - 1) / (micro_batches * each)

    def _again(self, item: Try, work_s: float) -> None:
        """Back into the queue with a better estimate."""
        item.seconds = max(item.seconds, work_s / item.degree * (1 + self._idle(item.degree, item.micro_batches)))
        heapq.heappush(self._heap, item)

    def _build(self, item: Try) -> OnMesh:
        program = self._program(item.recompute)
        whole = self.name == "auto" and item.micro_batches > 1
        key = item.recompute, item.micro_batches, whole
        if key not in self._cut_programs:
            options = replace(program.options, micro_batches=item.micro_batches, whole_gradients=whole)
            self._cut_programs[key] = replace(program, options=options)
        return OnMesh(self._cut_programs[key], item.where)

    def _look_at(self, item: Try) -> None:
        item.on = self._build(item)
        self._looked += 1
        try:
            work_s = item.on.kernels_s()
        except InputError as e:
            self.refused = self.refused or e
            return
        self._again(item, work_s)

    def _fewer_micro_batches(self, item: Try, work_s: float) -> None:
        """The same with larger micro-batches, whose kernels are faster."""
        smaller = [n for n in self._counts.get(item.degree, ()) if n < item.micro_batches]
        if smaller:
            self._push(work_s, item.degree, max(smaller), item.where, item.link, item.recompute)

    def _solve(self, item: Try) -> None:
        assert item.on is not None
        self._solves += 1
        self._candidates += sum(c.num_candidates for c in item.on.tables_for(self.name).problem.choices)
        if self._is_known and self._candidates > BESIDE_CANDIDATES:
            return
        item.found = self._solved(item, _ROUGH)
        if item.found is not None:
            self._again(item, item.found.outcome.step_time_s)
            return
        self._unsolved.append(item)
        if self.name != "auto":  # a stage's devices may not be able to share such small micro-batches as the strategy demands
            self._fewer_micro_batches(item, item.on.floor_s)
        self._with_less(item)

    def _solved(self, item: Try, effort: Effort, objective: str = "time") -> Found | None:
        """The best plan with the memory that one rank has; or that of the least memory."""
        assert item.on is not None
        limit = int(self.options.memory_limit(item.where.hardware) * item.room) if objective == "time" else None
        whole = item.micro_batches > 1 and (self.name == "auto" or strategy_named(self.name).whole_gradients)

        def change(tables: Tables) -> Problem:
            return as_one_rank(tables, item.degree, item.micro_batches, whole_sums=whole, limit_bytes=limit)

        try:
            return item.on.solve_changed(self.name, change, effort, objective)
        except NoPlanFoundError:
            return None  # memory is so short that the little effort of this search finds nothing: more recomputation comes next

    # --- stages ---

    def _finish(self, item: Try) -> Finished | None:
        """Cut and simulate; what does not fit goes on with dearer memory and with more recomputation."""
        assert item.on is not None and item.found is not None
        done = self._cut(item, self._uncut(item))
        if done is None:
            return None
        self.finished.append(done)
        if done.fits:
            return self._less_recomputation(done) or done
        rescued = self._balanced(done)
        if rescued is None or not rescued.fits:
            self._go_on(done)
        return rescued or done

    def _go_on(self, done: Finished) -> None:
        """The same with less memory: more recomputation, less room for the solver."""
        self._with_less(done.item)
        if done.item.tries < ROOMS:
            over = done.plan.predicted.peak_memory_bytes / done.uncut.limit_bytes
            self._push_like(done.item, room=done.item.room / over * _TIGHTER, tries=done.item.tries + 1)

    def _with_less(self, item: Try) -> None:
        level = self._next_level(item)
        if level is not None:
            self._push_like(item, recompute=level, room=1.0, tries=0)

    def _next_level(self, item: Try) -> Recompute | None:
        at = LEVELS.index(item.recompute.level) + 1
        if (
            self.options.recompute is not None
            or item.recompute.is_mixed
            or at >= len(LEVELS)
            or not self._program().capture.training
        ):
            return None
        return Recompute(LEVELS[at])

    def _cut(self, item: Try, uncut: Uncut) -> Finished | None:
        """The fastest schedule that fits; where none does, the one that needs the least."""
        with self.clock.phase("stages"):
            return self._cut_best(item, uncut)

    def _cut_best(self, item: Try, uncut: Uncut) -> Finished | None:
        return best_of([f for request in self._requests(item) if (f := self._try(item, uncut, request)) is not None])

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
            self.refused = self.refused or e
            return None

    def _requests(self, item: Try) -> Iterator[PipelineRequest]:
        for name, each in schedules(item.degree, item.micro_batches, self.asked):
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
            done.item, recompute=Recompute(level.level, blocks, lower.item.recompute.level), on=None, found=None, seconds=0.0
        )
        return self._mixture(mixed, done, found.cuts)

    def _mixture(self, mixed: Try, done: Finished, cuts: tuple[str, ...]) -> Finished | None:
        try:
            mixed.on = self._build(mixed)
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
        return replace(plan, notes=(*plan.notes, *((note,) if note else ())))

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
        return self.refused or InfeasibleError("no plan in stages satisfies strategy and pins", binding=f"strategy {self.name!r}")
