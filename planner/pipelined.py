"""Give a plan stages, a schedule and micro-batches, and say what that makes of its time and memory.

The plan was made for the whole batch and the whole program on the devices of one stage. Its stages run it in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.cost import CostModel
from meshwright.planner.homes import cuts_at_homes
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Hardware, Link
from meshwright.planner.ir.pipeline import Pipeline, check_schedule, schedule_named, stage_of_op
from meshwright.planner.ir.plan import Plan, Prediction
from meshwright.planner.micro import batch_length, time_specs
from meshwright.planner.orders import Action, orders
from meshwright.planner.simulate import Simulated, StageBytes, simulate
from meshwright.planner.solve.strategies import strategy_named
from meshwright.planner.stage_cuts import Profile, choose_cuts, profile
from meshwright.planner.stage_memory import fullest_rank

MOST_MICRO_BATCHES_PER_STAGE = 4
"""With so many micro-batches per rank the pipeline idles at most a fifth of the time; more make kernels small."""


@dataclass(frozen=True)
class PipelineRequest:
    """What is asked of the stages.

    Attributes:
        degree: ranks along the pipeline axis.
        schedule: a name of ``SCHEDULES``; None: ``"1f1b"``, or ``"gpipe"`` where there are fewer micro-batches than stages.
        micro_batches: how many; None: as many as divide the batch, up to four per rank.
        stages_per_rank: None: as few as the schedule allows (``zero_bubble`` and ``interleaved_1f1b``: 2).
        homes: the stages that hold each parameter, by FQN, where the model lies in stages already; None: cut freely.
    """

    degree: int
    schedule: str | None = None
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    homes: Mapping[str, tuple[int, ...]] | None = None


def resolved(request: PipelineRequest, graph: OpGraph, devices: int) -> PipelineRequest:
    """The request with everything chosen that it leaves open.

    Args:
        request: what is asked.
        graph: the program.
        devices: number of devices of a stage.

    Raises:
        InputError: the batch, the program or the schedule does not allow it.
    """
    count = request.micro_batches or _micro_batches(graph, request, devices)
    name = request.schedule or ("gpipe" if count < request.degree else "1f1b")
    least, most = schedule_named(name).stages_per_rank
    each = request.stages_per_rank or (2 if most is None else least)
    check_schedule(name, request.degree, request.degree * each, count)
    return PipelineRequest(request.degree, name, count, each, request.homes)


def _micro_batches(graph: OpGraph, request: PipelineRequest, devices: int) -> int:
    """The most that divide the batch, up to a few per rank; such that all devices of a stage can share each, if there are any."""
    if request.schedule == "naive":
        return 1
    batch = batch_length(graph)
    counts = [n for n in range(1, MOST_MICRO_BATCHES_PER_STAGE * request.degree + 1) if batch % n == 0]
    shared = [n for n in counts if (batch // n) % devices == 0]
    for count in sorted(shared or counts, reverse=True):
        try:
            time_specs(graph, count)
        except InputError:
            return 1
        return count
    return 1


def with_pipeline(plan: Plan, graph: OpGraph, request: PipelineRequest, hardware: Hardware, link: Link) -> Plan:
    """``plan`` in stages.

    Args:
        plan: for the whole program on the devices of one stage, made under ``degree`` times the memory of a device and for pieces
            of the batch that its devices can share.
        graph: the program.
        request: what is asked, see :func:`resolved`.
        hardware: of a stage.
        link: between neighbouring stages.

    Raises:
        InputError: the program cannot be cut so.
        InfeasibleError: the fullest rank needs more than the memory limit.
    """
    assert request.schedule is not None and request.micro_batches is not None and request.stages_per_rank is not None
    times = time_specs(graph, request.micro_batches)
    found = profile(graph, plan, CostModel(hardware, plan.mesh))
    count = request.degree * request.stages_per_rank
    if request.homes is not None:
        cuts = cuts_at_homes(graph, request.homes, count, found.alive_bytes)
    else:
        cuts = choose_cuts(found, count, link, request.micro_batches)
    whole = request.micro_batches > 1 and strategy_named(plan.strategy).whole_gradients and bool(plan.kept)
    pipeline = Pipeline(request.degree, request.schedule, cuts, request.micro_batches, times.inputs, times.ops, whole)
    staged = replace(plan, pipeline=pipeline, memory_limit_bytes=plan.memory_limit_bytes // request.degree)
    predicted = _predicted(staged, graph, found, link)
    if predicted.peak_memory_bytes > staged.memory_limit_bytes:
        raise InfeasibleError(
            f"the fullest of {request.degree} pipeline ranks needs {predicted.peak_memory_bytes} bytes, {staged.memory_limit_bytes} are "
            "allowed: use more pipeline ranks, more micro-batches (each is smaller), or sharding inside stages",
            binding="memory",
            needed_bytes=predicted.peak_memory_bytes,
        )
    return replace(staged, predicted=predicted, collectives=())


# --- predictions --------------------------------------------------------------------------------------------------


def held_by_stage(plan: Plan, found: Profile) -> list[StageBytes]:
    """What each stage holds for its backward, for the whole batch; what the backward of several reads is held by each."""
    assert plan.pipeline is not None
    cuts = [found.names.index(name) for name in plan.pipeline.cuts]
    saved, freed = [0.0] * plan.pipeline.num_stages, [0.0] * plan.pipeline.num_stages
    for size, places, by_weights in found.saved:
        later = {stage_of_op(place, cuts) for place in by_weights}
        for stage in {stage_of_op(place, cuts) for place in places}:
            saved[stage] += size
            freed[stage] += size * (stage not in later)
    stash = [float(part.sum()) for part in np.split(found.stash_bytes, [cut + 1 for cut in cuts])]
    return [StageBytes(s, more - less) for s, more, less in zip(saved, stash, freed, strict=True)]


def simulated(plan: Plan, found: Profile, link: Link) -> Simulated:
    """A step of ``plan``, simulated with the program's profile scaled to the time that the plan predicts without stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    at = {name: i for i, name in enumerate(found.names)}
    edges = [at[name] + 1 for name in pipeline.cuts]
    m, total = pipeline.micro_batches, float(found.work_s.sum())
    scale = plan.predicted.step_time_s / total / m if total else 0.0

    def by_stage(values: np.ndarray) -> list[float]:
        return [float(part.sum()) for part in np.split(values, edges)]

    forward, backward, weight = (by_stage(v) for v in (found.forward_s, found.backward_s, found.weight_s))
    held = held_by_stage(plan, found)
    sizes = [float(found.alive_bytes[i - 1]) / m for i in edges]

    def seconds(a: Action) -> float:
        whole = {"F": forward, "B": backward, "W": weight}.get(a.kind)
        return scale * (backward[a.stage] - weight[a.stage] if whole is None else whole[a.stage])

    return simulate(
        pipeline,
        orders(pipeline),
        seconds,
        lambda boundary: sizes[boundary] / link.bytes_per_s + link.latency_s,
        lambda stage: StageBytes(held[stage].saved / m, held[stage].stashed / m),
    )


def _predicted(plan: Plan, graph: OpGraph, found: Profile, link: Link) -> Prediction:
    before, step = plan.predicted, simulated(plan, found, link)
    slowest = max(step.busy_s)
    scale = slowest / before.step_time_s if before.step_time_s else 0.0
    return Prediction(
        compute_s=before.compute_s * scale,
        exposed_s=before.exposed_s * scale + step.step_s - slowest,
        hidden_s=before.hidden_s * scale,
        step_time_s=step.step_s,
        memory_bytes=fullest_rank(plan, graph, step.peak_bytes),
    )
