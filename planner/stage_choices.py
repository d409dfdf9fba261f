"""What a pipeline leaves to choose: schedules with stages per rank, and numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.pipeline import check_schedule
from meshwright.planner.micro import batch_length, time_specs
from meshwright.planner.pipelined import PipelineRequest

STAGES_PER_RANK = (1, 2, 3, 4, 5, 8)
"""How many stages a rank may have where the user does not say."""

MICRO_BATCHES_PER_RANK = (1, 2, 4, 8)
"""Micro-batches that are tried, per rank along the pipeline axis."""


def schedules(degree: int, micro_batches: int, asked: PipelineRequest) -> Iterator[tuple[str, int]]:
    """The schedules that can run so, with stages per rank; the simplest first.

    Raises:
        InputError: the schedule that is asked for cannot.
    """
    if asked.schedule is not None:
        default = (2,) if asked.schedule in ("interleaved_1f1b", "zero_bubble", "zbv") else (1,)
        eaches = (asked.stages_per_rank,) if asked.stages_per_rank else default
        for each in eaches:
            check_schedule(asked.schedule, degree, degree * each, micro_batches)
            yield asked.schedule, each
        return
    names = ("naive",) if micro_batches == 1 and degree > 1 else ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv")
    for name in names:
        for each in (asked.stages_per_rank,) if asked.stages_per_rank else STAGES_PER_RANK:
            if (name, each) in (("interleaved_1f1b", 1), ("gpipe", 1)) and micro_batches >= degree:
                continue
            try:
                check_schedule(name, degree, degree * each, micro_batches)
            except InputError:
                continue
            yield name, each


def micro_batch_counts(graph: OpGraph, degree: int, asked: PipelineRequest, devices: int) -> tuple[int, ...]:
    """The numbers of micro-batches to try.

    Args:
        graph: the program.
        degree: ranks along the pipeline axis.
        asked: what is fixed.
        devices: of a stage: counts whose micro-batches all of them can share come first.

    Raises:
        InputError: the number that is asked for does not divide the batch, or changes what the model computes.
    """
    if asked.micro_batches is not None:
        time_specs(graph, asked.micro_batches)
        return (asked.micro_batches,)
    if asked.schedule == "naive":
        return (1,)
    batch = batch_length(graph)
    divisors = [n for n in range(1, max(MICRO_BATCHES_PER_RANK) * degree + 1) if batch % n == 0]
    try:
        time_specs(graph, divisors[1] if len(divisors) > 1 else 1)
    except InputError:
        return (1,)
    found = [max(n for n in divisors if n <= each * degree) for each in MICRO_BATCHES_PER_RANK]
    kept = [n for n in dict.fromkeys(found) if _runs(degree, n, asked)]
    return tuple(reversed(kept)) or (1,)


def _runs(degree: int, micro_batches: int, asked: PipelineRequest) -> bool:
    try:
        return any(True for _ in schedules(degree, micro_batches, asked))
    except InputError:
        return False
