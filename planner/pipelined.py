"""Give a plan stages, a schedule and micro-batches, and say what that makes of its time and memory.

The plan was made for the whole batch and the whole program on the devices of one stage. Its stages run it in turn. Kernels and
collectives are priced at the size of a micro-batch; what is done once per step comes before and behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.planner.cost import CostModel
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.homes import cuts_at_homes
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.errors import InfeasibleError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.pipeline import Pipeline, schedule_named
from meshwright.planner.ir.plan import Plan, Prediction
from meshwright.planner.ir.verify import made_placements, parameter_behind
from meshwright.planner.micro import TimeSpecs, time_specs
from meshwright.planner.micro_costs import MicroCosts, TimeRows
from meshwright.planner.orders import orders
from meshwright.planner.places import Places, places_in_whole
from meshwright.planner.simulate import Simulated, StageBytes, simulate
from meshwright.planner.solve.alive import beside_saved
from meshwright.planner.solve.diagnose import WHAT_TO_DO, size_text
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.stage_cuts import Profile, choose_cuts, places_of, profile
from meshwright.planner.stage_memory import GradientBytes, Resting, gradient_bytes, rank_memory, read_down_to, resting_of
from meshwright.planner.traffic import moved_bytes

_EACH_FOR_ITSELF = ClusterGraph((), (), ())
"""Says that every op and value of a program stands for itself alone."""


@dataclass(frozen=True)
class PipelineRequest:
    """What is asked of the stages.

    Attributes:
        degree: ranks along the pipeline axis.
        schedule: a name of ``SCHEDULES``; None: searched.
        micro_batches: how many; None: searched.
        stages_per_rank: None: searched, or where the schedule is given, as few as it allows (``zero_bubble`` and ``interleaved_1f1b``: 2).
        homes: the stages that hold each parameter, by FQN, where the model lies in stages already; None: cut freely.
        at_once: whether the whole batch at once, which keeps one rank busy at a time, is of interest where the number of micro-batches is
            searched. It is no faster than the same plan run by all devices, each stage's again by those of every other one: it saves memory
            alone.
    """

    degree: int
    schedule: str | None = None
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    homes: Mapping[str, tuple[int, ...]] | None = None
    at_once: bool = True


@dataclass(frozen=True)
class Lying:
    """Where a program's values lie over the axis of micro-batches, and which of their communication can hide.

    Attributes:
        times: over the axis of micro-batches.
        hides: (value, phase) whose redistribution can hide, see :mod:`~meshwright.planner.solve.segments`.
    """

    times: TimeSpecs
    hides: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, graph: OpGraph, clusters: ClusterGraph, micro_batches: int) -> Lying:
        """Of a program.

        Raises:
            InputError: it cannot run in so many micro-batches.
        """
        return cls(time_specs(graph, micro_batches), hidden_values(graph, clusters))

    def of_copies(self, graph: OpGraph, names: Mapping[str, str]) -> Lying:
        """The same of a program with copies of the blocks of this one; ``names``: of its ops and placeholders here."""
        inputs = {i.value.name: p for i in graph.inputs if (p := self.times.inputs.get(names[i.value.name])) is not None}
        ops = {op.name: spec for op in graph.ops if (spec := self.times.ops.get(names[op.name])) is not None}
        values = [*(i.value.name for i in graph.inputs), *(v.name for op in graph.ops for v in op.outs if v is not None)]
        hides = set[tuple[str, str]]()
        for value in values:
            node, mark, slot = value.partition("#")
            hides.update((value, phase) for phase in SEGMENTS if (names[node] + mark + slot, phase) in self.hides)
        return Lying(TimeSpecs(inputs, ops), frozenset(hides))


@dataclass(frozen=True)
class Uncut:
    """A planned program that is to be cut.

    Attributes:
        plan: for the whole program on the devices of one stage, made for pieces of the batch that its devices can share.
        graph: the program.
        lying: where its values lie over the axis of micro-batches.
        micro_batches: into how many the batch is cut.
        hardware: of a stage.
        link: between neighbouring stages.
        limit_bytes: memory per device.
        sums_whole: whether gradients of kept parameters are to be summed whole; None: as the plan's strategy says.
        places: where the program's ops stand in the whole one; None: it is the whole one.
        clusters: for how much of the whole one its ops and values stand.
        whole_graph: makes the whole program, where this is not it.
    """

    plan: Plan
    graph: OpGraph
    lying: Lying
    micro_batches: int
    hardware: Hardware
    link: Link
    limit_bytes: int
    sums_whole: bool | None = None
    places: Places | None = None
    clusters: ClusterGraph = _EACH_FOR_ITSELF
    whole_graph: Callable[[], OpGraph] | None = None
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients of kept parameters are summed whole over micro-batches and scattered once per step."""
        asked = strategy_named(self.plan.strategy).whole_gradients if self.sums_whole is None else self.sums_whole
        return self.micro_batches > 1 and asked and bool(self.plan.kept)

    @cached_property
    def costs(self) -> CostModel | MicroCosts:
        """Prices of a step."""
        if self.micro_batches == 1:
            return CostModel(self.hardware, self.plan.mesh, self._buffers)
        behind = {parameter_behind(self.graph, value) for value in self.plan.kept} if self.whole_gradients else set[str]()
        whole = {i.name for i in self.graph.inputs_of("parameter") if i.value.name in behind}
        rows = TimeRows(self.graph, self.lying.times, self.micro_batches, whole)
        return MicroCosts(self.hardware, self.plan.mesh, rows, self._buffers)

    @property
    def _buffers(self) -> SharedBuffers:
        if "buffers" not in self._shared:
            self._shared["buffers"] = SharedBuffers.of(self.graph, self.clusters.times)
        found: SharedBuffers = self._shared["buffers"]
        return found

    @cached_property
    def profile(self) -> Profile:
        """Work and bytes along the program."""
        found = profile(self.graph, self.plan, self.costs, self.lying.hides, self.places)
        if self.micro_batches == 1 or not self.plan.training:
            return found
        sums_s = self._sums_s(len(found.names))
        return replace(found, backward_s=found.backward_s + sums_s, weight_s=found.weight_s + sums_s)

    def _sums_s(self, num_places: int) -> np.ndarray:
        """Seconds of adding gradients up over micro-batches, by the first op that reads their parameter, float64 [forward ops]."""
        moved = (self.micro_batches - 1) * (self.resting.fresh + 2 * self.resting.sums)  # all but the first are read, and added
        return self.resting.at_first(moved, num_places) / self.hardware.device.memory_bytes_per_s

    @property
    def resting(self) -> Resting:
        """What is held for parameters."""
        key = "resting", self.whole_gradients
        if key not in self._shared:
            self._shared[key] = resting_of(self.plan, self.graph, self._gradients, self.places)
        found: Resting = self._shared[key]
        return found

    @cached_property
    def _gradients(self) -> Mapping[str, GradientBytes]:
        return gradient_bytes(replace(self.plan, pipeline=self._in_one_piece()), self.graph)

    def _in_one_piece(self) -> Pipeline:
        times = self.lying.times
        return Pipeline(1, "gpipe", (), self.micro_batches, times.inputs, times.ops, self.whole_gradients)

    @property
    def beside(self) -> dict[str, np.ndarray]:
        """Bytes that running takes besides what is saved, by category, at the worst moment of each forward op and its backward."""
        forth, back = (self._beside_in[phase] for phase in ("forward", "backward"))
        is_back = sum(back.values(), np.zeros(1)) > sum(forth.values(), np.zeros(1))
        return {category: np.where(is_back, back[category], forth[category]) for category in forth}

    @property
    def _beside_in(self) -> dict[str, dict[str, np.ndarray]]:
        """The same for either phase."""
        key = "beside", self.whole_gradients
        if key not in self._shared:
            self._shared[key] = self._find_beside()
        found: dict[str, dict[str, np.ndarray]] = self._shared[key]
        return found

    def _find_beside(self) -> dict[str, dict[str, np.ndarray]]:
        over_time = self.costs.time.made if isinstance(self.costs, MicroCosts) else {}
        made = made_placements(self.plan, self.graph)
        later = {name for name, taken in self._gradients.items() if taken.travel}
        names, found = beside_saved(self.plan, self.graph, self.clusters, made, over_time, self.micro_batches, later)
        place, total = places_of(self.graph), sum(found.values(), np.zeros(len(names)))
        worst: dict[tuple[str, int], int] = {}
        for point, name in enumerate(names):
            at = self.graph.by_name[name].phase, place[name]
            worst[at] = point if at not in worst or total[point] > total[worst[at]] else worst[at]
        spread = self.places or places_in_whole(self.graph, ())
        assert spread is not None, "a program without repeats stands for itself"
        whole = {phase: {category: np.zeros(len(spread.names)) for category in found} for phase in ("forward", "backward")}
        for (phase, index), point in worst.items():
            for category, sizes in found.items():
                whole[phase][category][spread.all_of(index)] = sizes[point]
        return whole

    def cut(self, request: PipelineRequest) -> Plan:
        """In stages, for a request that leaves nothing open, whether or not it fits.

        Raises:
            InputError: the program has too few places to be cut.
        """
        assert request.schedule is not None and request.stages_per_rank is not None
        count = request.degree * request.stages_per_rank
        if request.homes is not None:
            whole = self.graph if self.whole_graph is None else self.whole_graph()
            return self.cut_at(request, cuts_at_homes(whole, request.homes, count, self.profile.alive_bytes))
        return self.cut_at(request, self._cuts(count))

    def _cuts(self, count: int) -> tuple[str, ...]:
        if count not in self._shared:
            self._shared[count] = choose_cuts(self.profile, count, self.link, self.micro_batches)
        found: tuple[str, ...] = self._shared[count]
        return found

    def least_s(self, request: PipelineRequest) -> float:
        """What a step takes at least that is cut so: what a rank does, and what is before its first stage and behind its last.

        Raises:
            InputError: the program has too few places to be cut.
        """
        assert request.schedule is not None and request.stages_per_rank is not None
        if request.homes is not None:
            return 0.0
        count = request.degree * request.stages_per_rank
        pipeline = Pipeline(request.degree, request.schedule, self._cuts(count), self.micro_batches)
        edges, found = [self._index[name] + 1 for name in pipeline.cuts], self.profile
        parts = (found.work_s, found.work_s - found.weight_s)
        work, late = (np.array([part.sum() for part in np.split(v, edges)]) for v in parts)
        once, before = self._once_s(pipeline), np.append(0.0, np.cumsum(late)) / self.micro_batches
        ranks = [pipeline.stages_of(rank) for rank in range(pipeline.degree)]
        return max(float(work[list(stages)].sum() + before[stages[0]]) for stages in ranks) + max(once)

    def cut_at(self, request: PipelineRequest, cuts: tuple[str, ...]) -> Plan:
        """In stages that end behind given ops."""
        assert request.schedule is not None
        times = self.lying.times
        pipeline = Pipeline(
            request.degree, request.schedule, cuts, self.micro_batches, times.inputs, times.ops, self.whole_gradients
        )
        staged = replace(self.plan, pipeline=pipeline, memory_limit_bytes=self.limit_bytes, collectives=())
        return replace(staged, predicted=self._predicted(staged))

    def memory(self, staged: Plan, peak_bytes: Sequence[float] | None = None) -> list[dict[str, int]]:
        """Bytes by category on every rank of a plan that :meth:`cut` made; ``peak_bytes``: of what is in flight, if known."""
        assert staged.pipeline is not None
        cuts = [self._index[name] for name in staged.pipeline.cuts]
        flying = self._simulated(staged).peak_bytes if peak_bytes is None else peak_bytes
        return rank_memory(staged, self.resting, cuts, flying, self._beside(staged, cuts))

    @property
    def _index(self) -> dict[str, int]:
        if "index" not in self._shared:
            self._shared["index"] = {name: i for i, name in enumerate(self.profile.names)}
        found: dict[str, int] = self._shared["index"]
        return found

    def _beside(self, staged: Plan, cuts: Sequence[int]) -> list[dict[str, int]]:
        """Per rank, the most that running takes besides what is saved, at the moment when that is most."""
        pipeline, count = staged.pipeline, len(self.profile.names)
        assert pipeline is not None
        back = {**self._beside_in["backward"], "gradients": self.resting.fresh_by_place(cuts, count)}
        if not schedule_named(pipeline.schedule).splits_backward:  # else the part for weights reads it later
            back["activations"] = -self._freed_by_place(cuts)
        ranks = np.array([pipeline.rank_of(s) for s in range(pipeline.num_stages)])
        rank = ranks[np.searchsorted(np.asarray(cuts, dtype=np.int64), np.arange(count))]
        found = []
        for mine in (np.flatnonzero(rank == r) for r in range(pipeline.degree)):
            moments = ({k: p[at] for k, p in held.items()} for held in (self._beside_in["forward"], back) for at in mine)
            found.append(max(moments, key=lambda sizes: sum(sizes.values()), default={}))
        return [{k: int(size) for k, size in moment.items() if size} for moment in found]

    def _freed_by_place(self, cuts: Sequence[int]) -> np.ndarray:
        """Bytes of one micro-batch that a stage's backward no longer needs when it is at each forward op, float64 [forward ops]."""
        storage, place, _ = self.profile.readings
        sizes = np.array([size for size, _, _ in self.profile.saved]) / self.micro_batches
        there = read_down_to(storage, place, sizes, cuts, len(self.profile.names))
        edges = np.zeros(len(there), dtype=bool)
        edges[[*cuts, len(there) - 1]] = True
        return np.where(edges, 0.0, np.append(there[1:], 0.0))

    def _simulated(self, staged: Plan) -> Simulated:
        return simulated(staged, self.profile, self.link, self.hardware.device)

    def _predicted(self, staged: Plan) -> Prediction:
        assert staged.pipeline is not None
        before, step = self.plan.predicted, self._simulated(staged)
        slowest, once_s = max(step.busy_s), max(self._once_s(staged.pipeline))
        scale = slowest / before.step_time_s if before.step_time_s else 0.0
        return Prediction(
            compute_s=before.compute_s * scale,
            exposed_s=before.exposed_s * scale + step.step_s - slowest + once_s,
            hidden_s=before.hidden_s * scale,
            step_time_s=step.step_s + once_s,
            memory_bytes=max(self.memory(staged, step.peak_bytes), key=lambda m: sum(m.values())),
            in_flight_bytes=int(max(step.peak_bytes)),
            moved_bytes=moved_bytes(staged.pipeline, self.profile, self.plan.collectives),
        )

    def _once_s(self, pipeline: Pipeline) -> list[float]:
        """Per rank, the seconds of what is done once per step."""
        edges = [self._index[name] + 1 for name in pipeline.cuts]
        parts = [float(part.sum()) for part in np.split(self.profile.once_s, edges)]
        return [sum(parts[s] for s in pipeline.stages_of(rank)) for rank in range(pipeline.degree)]


