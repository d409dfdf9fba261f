"""Solve a problem: price the overlap, then integers only where that leaves a gap.

The time of a segment is ``exposed + max(compute, hidden)``, at least ``exposed + (1 - w) * compute + w * hidden`` for every
``w`` in [0, 1]. For fixed weights the program is a sum of flows whose relaxation is integral as a rule and solved in
milliseconds: a plan and a lower bound at once. The scan looks for the weights of the highest bound. What gap is left is closed by
an integer program with the overlap in it, over the candidates whose reduced cost does not already prove them useless.

Source: Lagrangian bound, maximised by cutting planes (Kelley, "The cutting-plane method for solving convex programs", 1960),
and variable fixing by reduced costs. Measured: PLANNER_FACTS §3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.planner.solve.backend import Answer, LinearProgram, Solver
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import SEGMENTS, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, Program, assemble, largest_memory_bytes

_EXACT = 1e-9
_SUPPORT = 1e-7


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        gap: relative gap at which to stop.
        time_limit_s: seconds for all integer programs of one problem together.
        rounds: weights tried by the scan at most.
    """

    gap: float = 5e-3
    time_limit_s: float = 10.0
    rounds: int = 12


@dataclass(frozen=True)
class Solution:
    """A choice for everything.

    Attributes:
        chosen: candidate of every choice.
        objective_s: objective in seconds, tie-breaks and penalties included.
        bound_s: proved lower bound of it.
        method: ``"lp"`` (relaxations alone), ``"mip"``, or ``"mip, time limit"``.
        columns: columns of the program.
        rows: rows of the program.
    """

    chosen: tuple[int, ...]
    objective_s: float
    bound_s: float
    method: str
    columns: int
    rows: int

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the bound; 0 where proved optimal."""
        return max(0.0, (self.objective_s - self.bound_s) / max(abs(self.objective_s), 1e-30))


def optimise(
    problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort | None = None, *, objective: str = "time"
) -> Solution | None:
    """The best candidates; None where none satisfy the restriction and the memory limit.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        effort: gap and time limit.
        objective: ``"time"``, or ``"memory"`` for the smallest memory (without limit).

    Raises:
        RuntimeError: the time limit passed without any plan found.
    """
    if any(not allowed.any() for allowed in restriction.allowed.values()):
        return None
    search = _Search(problem, restriction, cache, effort or Effort(), objective)
    if not search.scan(limited=False):
        return None
    if not search.is_settled() and search.limit_binds() and not search.scan(limited=True):
        return None
    if not search.is_settled() and not search.close():
        return None
    return search.solution()


@dataclass
class _Cut:
    """An upper bound of the bound as a function of the weights: ``fixed + (1 - w) @ compute + w @ hidden``."""

    fixed: float
    compute: np.ndarray
    hidden: np.ndarray


@dataclass
class _Search:
    problem: Problem
    restriction: Restriction
    cache: NetworkCache
    effort: Effort
    objective: str
    chosen: tuple[int, ...] | None = None
    upper: float = np.inf
    lower: float = -np.inf
    method: str = "lp"
    support: list[np.ndarray] = field(default_factory=list)
    program: Program = field(init=False)
    _best: Answer = field(init=False)

    # --- pricing the overlap ---

    def scan(self, limited: bool) -> bool:
        """Look for the weights of the highest bound, keeping the best plan met on the way; False if nothing is feasible."""
        self.program = assemble(self.problem, self.restriction, self.cache, objective=self.objective, limited=limited)
        solver = Solver(self.program.arrays, integer=False)
        self.support = []
        hides = np.array([bool(h.any()) for h in self.program.hidden])
        weights = np.zeros(len(SEGMENTS))
        cuts: list[_Cut] = []
        for _ in range(self.effort.rounds):
            answer = solver.solve(self.program.cost_at(weights))
            if answer.x is None:
                return False
            self._learn(answer)
            cuts.append(_Cut(*self.program.parts(answer.x)))
            if self.is_settled() or not hides.any():
                break
            reach, weights = _highest(cuts, hides)
            if reach - self.lower <= self.effort.gap / 10 * abs(reach):
                break
        return True

    def _learn(self, answer: Answer) -> None:
        """Take an answer's bound, and its plan if it is one that fits."""
        assert answer.x is not None
        if answer.objective > self.lower:
            self.lower, self._best = answer.objective, answer
        self.support.append(answer.x > _SUPPORT)
        if self.program.is_integral(answer.x):
            self._offer(answer.x)

    def _offer(self, x: np.ndarray) -> None:
        fixed, compute, hidden = self.program.parts(x)
        objective = fixed + float(np.maximum(compute, hidden).sum())
        chosen = self.program.candidates_of(x)
        if objective < self.upper and self._fits(chosen):
            self.upper, self.chosen = objective, chosen

    def _fits(self, chosen: Sequence[int]) -> bool:
        limit = self.problem.memory_limit_bytes
        return limit is None or self.objective == "memory" or sum(memory_of(self.problem, chosen).values()) <= limit

    def _gap(self) -> float:
        return (self.upper - self.lower) / max(abs(self.upper), 1e-30) if self.chosen is not None else np.inf

    def is_settled(self) -> bool:
        """Whether the best plan is within the gap; plans that do not fit do not count."""
        return self._gap() <= self.effort.gap

    def limit_binds(self) -> bool:
        """Whether some choice would exceed the memory limit."""
        limit = self.problem.memory_limit_bytes
        return self.objective == "time" and limit is not None and largest_memory_bytes(self.problem, self.restriction) > limit

    # --- closing the gap ---

    def close(self) -> bool:
        """Integer programs over what may still matter; False if nothing is feasible.

        Raises:
            RuntimeError: the time limit passed without any plan found.
        """
        start = time.perf_counter()
        self._integers(np.logical_or.reduce(self.support), self.effort.time_limit_s / 3, proves=False)
        if self.is_settled():
            return True
        left = max(1.0, self.effort.time_limit_s - (time.perf_counter() - start))
        status = self._integers(self._useful(), left, proves=True)
        if self.chosen is None and status != "infeasible":
            raise RuntimeError(
                f"no plan was found within {self.effort.time_limit_s:g} s, and none was excluded: raise the time limit"
            )
        return self.chosen is not None

    def _useful(self) -> np.ndarray:
        """Columns that a better plan than the best known could use, shape [columns]."""
        assert self._best.reduced_costs is not None and self._best.x is not None
        slack = self.upper - self.lower
        return (self._best.reduced_costs <= slack + 1e-6 * abs(slack)) | (self._best.x > _SUPPORT)

    def _integers(self, keep: np.ndarray, time_limit_s: float, *, proves: bool) -> str:
        """Solve over the candidates kept; ``proves`` says whether no better plan uses others, so that its bound counts."""
        allowed = {g: self._kept(columns, keep) for g, columns in enumerate(self.program.columns)}
        smaller = replace(self.restriction, allowed=allowed)
        program = assemble(self.problem, smaller, self.cache, objective=self.objective)
        # A smaller program may be scaled alike, because the scale is the problem's.
        arrays: LinearProgram = program.with_overlap()
        answer = Solver(arrays, integer=True).solve(arrays.cost, gap=self.effort.gap / 2, time_limit_s=time_limit_s)
        self.method = "mip"
        if answer.x is not None and answer.objective < self.upper:
            self.upper, self.chosen = answer.objective, program.candidates_of(answer.x)
        if proves:
            self.lower = max(self.lower, min(answer.bound, self.upper))
            self.method = "mip" if answer.status in ("optimal", "infeasible") else "mip, time limit"
        return answer.status

    def _kept(self, columns: np.ndarray, keep: np.ndarray) -> np.ndarray:
        return (columns >= 0) & keep[columns]

    def solution(self) -> Solution:
        assert self.chosen is not None
        scale = self.program.scale
        return Solution(
            self.chosen,
            self.upper / scale,
            min(self.lower, self.upper) / scale,
            self.method,
            self.program.arrays.num_columns,
            self.program.arrays.num_rows,
        )


def _highest(cuts: Sequence[_Cut], hides: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest value that the cuts allow the bound, and the weights where they do."""
    segments = len(hides)
    reach = segments
    rows, columns, entries = [], [], []
    for k, cut in enumerate(cuts):
        rows += [k] * (segments + 1)
        columns += [*range(segments), reach]
        entries += [*(cut.compute - cut.hidden), 1.0]
    free = np.append(hides.astype(float), np.inf)
    program = LinearProgram(
        np.append(np.zeros(segments), -1.0),
        np.zeros(segments + 1),
        free,
        np.zeros(segments + 1, dtype=bool),
        np.full(len(cuts), -np.inf),
        np.array([cut.fixed + cut.compute.sum() for cut in cuts]),
        np.array(rows),
        np.array(columns),
        np.array(entries, dtype=float),
    )
    answer = Solver(program, integer=False).solve(program.cost)
    assert answer.x is not None
    return float(answer.x[reach]), np.clip(answer.x[:segments], 0.0, 1.0)
