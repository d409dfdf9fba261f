"""Solve a problem: the relaxation first, integers only where it is fractional.

The flow form's relaxation is nearly always integral, and then proved optimal at once. Otherwise a mixed-integer program over the
relaxation's support gives a plan, reduced costs show which candidates no better plan can use, and a second one over the
rest closes the gap (or says how much is left at the time limit).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve import backend
from meshwright.planner.solve.backend import Answer, LinearProgram
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, Program, assemble

_INTEGRAL = 1e-6


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        gap: relative gap at which to stop.
        time_limit_s: seconds for all mixed-integer programs of one problem together.
    """

    gap: float = 1e-4
    time_limit_s: float = 30.0


@dataclass(frozen=True)
class Solution:
    """A choice for everything.

    Attributes:
        chosen: candidate of every choice.
        objective_s: objective in seconds, tie-breaks and penalties included (or bytes when memory was minimised).
        bound_s: proved lower bound of it.
        method: ``"lp"`` (the relaxation was integral), ``"mip"``, or ``"mip, time limit"``.
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
        objective: ``"time"`` or ``"memory"``.

    Raises:
        RuntimeError: the time limit passed without any plan found.
    """
    effort = effort or Effort()
    if any(not allowed.any() for allowed in restriction.allowed.values()):
        return None
    program = assemble(problem, restriction, cache, objective=objective)
    relaxed = backend.solve(program.arrays, integer=False)
    if relaxed.x is None:
        return None
    answer, method = relaxed, "lp"
    if not _integral(program, relaxed.x):
        found = _integers(program, relaxed, effort)
        if found is None:
            return None
        answer, method = found
    assert answer.x is not None
    return Solution(
        program.candidates_of(answer.x),
        answer.objective / program.scale,
        min(answer.objective, max(answer.bound, relaxed.objective)) / program.scale,
        method,
        program.arrays.num_columns,
        program.arrays.num_rows,
    )


def _integral(program: Program, x: np.ndarray) -> bool:
    values = x[program.binary_columns()]
    return bool(np.all(np.abs(values - np.round(values)) < _INTEGRAL))


def _integers(program: Program, relaxed: Answer, effort: Effort) -> tuple[Answer, str] | None:
    """A mixed-integer solution and how it was found; None where there is none."""
    assert relaxed.x is not None and relaxed.reduced_costs is not None
    deadline = time.perf_counter() + effort.time_limit_s
    binary = program.arrays.integer
    support = ~binary | (relaxed.x > 1e-9)
    first = backend.solve(
        _restricted(program.arrays, support), integer=True, gap=effort.gap, time_limit_s=effort.time_limit_s / 3
    )
    if first.x is not None and first.objective - relaxed.objective <= effort.gap * abs(first.objective):
        return replace(first, bound=relaxed.objective), "mip"
    slack = first.objective - relaxed.objective if first.x is not None else np.inf
    useful = ~binary | (relaxed.reduced_costs <= slack) | (relaxed.x > 1e-9)
    left = max(1.0, deadline - time.perf_counter())
    second = backend.solve(_restricted(program.arrays, useful), integer=True, gap=effort.gap, time_limit_s=left)
    best = min((a for a in (first, second) if a.x is not None), key=lambda a: a.objective, default=None)
    if best is None:
        if second.status == "infeasible":
            return None
        raise RuntimeError(f"no plan was found within {effort.time_limit_s:g} s, and none was excluded: raise the time limit")
    bound = second.bound if second.status != "infeasible" else best.objective
    return replace(best, bound=max(bound, relaxed.objective)), "mip" if second.status == "optimal" else "mip, time limit"


def _restricted(arrays: LinearProgram, keep: np.ndarray) -> LinearProgram:
    """The program with all other columns fixed at 0."""
    return replace(arrays, upper=np.where(keep, arrays.upper, 0.0), lower=np.where(keep, arrays.lower, 0.0))
