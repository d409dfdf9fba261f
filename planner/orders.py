"""The order in which each rank of a pipeline runs its actions, as the runtime's schedules have it.

```
1f1b on 2 ranks, 3 micro-batches:   rank 0:  F0 F1 B0 F2 B1 B2        rank 1:  F0 B0 F1 B1 F2 B2
```

Source: GPipe (Huang et al., 2018, arXiv:1811.06965); 1F1B and its interleaved form (Narayanan et al., 2021, arXiv:2104.04473); zero bubble and
ZB-V (Qi et al., 2023, arXiv:2401.10241, and 2024, arXiv:2405.15362). The interleaved ones run micro-batches in rounds of about
the number of ranks, as ``torch.distributed.pipelining`` does; the tests compare with it action by action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from meshwright.planner.ir.pipeline import Pipeline


class Action(NamedTuple):
    """One thing that a rank computes.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` whole backward, ``"I"`` gradients of inputs, ``"W"`` gradients of weights.
        stage: of the rank.
        micro_batch: which.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"


Order = tuple[Action, ...]


def orders(pipeline: Pipeline) -> tuple[Order, ...]:
    """The actions of every rank along the pipeline axis, in order."""
    make: dict[str, Callable[[Pipeline, int], list[Action]]] = {
        "naive": _all_forwards_first,
        "gpipe": _all_forwards_first,
        "1f1b": _one_forward_one_backward,
        "interleaved_1f1b": lambda p, rank: _interleaved(p, rank, split=False),
        "zero_bubble": lambda p, rank: _interleaved(p, rank, split=True),
        "zbv": _forth_and_back,
    }
    return tuple(tuple(make[pipeline.schedule](pipeline, rank)) for rank in range(pipeline.degree))


def _all_forwards_first(pipeline: Pipeline, rank: int) -> list[Action]:
    return [Action(kind, rank, i) for kind in "FB" for i in range(pipeline.micro_batches)]


def _one_forward_one_backward(pipeline: Pipeline, rank: int) -> list[Action]:
    m = pipeline.micro_batches
    ahead = min(m, pipeline.num_stages - rank)
    found = [Action("F", rank, i) for i in range(ahead)]
    for i in range(m):
        found.append(Action("B", rank, i))
        if ahead + i < m:
            found.append(Action("F", rank, ahead + i))
    return found


def _interleaved(pipeline: Pipeline, rank: int, *, split: bool) -> list[Action]:
    """Rounds of micro-batches go through the rank's stages; backwards begin when the first has come back."""
    p, m, v = pipeline.degree, pipeline.micro_batches, pipeline.stages_per_rank
    per_round = m // max(1, m // p)
    total = v * m
    ahead = min((v - 1) * per_round + (1 if split else 2) * (p - 1 - rank), total)
    counts: Counter[tuple[str, int]] = Counter()
    found: list[Action] = []

    def add(kind: str, lap: int) -> None:
        stage = lap * p + rank
        found.append(Action(kind, stage, counts[kind, stage]))
        counts[kind, stage] += 1

    def lap_back(step: int) -> int:
        return v - 1 - (step // per_round) % v

    weights = 0
    for step in range(ahead + total):
        if step < total:
            add("F", (step // per_round) % v)
        if step < ahead:
            continue
        add("I" if split else "B", lap_back(step - ahead))
        if split and step - ahead >= rank:
            add("W", lap_back(weights))
            weights += 1
    for step in range(weights, total if split else 0):
        add("W", lap_back(step))
    return found


def _forth_and_back(pipeline: Pipeline, rank: int) -> list[Action]:
    """Two stages per rank, ``rank`` on the way forth and its mirror on the way back."""
    p, m = pipeline.degree, pipeline.micro_batches
    forth, back = rank, 2 * p - 1 - rank
    whole = max(2 * p - 1, m)  # the order is made for a full pipeline; what exceeds m is left out
    counts: Counter[tuple[str, int]] = Counter()
    found: list[Action] = []

    def add(stage: int, kinds: str) -> None:
        for kind in kinds:
            if counts[kind, stage] < m:
                found.append(Action(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1

    add(forth, "F" * (2 * (p - rank) - 1))
    for _ in range(rank):
        add(back, "F")
        add(forth, "F")
    for _ in range(p - rank):
        add(back, "FIW")
    while counts["F", back] < counts["F", forth] or counts["F", forth] < whole:
        add(forth, "FIW" if counts["F", forth] < whole else "IW")
        add(back, "FIW")
    for _ in range(rank):
        add(forth, "I")
        add(back, "I")
    for _ in range(p - rank):
        add(forth, "IW")
    for stage in (back, forth):
        add(stage, "W" * (counts["I", stage] - counts["W", stage]))
    return found
