"""Branch and bound over the candidates: bounds by prices, an integer program over what they found useful, then halves of what is left.

A scan (:mod:`.scan`) gives a lower bound and plans, or mixtures of plans where memory binds; candidates that no plan within the gap
can use are dropped (:mod:`.marginals`); an integer program over the candidates that any relaxation used gives a good plan. What gap
is left is closed by branch and bound: the two plans that hold the bound down are torn apart (:mod:`.split`), and each half is
scanned again.

Source: Land and Doig, "An automatic method of solving discrete programming problems" (1960), with Lagrangian bounds. Measured:
PLANNER_FACTS §3; HiGHS alone spent 5-10 s in heuristics where one split and a few relaxations of 0.05 s prove the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve.answers import Effort, Excluded, NoPlanFoundError, Solution, Unlimited
from meshwright.planner.solve.backend import Answer, LinearProgram, Solver
from meshwright.planner.solve.foresight import Foresight
from meshwright.planner.solve.marginals import proved_costs
from meshwright.planner.solve.price import memory_of, objective_s, price
from meshwright.planner.solve.problem import SEGMENTS, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, Program, assemble, scale_of
from meshwright.planner.solve.scan import Cut, Scan
from meshwright.planner.solve.split import halves

_EXACT = 1e-6
_SUPPORT = 1e-7
# Candidates are dropped for plans better by this part of the gap, so that what is excluded is safely within the gap.
_PART = 0.95
# Programs up to this many columns are solved as integer programs at once where the scan leads to no plan.
_SMALL = 6_000
# The search ends where the bound rose by less than this part of the gap during this many nodes and this part of the columns allowed.
_RISE, _PATIENCE, _STALLED = 0.1, 8, 0.1
# A scan ends where the bound rose by less than this part of the gap in so many rounds.
_WORTH_A_ROUND, _FEW_ROUNDS = 0.3, 3
# Relaxations after which the root looks for a plan, where none is known: with one, candidates can be dropped.
_LEARNED = 2
# A new program is filled when at most this part of the candidates is left.
_WORTH = 0.7


@dataclass
class _Node:
    """A part of the problem.

    Attributes:
        restriction: candidates and arcs that are left.
        scan: what its prices are found by; None before the first relaxation.
        lower: proved cost of its plans.
        split: choice to decide next and the candidates on one side; None where only one plan is left.
    """

    restriction: Restriction
    scan: Scan | None
    lower: float
    split: tuple[int, np.ndarray] | None = None


@dataclass
class _Stalled:
    """Whether halving leads anywhere.

    Attributes:
        done: nodes when the gap last changed by much.
        work: columns then.
        lower: the bound then.
        upper: the best plan's cost then.
    """

    done: int
    work: int
    lower: float = -np.inf
    upper: float = np.inf

    def at(self, lower: float, upper: float, done: int, work: int, patience: float) -> bool:
        """Whether neither bound moved much during ``patience`` columns and some nodes; False as long as there is no plan."""
        if not np.isfinite(self.lower) or upper < self.upper or lower - self.lower > _RISE * (upper - self.lower):
            self.done, self.work, self.lower, self.upper = done, work, lower, upper
        return np.isfinite(upper) and done - self.done >= _PATIENCE and work - self.work > patience


class Search:
    """Branch and bound over the candidates."""

    def __init__(
        self,
        problem: Problem,
        restriction: Restriction,
        cache: NetworkCache,
        effort: Effort,
        beat_s: float,
        unlimited: Unlimited,
        ahead: Foresight,
    ):
        self.problem, self.cache, self.effort, self.beat_s = problem, cache, effort, beat_s
        everything = {g: np.ones(c.num_candidates, dtype=bool) for g, c in enumerate(problem.choices)}
        self.root = _Node(replace(restriction, allowed={**everything, **restriction.allowed}), None, -np.inf)
        self.chosen: tuple[int, ...] | None = None
        self.upper, self.excluded = np.inf, np.inf
        """Cost of the best plan; every plan that was dropped costs at least ``excluded``."""
        self.unlimited, self.ahead = unlimited, ahead
        self.has_charged = not ahead.prices.is_free
        """Whether a memory row held a bound up: bounds from then on hold only for plans within the limit."""
        self.scale = scale_of(problem)
        self.size = (0, 0)
        self.work = 0
        self.method = "lp"
        self._support = [np.zeros(c.num_candidates, dtype=bool) for c in problem.choices]

    def _start(self) -> bool:
        """Take the plan that was foreseen, if it fits, and drop what was proved to be of no interest; False where that is all."""
        chosen = self.ahead.chosen
        if chosen is not None:
            outcome = price(self.problem, self.root.restriction, chosen)
            self._offer(objective_s(self.problem, outcome, chosen) * self.scale, chosen)
        self.root.lower = self.ahead.bound_s * self.scale
        return self._drop_foreseen(min(self.upper, self._beat()))

    def _drop_foreseen(self, cutoff: float | None = None) -> bool:
        """Drop what was foreseen to cost at least a cutoff, by default what is not looked for any more; False where that is all."""
        cutoff = self._target() if cutoff is None else cutoff
        kept = self.ahead.below(self.root.restriction, cutoff / self.scale)
        self.excluded = min(self.excluded, cutoff)
        if kept is not None:
            self.root.restriction = kept
        return kept is not None

    def _is_foreseen(self) -> bool:
        """Whether a plan was foreseen that is of interest and so near to the bound that nothing is worth solving."""
        return self.upper < self._beat() and self.effort.takes(self.upper, self.root.lower)

    def _solution(self, lower: float) -> Solution:
        assert self.chosen is not None
        weights = None if self.root.scan is None else tuple(self.root.scan.weights.tolist())
        bounds = (self.upper / self.scale, min(lower, self.upper) / self.scale)
        return Solution(self.chosen, *bounds, self.method, *self.size, weights)

    def run(self) -> Solution | Excluded | None:
        """The best plan; what all cost where none is below ``beat_s``; None where nothing fits.

        Raises:
            NoPlanFoundError: a limit was reached without any plan found.
        """
        is_open = self._start()
        if self._is_foreseen():
            self.method = "messages"
            return self._solution(self.root.lower)
        open_nodes = [self.root] if is_open and self._scan(self.root, self.effort.rounds) else []
        if open_nodes and not self._is_settled(self.root.lower):
            self._integers_on_support()
            if not self._is_settled(self.root.lower) and not (self._drop_foreseen() and self._integers_at_once()):
                open_nodes = []
        lower = self._explore(open_nodes)
        self._learn_unlimited(lower)
        if np.isfinite(lower) and lower >= self._beat():
            return Excluded(lower / self.scale)
        if self.chosen is None:
            return self._last_resort() if open_nodes else None
        return self._solution(lower)

    def _learn_unlimited(self, bound: float) -> None:
        """Take a bound that holds for all plans as long as memory was not charged for."""
        if not self.has_charged and np.isfinite(bound):
            self.unlimited.bound_s = max(self.unlimited.bound_s, min(bound, self.excluded) / self.scale)

    def _beat(self) -> float:
        return self.beat_s * self.scale

    def _target(self) -> float:
        """Plans that cost more than this are not looked for."""
        return min(self.upper * (1 - _PART * self.effort.gap), self._beat())

    def _is_settled(self, lower: float) -> bool:
        if lower >= self._beat():
            return True
        return self.chosen is not None and self.upper - lower <= self.effort.gap * max(abs(self.upper), 1e-30)

    def _explore(self, open_nodes: list[_Node]) -> float:
        """Split nodes, those with the lowest bound first, until the gap is closed or stays; the proved lower bound."""
        done, stalled = 0, _Stalled(0, self.work)
        while open_nodes:
            open_nodes.sort(key=lambda n: -n.lower)
            lower = min(open_nodes[-1].lower, self.excluded, self.upper)
            if self._is_settled(lower):
                return lower
            spent = done >= self.effort.nodes or self.work >= self.effort.columns
            if spent or stalled.at(lower, self.upper, done, self.work, self.effort.columns * _STALLED):
                self.method += ", limit"
                return lower
            node = open_nodes.pop()
            done += 1
            self.method = "branch"
            open_nodes += [half for half in self._halves(node) if self._scan(half, self.effort.rounds)]
        return min(self.excluded, self.upper)

    def _halves(self, node: _Node) -> list[_Node]:
        assert node.split is not None and node.scan is not None
        g, side = node.split
        allowed = node.restriction.allowed
        found = []
        for part in (side, allowed[g] & ~side):
            if part.any():
                masks = {**allowed, g: part}
                scan = node.scan.inherited([masks[k] for k in range(len(masks))])
                found.append(_Node(replace(node.restriction, allowed=masks), scan, node.lower))
        return found

    # --- one node ---

    def _scan(self, node: _Node, rounds: int) -> bool:
        """Raise the node's bound; False where nothing of it is worth looking at any more."""
        program, solver = self._relaxation(node.restriction)
        scan = node.scan or Scan(np.array([bool(h.any()) for h in program.hidden]), self.ahead.prices.weights)
        weights = scan.propose()[1] if scan.cuts else scan.weights
        risen = [-np.inf] * _FEW_ROUNDS
        for done in range(rounds):
            if done == _LEARNED and node is self.root and not np.isfinite(self._target()):
                self._integers_on_support()
            cost = program.cost_at(weights)
            answer = solver.solve(cost)
            self.work += program.arrays.num_columns
            if answer.x is None:
                node.lower = np.inf
                return False
            cut, bound = self._learned(program, answer), answer.objective
            node.lower = max(node.lower, bound)
            if node is self.root:
                self._learn_unlimited(bound)
            scan.add(weights, bound, cut)
            if node.lower >= self._target():
                self.excluded = min(self.excluded, node.lower)
                return False
            if self._narrow(node, program, cost, bound, answer):
                program, solver = self._relaxation(node.restriction)
            reach, weights = scan.propose()
            if not scan.hides.any() or reach - scan.bound <= self.effort.gap / 3 * abs(reach):
                break
            risen = [*risen[1:], scan.bound]
            if risen[-1] - risen[0] < _WORTH_A_ROUND * self.effort.gap * abs(scan.bound):
                break
        node.scan, node.split = scan, self._split(node, scan)
        if node.split is None:
            self._take_last(node)
        return node.split is not None

    def _take_last(self, node: _Node) -> None:
        """Price the one plan that is left."""
        program, solver = self._relaxation(node.restriction)
        answer = solver.solve(program.cost_at(np.zeros(len(SEGMENTS))))
        if answer.x is not None:
            self._learned(program, answer)

    def _relaxation(self, restriction: Restriction) -> tuple[Program, Solver]:
        program = assemble(self.problem, restriction, self.cache)
        self.size = max(self.size, (program.arrays.num_columns, program.arrays.num_rows))
        return program, Solver(program.arrays, integer=False)

    def _learned(self, program: Program, answer: Answer) -> Cut:
        """The cut of an answer; its candidates are remembered, and its plan if it is the best."""
        x = answer.x
        assert x is not None and answer.duals is not None
        for g, columns in enumerate(program.columns):
            self._support[g] |= (columns >= 0) & (x[columns] > _SUPPORT)
        fixed, compute, hidden = program.parts(x)
        chosen, byte_s = program.candidates_of(x), program.byte_s(answer.duals)
        self.has_charged |= byte_s > 0
        if program.is_integral(x):
            self._offer(fixed + float(np.maximum(compute, hidden).sum()), chosen)
            return Cut(fixed, compute, hidden, chosen, chosen, byte_s)
        return Cut(fixed, compute, hidden, chosen, program.runners_up(x), byte_s)

    def _offer(self, objective: float, chosen: tuple[int, ...]) -> None:
        """Keep a plan if it fits and is the best."""
        limit = self.problem.memory_limit_bytes
        if objective < self.upper and (limit is None or sum(memory_of(self.problem, chosen).values()) <= limit):
            self.upper, self.chosen = objective, chosen

    def _narrow(self, node: _Node, program: Program, cost: np.ndarray, bound: float, answer: Answer) -> bool:
        """Drop candidates with which no plan is better enough than the best known; False where few could be dropped."""
        target = self._target()
        if not np.isfinite(target):
            return False
        assert answer.reduced_costs is not None and answer.duals is not None
        proved = proved_costs(program.links, program.columns, cost, bound, answer.reduced_costs, answer.duals)
        now = [node.restriction.allowed[g] for g in range(len(proved))]
        kept = [mask & (floor <= target + _EXACT * abs(target)) for mask, floor in zip(now, proved, strict=True)]
        before, after = (sum(int(mask.sum()) for mask in masks) for masks in (now, kept))
        if after > _WORTH * before or not all(mask.any() for mask in kept):
            return False
        self.excluded = min(self.excluded, target)
        node.restriction = replace(node.restriction, allowed=dict(enumerate(kept)))
        return True

    def _split(self, node: _Node, scan: Scan) -> tuple[int, np.ndarray] | None:
        """Where to tear the node apart; None where one plan is left."""
        allowed = [node.restriction.allowed[g] for g in range(len(self.problem.choices))]
        active = scan.active()
        if active is not None:
            cut, one, other = active
            if all(allowed[g][c] for plan in (one, other) for g, c in enumerate(plan)):
                return halves(self.problem, self.cache, one, other, allowed, cut.byte_s)
        g = max(range(len(allowed)), key=lambda g: int(allowed[g].sum()))
        several = np.flatnonzero(allowed[g])
        if len(several) < 2:
            return None
        side = np.zeros(len(allowed[g]), dtype=bool)
        side[several[: len(several) // 2]] = True
        return g, side

    # --- integer programs ---

    def _integers_on_support(self) -> None:
        """A good plan from the candidates that any relaxation used."""
        support = {g: mask & self.root.restriction.allowed[g] for g, mask in enumerate(self._support)}
        if all(mask.any() for mask in support.values()):
            self.method = "mip"
            self._integers(self.root.restriction.merged(Restriction(support)))

    def _integers_at_once(self) -> bool:
        """What is left of the root as one integer program, if it is small; False where that shows that nothing of it is left."""
        if np.isfinite(self._target()) and not self._scan(self.root, _LEARNED):
            return False
        program = assemble(self.problem, self.root.restriction, self.cache)
        if program.arrays.num_columns > _SMALL:
            return True
        answer = self._integers(self.root.restriction)
        self.method, self.root.lower = "mip", max(self.root.lower, answer.bound)
        return answer.status != "infeasible"

    def _last_resort(self) -> Solution | None:
        """All as one integer program, where no plan was met that fits.

        Raises:
            NoPlanFoundError: its limit was reached without any plan found.
        """
        answer = self._integers(self.root.restriction)
        if self.chosen is None and answer.status != "infeasible":
            raise NoPlanFoundError(f"no plan was found within {self.effort.nodes} nodes, and none was excluded: raise the effort")
        if self.chosen is None:
            return None
        self.method = "mip" if answer.status == "optimal" else "mip, limit"
        return self._solution(answer.bound)

    def _integers(self, restriction: Restriction) -> Answer:
        program = assemble(self.problem, restriction, self.cache)
        arrays: LinearProgram = program.with_overlap()
        answer = Solver(arrays, integer=True).solve(
            arrays.cost, gap=self.effort.gap * 0.5, nodes=self.effort.nodes, time_limit_s=self.effort.time_limit_s
        )
        if answer.x is not None:
            self._offer(answer.objective, program.candidates_of(answer.x))
        return answer
