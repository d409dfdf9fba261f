"""The plan of the least memory without a solver: messages at a price of memory so high that time hardly counts.

Most problems of memory are sums of what each choice holds, which messages solve exactly; an integer program that minimises memory has
nothing to tell equal plans apart by and takes seconds instead.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.solve.answers import Solution
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import SEGMENTS, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, largest_memory_bytes, typical_seconds

# Memory that a plan may hold at most is worth so many times the seconds that it may take at least.
_DEAR = 1e6
_PASSES = 32


def smallest_by_messages(problem: Problem, restriction: Restriction, cache: NetworkCache, gap: float) -> Solution | None:
    """A plan whose memory is within ``gap`` of the least, the limit ignored; None where messages do not prove one.

    Plans that take a hundred times what is usual do not count.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        gap: relative gap.
    """
    most = largest_memory_bytes(problem, restriction)
    if most <= 0.0:
        return None
    messages = Messages(problem, restriction, cache)
    byte_s = _DEAR * typical_seconds(problem) / most
    shares = [byte_s * p.weight / len(p.terms) * np.ones(len(p.terms)) for p in problem.peaks if p.terms]
    messages.price(Prices(np.zeros(len(SEGMENTS)), byte_s, np.concatenate([np.zeros(0), *shares])))
    messages.settle(_PASSES, gap / _DEAR)
    bound_s, _ = messages.proved()
    plane = messages.reading()
    if plane.objective >= messages.unreachable_s:
        return None
    held = float(sum(memory_of(problem, plane.chosen).values()))
    least = float(problem.memory_limit_bytes or 0) + (bound_s - messages.unreachable_s) / byte_s
    if held - least > gap * held:
        return None
    return Solution(plane.chosen, held, min(least, held), "messages", 0, 0)
