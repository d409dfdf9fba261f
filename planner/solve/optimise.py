"""Solve a problem: what can be known without a solver first, then a search over what that leaves.

What is foreseen (:mod:`.foresight`) drops most candidates: all that only plans use that cost more than a plan known, or more than is
likely; where that turns out too little, the search (:mod:`.branch`) starts again with more of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.planner.solve.answers import Effort, Excluded, NoPlanFoundError, Solution, Unlimited
from meshwright.planner.solve.backend import Solver
from meshwright.planner.solve.branch import Search
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.foresight import NEAR, Foresight, Look, nothing_left
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, assemble, least_memory_bytes
from meshwright.planner.solve.smallest import fewest_by_messages, least_by_messages, smallest_by_messages

__all__ = [
    "Effort",
    "Excluded",
    "NoPlanFoundError",
    "Solution",
    "Unlimited",
    "optimise",
    "optimise_below",
    "settled_ahead",
]

# How far above the bound that is foreseen the best plan is expected, at first and when that was wrong; then anywhere.
_LIKELY = (1.03, 1.1, 1.3, np.inf)
_EXACT = 1e-6


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
        NoPlanFoundError: a limit was reached without any plan found.
    """
    if _is_empty(restriction):
        return None
    effort = effort or Effort()
    if objective == "memory" and (found := smallest_by_messages(problem, restriction, cache, effort.gap)) is not None:
        return found
    if objective != "time":
        return _by_integers(problem, restriction, cache, effort, objective)
    best = optimise_below(problem, restriction, cache, effort)
    assert not isinstance(best, Excluded)
    return best


def optimise_below(
    problem: Problem,
    restriction: Restriction,
    cache: NetworkCache,
    effort: Effort,
    beat_s: float = np.inf,
    *,
    unlimited: Unlimited | None = None,
    ahead: Foresight | None = None,
) -> Solution | Excluded | None:
    """As :func:`optimise`, but looks only for plans that cost less than ``beat_s``, and stops once there are none; fills
    ``unlimited``.

    ``ahead``: what :func:`settled_ahead` said of this problem, or of the same with less memory in it; ``restriction`` is then the settled one.
    """
    if ahead is None:
        restriction, ahead = settled_ahead(problem, restriction, cache, effort, beat_s)
    if ahead.is_nothing:
        return None
    unlimited = unlimited or Unlimited()
    unlimited.bound_s = max(unlimited.bound_s, ahead.free_bound_s)
    if ahead.bound_s >= beat_s:
        return Excluded(ahead.bound_s)
    if not ahead.is_usual and ahead.chosen is None and not _can_fit(problem, restriction, cache, effort):
        return None
    if ahead.look is not None and ahead.about_s > ahead.bound_s * (1 + effort.gap):
        ahead = ahead.look.move(max(NEAR, effort.foreseen))
    least_cutoff_s = ahead.about_s * (1 + _EXACT) if effort.takes(ahead.about_s, ahead.bound_s) else 0.0
    for likely in _LIKELY:
        cutoff_s = min(beat_s, max(likely * ahead.bound_s, least_cutoff_s))
        found = Search(problem, restriction, cache, effort, cutoff_s, unlimited, ahead).run()
        if cutoff_s >= beat_s:
            break
        if isinstance(found, Solution):  # better ones, if any, cost more than the cutoff and less than this
            if found.objective_s * (1 - effort.gap) > cutoff_s:
                ahead = replace(ahead, chosen=found.chosen, about_s=found.objective_s)
                found = Search(
                    problem, restriction, cache, effort, min(beat_s, found.objective_s * (1 + _EXACT)), unlimited, ahead
                ).run()
            break
    return found


def _can_fit(problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort) -> bool:
    """False where messages prove that no plan is within the memory limit: a relaxation may take minutes for that."""
    limit = problem.memory_limit_bytes
    least = None if limit is None else least_by_messages(problem, restriction, cache, effort.gap)
    return limit is None or least is None or least.least_bytes <= limit


