"""Which blocks go to which pipeline stage, and in which form: the second integer program.

A program is a chain of *runs* of equal blocks. A block can be had in several forms (*points*): dearer in memory or dearer in time.
With ``n[s, r, q]`` the number of blocks of run ``r`` at point ``q`` on stage ``s``, minimise ``T`` where::

    T >= m * (time of rank) + time of the stages before it + its seconds once per step      for every rank
    memory at rest + micro-batches in flight * memory of one                                 <= limit, for every rank
    sum over s, q of n[s, r, q] = length of run r;   every stage has a block
    e[s, r] = 1:  stage s ends in run r: the runs before r are used up, those behind it untouched
    h[s, q] = 1:  a point behind q has been used by stage s: no point up to q comes later

Only ``n``, ``e`` and ``h`` are integer; counts solve where a binary per block does not. ``T`` is a lower bound of a step of every
schedule that starts a rank's first forward when it arrives and ends with its first stage's backward; it is exact for equal stages.

Source: Alpa (Zheng et al., 2022, arXiv:2201.12023) for the two levels; counts instead of binaries, and Pareto points: measured, 30 cases of
up to 16 stages and 126 blocks in 6 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.solve.backend import LinearProgram, Solver

_OBJECTIVE = 1e4
"""The objective is scaled to about this, well above the solver's tolerances."""


@dataclass(frozen=True, slots=True)
class Point:
    """One form of a block.

    Attributes:
        work_s: seconds of its forward and backward, for one micro-batch.
        step_s: seconds once per step.
        rest_bytes: what it holds whatever runs.
        saved_bytes: what it holds of one micro-batch in flight.
    """

    work_s: float
    step_s: float = 0.0
    rest_bytes: float = 0.0
    saved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks in a row.

    Attributes:
        count: how many.
        points: the forms that each can be had in; along the chain they are taken in this order.
        send_s: seconds of sending what is alive behind one of them to the next stage and its gradient back, for one micro-batch.
    """

    count: int
    points: tuple[Point, ...]
    send_s: float = 0.0


@dataclass(frozen=True)
class Chain:
    """A program to be cut.

    Attributes:
        runs: in execution order.
        rank_of: rank of every stage.
        in_flight: micro-batches that each stage holds at once.
        micro_batches: per step.
        limit_bytes: memory per rank; None for no limit.
        fixed_bytes: what every rank holds beside its blocks.
    """

    runs: tuple[Run, ...]
    rank_of: tuple[int, ...]
    in_flight: tuple[float, ...]
    micro_batches: int
    limit_bytes: float | None = None
    fixed_bytes: float = 0.0

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1


Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""Blocks by stage, run and point."""


@dataclass(frozen=True)
class Staged:
    """Blocks dealt out.

    Attributes:
        counts: blocks by stage, run and point.
        step_s: seconds of a step, as far as the bound knows it.
        bound_s: proved lower bound of that.
    """

    counts: Counts
    step_s: float
    bound_s: float

    def ends(self) -> tuple[int, ...]:
        """Number of blocks in front of the end of every stage but the last."""
        sizes = [sum(map(sum, stage)) for stage in self.counts]
        return tuple(int(n) for n in np.cumsum(sizes)[:-1])


def step_seconds(chain: Chain, counts: Counts) -> float:
    """The objective of a way to deal out blocks: the largest over ranks of its work, what is before it and its seconds once per step."""
    stage = [sum(n * p.work_s for n, p in _pairs(chain, c)) for c in counts]
    for s in range(chain.num_stages - 1):
        if chain.rank_of[s] != chain.rank_of[s + 1]:
            sent = chain.runs[_last_run(counts, s)].send_s
            stage[s] += sent / 2
            stage[s + 1] += sent / 2
    worst = 0.0
    for rank in range(chain.num_ranks):
        mine = [s for s, r in enumerate(chain.rank_of) if r == rank]
        once = sum(n * p.step_s for s in mine for n, p in _pairs(chain, counts[s]))
        worst = max(worst, chain.micro_batches * sum(stage[s] for s in mine) + sum(stage[: mine[0]]) + once)
    return worst


def rank_bytes(chain: Chain, counts: Counts) -> list[float]:
    """What every rank holds."""
    held = [chain.fixed_bytes] * chain.num_ranks
    for s, rank in enumerate(chain.rank_of):
        held[rank] += sum(n * (p.rest_bytes + chain.in_flight[s] * p.saved_bytes) for n, p in _pairs(chain, counts[s]))
    return held


def _pairs(chain: Chain, stage: Sequence[Sequence[int]]) -> Iterator[tuple[int, Point]]:
    return ((n, p) for run, used in zip(chain.runs, stage, strict=True) for n, p in zip(used, run.points, strict=True))


def _last_run(counts: Counts, stage: int) -> int:
    return max(r for s in range(stage + 1) for r, used in enumerate(counts[s]) if sum(used))


def deal(chain: Chain, *, gap: float = 1e-3, nodes: int = 2000, time_limit_s: float = 10.0) -> Staged | None:
    """The fastest way to deal blocks out to stages; None where none fits, or the limits were reached with nothing found.

    Args:
        chain: the program.
        gap: relative gap at which to stop.
        nodes: nodes of the solver's search tree at most.
        time_limit_s: for safety.
    """
    if sum(run.count for run in chain.runs) < chain.num_stages:
        return None
    build = _Rows(chain)
    program = build.program()
    answer = Solver(program, integer=True).solve(program.cost, gap=gap, nodes=nodes, time_limit_s=time_limit_s)
    if answer.x is None:
        return None
    counts = build.counts(answer.x)
    step = step_seconds(chain, counts)
    return Staged(counts, step, min(step, answer.bound / build.scale))