def too_large(uncut: Uncut, staged: Plan) -> InfeasibleError:
    """The error for stages of which one rank's do not fit: which rank, how much it is over, and what takes the most."""
    pipeline, memory = staged.pipeline, uncut.memory(staged)
    assert pipeline is not None
    rank = max(range(pipeline.degree), key=lambda r: sum(memory[r].values()))
    needed, limit = sum(memory[rank].values()), uncut.limit_bytes
    stages = pipeline.stages_of(rank)
    name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    parts = sorted(memory[rank].items(), key=lambda item: -item[1])
    told = ", ".join(f"{category} {size_text(n)}" for category, n in parts if n)
    most = parts[0][0]
    return InfeasibleError(
        f"{name} of {pipeline.num_stages} on pipeline rank {rank} of {pipeline.degree} needs {size_text(needed)} per device, over the "
        f"limit of {size_text(limit)} by {size_text(needed - limit)}, with schedule {pipeline.schedule!r}, {pipeline.micro_batches} "
        f"micro-batches and recompute='{staged.recompute}': {told}. {most} take the most; what helps: more pipeline ranks, "
        f"{WHAT_TO_DO.get(most, 'more devices')}",
        binding="memory",
        needed_bytes=needed,
    )


# --- predictions --------------------------------------------------------------------------------------------------