def settled_ahead(
    problem: Problem,
    restriction: Restriction,
    cache: NetworkCache,
    effort: Effort,
    beat_s: float = np.inf,
    likely: Prices | None = None,
) -> tuple[Restriction, Foresight]:
    """The restriction with avoided candidates forbidden wherever the fewest of them does without, and what is known of the problem under it
    without solving it.

    Where one look at what is left without any avoided candidate meets a plan that fits, no fewer are possible, and the look goes on. The
    search for a higher bound stops once it reaches ``beat_s``; ``likely``: prices to try early.
    """
    limit = problem.memory_limit_bytes
    if not _is_empty(restriction):
        if restriction.avoid and limit is not None and least_memory_bytes(problem, restriction) > limit:
            return restriction, replace(nothing_left(problem), free_bound_s=-np.inf)  # the fewest avoided need not be known
        none_avoided = _without_avoided(restriction)
        if not _is_empty(none_avoided):
            look = Look(problem, none_avoided, cache, effort.gap, effort.prices, likely)
            if not restriction.avoid or look.meets_a_plan():
                return none_avoided, look.until(beat_s)
        settled = _settled(problem, restriction, cache, effort)
        if settled is not None:
            return settled, Look(problem, settled, cache, effort.gap, effort.prices, likely).until(beat_s)
    return restriction, nothing_left(problem)


def _without_avoided(restriction: Restriction) -> Restriction:
    """The restriction without the candidates that are avoided, wherever others are allowed."""
    kept = {g: ~avoided for g, avoided in restriction.avoid.items()}
    others = {g: mask & restriction.allowed[g] if g in restriction.allowed else mask for g, mask in kept.items()}
    return replace(restriction.merged(Restriction({g: mask for g, mask in kept.items() if others[g].any()})), avoid={})


def _is_empty(restriction: Restriction) -> bool:
    return any(not allowed.any() for allowed in restriction.allowed.values())


def _by_integers(
    problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort, objective: str
) -> Solution | None:
    """One relaxation, and one integer program where that is fractional."""
    program = assemble(problem, restriction, cache, objective=objective)
    sizes = (program.arrays.num_columns, program.arrays.num_rows)
    answer = Solver(program.arrays, integer=False).solve(program.arrays.cost)
    if answer.x is not None and program.is_integral(answer.x):
        return Solution(program.candidates_of(answer.x), answer.objective, answer.objective, "lp", *sizes)
    if answer.status == "infeasible":
        return None
    answer = Solver(program.arrays, integer=True).solve(
        program.arrays.cost, gap=effort.gap * 0.9, nodes=effort.nodes, time_limit_s=effort.time_limit_s
    )
    if answer.status == "infeasible":
        return None
    if answer.x is None:
        raise NoPlanFoundError(f"no plan was found within {effort.nodes} nodes, and none was excluded: raise the effort")
    method = "mip" if answer.status == "optimal" else "mip, limit"
    return Solution(program.candidates_of(answer.x), answer.objective, min(answer.bound, answer.objective), method, *sizes)


def _settled(problem: Problem, restriction: Restriction, cache: NetworkCache, effort: Effort) -> Restriction | None:
    """The restriction with avoided candidates forbidden wherever the fewest of them does without; None where nothing is left."""
    if _is_empty(restriction):
        return None
    if not restriction.avoid:
        return restriction
    chosen = fewest_by_messages(problem, restriction)
    if chosen is None:
        fewest = _by_integers(problem, restriction, cache, replace(effort, gap=1e-6), "avoid")
        if fewest is None:
            return None
        chosen = fewest.chosen
    kept = {g: ~avoided for g, avoided in restriction.avoid.items() if not avoided[chosen[g]]}
    return replace(restriction.merged(Restriction(kept)), avoid={})
