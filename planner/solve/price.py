"""What a choice of candidates costs, read off the problem's own tables: time, memory, and each flow's tree of arcs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.solve.paths import cheapest_tree
from meshwright.planner.solve.problem import SEGMENTS, Flow, Problem, Restriction


@dataclass(frozen=True)
class Outcome:
    """Time and memory of a plan.

    Attributes:
        compute_s: seconds of kernels by segment.
        exposed_s: seconds of communication that nothing hides, by segment.
        hidden_s: seconds of communication that can be issued ahead, by segment.
        memory_bytes: bytes by category.
        trees: arcs bought by each flow (empty when priced from a finished plan).
    """

    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    memory_bytes: Mapping[str, int]
    trees: tuple[tuple[int, ...], ...] = ()

    @property
    def step_time_s(self) -> float:
        """Segment by segment: what is exposed, plus the longer of compute and hidden."""
        return sum(e + max(c, h) for c, e, h in zip(self.compute_s, self.exposed_s, self.hidden_s, strict=True))

    @property
    def peak_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


def price(problem: Problem, restriction: Restriction, chosen: Sequence[int]) -> Outcome:
    """Evaluate ``chosen``, with the cheapest tree for every flow.

    Raises:
        VerifyError: a flow cannot reach a demand (the choice is not a solution).
    """
    compute, exposed, hidden = ([0.0] * len(SEGMENTS) for _ in range(3))
    for choice, c in zip(problem.choices, chosen, strict=True):
        compute[choice.segment] += choice.count * float(choice.compute_s[c])
        if choice.gather_s is not None:
            (hidden if choice.gather_hidden else exposed)[choice.segment] += choice.count * float(choice.gather_s[c])
    trees, known = [], dict[tuple, list[int]]()
    for index, flow in enumerate(problem.flows):
        tree = _tree(flow, restriction.arcs.get(index), chosen, known)
        seconds = flow.count * float(flow.network.seconds[tree].sum()) if tree else 0.0
        (hidden if flow.hidden else exposed)[flow.segment] += seconds
        trees.append(tuple(tree))
    return Outcome(tuple(compute), tuple(exposed), tuple(hidden), memory_of(problem, chosen), tuple(trees))


def _tree(flow: Flow, arcs: np.ndarray | None, chosen: Sequence[int], known: dict[tuple, list[int]]) -> list[int]:
    """``known``: trees of other flows; grows."""
    root = int(flow.supply_nodes[chosen[flow.supply]])
    terminals = [
        frozenset(d.nodes.tolist()) if d.choice is None else frozenset((int(d.nodes[chosen[d.choice]]),)) for d in flow.demands
    ]
    allowed = flow.allowed if arcs is None else flow.allowed & arcs
    key = id(flow.network), allowed.tobytes(), root, tuple(terminals)
    if key not in known:
        tree = cheapest_tree(flow.network, allowed, root, terminals)
        if tree is None:
            raise VerifyError(f"value {flow.name}: no path from node {root} to one of {terminals}")
        known[key] = tree
    return known[key]


def memory_of(problem: Problem, chosen: Sequence[int]) -> dict[str, int]:
    """Bytes by category."""
    total: dict[str, float] = {}
    for choice, c in zip(problem.choices, chosen, strict=True):
        for category, by_candidate in choice.memory_bytes.items():
            total[category] = total.get(category, 0.0) + float(by_candidate[c])
    for peak in problem.peaks:
        largest = max((sum(float(b[chosen[g]]) for g, b in term) for term in peak.terms), default=0.0)
        total[peak.category] = total.get(peak.category, 0.0) + peak.weight * max(0.0, largest)
    for category, fixed in problem.fixed_bytes.items():
        total[category] = total.get(category, 0.0) + fixed
    return {category: round(b) for category, b in total.items() if b or category != "kept"}


def objective_s(problem: Problem, outcome: Outcome, chosen: Sequence[int]) -> float:
    """The solver's objective for a choice: step time plus the tie-breaks."""
    static = sum(float(b[c]) for choice, c in zip(problem.choices, chosen, strict=True) for b in choice.memory_bytes.values())
    return outcome.step_time_s + problem.tie_memory_s_per_byte * static + problem.tie_hidden * sum(outcome.hidden_s)
