"""A planned program as a chain of blocks for the integer program of :mod:`~meshwright.planner.solve.stages`, and its answer as cuts.

Blocks are what lies between two places where few bytes cross. Where they repeat with a period (attention, feed-forward, attention,
...) one period is one block, so that a deep model is a few runs of equal blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.orders import orders
from meshwright.planner.pipelined import PipelineRequest, Uncut
from meshwright.planner.solve.stages import Chain, Point, Run, Staged, deal
from meshwright.planner.stage_cuts import cut_places

_MOST_PERIOD = 8
_EQUAL = 0.02
"""Blocks whose work and bytes differ by less than this part are one run."""


@dataclass(frozen=True)
class Dealt:
    """How blocks were dealt out.

    Attributes:
        cuts: the forward ops behind which stages end.
        dear: how many blocks, the first ones, take the first of the forms that there are.
        blocks: how many blocks of several forms there are.
        staged: the integer program's answer.
    """

    cuts: tuple[str, ...]
    dear: int
    blocks: int
    staged: Staged


def dealt(forms: Sequence[Uncut], request: PipelineRequest) -> Dealt | None:
    """Deal the blocks of a program out to stages so that every rank fits; None where that cannot be.

    Args:
        forms: the program planned in one or two ways that differ in what the backward computes again, the one that does more of it
            first.
        request: with nothing left open.
    """
    assert request.schedule is not None and request.stages_per_rank is not None
    stages = request.degree * request.stages_per_rank
    blocks = _Blocks(forms, stages)
    if len(blocks.ends) < stages:
        return None
    pipeline = Pipeline(request.degree, request.schedule, ("",) * (stages - 1), forms[0].micro_batches)
    limit, beside = forms[0].limit_bytes, max(_beside_bytes(f) for f in forms)
    rank_of = tuple(pipeline.rank_of(s) for s in range(stages))
    chain = Chain(blocks.runs(), rank_of, _in_flight(pipeline), pipeline.micro_batches, float(limit), beside)
    staged = deal(chain)
    if staged is None:
        return None
    cuts = tuple(forms[0].profile.names[blocks.ends[n - 1]] for n in staged.ends())
    several = [r for r, run in enumerate(chain.runs) if len(run.points) > 1]
    dear = sum(stage[r][0] for stage in staged.counts for r in several)
    return Dealt(cuts, dear, sum(chain.runs[r].count for r in several), staged)


def _beside_bytes(form: Uncut) -> float:
    return float(max(sum(form.beside.values(), np.zeros(1))))


def _in_flight(pipeline: Pipeline) -> tuple[float, ...]:
    """Micro-batches that each stage holds at once."""
    found = [0.0] * pipeline.num_stages
    for actions in orders(pipeline):
        now = dict.fromkeys(range(pipeline.num_stages), 0)
        for kind, stage, _ in actions:
            now[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            found[stage] = max(found[stage], float(now[stage]))
    return tuple(found)


class _Blocks:
    """The blocks of a program in each of its forms.

    Attributes:
        ends: index of the forward op that each block ends with.
    """

    def __init__(self, forms: Sequence[Uncut], stages: int):
        self.forms = forms
        first = forms[0].profile
        places = [int(i) for i in cut_places(first, stages)] + [len(first.names) - 1]
        self.ends = list(dict.fromkeys(places))
        period = self._period(stages)
        if period > 1:
            start = self._start(period)
            last = len(self.ends) - 1
            self.ends = [e for i, e in enumerate(self.ends) if i < start or (i - start) % period == period - 1 or i == last]

    def points(self) -> list[tuple[Point, ...]]:
        """The forms of every block; those that are no better than the first are left out."""
        by_form = [self._of(form) for form in self.forms]
        found = []
        for i in range(len(self.ends)):
            points = [p[i] for p in by_form]
            different = [p for p in points[1:] if p.work_s < points[0].work_s * (1 - 1e-6)]
            found.append((points[0], *different) if different else (min(points, key=lambda p: p.saved_bytes),))
        return found

    def runs(self) -> tuple[Run, ...]:
        """Equal neighbours together."""
        profile, link = self.forms[0].profile, self.forms[0].link
        runs: list[Run] = []
        for end, points in zip(self.ends, self.points(), strict=True):
            size = float(profile.alive_bytes[end]) / self.forms[0].micro_batches
            send = 2 * (size / link.bytes_per_s + link.latency_s) if size else 0.0
            if runs and _alike(runs[-1].points, points):
                runs[-1] = Run(runs[-1].count + 1, runs[-1].points, max(send, runs[-1].send_s))
            else:
                runs.append(Run(1, points, send))
        return tuple(runs)

    def _of(self, form: Uncut) -> list[Point]:
        found, m = form.profile, form.micro_batches
        edges = [e + 1 for e in self.ends[:-1]]

        def parts(values: np.ndarray) -> list[float]:
            return [float(part.sum()) for part in np.split(values, edges)]

        rest = form.resting.by_place(len(found.names))
        saved = np.zeros(len(found.names))
        for size, places, _ in found.saved:
            saved[min(places)] += size
        columns = (parts(found.work_s), parts(found.once_s), parts(rest), parts(saved))
        return [Point(w / m, o, r, s / m) for w, o, r, s in zip(*columns, strict=True)]

    def _period(self, stages: int) -> int:
        """After how many blocks they repeat, if enough remain to be dealt out."""
        work = [p.work_s for p in self._of(self.forms[0])]
        for period in range(1, min(_MOST_PERIOD, len(work) // max(stages, 2)) + 1):
            pairs = list(zip(work, work[period:], strict=False))
            alike = sum(abs(a - b) <= _EQUAL * max(a, b) for a, b in pairs)
            if pairs and alike >= 0.8 * len(pairs):
                return period
        return 1

    def _start(self, period: int) -> int:
        """The first block that is like the one a period behind it."""
        work = [p.work_s for p in self._of(self.forms[0])]
        return next(i for i in range(len(work) - period) if abs(work[i] - work[i + period]) <= _EQUAL * work[i])


def _alike(a: Sequence[Point], b: Sequence[Point]) -> bool:
    if len(a) != len(b):
        return False
    pairs = [
        (getattr(p, f), getattr(q, f))
        for p, q in zip(a, b, strict=True)
        for f in ("work_s", "step_s", "rest_bytes", "saved_bytes")
    ]
    return all(abs(x - y) <= _EQUAL * max(abs(x), abs(y)) for x, y in pairs)