def held_by_stage(plan: Plan, found: Profile) -> list[StageBytes]:
    """What each stage holds for its backward, for the whole batch; what the backward of several reads is held by each."""
    assert plan.pipeline is not None
    at, count = {name: i for i, name in enumerate(found.names)}, plan.pipeline.num_stages
    cuts = np.array([at[name] for name in plan.pipeline.cuts], dtype=np.int64)
    storage, place, by_weights = found.readings
    stage = np.searchsorted(cuts, place)
    of_storage = storage * count + stage
    held, later = np.unique(of_storage), np.unique(of_storage[by_weights])
    sizes = np.array([size for size, _, _ in found.saved])
    saved = np.bincount(held % count, weights=sizes[held // count], minlength=count)
    kept = np.bincount(later % count, weights=sizes[later // count], minlength=count)
    stash = [float(part.sum()) for part in np.split(found.stash_bytes, cuts + 1)]
    return [StageBytes(float(s), more - float(s - k)) for s, k, more in zip(saved, kept, stash, strict=True)]


def simulated(plan: Plan, found: Profile, link: Link, device: Device) -> Simulated:
    """The micro-batches of a step of ``plan``, simulated with the program's profile."""
    pipeline = plan.pipeline
    assert pipeline is not None
    at = {name: i for i, name in enumerate(found.names)}
    edges = [at[name] + 1 for name in pipeline.cuts]
    m = pipeline.micro_batches

    def by_stage(values: np.ndarray) -> list[float]:
        return [float(part.sum()) for part in np.split(values, edges)]

    forward, backward, weight = (by_stage(v) for v in (found.forward_s, found.backward_s, found.weight_s))
    held = held_by_stage(plan, found)
    sending_s = [float(found.alive_bytes[i - 1]) / m / link.bytes_per_s + link.latency_s for i in edges]

    inputs = [b - w for b, w in zip(backward, weight, strict=True)]
    whole = {"F": forward, "B": backward, "W": weight, "I": inputs}

    return simulate(
        pipeline,
        orders(pipeline),
        lambda action: whole[action.kind][action.stage] / m + device.action_overhead_s,
        lambda boundary: 0.0 if device.moves_data else sending_s[boundary],
        lambda boundary: sending_s[boundary] / 2 if device.moves_data else 0.0,
        lambda stage: StageBytes(held[stage].saved / m, held[stage].stashed / m),
    )