class _Rows:
    """Columns and rows of the program."""

    def __init__(self, chain: Chain):
        self.chain, stages, runs = chain, chain.num_stages, chain.runs
        self.points = [(r, q) for r, run in enumerate(runs) for q in range(len(run.points))]
        self.n = {key: i for i, key in enumerate((s, r, q) for s in range(stages) for r, q in self.points)}
        edges = [(s, r) for s in range(stages - 1) for r in range(len(runs))]
        self.e = {key: len(self.n) + i for i, key in enumerate(edges)}
        turns = [(s, r, q) for s in range(stages - 1) for r, run in enumerate(runs) for q in range(len(run.points) - 1)]
        self.h = {key: len(self.n) + len(self.e) + i for i, key in enumerate(turns)}
        self.t = len(self.n) + len(self.e) + len(self.h)
        least = sum(run.count * min(p.work_s for p in run.points) for run in runs) * chain.micro_batches / chain.num_ranks
        self.scale = _OBJECTIVE / least if least > 0 else 1.0
        self.rows: list[tuple[float, float, dict[int, float]]] = []

    def program(self) -> LinearProgram:
        self._used_up()
        self._contiguous()
        self._in_order()
        for rank in range(self.chain.num_ranks):
            self._time(rank)
            self._memory(rank)
        size = self.t + 1
        upper = np.array([*(self.chain.runs[r].count for _, r, _ in self.n), *([1] * (len(self.e) + len(self.h))), np.inf], float)
        integer, cost = np.ones(size, dtype=bool), np.zeros(size)
        integer[self.t], cost[self.t] = False, 1.0
        entries = [(i, c, v) for i, (_, _, row) in enumerate(self.rows) for c, v in sorted(row.items()) if v]
        at, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        lower, most = (np.array([row[k] for row in self.rows], float) for k in (0, 1))
        return LinearProgram(cost, np.zeros(size), upper, integer, lower, most, at, columns, values.astype(float))

    def counts(self, x: np.ndarray) -> Counts:
        stages, runs = range(self.chain.num_stages), self.chain.runs
        return tuple(
            tuple(tuple(round(float(x[self.n[s, r, q]])) for q in range(len(run.points))) for r, run in enumerate(runs))
            for s in stages
        )

    def _used_up(self) -> None:
        for r, run in enumerate(self.chain.runs):
            self.rows.append((run.count, run.count, {i: 1.0 for (_, at, _), i in self.n.items() if at == r}))
        for s in range(self.chain.num_stages):
            self.rows.append((1.0, np.inf, {i: 1.0 for (at, _, _), i in self.n.items() if at == s}))

    def _before(self, s: int, r: int) -> dict[int, float]:
        """Blocks of run ``r`` on stages up to ``s``."""
        return {i: 1.0 for (at, run, _), i in self.n.items() if at <= s and run == r}

    def _contiguous(self) -> None:
        for s in range(self.chain.num_stages - 1):
            ends = {r: self.e[s, r] for r in range(len(self.chain.runs))}
            self.rows.append((1.0, 1.0, dict.fromkeys(ends.values(), 1.0)))
            for r, run in enumerate(self.chain.runs):
                placed = self._before(s, r)
                self.rows.append(
                    (0.0, np.inf, {**placed, **{e: -float(run.count) for at, e in ends.items() if at > r}, ends[r]: -1.0})
                )
                self.rows.append((-np.inf, 0.0, {**placed, **{e: -float(run.count) for at, e in ends.items() if at >= r}}))

    def _in_order(self) -> None:
        for (s, r, q), turned in self.h.items():
            count = float(self.chain.runs[r].count)
            behind = {i: 1.0 for (at, run, p), i in self.n.items() if at <= s and run == r and p > q}
            self.rows.append((-np.inf, 0.0, {**behind, turned: -count}))
            later = {i: 1.0 for (at, run, p), i in self.n.items() if at > s and run == r and p <= q}
            self.rows.append((-np.inf, count, {**later, turned: count}))

    def _time(self, rank: int) -> None:
        chain, row = self.chain, {self.t: 1.0}
        mine = [s for s, at in enumerate(chain.rank_of) if at == rank]
        times = {s: float(chain.micro_batches) for s in mine} | dict.fromkeys(range(mine[0]), 1.0)
        for (s, r, q), i in self.n.items():
            point = chain.runs[r].points[q]
            row[i] = -self.scale * (times.get(s, 0.0) * point.work_s + (point.step_s if s in mine else 0.0))
        for (s, r), i in self.e.items():
            if chain.rank_of[s] != chain.rank_of[s + 1]:
                row[i] = -self.scale * chain.runs[r].send_s / 2 * (times.get(s, 0.0) + times.get(s + 1, 0.0))
        self.rows.append((0.0, np.inf, row))

    def _memory(self, rank: int) -> None:
        chain = self.chain
        if chain.limit_bytes is None:
            return
        room = max(chain.limit_bytes - chain.fixed_bytes, 0.0)
        unit = max(room, 1.0)
        row = {}
        for (s, r, q), i in self.n.items():
            if chain.rank_of[s] == rank:
                point = chain.runs[r].points[q]
                row[i] = (point.rest_bytes + chain.in_flight[s] * point.saved_bytes) / unit
        self.rows.append((-np.inf, room / unit if chain.limit_bytes >= chain.fixed_bytes else -1.0, row))
