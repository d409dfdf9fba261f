"""What is known of a problem before any program is filled: a bound, candidates that cannot be of interest, and a plan.

All by messages (:mod:`.messages`), at the prices of overlap and memory that planes propose (:mod:`.bundle`); a plan near the bound is looked
for where one is needed (:mod:`.balance`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve.balance import balanced, fits
from meshwright.planner.solve.bundle import Bundle, Plane, Prices
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, largest_memory_bytes

# Passes of messages at each of the prices, at most, and the part of the gap by which four more have to raise the bound.
_PASSES, _WORTH = 32, 0.2
_A_FEW = 4
# The search for prices ends where the bound rose by less than this part of the gap in so many rounds.
_RISE, _PATIENCE = 0.3, 3
# A bound so many times that without a memory limit: nothing fits, as a rule, and the solver says so sooner.
_HOPELESS = 16.0
NEAR = 0.5
"""A plan is looked for until it is so near to the bound, as a part of the gap, unless one that is further is taken too."""

# Floors are sums of many numbers: what is at most so much above a cutoff is kept.
_EXACT = 1e-6


@dataclass(frozen=True)
class Foresight:
    """What holds for all plans that fit the memory limit.

    Attributes:
        bound_s: lower bound of the objective.
        free_bound_s: likewise of all plans, whether they fit or not.
        proved_s: lower bound of plans with a candidate, by choice; infinite where it is not allowed.
        prices: of overlap and memory at which the bound is highest.
        chosen: a plan that fits and is near to the bound; None where none was met.
        about_s: about what it costs, and at most that; infinite where there is none.
        is_short: whether a higher bound was not looked for, as this one was high enough.
        look: what goes on from here; None where nothing is left, or no better plan is of interest.
    """

    bound_s: float
    free_bound_s: float
    proved_s: tuple[np.ndarray, ...]
    prices: Prices
    chosen: tuple[int, ...] | None
    about_s: float
    is_short: bool = False
    look: Look | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether there are no plans at all."""
        return self.look is None and bool(np.isinf(self.bound_s))

    @property
    def is_usual(self) -> bool:
        """Whether memory does not cost so much that nothing fits as a rule."""
        return self.bound_s <= _HOPELESS * self.free_bound_s

    def below(self, restriction: Restriction, cutoff_s: float) -> Restriction | None:
        """The restriction without what only plans of at least ``cutoff_s`` use; None where nothing else is left."""
        kept = {g: (proved <= cutoff_s * (1 + _EXACT)) & (proved < np.inf) for g, proved in enumerate(self.proved_s)}
        kept = {g: mask & restriction.allowed[g] if g in restriction.allowed else mask for g, mask in kept.items()}
        return replace(restriction, allowed=kept) if all(mask.any() for mask in kept.values()) else None


def nothing_left(problem: Problem) -> Foresight:
    """What is known where a restriction leaves nothing."""
    proved = tuple(np.full(c.num_candidates, np.inf) for c in problem.choices)
    return Foresight(np.inf, np.inf, proved, Prices.none(problem), None, np.inf)


