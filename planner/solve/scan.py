"""Bounds by prices: the overlap's weights with which the relaxation is highest.

The time of a segment is ``exposed + max(compute, hidden)``, at least ``exposed + (1 - w) * compute + w * hidden`` for every
``w`` in [0, 1]. For fixed weights the program is a sum of flows and the memory rows, whose relaxation is solved in milliseconds and
integral where memory does not bind: a lower bound, and a plan or what to mix one from. With overlap as rows it is dense,
fractional and many times slower (measured: Llama-3-405B, 12 s against 0.2 s).

Source: Lagrangian bound, maximised by cutting planes (Kelley, "The cutting-plane method for solving convex programs", 1960).
Measured: PLANNER_FACTS §3. Memory as rows, not as a price: where it binds, the bound of Llama-3-70B on 64x8 GPUs rises from 1.1 %
below the best plan to 0.3 %, at the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.solve.backend import LinearProgram, Solver
from meshwright.planner.solve.problem import SEGMENTS

# Largest change of a weight at once: with one of compute and hidden nearly free the program is slow, and says little.
_STEP, _STEP_OF_HALF = 0.5, 0.25


@dataclass(frozen=True)
class Cut:
    """An upper bound of the bound as a function of the weights, from the answer of one relaxation.

    Attributes:
        fixed: what is paid anyway.
        compute: by segment.
        hidden: by segment.
        chosen: the candidate that the answer takes most of, by choice.
        second: the one that it takes most of beside that; ``chosen`` where it takes one alone.
        byte_s: seconds that a byte of memory is worth in it.
    """

    fixed: float
    compute: np.ndarray
    hidden: np.ndarray
    chosen: tuple[int, ...]
    second: tuple[int, ...]
    byte_s: float = 0.0

    @property
    def is_plan(self) -> bool:
        """Whether the answer was integral."""
        return self.chosen == self.second

    def at(self, weights: np.ndarray) -> float:
        """What the cut costs at some weights."""
        return self.fixed + float((1 - weights) @ self.compute + weights @ self.hidden)


@dataclass
class Scan:
    """Cutting planes of one program, and the best weights so far.

    Attributes:
        hides: by segment, whether anything can be hidden.
        weights: those with the highest bound, part of hidden instead of compute by segment.
        bound: it.
        cuts: all met.
        is_half: whether it goes on from the scan of a larger problem: then the best weights are near.
    """

    hides: np.ndarray
    weights: np.ndarray = field(default_factory=lambda: np.zeros(len(SEGMENTS)))
    bound: float = -np.inf
    cuts: list[Cut] = field(default_factory=list)
    is_half: bool = False

    def inherited(self, allowed: Sequence[np.ndarray]) -> Scan:
        """The scan of a half, with the cuts of the plans that are in it."""
        kept = [c for c in self.cuts if c.is_plan and all(m[x] for m, x in zip(allowed, c.chosen, strict=True))]
        return Scan(self.hides, self.weights, self.bound, kept, True)

    def add(self, weights: np.ndarray, bound: float, cut: Cut) -> None:
        self.cuts.append(cut)
        if bound >= self.bound:
            self.bound, self.weights = bound, weights

    def propose(self) -> tuple[float, np.ndarray]:
        """The highest bound that the cuts allow, and weights near the best ones in that direction."""
        step = _STEP_OF_HALF if self.is_half else _STEP
        reach, weights = _highest(self.cuts, self.hides)
        return reach, np.clip(weights, self.weights - step, self.weights + step)

    def active(self) -> tuple[Cut, tuple[int, ...], tuple[int, ...]] | None:
        """What holds the bound down at the best weights: the lowest cut, and the two plans that it mixes or that lie lowest."""
        lowest = sorted(self.cuts, key=lambda c: c.at(self.weights))
        if not lowest:
            return None
        if not lowest[0].is_plan:
            return lowest[0], lowest[0].chosen, lowest[0].second
        other = next((c.chosen for c in lowest if c.chosen != lowest[0].chosen), None)
        return None if other is None else (lowest[0], lowest[0].chosen, other)


def _highest(cuts: Sequence[Cut], hides: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest value that the cuts allow the bound, with the weights where they do."""
    segments = len(hides)
    matrix = np.array([[*(c.compute - c.hidden), 1.0] for c in cuts])
    rows, columns = np.nonzero(np.abs(matrix) > 0)
    program = LinearProgram(
        np.append(np.zeros(segments), -1.0),
        np.zeros(segments + 1),
        np.array([*hides.astype(float), np.inf]),
        np.zeros(segments + 1, dtype=bool),
        np.full(len(cuts), -np.inf),
        np.array([c.fixed + c.compute.sum() for c in cuts]),
        rows,
        columns,
        matrix[rows, columns],
    )
    answer = Solver(program, integer=False).solve(program.cost)
    assert answer.x is not None
    return float(answer.x[-1]), np.clip(answer.x[:segments], 0.0, 1.0)
