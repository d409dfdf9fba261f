"""What a search over pipelines can try: degrees, meshes inside a stage, numbers of micro-batches; and the least each can take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.recompute import LEVELS, Recompute
from meshwright.planner.levels import Recomputable
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.micro import batch_length
from meshwright.planner.on_mesh import OnMesh
from meshwright.planner.options import Clock, Options
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.program import Program
from meshwright.planner.solve.restrict import followed
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.stage_choices import STAGES_PER_RANK, micro_batch_counts
from meshwright.planner.stage_floor import Shape, by_number_of_axes
from meshwright.planner.stage_tries import Try

FIRST_TRIED = 4
"""Micro-batches per rank that a named strategy is tried with first; other numbers only for what is best with it."""

_UNLIMITED = 1 << 60
_FORWARD = 0.25
"""Part of the work of a micro-batch that its forward is at least."""

_ONCE_BYTES = 6
"""Bytes moved per element of a parameter once per step, for what is expected: its gradient of 4 and its copy of 2."""


@dataclass(frozen=True)
class Devices:
    """What stages are cut from.

    Attributes:
        count: of devices.
        inside: pipeline degree to the logical meshes of one stage's devices, and the link between neighbouring stages.
    """

    count: int
    inside: Callable[[int], tuple[Sequence[LogicalMesh], Link]]


class Space:
    """All combinations of one search.

    Args:
        source: the program.
        devices: what stages are cut from.
        options: what to search for; the memory limit is that of a device.
        asked: what is fixed.
        degrees: pipeline degrees to look at.

    Attributes:
        name: of the strategy.
        counts: degree to the numbers of micro-batches that a named strategy is not yet tried with.
        refused: why some combination cannot be.
        least_s: what any plan of any combination takes at least, by its kernels and what no schedule can help.
    """

    def __init__(
        self,
        source: Recomputable,
        devices: Devices,
        options: Options,
        asked: PipelineRequest,
        degrees: Sequence[int],
        clock: Clock,
    ):
        self.source, self.devices, self.options, self.asked, self.clock = source, devices, options, asked, clock
        self.degrees, self.name = tuple(degrees), strategy_named(options.strategy).name
        self.counts: dict[int, tuple[int, ...]] = {}
        self.refused: InputError | None = None
        self.least_s = math.inf
        self.numbers = itertools.count()
        self._programs: dict[Recompute, Program] = {}
        self._cut_programs: dict[tuple[Recompute, int, bool], Program] = {}
        self._inside: dict[int, tuple[Sequence[LogicalMesh], Link]] = {}
        self._saved: dict[Recompute, float] = {}

    def inside(self, degree: int) -> tuple[Sequence[LogicalMesh], Link]:
        """The meshes of one of so many stages' devices, and the link between stages."""
        if degree not in self._inside:
            self._inside[degree] = self.devices.inside(degree)
        return self._inside[degree]

    # --- programs ---

    @property
    def graph(self) -> OpGraph:
        return self.program().capture.graph

    @property
    def first_recompute(self) -> Recompute:
        return Recompute(self.options.recompute or LEVELS[0])

    def program(self, recompute: Recompute | None = None) -> Program:
        """The program with a choice of recomputation, prepared once."""
        wanted = recompute or self.first_recompute
        if wanted not in self._programs:
            capture = self.source.capture_at(wanted)
            meshes, _ = self.inside(self.degrees[0])
            options = replace(self.options, memory_limit_bytes=_UNLIMITED, alternatives=False)
            self._programs[wanted] = Program.of(capture, meshes[0].hardware, options, self.clock, wanted)
        return self._programs[wanted]

    def _cut_program(self, recompute: Recompute, micro_batches: int) -> Program:
        whole = self.name == "auto" and micro_batches > 1
        key = recompute, micro_batches, whole
        if key not in self._cut_programs:
            program = self.program(recompute)
            options = replace(program.options, micro_batches=micro_batches, whole_gradients=whole)
            self._cut_programs[key] = replace(program, options=options)
        return self._cut_programs[key]

    def build(self, item: Try) -> OnMesh:
        """The problem of a combination."""
        return OnMesh(self._cut_program(item.recompute, item.micro_batches), item.where)

    @cached_property
    def limit_bytes(self) -> int:
        meshes, _ = self.inside(self.degrees[0])
        return self.options.memory_limit(meshes[0].hardware)

    # --- combinations ---

    def combinations(self) -> list[Try]:
        """All of them, bounded by their kernels, none worked on yet."""
        return [replace(item, order=next(self.numbers)) for item in self._combinations]

    @cached_property
    def _combinations(self) -> list[Try]:
        found = [item for degree in self.degrees for item in self._of_degree(degree)]
        for level in dict.fromkeys(item.recompute for item in found):
            items = [item for item in found if item.recompute == level]
            self.bound_by_kernels(items)
            self.least_s = min(self.least_s, *(item.bound_s for item in items))
        return found

    def _of_degree(self, degree: int) -> list[Try]:
        try:
            meshes, link = self.inside(degree)
            counts = micro_batch_counts(self.graph, degree, self.asked, self.devices.count // degree)
        except InputError as e:
            self.refused = self.refused or e
            return []
        counts = tuple(n for n in counts if n > 1 or self.asked.at_once)
        if self.name == "auto":
            useful = [w for w in meshes if all(rule.compute == "free" or followed(self.graph, rule.compute) for rule in w.rules)]
            pairs = [(w, n) for w in useful or meshes for n in counts if len(counts) == 1 or self._can_share(n, w)]
        else:
            self.counts[degree] = counts
            count = min(counts, key=lambda n: abs(n - FIRST_TRIED * degree))
            pairs = [(w, count) for w in meshes]
        levels = {n: self._least_level(degree, n) for n in counts}
        return [Try(0.0, next(self.numbers), degree, count, where, link, levels[count]) for where, count in pairs]

    def _can_share(self, count: int, where: LogicalMesh) -> bool:
        """Whether the devices that share the batch have a piece of every micro-batch."""
        batch = batch_length(self.graph)
        parts = math.prod(where.mesh.sizes[axis] for axis, rule in enumerate(where.rules) if rule.compute == "follows batch")
        return batch % (count * parts) == 0

    def _least_level(self, degree: int, count: int) -> Recompute:
        """The least recomputation with which the first rank could hold its micro-batches in flight if all were sharded evenly."""
        if self.options.recompute is not None:
            return self.first_recompute
        devices = self.devices.count // degree
        for level in map(Recompute, LEVELS[:-1]):
            if level not in self._saved:
                program = self.program(level)
                self._saved[level] = sum(v.size_bytes * program.clusters.times(v.name) for v in program.capture.graph.saved)
            if self._saved[level] / devices / count * min(1.0, count / degree) <= self.limit_bytes:
                return level
        return Recompute(LEVELS[-1])

    def next_level(self, recompute: Recompute) -> Recompute | None:
        """More recomputation, that computes more again; None where there is none or it is fixed."""
        if self.options.recompute is not None or recompute.is_mixed or not self.program().capture.training:
            return None
        now = self.program(recompute).capture.graph.hash
        above = map(Recompute, LEVELS[LEVELS.index(recompute.level) + 1 :])
        return next((level for level in above if self.program(level).capture.graph.hash != now), None)

    # --- bounds ---

    def bound(self, item: Try, work_s: float) -> None:
        """Raise what a combination takes at least, and is expected to, to what its work says: that of the whole batch on the devices of
        one stage."""
        item.bound_s = max(item.bound_s, work_s * self.least_share(item))
        item.seconds = max(item.seconds, work_s * self.share(item))

    def share(self, item: Try) -> float:
        """Seconds of a step per second of work, as far as several stages per rank can help a pipeline that idles."""
        each = self.asked.stages_per_rank or (1 if self.asked.schedule in ("naive", "gpipe", "1f1b") else 0)
        each = each or max(1, min(STAGES_PER_RANK[-1], self.source.num_parts // item.degree))
        each = 1 if item.micro_batches == 1 else each  # one micro-batch is on one rank at a time
        return (1 + (item.degree - 1) / (item.micro_batches * each)) / item.degree

    def least_share(self, item: Try) -> float:
        """As :meth:`share`, for whatever schedule: one that splits the backward idles for the first forwards alone."""
        splits = item.micro_batches > 1 and self.asked.schedule in (None, "zero_bubble", "zbv")
        return (1 + (self.share(item) * item.degree - 1) * (_FORWARD if splits else 1.0)) / item.degree

    def bound_by_kernels(self, items: Sequence[Try]) -> None:
        """What kernels alone say of combinations of one level."""
        for item, work_s in zip(items, self._kernels_s(items).tolist(), strict=True):
            item.kernels_s, item.once_s = work_s * self.share(item), self._once_s(item)
            self.bound(item, work_s)
            item.seconds = max(item.seconds, item.kernels_s + item.once_s)

    def _kernels_s(self, items: Sequence[Try]) -> np.ndarray:
        """Least kernels for the whole batch on the devices of one stage, float64 [items]."""
        program, found = self.program(items[0].recompute), np.zeros(len(items))
        with self.clock.phase("bound"):
            shapes, late = [self._shape(item) for item in items], self._late(items)
            for group in by_number_of_axes(shapes):
                found[group] = program.kernels.seconds([shapes[k] for k in group], late)
        return found

    def _once_s(self, item: Try) -> float:
        """About the seconds that a rank's parameters take to be gathered and their gradients to be summed, once per step."""
        axes = zip(item.where.mesh.sizes, item.where.rules, item.where.hardware.links, strict=False)
        data = [(n, link) for n, rule, link in axes if rule.compute != "free" and n > 1]
        if not data or not self.program().capture.training:
            return 0.0
        devices = math.prod(n for n, _ in data)
        slowest = min(link.bytes_per_s for _, link in data)
        held = self._parameter_numel * devices / self.devices.count
        return held * _ONCE_BYTES * (1 - 1 / devices) / slowest

    @cached_property
    def _parameter_numel(self) -> float:
        program = self.program()
        values = [i.value for i in program.capture.graph.inputs_of("parameter") if i.trainable]
        return float(sum(math.prod(v.shape) * program.clusters.times(v.name) for v in values))

    def _shape(self, item: Try) -> Shape:
        follows = [rule.compute for rule in item.where.rules] or ["free"] * item.where.mesh.num_axes
        return Shape.of(item.where.mesh.sizes, follows, item.micro_batches)

    def _late(self, items: Sequence[Try]) -> frozenset[str]:
        """Values that are known only when all micro-batches have run."""
        count = min((item.micro_batches for item in items if item.micro_batches > 1), default=1)
        return frozenset(self._cut_program(items[0].recompute, count).time_rows.late) if count > 1 else frozenset()