class Look:
    """The prices that were tried, and what was learned at them.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        gap: relative gap that is of interest: finer prices are not looked for.
        rounds: prices tried at most.
        likely: prices to try early, first where something is to be beaten: those of a similar problem.

    Attributes:
        is_limited: whether some plan is larger than the memory limit.
    """

    def __init__(
        self,
        problem: Problem,
        restriction: Restriction,
        cache: NetworkCache,
        gap: float,
        rounds: int,
        likely: Prices | None = None,
    ):
        self.problem, self.gap = problem, gap
        limit = problem.memory_limit_bytes
        self.messages = Messages(problem, restriction, cache)
        self.is_limited = limit is not None and largest_memory_bytes(problem, restriction) > limit
        self.bundle = Bundle(problem, self.messages.hides, self.is_limited)
        self.tried: list[Prices] = []
        self._likely = likely if likely is not None and self.is_limited and likely.is_for(problem) else None
        self._queue: list[Prices] = []
        self._rounds, self._read = rounds, list[tuple[Prices, list[int]]]()
        self._proved = [np.full(c.num_candidates, -np.inf) for c in problem.choices]
        self._risen, self._free_bound = [-np.inf] * _PATIENCE, -np.inf
        self._free = Prices.none(problem)
        self._priced: Prices | None = None

    def until(self, beat_s: float) -> Foresight:
        """Go on until the bound is ``beat_s`` or hardly rises any more."""
        if not self.tried and self._likely is not None and np.isfinite(beat_s):
            self._queue, self._likely = [self._likely], None
        while self.bundle.bound < beat_s and not self._is_hopeless:
            self._queue = self._queue or self._next()
            if not self._queue:
                break
            if self._at(self._queue[0], beat_s):
                self._queue.pop(0)
                self._rounds -= 1
        return self._found(self.bundle.bound >= beat_s)

    def meets_a_plan(self) -> bool:
        """Whether a plan that reaches all and fits is met at once."""
        self._price(self._free)
        self.messages.sweep(_A_FEW)
        plane = self.messages.reading()
        return plane.objective < self.messages.unreachable_s and fits(self.problem, plane)

    def _next(self) -> list[Prices]:
        """The prices to try next: none of memory at first, then likely ones, then where the bound may be higher."""
        if self._rounds <= 0:
            return []
        if not any(map(self._free.equals, self.tried)):
            return [self._free]
        proposed = self._proposed()
        if proposed is not None and self._likely is not None:
            proposed, self._likely = self._likely, None
        return [] if proposed is None or any(map(proposed.equals, self.tried)) else [proposed]

    @property
    def _is_hopeless(self) -> bool:
        return np.isfinite(self._free_bound) and self.bundle.bound > _HOPELESS * self._free_bound

    def _at(self, prices: Prices, beat_s: float) -> bool:
        """Learn what some prices prove; whether that is all. A bound that is high enough is all that is learned for now."""
        if not any(prices is known for known in self.tried):
            self.tried.append(prices)
        if self._priced is not prices:
            self._price(prices)
        self.messages.settle(_PASSES, _WORTH * self.gap, beat_s)
        is_short = self.messages.plain_bound >= beat_s
        bound = self.messages.plain_bound if is_short else self._prove()
        self._free_bound = max(self._free_bound, bound if prices.is_free else -np.inf)
        if is_short:
            self.bundle.prove(prices, bound)
        else:
            self.bundle.add(prices, bound, self._reading(prices))
        return not is_short

    def _price(self, prices: Prices) -> None:
        self._priced = prices
        self.messages.price(prices)

    def _reading(self, prices: Prices) -> Plane:
        plane = self.messages.reading()
        self._read.append((prices, self.messages.read))
        return plane

    def _prove(self) -> float:
        bound, floors = self.messages.proved()
        for best, floor in zip(self._proved, floors, strict=True):
            np.maximum(best, floor, out=best)
        return bound

    def _proposed(self) -> Prices | None:
        """Where the bound may be higher; None where it hardly rises any more."""
        self._risen = [*self._risen[1:], self.bundle.bound]
        if self._risen[-1] - self._risen[0] < _RISE * self.gap * abs(self._risen[-1]):
            return None
        reach, prices = self.bundle.propose()
        return None if reach - self.bundle.bound <= self.gap / 3 * abs(reach) else prices

    def _found(self, is_short: bool) -> Foresight:
        bundle, nearest = self.bundle, _nearest(self.problem, self._planes())
        chosen, about = (None, np.inf) if nearest is None else (nearest.chosen, nearest.objective)
        proved = tuple(map(np.copy, self._proved))
        on = self if is_short or about > bundle.bound * (1 + self.gap) else None
        return Foresight(bundle.bound, self._free_bound, proved, bundle.prices, chosen, about, is_short, on)

    def _planes(self) -> list[Plane]:
        return [p for p in self.bundle.planes if p.objective < self.messages.unreachable_s]

    def move(self, near: float = NEAR) -> Foresight:
        """Look for a better plan near the one that was read at the best prices; one within a part ``near`` of the gap is good enough."""
        bound, prices = self.bundle.bound, self.bundle.prices
        at = next((at for tried, at in reversed(self._read) if tried.equals(prices)), None)
        self._priced = None
        for plane in balanced(self.messages, self.problem, prices, at, bound * (1 + self.gap)) if at is not None else ():
            self.bundle.planes.append(plane)
            if plane.objective * (1 - near * self.gap) <= bound:
                break
        return self._found(False)


def _nearest(problem: Problem, planes: list[Plane]) -> Plane | None:
    """The best of the plans that fit."""
    return next((plane for plane in sorted(planes, key=lambda p: p.objective) if fits(problem, plane)), None)
