"""Solve a problem: price the overlap, then integers only where that leaves a gap.

The time of a segment is ``exposed + max(compute, hidden)``, at least ``exposed + (1 - w) * compute + w * hidden`` for every
``w`` in [0, 1]. For fixed weights the program is a sum of flows whose relaxation is integral as a rule and solved in
milliseconds: a plan and a lower bound at once. The scan looks for the weights of the highest bound. What gap is left is closed by
an integer program with the overlap in it, over the candidates whose reduced cost does not already prove them useless.

Source: Lagrangian bound, maximised by cutting planes (Kelley, "The cutting-plane method for solving convex programs", 1960),
and variable fixing by reduced costs. Measured: PLANNER_FACTS §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve.backend import Answer, LinearProgram, Solver
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import SEGMENTS, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, Program, assemble, largest_memory_bytes

_EXACT = 1e-9
_SUPPORT = 1e-7
# Largest change of a weight at once: with one of compute and hidden nearly free the program is slow, and says little.
_STEP = 0.5
# Columns from which candidates that the scan used are combined first.
_LARGE = 5_000
# A new program is filled when at most this part of the candidates is left.
_WORTH = 0.7


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        gap: relative gap at which to stop.
        nodes: nodes of an integer program's search tree at most. A count, not a time: equal input, equal plan.
        time_limit_s: seconds for one integer program, for safety: never reached as a rule, and told when it is.
        rounds: weights tried by the scan at most.
    """

    gap: float = 1e-2
    nodes: int = 200
    time_limit_s: float = 30.0
    rounds: int = 12


