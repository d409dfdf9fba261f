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
        likely: prices to try early: those of a similar problem.
    """
    limit = problem.memory_limit_bytes
    messages = Messages(problem, restriction, cache)
    bundle = Bundle(problem, messages.hides, limit is not None and largest_memory_bytes(problem, restriction) > limit)
    prices, free_bound, later = bundle.prices, -np.inf, None
    likely = likely if likely is not None and not likely.is_free and bundle.suits(likely) else None
    if likely is not None and np.isfinite(beat_s):  # where memory hurts, that alone may be enough
        prices, likely, later = likely, None, prices
    proved = [np.full(c.num_candidates, -np.inf) for c in problem.choices]
    risen, tried = [-np.inf] * _PATIENCE, list[Prices]()
    for _ in range(rounds):
        tried.append(prices)
        messages.price(prices)
        messages.settle(_PASSES, _WORTH * gap, beat_s)
        if messages.plain_bound >= beat_s:
            free_bound = max(free_bound, messages.plain_bound if prices.is_free else -np.inf)
            return Foresight(messages.plain_bound, free_bound, tuple(proved), prices, None, np.inf, True)
        bound, floors = messages.proved()
        for best, floor in zip(proved, floors, strict=True):
            np.maximum(best, floor, out=best)
        bundle.add(prices, bound, messages.reading())
        free_bound = max(free_bound, bound if prices.is_free else -np.inf)
        if bound >= beat_s or (np.isfinite(free_bound) and bundle.bound > _HOPELESS * free_bound):
            break
        if later is not None:
            prices, later = later, None
            continue
        risen = [*risen[1:], bundle.bound]
        if risen[-1] - risen[0] < _RISE * gap * abs(risen[-1]):
            break
        reach, prices = bundle.propose()
        if reach - bundle.bound <= gap / 3 * abs(reach):
            break
        if likely is not None:
            prices, likely = likely, None
        if any(map(prices.equals, tried)):
            break
    nearest = _nearest(problem, [p for p in bundle.planes if p.objective < messages.unreachable_s])
    chosen, about = (None, np.inf) if nearest is None else (nearest.chosen, nearest.objective)
    return Foresight(bundle.bound, free_bound, tuple(proved), bundle.prices, chosen, about, bundle.bound >= beat_s)


def _nearest(problem: Problem, planes: list[Plane]) -> Plane | None:
    """The best of the plans that fit."""
    limit = problem.memory_limit_bytes
    for plane in sorted(planes, key=lambda p: p.objective):
        if limit is None or sum(memory_of(problem, plane.chosen).values()) <= limit:
            return plane
    return None
