"""Search over pipelines: how many stages, on which logical mesh each, in how many micro-batches, by which schedule.

Every combination of pipeline degree, number of micro-batches and mesh inside a stage is a problem of its own: the whole program on
the devices of one stage, at the kernel sizes of a micro-batch, without a memory limit (such problems are solved by one relaxation).
Its time divided by the degree, and the share that the pipeline idles, make an estimate. Estimates get better from the least compute
to the repeated block alone to the whole solution; the lowest is always worked on next, until a finished plan is lower than all others.

Only a finished plan knows its memory: the stages are cut, every schedule is simulated, and micro-batches in flight are counted on every
rank. What does not fit is tried again with dearer memory (a price per byte at rest) and with more recomputation; between a level
that fits and one that does not, the integer program of :mod:`~meshwright.planner.solve.stages` says how many blocks must take
which.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import LEVELS, Recompute
from meshwright.planner.levels import Recomputable
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.on_mesh import Found, OnMesh, Program
from meshwright.planner.options import Clock, Options
from meshwright.planner.pipelined import Lying, PipelineRequest, Uncut, too_large
from meshwright.planner.solve.optimise import Effort
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.spell import checked_plan
from meshwright.planner.stage_chain import dealt
from meshwright.planner.stage_choices import STAGES_PER_RANK, micro_batch_counts, schedules

FIRST_TRIED = 4
"""The number of them that is tried first; others only for what is best with it."""

THRIFT = (1.0, 1e4, 1e6)
"""Prices of memory at rest that are tried, relative to one that only breaks ties."""

FINISHED = 6
"""Plans that are cut and simulated at most, and ``LOOKED_AT`` problems that are built at most once one is. Counts, not times."""

LOOKED_AT = 48

BESIDE, BESIDE_CANDIDATES = 12, 12_000
"""Problems that are built at most, and candidates of all those that are solved, where a plan without stages is known already: it is
planning time that a user who asks for no stages does not expect."""

_UNLIMITED = 1 << 60
_ROUGH = Effort(gap=2e-2, nodes=4, rounds=4)
"""What the plan inside a stage is worth: what the cuts and the schedule cost beside it is simulated anyway."""

_SMALL_KERNELS = 1.1
"""Work over the least that kernels of the whole batch take, from which on larger micro-batches are tried too."""

_LITTLE = 0.03
"""Part of a step that what is done once in it may take on all ranks together before it is tried otherwise."""

_SIMPLER = 0.01
"""A schedule is taken only where it is faster than a simpler one by more than this part."""


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


@dataclass(order=True)
class _Try:
    """A combination, and how far it has been worked out.

    Attributes:
        seconds: estimate of its step.
        order: of being made, to break ties.
        degree: ranks along the pipeline axis; ``micro_batches`` how many.
        where: the mesh inside a stage; ``link`` between stages.
        recompute: what the backward computes again.
        thrift: index in ``THRIFT``.
        on: the problem, once it is built.
        found: its solution, once there is one.
    """

    seconds: float
    order: int
    degree: int = field(compare=False)
    micro_batches: int = field(compare=False)
    where: LogicalMesh = field(compare=False)
    link: Link = field(compare=False)
    recompute: Recompute = field(compare=False, default_factory=Recompute)
    thrift: int = field(compare=False, default=0)
    on: OnMesh | None = field(compare=False, default=None)
    found: Found | None = field(compare=False, default=None)


@dataclass
class _Finished:
    """A combination cut into stages: its plan uncut, and the best way to cut it (the least memory where none fits)."""

    item: _Try
    uncut: Uncut
    request: PipelineRequest
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.predicted.peak_memory_bytes <= self.uncut.limit_bytes

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_time_s


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
        self._cut_programs: dict[tuple[Recompute, int], Program] = {}
        self._counts: dict[int, tuple[int, ...]] = {}
        self._heap: list[_Try] = []
        self._number = itertools.count()
        self._looked, self._candidates, self._is_known = 0, 0, False
        self.finished: list[_Finished] = []
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
        best: _Finished | None = None
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
        if self._is_known and not self.finished and self._looked >= BESIDE:
            return True
        return len(self.finished) >= FINISHED or (self._looked >= LOOKED_AT and bool(self.finished))

    def _start(self, degree: int) -> None:
        """The combinations of one degree, each at the least that its compute can take."""
        try:
            meshes, link = self.devices.inside(degree)
            counts = micro_batch_counts(self._graph, degree, self.asked, self.devices.count // degree)
        except InputError as e:
            self.refused = self.refused or e
            return
        self._counts[degree] = counts
        count = min(counts, key=lambda n: abs(n - FIRST_TRIED * degree))
        level = self._least_level(degree, count)
        for where in meshes:
            floor_s = self._program(level).floors.compute_s(where.mesh.sizes)
            self._push(floor_s, degree, count, where, link, level)

    def _least_level(self, degree: int, count: int) -> Recompute:
        """The least recomputation with which the first rank could hold its micro-batches in flight if all were sharded evenly."""
        if self.options.recompute is not None:
            return self._first_recompute
        devices = self.devices.count // degree
        for level in LEVELS[:-1]:
            program = self._program(Recompute(level))
            graph, times = program.capture.graph, program.clusters.times
            saved = sum(v.size_bytes * times(v.name) for v in graph.saved) / devices
            if saved / count * min(1.0, count / degree) <= self._limit_bytes():
                return Recompute(level)
        return Recompute(LEVELS[-1])

    def _limit_bytes(self) -> int:
        meshes, _ = self.devices.inside(self.degrees[0])
        return self.options.memory_limit(meshes[0].hardware)

    def _other_counts(self, best: _Try) -> None:
        """The best combination so far, in other numbers of micro-batches."""
        floor_s = self._program().floors.compute_s(best.where.mesh.sizes)
        for count in self._counts.pop(best.degree, ()):
            if count != best.micro_batches:
                assert best.found is not None, "a finished combination has been solved"
                work_s = best.found.outcome.step_time_s if count > best.micro_batches else floor_s
                self._push(work_s, best.degree, count, best.where, best.link, best.recompute, best.thrift)

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
        self, work_s: float, degree: int, count: int, where: LogicalMesh, link: Link, recompute: Recompute, thrift: int = 0
    ) -> None:
        seconds = work_s / degree * (1 + self._idle(degree, count))
        heapq.heappush(self._heap, _Try(seconds, next(self._number), degree, count, where, link, recompute, thrift))

    def _work_on(self, item: _Try) -> _Finished | None:
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

    def _again(self, item: _Try, work_s: float) -> None:
        """Back into the queue with a better estimate."""
        item.seconds = max(item.seconds, work_s / item.degree * (1 + self._idle(item.degree, item.micro_batches)))
        heapq.heappush(self._heap, item)

    def _build(self, item: _Try) -> OnMesh:
        program = self._program(item.recompute)
        whole = self.name == "auto" and item.micro_batches > 1
        options = replace(program.options, micro_batches=item.micro_batches, whole_gradients=whole)
        if (item.recompute, item.micro_batches) not in self._cut_programs:
            self._cut_programs[item.recompute, item.micro_batches] = replace(program, options=options)
        return OnMesh(self._cut_programs[item.recompute, item.micro_batches], item.where)

    def _look_at(self, item: _Try) -> None:
        item.on = self._build(item)
        self._looked += 1
        try:
            work_s = item.on.bound_s(self.name, math.inf) if self.name == "auto" else item.on.floor_s
        except InputError as e:
            self.refused = self.refused or e
            return
        if math.isfinite(work_s):
            self._again(item, work_s)
        if work_s > _SMALL_KERNELS * item.on.floor_s:
            self._fewer_micro_batches(item, item.on.floor_s)

    def _fewer_micro_batches(self, item: _Try, work_s: float) -> None:
        """The same with larger micro-batches, whose kernels are faster."""
        smaller = [n for n in self._counts.get(item.degree, ()) if n < item.micro_batches]
        if smaller:
            self._push(work_s, item.degree, max(smaller), item.where, item.link, item.recompute, item.thrift)

    def _solve(self, item: _Try) -> None:
        assert item.on is not None
        self._candidates += sum(c.num_candidates for c in item.on.tables_for(self.name).problem.choices)
        if self._is_known and self._candidates > BESIDE_CANDIDATES:
            return
        item.found = item.on.solve_priced(self.name, THRIFT[item.thrift], _ROUGH)
        if item.found is not None:
            self._again(item, item.found.outcome.step_time_s)
        elif (
            self.name != "auto"
        ):  # the devices of a stage may not be able to share such small micro-batches as the strategy demands
            self._fewer_micro_batches(item, item.on.floor_s)

    # --- stages ---

    def _finish(self, item: _Try) -> _Finished | None:
        """Cut and simulate; what does not fit goes on with dearer memory and with more recomputation."""
        assert item.on is not None and item.found is not None
        if self._surely_too_large(item):
            self._go_on(item)
            return None
        done = self._cut(item, self._uncut(item))
        if done is None:
            return None
        self.finished.append(done)
        if done.fits:
            return self._less_recomputation(done) or done
        rescued = self._balanced(done)
        if rescued is None or not rescued.fits:
            self._go_on(item)
        return rescued or done

    def _surely_too_large(self, item: _Try) -> bool:
        """Whether even an equal share of what the plan holds at rest, and one micro-batch of activations, is over the limit."""
        assert item.found is not None
        flight = item.found.outcome.memory_bytes.get("activations", 0) / item.micro_batches
        flight *= min(1.0, item.micro_batches / item.degree)
        has_next = item.thrift + 1 < len(THRIFT) or self._next_level(item) is not None
        return has_next and _share_at_rest(item) + flight > self.options.memory_limit(item.where.hardware)

    def _go_on(self, item: _Try) -> None:
        assert item.found is not None
        work_s, common = item.found.outcome.step_time_s, (item.degree, item.micro_batches, item.where, item.link)
        level = self._next_level(item)
        if level is not None:
            self._push(work_s, *common, level, item.thrift)
        if item.thrift + 1 < len(THRIFT) and _share_at_rest(item) > self.options.memory_limit(item.where.hardware) / 4:
            self._push(work_s, *common, item.recompute, item.thrift + 1)

    def _next_level(self, item: _Try) -> Recompute | None:
        at = LEVELS.index(item.recompute.level) + 1
        if (
            self.options.recompute is not None
            or item.recompute.is_mixed
            or at >= len(LEVELS)
            or not self._program().capture.training
        ):
            return None
        return Recompute(LEVELS[at])

    def _cut(self, item: _Try, uncut: Uncut) -> _Finished | None:
        """The fastest schedule that fits; where none does, the one that needs the least."""
        with self.clock.phase("stages"):
            chooses = self.name == "auto" and item.micro_batches > 1 and bool(uncut.plan.kept)
            best = self._cut_best(item, replace(uncut, sums_whole=True if chooses else None))
            if chooses and best is not None and not (best.fits and best.uncut.profile.once_s.sum() < _LITTLE * best.seconds):
                other = self._cut_best(item, replace(uncut, sums_whole=False))
                best = _best([f for f in (best, other) if f is not None])
        return best

    def _cut_best(self, item: _Try, uncut: Uncut) -> _Finished | None:
        return _best([f for request in self._requests(item) if (f := self._try(item, uncut, request)) is not None])

    def _uncut(self, item: _Try) -> Uncut:
        assert item.on is not None and item.found is not None
        program = item.on.program
        with self.clock.phase("check"):
            spelled = checked_plan(program, self.name, item.found, item.found.bound_s, (), ())
        with self.clock.phase("stages"):
            plan, graph, names = self.whole(spelled)
            lying = Lying(program.times, hidden_values(program.capture.graph, program.clusters))
            lying = lying if names is None else lying.of_copies(graph, names)
        limit = self.options.memory_limit(item.where.hardware)
        return Uncut(plan, graph, lying, item.micro_batches, item.where.hardware, item.link, limit)

    def _try(self, item: _Try, uncut: Uncut, request: PipelineRequest) -> _Finished | None:
        try:
            return _Finished(item, uncut, request, uncut.cut(request))
        except InputError as e:
            self.refused = self.refused or e
            return None

    def _requests(self, item: _Try) -> Iterator[PipelineRequest]:
        for name, each in schedules(item.degree, item.micro_batches, self.asked):
            yield PipelineRequest(item.degree, name, item.micro_batches, each, self.asked.homes)

    def _balanced(self, done: _Finished) -> _Finished | None:
        """The same plan cut so that the fullest rank holds less, if that fits."""
        with self.clock.phase("stages"):
            found = None if done.request.homes is not None else dealt((done.uncut,), done.request)
            if found is None:
                return None
            again = replace(done, plan=done.uncut.cut_at(done.request, found.cuts))
            return again if again.fits else None

    def _less_recomputation(self, done: _Finished) -> _Finished | None:
        """With the level before in as many blocks as memory allows, if that is faster."""
        level = done.item.recompute
        before = [f for f in self.finished if not f.fits and _alike(f.item, done.item)]
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

    def _mixture(self, mixed: _Try, done: _Finished, cuts: tuple[str, ...]) -> _Finished | None:
        try:
            mixed.on = self._build(mixed)
            mixed.found = mixed.on.solve_priced(self.name, THRIFT[mixed.thrift], self.options.effort)
        except (Unlike, InputError):
            return None
        if mixed.found is None:
            return None
        uncut = self._uncut(mixed)
        tried = (self._cut(mixed, uncut), self._cut_as(mixed, replace(uncut, sums_whole=done.uncut.sums_whole), done, cuts))
        found = [f for f in tried if f is not None and f.fits]
        best = _best(found) if found else None
        return best if best is not None and best.seconds < done.seconds else None

    def _cut_as(self, mixed: _Try, uncut: Uncut, done: _Finished, cuts: tuple[str, ...]) -> _Finished | None:
        """A mixture cut where the integer program says."""
        if any(name not in uncut.graph.by_name for name in cuts):
            return None
        return _Finished(mixed, uncut, done.request, uncut.cut_at(done.request, cuts))

    # --- what is said ---

    def _told(self, best: _Finished) -> Plan:
        others = {}
        for f in self.finished:
            if f.item is not best.item:
                others[
                    f"pp {f.item.degree} x {f.item.where.mesh}, {f.item.micro_batches} micro-batches, {f.request.schedule}"
                ] = f
        told = "; ".join(f"{k}: {f.seconds:.4g} s" + ("" if f.fits else ", does not fit") for k, f in others.items())
        note = f"pipelines that were tried too: {told}" if told else ""
        plan = replace(best.plan, solver={**self.clock.seconds, **_sizes(best.item.found)})
        return replace(plan, notes=(*plan.notes, *((note,) if note else ())))

    def _why_none(self) -> Exception:
        if self.finished:
            least = min(self.finished, key=lambda f: f.plan.predicted.peak_memory_bytes)
            return too_large(least.uncut, least.plan)
        return self.refused or InfeasibleError("no plan in stages satisfies strategy and pins", binding=f"strategy {self.name!r}")


def _share_at_rest(item: _Try) -> float:
    """Bytes that one rank of the pipeline holds all the time if all hold the same: parameters, gradients, optimizer, copies."""
    assert item.found is not None
    memory = item.found.outcome.memory_bytes
    return (2 * memory.get("parameters", 0) + memory.get("optimizer", 0) + memory.get("kept", 0)) / item.degree


def _sizes(found: Found | None) -> dict[str, object]:
    if found is None:
        return {}
    return {"method": found.solution.method, "variables": found.solution.columns, "constraints": found.solution.rows}


def _alike(a: _Try, b: _Try) -> bool:
    return (a.degree, a.micro_batches, a.where, a.thrift) == (b.degree, b.micro_batches, b.where, b.thrift)


def _best(found: Sequence[_Finished]) -> _Finished | None:
    """The fastest that fits, a simpler one where it is as fast within a margin; else the one that needs the least."""
    fitting = [f for f in found if f.fits]
    if not fitting:
        return min(found, key=lambda f: f.plan.predicted.peak_memory_bytes, default=None)
    best = fitting[0]
    for f in fitting[1:]:
        best = f if f.seconds < best.seconds * (1 - _SIMPLER) else best
    return best
