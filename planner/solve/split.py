"""Two halves of a problem: the choice that two plans differ by most, and which of its candidates are nearer to which plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.planner.solve.problem import Flow, Problem
from meshwright.planner.solve.program import NetworkCache

# What stands for "cannot be reached" in a distance.
_FAR = 1e9


def halves(
    problem: Problem, cache: NetworkCache, a: Sequence[int], b: Sequence[int], allowed: Sequence[np.ndarray], byte_s: float
) -> tuple[int, np.ndarray] | None:
    """The choice to decide next, and the candidates that stay on the side of plan ``a``; None where the plans are one.

    It is the one whose own compute, memory and redistributions differ most between the plans: two plans hold a bound down by being
    cheap in different ways.

    Args:
        problem: the problem.
        cache: its networks.
        a: candidate of every choice.
        b: another plan.
        allowed: candidates that may be taken by choice.
        byte_s: seconds that a byte of memory is worth.
    """
    differ = [g for g in range(len(a)) if a[g] != b[g]]
    if not differ:
        return None
    flows = _difference_by_choice(problem, cache, a, b)
    apart = {g: flows[g] + abs(float(_own(problem, g, byte_s)[[a[g], b[g]]] @ [1.0, -1.0])) for g in differ}
    g = max(differ, key=lambda g: (apart[g], -g))
    near_a, near_b = (_distances(problem, cache, g, c, byte_s) for c in (a[g], b[g]))
    side = near_a <= near_b
    side[a[g]], side[b[g]] = True, False
    return g, side & allowed[g]


def _own(problem: Problem, g: int, byte_s: float) -> np.ndarray:
    """Compute and the worth of memory of a choice in seconds, shape [candidates]."""
    choice = problem.choices[g]
    gather_s = np.zeros(choice.num_candidates) if choice.gather_s is None else choice.gather_s
    return choice.count * (choice.compute_s + gather_s) + byte_s * choice.static_bytes


def _difference_by_choice(problem: Problem, cache: NetworkCache, a: Sequence[int], b: Sequence[int]) -> np.ndarray:
    """Seconds by which the flows around each choice differ between two plans, shape [choices]."""
    found = np.zeros(len(problem.choices))
    for flow in problem.flows:
        around = [flow.supply, *(d.choice for d in flow.demands if d.choice is not None)]
        if any(a[g] != b[g] for g in around):
            found[around] += abs(_length(flow, cache, a) - _length(flow, cache, b))
    return found


def _length(flow: Flow, cache: NetworkCache, chosen: Sequence[int]) -> float:
    """Seconds of a flow with a path of its own for every demand."""
    (cost,) = cache.costs([(flow.network, flow.allowed)])
    source = flow.supply_nodes[chosen[flow.supply]]
    paths = (cost[source, d.nodes if d.choice is None else d.nodes[chosen[d.choice]]].min() for d in flow.demands)
    return flow.count * min(float(sum(paths)), _FAR)


def _distances(problem: Problem, cache: NetworkCache, g: int, c: int, byte_s: float) -> np.ndarray:
    """Seconds between candidate ``c`` and every other of choice ``g``, in itself and in what it makes, shape [candidates]."""
    own = _own(problem, g, byte_s)
    total = np.abs(own - own[c])
    for flow in problem.flows:
        if flow.supply == g:
            (cost,), nodes = cache.costs([(flow.network, flow.allowed)]), flow.supply_nodes
            total += flow.count * np.minimum(np.minimum(cost[nodes[c], nodes], cost[nodes, nodes[c]]), _FAR)
    return total
