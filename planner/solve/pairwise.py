"""A problem as a sum over variables and pairs of them.

The variables are the choices, and for each flow with several demands the places where its paths part (:mod:`.forks`): with them the
cheapest tree to two or three demands is exactly a sum over pairs. More demands are taken three at a time; each such tree pays its part
of every arc, so that together they never pay more than the tree to all. What cannot be reached costs much instead of infinitely much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.solve.bundle import Plane, Prices
from meshwright.planner.solve.forks import Groups, Leg, forks_of, together
from meshwright.planner.solve.problem import SEGMENTS, Demand, Flow, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, typical_seconds

# Stands for "cannot be reached": so many times a typical objective. Far larger numbers would travel with the messages.
_FAR = 100.0

_NOTHING = np.zeros(1)

Pair = tuple[int, int]


@dataclass
class Priced:
    """Seconds of one variable or pair: what is paid anyway, and what counts by the weight of overlap.

    Attributes:
        fixed: exposed, with ties.
        hidden: segment to seconds that can be hidden.
        compute: likewise computed.
    """

    fixed: np.ndarray
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    compute: dict[int, np.ndarray] = field(default_factory=dict)

    def at(self, weights: Sequence[float]) -> np.ndarray:
        """At weights by segment; not to be changed."""
        total = self.fixed
        for segment, seconds in self.hidden.items():
            total = total + weights[segment] * seconds if weights[segment] else total
        for segment, seconds in self.compute.items():
            total = total + (1.0 - weights[segment]) * seconds
        return total


class Pairwise:
    """One problem under one restriction.

    Attributes:
        unreachable_s: what a placement costs that cannot be reached.
        kept: candidates that are left of each choice.
        own: seconds of each variable: the choices, then the forks.
        between: those of each pair (a, b), a below b, by candidate of ``a`` and candidate, or group of candidates, of ``b``.
        groups: (b, a) to the groups of ``b``'s candidates that are alike for ``a``, where there are any.
        rank: the variables' order: forks come right after what supplies them.
    """

    def __init__(self, problem: Problem, restriction: Restriction, cache: NetworkCache):
        self._problem = problem
        self.kept = [
            np.flatnonzero(restriction.allowed[g]) if g in restriction.allowed else np.arange(c.num_candidates)
            for g, c in enumerate(problem.choices)
        ]
        self.unreachable_s = _FAR * typical_seconds(problem)
        self._static = [c.static_bytes[kept] for c, kept in zip(problem.choices, self.kept, strict=True)]
        self.own = [self._of_choice(g) for g in range(len(problem.choices))]
        self.rank = [(g, -1) for g in range(len(problem.choices))]
        self.between: dict[Pair, Priced] = {}
        self.groups: dict[Pair, Groups] = {}
        arcs = [f.allowed & restriction.arcs[i] if i in restriction.arcs else f.allowed for i, f in enumerate(problem.flows)]
        costs = cache.costs([(flow.network, allowed) for flow, allowed in zip(problem.flows, arcs, strict=True)])
        for flow, cost in zip(problem.flows, costs, strict=True):
            self._add_flow(flow, cost)
        self._terms = [{g: bytes_[self.kept[g]] for g, bytes_ in _added(term).items()} for p in problem.peaks for term in p.terms]
        self._over_bytes = sum(problem.fixed_bytes.values()) - float(problem.memory_limit_bytes or 0)

    def size_of(self, variable: int) -> int:
        """How many candidates it has."""
        return len(self.own[variable].fixed)

    # --- what there is to pay ---

    def _of_choice(self, g: int) -> Priced:
        choice, kept = self._problem.choices[g], self.kept[g]
        own = Priced(self._problem.tie_memory_s_per_byte * self._static[g])
        own.compute[choice.segment] = choice.count * choice.compute_s[kept]
        if choice.gather_s is not None:
            self._pay(own, choice.count * choice.gather_s[kept], choice.segment, choice.gather_hidden)
        return own

    def _pay(self, priced: Priced, seconds: np.ndarray, segment: int, hidden: bool) -> None:
        paid = seconds * self._problem.tie_hidden if hidden else seconds
        if seconds.max() >= self.unreachable_s:
            unreachable = seconds >= self.unreachable_s
            paid, seconds = np.where(unreachable, self.unreachable_s, paid), np.where(unreachable, 0.0, seconds)
        priced.fixed = priced.fixed + paid
        if hidden:
            priced.hidden[segment] = priced.hidden[segment] + seconds if segment in priced.hidden else seconds

    def _add_flow(self, flow: Flow, cost: np.ndarray) -> None:
        """The cheapest tree to all demands that need any path, exact for few of them."""
        at = flow.supply_nodes[self.kept[flow.supply]]
        demands = [d for d in _different(flow.demands) if self._needs_a_path(flow, d, at)]
        for group in together(len(demands)):
            self._add_tree(flow, [demands[i] for i in group], cost, at, flow.count * len(group) / len(demands))

    def _add_tree(self, flow: Flow, demands: Sequence[Demand], cost: np.ndarray, at: np.ndarray, times: float) -> None:
        """The tree to some of the demands, which pays so many times every arc."""
        if len(demands) == 1:
            self._pay_between(flow, flow.supply, demands[0].choice, self._path(flow, demands[0], cost, at) * times)
            return
        forks, fork = forks_of(cost, at, len(demands)), len(self.own)
        self.own.append(Priced(np.zeros(len(forks.between))))
        self.rank.append((flow.supply, fork))
        self._pay(self.own[fork], times * forks.between, flow.segment, flow.hidden)
        self._pay_leg(flow, flow.supply, fork, forks.supply, times * cost[at[:, None], forks.supply.nodes])
        for demand, leg in zip(demands, forks.demands, strict=True):
            if demand.choice is None:
                least = cost[leg.nodes[:, None], demand.nodes].min(axis=1)
                self._pay(
                    self.own[fork], times * (least if leg.groups is None else least[leg.groups.index]), flow.segment, flow.hidden
                )
            else:
                wanted = demand.nodes[self.kept[demand.choice]]
                self._pay_leg(flow, demand.choice, fork, leg, times * cost[leg.nodes[:, None], wanted].T)

    def _pay_leg(self, flow: Flow, choice: int, fork: int, leg: Leg, seconds: np.ndarray) -> None:
        """Let a choice and forks pay; seconds by candidate of the choice and node of the leg."""
        if self.size_of(choice) == 1 and leg.groups is not None:
            seconds, leg = seconds[:, leg.groups.index], Leg(leg.nodes, None)
        known = self.groups.get((fork, choice))
        if (choice, fork) in self.between and known is not leg.groups:  # a demand of the supply: fork by fork
            self._spread(choice, fork)
            seconds, leg = (seconds if leg.groups is None else seconds[:, leg.groups.index]), Leg(leg.nodes, None)
        elif leg.groups is not None:
            self.groups[fork, choice] = leg.groups
        self._pay_between(flow, choice, fork, seconds)

    def _spread(self, choice: int, fork: int) -> None:
        """Let a pair no longer be grouped."""
        groups = self.groups.pop((fork, choice), None)
        if groups is not None:
            old = self.between[choice, fork]
            spread = [{k: v[:, groups.index] for k, v in part.items()} for part in (old.hidden, old.compute)]
            self.between[choice, fork] = Priced(old.fixed[:, groups.index], *spread)

    def _pay_between(self, flow: Flow, a: int, b: int | None, seconds: np.ndarray) -> None:
        """Let a pair pay; seconds by candidate of ``a`` and of ``b``, or of ``a`` alone where there is no other. Where one of them has
        no choice the other pays alone."""
        if b is None or b == a:
            self._pay(self.own[a], seconds, flow.segment, flow.hidden)
            return
        if self.size_of(a) == 1:
            self._pay(self.own[b], seconds[0], flow.segment, flow.hidden)
            return
        if self.size_of(b) == 1:
            self._pay(self.own[a], seconds[:, 0], flow.segment, flow.hidden)
            return
        key = (a, b) if a < b else (b, a)
        if key not in self.between:
            self.between[key] = Priced(_NOTHING)
        self._pay(self.between[key], seconds if a < b else seconds.T, flow.segment, flow.hidden)

    def _needs_a_path(self, flow: Flow, demand: Demand, at: np.ndarray) -> bool:
        """Whether a demand is not met wherever the supply makes the value."""
        if demand.choice is None:
            return not set(at.tolist()) <= set(demand.nodes.tolist())
        wanted = demand.nodes[self.kept[demand.choice]]
        if demand.choice == flow.supply:
            return bool((at != wanted).any())
        return len({*at.tolist(), *wanted.tolist()}) > 1

    def _path(self, flow: Flow, demand: Demand, cost: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Seconds of one value from where each candidate of the supply makes it, shape [supply] or [supply, demand]."""
        if demand.choice is None:
            return cost[at[:, None], demand.nodes].min(axis=1)
        wanted = demand.nodes[self.kept[demand.choice]]
        return cost[at, wanted] if demand.choice == flow.supply else cost[at[:, None], wanted]

    # --- what it is at some prices, and what a plan is at any ---

    @property
    def hides(self) -> np.ndarray:
        """By segment, whether anything can be hidden."""
        found = {segment for priced in (*self.own, *self.between.values()) for segment, s in priced.hidden.items() if s.any()}
        return np.array([segment in found for segment in range(len(SEGMENTS))])

    def at(self, prices: Prices) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
        """What is paid anyway, by each variable, and by each pair: pair ``k`` at ``2 k`` by candidate of its first variable and its second,
        at ``2 k + 1`` the other way round; not to be changed."""
        weights = prices.weights.tolist()
        alone = [own.at(weights) for own in self.own]
        pairs = []
        for pair in self.between.values():
            matrix = np.ascontiguousarray(pair.at(weights))
            pairs += [matrix, np.ascontiguousarray(matrix.T)]
        if not prices.is_free:
            for g, static in enumerate(self._static):
                alone[g] = alone[g] + prices.byte_s * static
            for j in np.flatnonzero(prices.term_s):
                for g, bytes_ in self._terms[j].items():
                    alone[g] = alone[g] + prices.term_s[j] * bytes_
        return prices.byte_s * self._over_bytes, alone, pairs

    def plane(self, at: Sequence[int]) -> Plane:
        """A plan, given by a candidate of every variable."""
        fixed, compute, hidden = 0.0, np.zeros(len(SEGMENTS)), np.zeros(len(SEGMENTS))
        parts = [(own, (at[g],)) for g, own in enumerate(self.own)]
        parts_of_pairs = [
            (pair, (at[a], at[b] if (b, a) not in self.groups else int(self.groups[b, a].index[at[b]])))
            for (a, b), pair in self.between.items()
        ]
        for priced, index in (*parts, *parts_of_pairs):
            fixed += float(priced.fixed[index])
            for total, seconds_of in ((compute, priced.compute), (hidden, priced.hidden)):
                for segment, seconds in seconds_of.items():
                    total[segment] += seconds[index]
        over = self._over_bytes + sum(float(static[i]) for static, i in zip(self._static, at, strict=False))
        terms = np.array([sum(float(b[at[g]]) for g, b in term.items()) for term in self._terms])
        chosen = tuple(int(kept[i]) for kept, i in zip(self.kept, at, strict=False))
        return Plane(fixed, compute, hidden, over, terms, chosen)


def _added(term: Sequence[tuple[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """A term with one entry a choice."""
    found: dict[int, np.ndarray] = {}
    for g, bytes_ in term:
        found[g] = found[g] + bytes_ if g in found else bytes_
    return found


def _different(demands: Sequence[Demand]) -> list[Demand]:
    return list({(d.choice, d.nodes.tobytes()): d for d in demands}.values())