@dataclass(frozen=True)
class Solution:
    """A choice for everything.

    Attributes:
        chosen: candidate of every choice.
        objective_s: objective in seconds, tie-breaks and penalties included.
        bound_s: proved lower bound of it.
        method: ``"lp"`` (relaxations alone), ``"mip"``, or ``"mip, limit"`` (stopped before the gap asked for).
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


@dataclass
class Unlimited:
    """What is learned on the way about the problem without its memory limit.

    Attributes:
        chosen: the best candidates met; None where every relaxation was fractional.
        objective_s: their objective in seconds.
        bound_s: lower bound of the objective.
    """

    chosen: tuple[int, ...] | None = None
    objective_s: float = np.inf
    bound_s: float = 0.0


@dataclass(frozen=True)
class Excluded:
    """No plan that is good enough: all cost at least ``bound_s``."""

    bound_s: float


def optimise(
    problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort | None = None, *, objective: str = "time"
) -> Solution | None:
    """The best candidates; None where none satisfy the restriction and the memory limit.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        effort: gap and time limit.
        objective: ``"time"``; ``"memory"`` for the smallest memory (without limit); ``"avoid"`` for the fewest avoided candidates.

    Raises:
        RuntimeError: a limit was reached without any plan found.
    """
    found = optimise_below(problem, restriction, cache, effort, np.inf, objective=objective)
    assert not isinstance(found, Excluded)
    return found


def optimise_below(
    problem: Problem,
    restriction: Restriction,
    cache: NetworkCache,
    effort: Effort | None,
    beat_s: float,
    *,
    objective: str = "time",
    unlimited: Unlimited | None = None,
) -> Solution | Excluded | None:
    """As :func:`optimise`, but stops as soon as a bound shows that no plan costs less than ``beat_s``; fills ``unlimited``."""
    if any(not allowed.any() for allowed in restriction.allowed.values()):
        return None
    effort = effort or Effort()
    if restriction.avoid and objective == "time":
        settled = _settle_avoided(problem, restriction, cache, effort)
        if settled is None:
            return None
        restriction = settled
    search = _Search(problem, restriction, cache, effort, objective, beat_s)
    search.unlimited = unlimited or Unlimited()
    if not search.scan(limited=False):
        return None
    search.unlimited.bound_s = search.lower / search.scale
    if search.is_beaten():
        return search.excluded()
    if search.chosen is None and search.limit_binds() and not search.scan(limited=True):
        return None
    if search.is_beaten():
        return search.excluded()
    if not search.is_settled() and not search.close():
        return None
    return search.solution()


def relaxed_bound_s(
    problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort, beat_s: float = np.inf
) -> float:
    """A lower bound of every plan's objective from relaxations alone; infinite where nothing is feasible.

    The search for a higher one stops once it reaches ``beat_s``.
    """
    if any(not allowed.any() for allowed in restriction.allowed.values()):
        return np.inf
    search = _Search(problem, restriction, cache, effort, "time", beat_s)
    if not search.scan(limited=False):
        return np.inf
    if not search.is_beaten() and search.chosen is None and search.limit_binds() and not search.scan(limited=True):
        return np.inf
    return search.excluded().bound_s


def _settle_avoided(problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort) -> Restriction | None:
    """The restriction with avoided candidates forbidden wherever the fewest of them does without."""
    fewest = optimise(problem, restriction, cache, replace(effort, gap=1e-6), objective="avoid")
    if fewest is None:
        return None
    kept = {g: ~avoided for g, avoided in restriction.avoid.items() if not avoided[fewest.chosen[g]]}
    return restriction.merged(Restriction(kept))


@dataclass
class _Cut:
    """An upper bound of the bound as a function of the weights: ``fixed + (1 - w) @ compute + w @ hidden``."""

    fixed: float
    compute: np.ndarray
    hidden: np.ndarray


class _Search:
    """Bounds and plans of one problem, closing in on each other."""

    def __init__(
        self,
        problem: Problem,
        restriction: Restriction,
        cache: NetworkCache,
        effort: Effort,
        objective: str,
        beat_s: float = np.inf,
    ):
        self.beat_s = beat_s
        self.problem, self.restriction, self.cache, self.effort, self.objective = problem, restriction, cache, effort, objective
        self.chosen: tuple[int, ...] | None = None
        self.upper, self.lower = np.inf, -np.inf
        self.unlimited = Unlimited()
        self.method = "lp"
        self.size = (0, 0)
        self._support: list[list[np.ndarray]] = []

    # --- pricing the overlap ---

    def scan(self, limited: bool) -> bool:
        """Look for the weights of the highest bound, keeping the best plan met on the way; False if nothing is feasible."""
        program, solver = self._relaxation(limited)
        self._support = []
        hides = np.array([bool(h.any()) for h in program.hidden])
        weights = best = np.zeros(len(SEGMENTS))
        cuts: list[_Cut] = []
        for _ in range(self.effort.rounds):
            answer = solver.solve(program.cost_at(weights))
            if answer.x is None:
                return self._nothing_better()
            if answer.objective >= self.lower:
                best = weights
            self._learn(program, answer)
            cuts.append(_Cut(*program.parts(answer.x)))
            if self.is_settled() or self.is_beaten() or not hides.any():
                break
            reach, promising = _highest(cuts, hides)
            weights = np.clip(promising, best - _STEP, best + _STEP)
            if reach - self.lower <= self.effort.gap / 3 * abs(reach):
                break
            if self._narrow(program, answer):
                program, solver = self._relaxation(limited)
        return True

    def _relaxation(self, limited: bool) -> tuple[Program, Solver]:
        program = assemble(self.problem, self.restriction, self.cache, objective=self.objective, limited=limited)
        self.scale = program.scale
        self.size = max(self.size, (program.arrays.num_columns, program.arrays.num_rows))
        return program, Solver(program.arrays, integer=False)

    def _nothing_better(self) -> bool:
        """No plan is left: the best one known is optimal, if there is one."""
        self.lower = self.upper
        return self.chosen is not None

    def _learn(self, program: Program, answer: Answer) -> None:
        """Take an answer's bound, and its plan if it is one that fits."""
        assert answer.x is not None
        self.lower = max(self.lower, min(answer.objective, self.upper))
        self._support.append([(c >= 0) & (answer.x[c] > _SUPPORT) for c in program.columns])
        if program.is_integral(answer.x):
            fixed, compute, hidden = program.parts(answer.x)
            self._offer(fixed + float(np.maximum(compute, hidden).sum()), program.candidates_of(answer.x))

    def _offer(self, objective: float, chosen: tuple[int, ...]) -> None:
        """Keep a plan if it fits and is the best."""
        if objective / self.scale < self.unlimited.objective_s:
            self.unlimited.objective_s, self.unlimited.chosen = objective / self.scale, chosen
        limit = self.problem.memory_limit_bytes
        fits = limit is None or self.objective == "memory" or sum(memory_of(self.problem, chosen).values()) <= limit
        if objective < self.upper and fits:
            self.upper, self.chosen = objective, chosen

    def _narrow(self, program: Program, answer: Answer) -> bool:
        """Forbid the candidates that no better plan than the best known can use; False where that is not worth a new program.

        A plan with candidate ``c`` costs at least the answer's objective plus the reduced cost of ``c``.
        """
        assert answer.reduced_costs is not None
        slack = self.upper - answer.objective
        before = sum(int((c >= 0).sum()) for c in program.columns)
        allowed = {g: (c >= 0) & (answer.reduced_costs[c] <= slack + _EXACT * self.upper) for g, c in enumerate(program.columns)}
        after = sum(int(mask.sum()) for mask in allowed.values())
        if not np.isfinite(slack) or after > _WORTH * before or not all(mask.any() for mask in allowed.values()):
            return False
        self.restriction = replace(self.restriction, allowed=allowed)
        return True

    def is_settled(self) -> bool:
        """Whether the best plan is within the gap."""
        return self.chosen is not None and self.upper - self.lower <= self.effort.gap * max(abs(self.upper), 1e-30)

    def is_beaten(self) -> bool:
        """Whether no plan is below what is to be beaten."""
        return bool(self.lower / self.scale >= self.beat_s)

    def excluded(self) -> Excluded:
        return Excluded(float(self.lower / self.scale))

    def limit_binds(self) -> bool:
        """Whether some choice would exceed the memory limit."""
        limit = self.problem.memory_limit_bytes
        return self.objective != "memory" and limit is not None and largest_memory_bytes(self.problem, self.restriction) > limit

    # --- closing the gap ---

    def close(self) -> bool:
        """Integer programs over what may still matter; False if nothing is feasible.

        Raises:
            RuntimeError: a limit was reached without any plan found.
        """
        free = self.restriction
        if self.size[0] > _LARGE or self.chosen is None:
            support = {g: np.logical_or.reduce(masks) for g, masks in enumerate(zip(*self._support, strict=True))}
            self._integers(free.merged(Restriction(support)), proves=False)
        if self.is_settled():
            return True
        status = self._integers(free, proves=True)
        if self.chosen is None and status != "infeasible":
            raise RuntimeError(f"no plan was found within {self.effort.nodes} nodes, and none was excluded: raise the effort")
        return self.chosen is not None

    def _integers(self, restriction: Restriction, *, proves: bool) -> str:
        """Solve under a restriction; ``proves`` says whether no better plan breaks it, so that the bound counts."""
        if not all(mask.any() for mask in restriction.allowed.values()):
            return "infeasible"
        program = assemble(self.problem, restriction, self.cache, objective=self.objective)
        arrays: LinearProgram = program.with_overlap()
        answer = Solver(arrays, integer=True).solve(
            arrays.cost, gap=self.effort.gap * 0.9, nodes=self.effort.nodes, time_limit_s=self.effort.time_limit_s
        )
        self.method = "mip"
        if answer.x is not None:
            self._offer(answer.objective, program.candidates_of(answer.x))
        if proves:
            self.lower = max(self.lower, min(answer.bound, self.upper))
            self.method = "mip" if answer.status in ("optimal", "infeasible") else "mip, limit"
        return answer.status

    def solution(self) -> Solution:
        assert self.chosen is not None
        return Solution(self.chosen, self.upper / self.scale, min(self.lower, self.upper) / self.scale, self.method, *self.size)


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
