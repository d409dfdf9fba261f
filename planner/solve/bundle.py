"""Prices of overlap and memory, and a search for those at which a bound is highest.

The time of a segment is at least ``(1 - w) * compute + w * hidden`` for every ``w`` in [0, 1], and a plan that fits costs at least its
time plus ``byte_s * (memory - limit)`` for every ``byte_s >= 0``, where the largest of several terms counts as any mixture of them. So
each choice of prices gives a bound that is a sum over choices and pairs, and each plan says how high the bound can be at most at
any prices: a plane. The next prices are those at which the planes so far allow the highest bound, near the best ones so far.

Source: Kelley, "The cutting-plane method for solving convex programs" (1960), in a box around the best point (Marsten, Hogan,
Blankenship, "The boxstep method for large-scale optimization", 1975).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.planner.solve.backend import LinearProgram, Solver
from meshwright.planner.solve.problem import SEGMENTS, Problem

# Largest change of a weight at once, and of the price of all memory as a part of the bound.
_STEP, _FIRST = 0.5, 0.03
# Once the price of memory is more than that, it may change by so many times what it was.
_FACTOR = 3.0
# The box is made so much narrower where the bound fell, and wider where it rose.
_NARROWER, _WIDER = 0.4, 2.0


@dataclass(frozen=True)
class Prices:
    """What counts how much.

    Attributes:
        weights: part of hidden that counts instead of compute, by segment.
        byte_s: seconds that a byte of memory at rest is worth.
        term_s: seconds that a byte of each term of each peak is worth, all terms in one array, shape [terms].
    """

    weights: np.ndarray
    byte_s: float
    term_s: np.ndarray

    @classmethod
    def none(cls, problem: Problem) -> Prices:
        """Compute counts, what can be hidden and memory do not."""
        return cls(np.zeros(len(SEGMENTS)), 0.0, np.zeros(sum(len(p.terms) for p in problem.peaks)))

    def equals(self, other: Prices) -> bool:
        """Whether other prices are the same."""
        same = np.array_equal(self.weights, other.weights) and self.byte_s == other.byte_s
        return same and np.array_equal(self.term_s, other.term_s)

    @property
    def is_free(self) -> bool:
        """Whether memory costs nothing."""
        return self.byte_s == 0.0

    def is_for(self, problem: Problem) -> bool:
        """Whether they say something of a problem's memory."""
        return not self.is_free and len(self.term_s) == sum(len(p.terms) for p in problem.peaks)


@dataclass(frozen=True)
class Plane:
    """What a plan costs at any prices.

    Attributes:
        fixed: seconds paid anyway.
        compute: by segment.
        hidden: by segment.
        over_bytes: memory at rest less the limit.
        term_bytes: of each term, shape [terms].
        chosen: the plan: candidate of every choice.
    """

    fixed: float
    compute: np.ndarray
    hidden: np.ndarray
    over_bytes: float
    term_bytes: np.ndarray
    chosen: tuple[int, ...]

    @property
    def objective(self) -> float:
        """What it costs with what hides behind compute."""
        return self.fixed + float(np.maximum(self.compute, self.hidden).sum())


class Bundle:
    """The planes so far, and the best prices.

    Attributes:
        prices: those with the highest bound.
        bound: it.
        planes: all met.
    """

    def __init__(self, problem: Problem, hides: np.ndarray, limited: bool):
        """``hides``: by segment, whether anything can be hidden; ``limited``: whether memory is priced."""
        self.prices, self.bound = Prices.none(problem), -np.inf
        self.planes: list[Plane] = []
        self._hides, self._limited, self._reach = hides, limited, 1.0
        self._unit = float(problem.memory_limit_bytes or 1)
        self._peak_of = np.repeat(np.arange(len(problem.peaks)), [len(p.terms) for p in problem.peaks])
        self._peak_weights = [p.weight for p in problem.peaks]

    def add(self, prices: Prices, bound: float, plane: Plane) -> None:
        """What was learned at some prices: a bound, and a plan."""
        self.planes.append(plane)
        self._reach = min(1.0, self._reach * _WIDER) if bound >= self.bound else self._reach * _NARROWER
        self.prove(prices, bound)

    def prove(self, prices: Prices, bound: float) -> None:
        """A bound at some prices."""
        if bound >= self.bound:
            self.bound, self.prices = bound, prices

    def propose(self) -> tuple[float, Prices]:
        """The highest bound that the planes allow near the best prices, and where."""
        segments, terms = len(self._hides), len(self._peak_of)
        at = self._vector(self.prices)
        most = max(_FACTOR * float(at[segments]), _FIRST * abs(self.bound)) if self._limited else 0.0
        of_terms = most * np.array(self._peak_weights)[self._peak_of] if terms else np.zeros(0)
        step = self._reach * np.array([*(_STEP * self._hides), most, *of_terms])
        lower, upper = np.maximum(at - step, 0.0), at + step
        upper[:segments] = np.minimum(upper[:segments], 1.0)
        planes = np.array(
            [[*(p.compute - p.hidden), -p.over_bytes / self._unit, *(-p.term_bytes / self._unit), 1.0] for p in self.planes]
        )
        mixtures = np.zeros((len(self._peak_weights), segments + terms + 2))
        mixtures[:, segments] = [-w for w in self._peak_weights]
        mixtures[self._peak_of, segments + 1 + np.arange(terms)] = 1.0
        matrix = np.vstack([planes, mixtures])
        rows, columns = np.nonzero(matrix)
        program = LinearProgram(
            np.append(np.zeros(segments + terms + 1), -1.0),
            np.append(lower, -np.inf),
            np.append(upper, np.inf),
            np.zeros(segments + terms + 2, dtype=bool),
            np.full(len(matrix), -np.inf),
            np.array([*(p.fixed + p.compute.sum() for p in self.planes), *np.zeros(len(mixtures))]),
            rows,
            columns,
            matrix[rows, columns],
        )
        answer = Solver(program, integer=False).solve(program.cost)
        assert answer.x is not None
        return float(answer.x[-1]), self._prices(answer.x[:-1])

    def _vector(self, prices: Prices) -> np.ndarray:
        return np.array([*prices.weights, prices.byte_s * self._unit, *(prices.term_s * self._unit)])

    def _prices(self, vector: np.ndarray) -> Prices:
        segments = len(self._hides)
        byte_s = max(0.0, float(vector[segments])) / self._unit
        terms = np.maximum(vector[segments + 1 :], 0.0) / self._unit
        for peak, weight in enumerate(self._peak_weights):  # exactly within what a mixture may be
            of_peak = self._peak_of == peak
            total = float(terms[of_peak].sum())
            if total > weight * byte_s:
                terms[of_peak] *= weight * byte_s / total
        return Prices(np.clip(vector[:segments], 0.0, 1.0), byte_s, terms)
