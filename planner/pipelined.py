"""Give a plan stages, a schedule and micro-batches, and say what that makes of its time and memory.

The plan was made for the whole batch and the whole program on the devices of one stage. Its stages run it in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.cost import CostModel
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.hardware import Hardware, Link
from meshwright.planner.ir.pipeline import Pipeline, check_schedule, schedule_named
from meshwright.planner.ir.plan import Plan, Prediction
from meshwright.planner.ir.spec import divides
from meshwright.planner.micro import batch_length, time_specs
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
    """

    degree: int
    schedule: str | None = None
    micro_batches: int | None = None
    stages_per_rank: int | None = None


def with_pipeline(plan: Plan, graph: OpGraph, request: PipelineRequest, hardware: Hardware, link: Link) -> Plan:
    """``plan`` in stages.

    Args:
        plan: for the whole program on the devices of one stage, made under ``degree`` times the memory of a device.
        graph: the program.
        request: what is asked.
        hardware: of a stage.
        link: between neighbouring stages.

    Raises:
        InputError: the batch, the program or the schedule does not allow it.
        InfeasibleError: the fullest rank needs more than the memory limit.
    """
    count = request.micro_batches or _micro_batches(graph, plan, request)
    name = request.schedule or ("gpipe" if count < request.degree else "1f1b")
    least, most = schedule_named(name).stages_per_rank
    each = request.stages_per_rank or (2 if most is None else least)
    check_schedule(name, request.degree, request.degree * each, count)
    times = time_specs(graph, count)
    found = profile(graph, plan, CostModel(hardware, plan.mesh))
    cuts = choose_cuts(found, request.degree * each, link, count)
    pipeline = Pipeline(request.degree, name, cuts, count, times.inputs, times.ops)
    staged = replace(plan, pipeline=pipeline, memory_limit_bytes=plan.memory_limit_bytes // request.degree)
    _check_pieces(staged, graph)
    predicted = _predicted(staged, graph, found, link)
    if predicted.peak_memory_bytes > staged.memory_limit_bytes:
        raise InfeasibleError(
            f"the fullest of {request.degree} pipeline ranks needs {predicted.peak_memory_bytes} bytes, {staged.memory_limit_bytes} are "
            "allowed: use more pipeline ranks, more micro-batches (each is smaller), or sharding inside stages",
            binding="memory",
            needed_bytes=predicted.peak_memory_bytes,
        )
    return replace(staged, predicted=predicted, collectives=())


def _micro_batches(graph: OpGraph, plan: Plan, request: PipelineRequest) -> int:
    """The largest number that divides the batch evenly over the devices, up to a few per rank."""
    if request.schedule == "naive":
        return 1
    batch = batch_length(graph)
    ways = max((_ways(plan, i.value.name) for i in graph.inputs_of("input")), default=1)
    limit = MOST_MICRO_BATCHES_PER_STAGE * request.degree
    fitting = [n for n in range(1, limit + 1) if batch % n == 0 and (batch // n) % ways == 0]
    for count in reversed(fitting):
        try:
            time_specs(graph, count)
        except InputError:
            return 1
        return count
    return 1


def _ways(plan: Plan, value: str) -> int:
    """Over how many devices of a stage dim 0 of a value is shared."""
    return math.prod(n for p, n in zip(plan.inputs[value], plan.mesh.sizes, strict=True) if p.is_shard and p.dim == 0)


def _check_pieces(plan: Plan, graph: OpGraph) -> None:
    """Refuse micro-batches that the devices of a stage cannot share evenly."""
    assert plan.pipeline is not None
    sizes = (plan.pipeline.micro_batches, *plan.mesh.sizes)
    for given in graph.inputs_of("input"):
        cut = plan.pipeline.inputs.get(given.value.name)
        if cut is not None and not divides(given.value.shape, (cut, *plan.inputs[given.value.name]), sizes):
            raise InputError(
                f"input {given.name!r} of shape {list(given.value.shape)} cannot be cut into {sizes[0]} micro-batches whose samples are "
                f"shared evenly by the devices of a stage ({plan.mesh}): use a larger batch or fewer micro-batches"
            )


# --- predictions --------------------------------------------------------------------------------------------------


def _predicted(plan: Plan, graph: OpGraph, found: Profile, link: Link) -> Prediction:
    pipeline = plan.pipeline
    assert pipeline is not None
    at = {name: i for i, name in enumerate(found.names)}
    cuts = [at[name] for name in pipeline.cuts]
    share = np.array([part.sum() for part in np.split(found.work_s, [i + 1 for i in cuts])])
    share = share / share.sum() if share.sum() else np.full(len(share), 1 / len(share))
    step = plan.predicted.step_time_s * share
    crossing = found.alive_bytes[cuts]
    sent = np.array([2 * (b / link.bytes_per_s + pipeline.micro_batches * link.latency_s) for b in crossing])
    loads = np.zeros(pipeline.degree)
    for stage, s in enumerate(step):
        loads[pipeline.rank_of(stage)] += s
    slowest, total_s = float(loads.max()), float(loads.sum())
    idle = total_s - slowest if pipeline.schedule == "naive" else slowest * _bubble(pipeline)
    exposed = float(sent.max(initial=0.0))
    scale = slowest / plan.predicted.step_time_s if plan.predicted.step_time_s else 0.0
    return Prediction(
        compute_s=plan.predicted.compute_s * scale,
        exposed_s=plan.predicted.exposed_s * scale + exposed + idle,
        hidden_s=plan.predicted.hidden_s * scale,
        step_time_s=slowest + idle + exposed,
        memory_bytes=fullest_rank(plan, graph),
    )


def _bubble(pipeline: Pipeline) -> float:
    """Idle time over working time of a rank with equal stages.

    Source: Narayanan et al., 2021 (arXiv:2104.04473), section 2.2: (p-1)/m, with v stages per rank (p-1)/(v m). Where weight gradients
    fill the gaps, about a third of it stays (Qi et al., 2023, arXiv:2401.10241, table 1); forth and back, about a sixth.
    """
    left = {"zero_bubble": 1 / 3, "zbv": 1 / 6}.get(pipeline.schedule, 1.0)
    laps = 1 if pipeline.schedule == "zbv" else pipeline.stages_per_rank
    return left * (pipeline.degree - 1) / (laps * pipeline.micro_batches)
