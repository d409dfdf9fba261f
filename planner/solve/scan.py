"""Bounds by prices: the overlap's weights and the price of memory with which the relaxation is highest.

The time of a segment is ``exposed + max(compute, hidden)``, at least ``exposed + (1 - w) * compute + w * hidden`` for every
``w`` in [0, 1]; and memory may be charged at any price ``m >= 0`` if what the limit allows is paid back. For fixed prices the
program is a sum of flows whose relaxation is integral as a rule and solved in milliseconds: a plan and a lower bound at once.
With both as rows it is dense, fractional and many times slower (measured: Llama-3-405B, 12 s against 0.2 s).

Source: Lagrangian bound, maximised by cutting planes (Kelley, "The cutting-plane method for solving convex programs", 1960).
Measured: PLANNER_FACTS §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.solve.backend import LinearProgram, Solver
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.program import Program

# Largest change of a weight at once: with one of compute and hidden nearly free the program is slow, and says little.
_STEP, _STEP_OF_HALF = 0.5, 0.25
# Largest price of memory at first, as a part of the objective for all that the limit allows; then what it may grow by.
_PRICE, _GROWTH, _GROWTH_OF_HALF = 0.1, 4.0, 1.6


@dataclass(frozen=True)
class Prices:
    """What a relaxation charges.

    Attributes:
        weights: part of hidden instead of compute by segment.
        memory: objective units for all the memory that the limit allows.
    """

    weights: tuple[float, ...] = (0.0,) * len(SEGMENTS)
    memory: float = 0.0

    def cost(self, program: Program) -> np.ndarray:
        """Objective by column."""
        cost = program.cost_at(np.array(self.weights))
        return cost if program.memory is None else cost + self.memory * program.memory


@dataclass(frozen=True)
class Cut:
    """An upper bound of the bound as a function of the prices.

    Attributes:
        fixed: what is paid anyway.
        compute: by segment.
        hidden: by segment.
        excess: memory beyond the limit, as a part of the limit.
        chosen: the plan that it stands for; None where the relaxation was fractional.
    """

    fixed: float
    compute: np.ndarray
    hidden: np.ndarray
    excess: float
    chosen: tuple[int, ...] | None

    def at(self, prices: Prices) -> float:
        """What the cut costs at some prices."""
        w = np.array(prices.weights)
        return self.fixed + float((1 - w) @ self.compute + w @ self.hidden) + prices.memory * self.excess


@dataclass
class Scan:
    """Cutting planes of one program, and the best prices so far.

    Attributes:
        hides: by segment, whether anything can be hidden.
        limited: whether the memory limit could be exceeded.
        prices: those with the highest bound.
        bound: it.
        cuts: all met.
        is_half: whether it goes on from the scan of a larger problem: then the best prices are near.
    """

    hides: np.ndarray
    limited: bool
    prices: Prices = field(default_factory=Prices)
    bound: float = -np.inf
    cuts: list[Cut] = field(default_factory=list)
    is_half: bool = False

    def inherited(self, allowed: Sequence[np.ndarray]) -> Scan:
        """The scan of a half, with the cuts of the plans that are in it."""
        kept = [c for c in self.cuts if c.chosen is not None and all(m[x] for m, x in zip(allowed, c.chosen, strict=True))]
        return Scan(self.hides, self.limited, self.prices, self.bound, kept, True)

    def add(self, prices: Prices, bound: float, cut: Cut) -> None:
        self.cuts.append(cut)
        if bound >= self.bound:
            self.bound, self.prices = bound, prices

    def propose(self) -> tuple[float, Prices]:
        """The highest bound that the cuts allow, and prices near the best ones in that direction."""
        growth, step = (_GROWTH_OF_HALF, _STEP_OF_HALF) if self.is_half else (_GROWTH, _STEP)
        largest = max(_PRICE * abs(self.bound), growth * self.prices.memory) if self.limited else 0.0
        reach, weights, memory = _highest(self.cuts, self.hides, largest)
        now = np.array(self.prices.weights)
        return reach, Prices(tuple(np.clip(weights, now - step, now + step).tolist()), memory)

    def seconds(self) -> float:
        """The largest time of the plans met, if nothing were hidden."""
        return max(c.fixed + float((c.compute + c.hidden).sum()) for c in self.cuts)

    def active(self) -> tuple[Cut, Cut] | None:
        """The two different plans that hold the bound down at the best prices."""
        plans: dict[tuple[int, ...], Cut] = {c.chosen: c for c in self.cuts if c.chosen is not None}
        lowest = sorted(plans.values(), key=lambda c: c.at(self.prices))
        return (lowest[0], lowest[1]) if len(lowest) > 1 else None


def _highest(cuts: Sequence[Cut], hides: np.ndarray, largest: float) -> tuple[float, np.ndarray, float]:
    """The largest value that the cuts allow the bound, with the weights and the price of memory where they do."""
    segments = len(hides)
    matrix = np.array([[*(c.compute - c.hidden), -c.excess, 1.0] for c in cuts])
    rows, columns = np.nonzero(np.abs(matrix) > 0)
    program = LinearProgram(
        np.append(np.zeros(segments + 1), -1.0),
        np.zeros(segments + 2),
        np.array([*hides.astype(float), largest, np.inf]),
        np.zeros(segments + 2, dtype=bool),
        np.full(len(cuts), -np.inf),
        np.array([c.fixed + c.compute.sum() for c in cuts]),
        rows,
        columns,
        matrix[rows, columns],
    )
    answer = Solver(program, integer=False).solve(program.cost)
    assert answer.x is not None
    return float(answer.x[-1]), np.clip(answer.x[:segments], 0.0, 1.0), max(0.0, float(answer.x[segments]))
