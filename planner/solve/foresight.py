"""What is known of a problem before any program is filled: a bound, candidates that cannot be of interest, and a plan.

All by messages (:mod:`.messages`), at the prices of overlap and memory that planes propose (:mod:`.bundle`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve.bundle import Bundle, Plane, Prices
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, largest_memory_bytes

# Passes of messages at each of the prices, at most, and the part of the gap by which four more have to raise the bound.
_PASSES, _WORTH = 32, 0.2
# The search for prices ends where the bound rose by less than this part of the gap in so many rounds.
_RISE, _PATIENCE = 0.3, 3
# A bound so many times that without a memory limit: nothing fits, as a rule, and the solver says so sooner.
_HOPELESS = 16.0
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
    """

    bound_s: float
    free_bound_s: float
    proved_s: tuple[np.ndarray, ...]
    prices: Prices
    chosen: tuple[int, ...] | None
    about_s: float
    is_short: bool = False

    def below(self, restriction: Restriction, cutoff_s: float) -> Restriction | None:
        """The restriction without what only plans of at least ``cutoff_s`` use; None where nothing else is left."""
        kept = {g: (proved <= cutoff_s * (1 + _EXACT)) & (proved < np.inf) for g, proved in enumerate(self.proved_s)}
        kept = {g: mask & restriction.allowed[g] if g in restriction.allowed else mask for g, mask in kept.items()}
        return replace(restriction, allowed=kept) if all(mask.any() for mask in kept.values()) else None


def nothing_left(problem: Problem) -> Foresight:
    """What is known where a restriction leaves nothing."""
    proved = tuple(np.full(c.num_candidates, np.inf) for c in problem.choices)
    return Foresight(np.inf, np.inf, proved, Prices.none(problem), None, np.inf)


def foresee(
    problem: Problem,
    restriction: Restriction,
    cache: NetworkCache,
    *,
    gap: float,
    rounds: int,
    beat_s: float = np.inf,
    likely: Prices | None = None,
) -> Foresight:
    """Look ahead.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        gap: relative gap that is of interest: finer prices are not looked for.
        rounds: prices tried at most.
        beat_s: a bound as high as this is high enough.
        likely: prices to try early, first where something is to be beaten: those of a similar problem.
    """
    look = _Look(problem, restriction, cache, gap, beat_s)
    likely = likely if likely is not None and not likely.is_free and look.bundle.suits(likely) else None
    free, early = look.bundle.prices, likely is not None and np.isfinite(beat_s)
    queue = [prices for prices in ((likely, free) if early else (free,)) if prices is not None]
    for _ in range(rounds):
        if not look.at(queue.pop(0)):
            break
        if not queue:
            proposed = look.next_prices()
            if proposed is None:
                break
            queue, likely = [proposed if likely is None or early else likely], None
            if any(map(queue[0].equals, look.tried)):
                break
    return look.found()


class _Look:
    """The prices that were tried, and what was learned at them."""

    def __init__(self, problem: Problem, restriction: Restriction, cache: NetworkCache, gap: float, beat_s: float):
        self.problem, self.gap, self.beat_s = problem, gap, beat_s
        limit = problem.memory_limit_bytes
        self.messages = Messages(problem, restriction, cache)
        is_limited = limit is not None and largest_memory_bytes(problem, restriction) > limit
        self.bundle = Bundle(problem, self.messages.hides, is_limited)
        self.tried: list[Prices] = []
        self._proved = [np.full(c.num_candidates, -np.inf) for c in problem.choices]
        self._risen, self._free_bound, self._is_short = [-np.inf] * _PATIENCE, -np.inf, False

    def at(self, prices: Prices) -> bool:
        """Learn what some prices prove; whether more prices are of interest. A bound that is high enough is all that is learned."""
        self.tried.append(prices)
        self.messages.price(prices)
        self.messages.settle(_PASSES, _WORTH * self.gap, self.beat_s)
        self._is_short = self.messages.plain_bound >= self.beat_s
        bound = self.messages.plain_bound if self._is_short else self._prove()
        self._free_bound = max(self._free_bound, bound if prices.is_free else -np.inf)
        self.bundle.add(prices, bound, None if self._is_short else self.messages.reading())
        self._is_short = self.bundle.bound >= self.beat_s
        is_hopeless = np.isfinite(self._free_bound) and self.bundle.bound > _HOPELESS * self._free_bound
        return not self._is_short and not is_hopeless

    def _prove(self) -> float:
        bound, floors = self.messages.proved()
        for best, floor in zip(self._proved, floors, strict=True):
            np.maximum(best, floor, out=best)
        return bound

    def next_prices(self) -> Prices | None:
        """Where the bound may be higher; None where it hardly rises any more."""
        self._risen = [*self._risen[1:], self.bundle.bound]
        if self._risen[-1] - self._risen[0] < _RISE * self.gap * abs(self._risen[-1]):
            return None
        reach, prices = self.bundle.propose()
        return None if reach - self.bundle.bound <= self.gap / 3 * abs(reach) else prices

    def found(self) -> Foresight:
        bundle, planes = self.bundle, [p for p in self.bundle.planes if p.objective < self.messages.unreachable_s]
        nearest = _nearest(self.problem, planes)
        chosen, about = (None, np.inf) if nearest is None else (nearest.chosen, nearest.objective)
        return Foresight(bundle.bound, self._free_bound, tuple(self._proved), bundle.prices, chosen, about, self._is_short)


def _nearest(problem: Problem, planes: list[Plane]) -> Plane | None:
    """The best of the plans that fit."""
    limit = problem.memory_limit_bytes
    for plane in sorted(planes, key=lambda p: p.objective):
        if limit is None or sum(memory_of(problem, plane.chosen).values()) <= limit:
            return plane
    return None
