"""Plans that fit, near a bound: many choices are moved at a time while overlap and memory get the prices that the plan at hand asks for.

Plans that are best at fixed prices are extremes: all communication hidden or none, far below the memory limit or far above it. Where what can
be hidden is more than there is to hide it behind, it counts more from then on; where a plan does not fit, memory does. As each move leaves
many choices where they are, plans settle between the extremes. Measured on four problems of Llama-3-405B on 16,384 GPUs: within 2-6 % of the
optimum in 0.2 s, where no plan of any fixed prices fits, and an integer program takes 0.3-5 s.

Source: subgradient steps with a primal heuristic, as in Fisher, "The Lagrangian relaxation method for solving integer programming problems"
(1981).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.planner.solve.bundle import Plane, Prices
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import Problem

# Moves at most, and how many end the search if none finds a better plan that fits, or than one that is good.
_MOVES, _IDLE, _IDLE_NEAR = 100, 30, 8
# The largest change of a weight, and of memory's price as a part of it, at first; they are half of that after so many moves.
_STEP, _DEARER, _HALVED = 0.2, 0.6, 20
# The price of memory stays within so many times what it was.
_FACTORS = (0.05, 50.0)


def fits(problem: Problem, plane: Plane) -> bool:
    """Whether a plan is within the memory limit."""
    limit = problem.memory_limit_bytes
    return limit is None or sum(memory_of(problem, plane.chosen).values()) <= limit


def balanced(messages: Messages, problem: Problem, prices: Prices, at: Sequence[int], near_s: float = -np.inf) -> Iterator[Plane]:
    """Better and better plans that fit.

    Args:
        messages: of the problem; they are priced anew.
        problem: the problem.
        prices: of overlap and memory, to begin with.
        at: the plan to begin with: a candidate of every variable.
        near_s: plans that cost at most this are good: better ones are not looked for as long.
    """
    at, generator, order = list(at), np.random.default_rng(0), np.arange(len(at))
    weights, dearer, best_s, idle, has_moved = prices.weights, 1.0, np.inf, 0, False
    plane, hides, now = messages.plane(at), messages.hides, prices
    for k in range(_MOVES):
        plane = messages.plane(at) if has_moved else plane
        does_fit = fits(problem, plane)
        idle += 1
        if does_fit and plane.objective < best_s:
            best_s, idle = plane.objective, 0
            yield plane
        if idle > (_IDLE if best_s > near_s else _IDLE_NEAR):
            return
        slower = 1 + k / _HALVED
        weights = _weights(weights, plane, hides, _STEP / slower)
        if not prices.is_free:
            times = 1 + _DEARER / slower
            dearer = float(np.clip(dearer * (1 / np.sqrt(times) if does_fit else times), *_FACTORS))
        asked = Prices(weights, dearer * prices.byte_s, dearer * prices.term_s)
        if k == 0 or not asked.equals(now):
            messages.price(now := asked)
        generator.shuffle(order)
        has_moved = messages.move(order.tolist(), at)


def _weights(weights: np.ndarray, plane: Plane, hides: np.ndarray, step: float) -> np.ndarray:
    """More weight for what is hidden in segments where it takes longer than what is computed, and less where it does not."""
    longer = np.maximum(plane.hidden, plane.compute)
    apart = np.divide(plane.hidden - plane.compute, longer, out=np.zeros(len(longer)), where=longer > 0)
    return np.where(hides, np.clip(weights + step * np.clip(5 * apart, -1.0, 1.0), 0.0, 1.0), weights)
