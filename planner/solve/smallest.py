"""Plans of the least memory, or with the fewest avoided candidates, without a solver: by messages in which time hardly counts.

Most such problems are sums of what each choice has, which messages solve exactly; an integer program with that objective has nothing to
tell equal plans apart by and takes seconds instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.solve.answers import Solution
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.price import memory_of
from meshwright.planner.solve.problem import SEGMENTS, Choice, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, largest_memory_bytes, typical_seconds

# Memory that a plan may hold at most is worth so many times the seconds that it may take at least.
_DEAR = 1e6
_PASSES, _FEW_PASSES = 32, 2
# Numbers of candidates that differ by less are equal; steps between placements hardly cost anything beside one.
_ONE, _STEP_S = 0.5, 1e-7


@dataclass(frozen=True)
class Least:
    """What messages say of the least memory.

    Attributes:
        chosen: a plan of little memory; None where some value cannot be brought to its readers in any that was met.
        held_bytes: what it holds.
        least_bytes: what all plans hold at least, but those that take a hundred times what is usual.
    """

    chosen: tuple[int, ...] | None
    held_bytes: float
    least_bytes: float


def least_by_messages(problem: Problem, restriction: Restriction, cache: NetworkCache, gap: float) -> Least | None:
    """A plan of little memory, the limit ignored, and a bound of the least; None where no plan holds anything.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of the problem.
        gap: relative gap that is of interest.
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
    held = float(sum(memory_of(problem, plane.chosen).values()))
    least = float(problem.memory_limit_bytes or 0) + (bound_s - messages.unreachable_s) / byte_s
    reaches = plane.objective < messages.unreachable_s
    return Least(plane.chosen if reaches else None, held, least)


def smallest_by_messages(problem: Problem, restriction: Restriction, cache: NetworkCache, gap: float) -> Solution | None:
    """A plan whose memory is within ``gap`` of the least, the limit ignored; None where messages do not prove one.

    Args:
        problem, restriction, cache, gap: as of :func:`least_by_messages`.
    """
    found = least_by_messages(problem, restriction, cache, gap)
    if found is None or found.chosen is None or found.held_bytes - found.least_bytes > gap * found.held_bytes:
        return None
    return Solution(found.chosen, found.held_bytes, min(found.least_bytes, found.held_bytes), "messages", 0, 0)


def fewest_by_messages(problem: Problem, restriction: Restriction) -> tuple[int, ...] | None:
    """A plan within the memory limit with the fewest avoided candidates; None where messages do not prove one.

    Args:
        problem: the problem.
        restriction: what is taken away from it, and what is avoided.
    """
    near = {id(f.network): replace(f.network, seconds=np.full(f.network.num_arcs, _STEP_S)) for f in problem.flows}
    counted = replace(
        problem,
        choices=tuple(_counted(c, restriction.avoid.get(g)) for g, c in enumerate(problem.choices)),
        flows=tuple(replace(f, segment=0, hidden=False, count=1, network=near[id(f.network)]) for f in problem.flows),
        peaks=(),
        memory_limit_bytes=None,
        tie_memory_s_per_byte=0.0,
    )
    messages, limit = Messages(counted, restriction, NetworkCache()), problem.memory_limit_bytes
    messages.price(Prices.none(counted))
    for _ in range(_PASSES // _FEW_PASSES):
        messages.sweep(_FEW_PASSES)
        plane = messages.reading()
        if plane.objective < min(messages.unreachable_s, messages.plain_bound + _ONE):
            fits = limit is None or sum(memory_of(problem, plane.chosen).values()) <= limit
            return plane.chosen if fits else None
    return None


def _counted(choice: Choice, avoided: np.ndarray | None) -> Choice:
    """A choice that costs what is avoided of it, and one more, so that the usual plan costs something."""
    count = 1.0 + (np.zeros(choice.num_candidates) if avoided is None else avoided)
    return replace(choice, segment=0, compute_s=count, memory_bytes={}, gather_s=None)
