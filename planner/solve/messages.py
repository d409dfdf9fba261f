"""Bounds without a solver: messages between choices that share a value.

Overlap and memory have prices (:mod:`.bundle`). Then the objective is a sum over choices and over pairs of choices: the demands of one flow pay
an arc in equal parts (together at most its price, so the sum never exceeds the objective). Each pass of messages moves cost between
the pairs and the choices such that the sum of all minima rises; it is a lower bound at any time, whatever the messages are. Forests of
pairs (:mod:`.marginals`) then turn it into one for every candidate, and the messages into a plan.

Source: sequential dual ascent for pairwise models, as in Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization" (2006) and "A new look at reweighted message passing" (2015). Measured on Llama-3-70B, 64x8 GPUs: after four passes (0.03 s) the bound is that of the relaxation (HiGHS: 0.1-0.4 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.solve.bundle import Plane, Prices
from meshwright.planner.solve.marginals import over_forests
from meshwright.planner.solve.problem import SEGMENTS, Demand, Flow, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, typical_seconds

# Stands for "cannot be reached": so many times a typical objective. Far larger numbers would travel with the messages.
_FAR = 100.0
# Messages are passed so often before it is looked whether that was enough.
_AT_ONCE = 4
# Passes over the choices that improve a plan read off the messages, one choice at a time.
_IMPROVEMENTS = 3

Pair = tuple[int, int]


@dataclass
class _Priced:
    """Seconds of one choice or pair: what is paid anyway, and what counts by the weight of overlap.

    Attributes:
        fixed: exposed, with ties.
        hidden: segment to seconds that can be hidden.
        compute: likewise computed.
    """

    fixed: np.ndarray
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    compute: dict[int, np.ndarray] = field(default_factory=dict)

    def at(self, weights: np.ndarray) -> np.ndarray:
        """At weights by segment; always a new array."""
        total = self.fixed.copy()
        for segment, seconds in self.hidden.items():
            total += weights[segment] * seconds
        for segment, seconds in self.compute.items():
            total += (1.0 - weights[segment]) * seconds
        return total


class Messages:
    """One problem under one restriction: its choices, the pairs of them that share values, and the messages between.

    Attributes:
        unreachable_s: what a placement costs that cannot be reached.
    """

    def __init__(self, problem: Problem, restriction: Restriction, cache: NetworkCache):
        self._problem = problem
        self._kept = [
            np.flatnonzero(restriction.allowed[g]) if g in restriction.allowed else np.arange(c.num_candidates)
            for g, c in enumerate(problem.choices)
        ]
        self.unreachable_s = _FAR * typical_seconds(problem)
        self._own = [self._of_choice(g) for g in range(len(problem.choices))]
        self._between: dict[Pair, _Priced] = {}
        for index, flow in enumerate(problem.flows):
            allowed = flow.allowed & restriction.arcs[index] if index in restriction.arcs else flow.allowed
            self._add_flow(flow, cache.routes(flow.network, allowed).cost)
        self._neighbours: list[list[int]] = [[] for _ in problem.choices]
        for a, b in self._between:
            self._neighbours[a].append(b)
            self._neighbours[b].append(a)
        self._after = [sorted(n for n in around if n > g) for g, around in enumerate(self._neighbours)]
        self._before = [sorted((n for n in around if n < g), reverse=True) for g, around in enumerate(self._neighbours)]
        self._part = [1.0 / max(len(a), len(b), 1) for a, b in zip(self._after, self._before, strict=True)]
        self._sent = {k: np.zeros(len(self._kept[k[1]])) for a, b in self._between for k in ((a, b), (b, a))}
        self._static = [
            sum(c.memory_bytes.values(), np.zeros(c.num_candidates))[k] for c, k in zip(problem.choices, self._kept, strict=True)
        ]
        self._terms = [
            {g: bytes_[self._kept[g]] for g, bytes_ in _added(term).items()} for p in problem.peaks for term in p.terms
        ]
        self._over_bytes = sum(problem.fixed_bytes.values()) - float(problem.memory_limit_bytes or 0)
        self.price(Prices.none(problem))

    def _of_choice(self, g: int) -> _Priced:
        choice, kept = self._problem.choices[g], self._kept[g]
        static = sum(choice.memory_bytes.values(), np.zeros(choice.num_candidates))[kept]
        own = _Priced(self._problem.tie_memory_s_per_byte * static)
        own.compute[choice.segment] = choice.count * choice.compute_s[kept]
        if choice.gather_s is not None:
            self._pay(own, choice.count * choice.gather_s[kept], choice.segment, choice.gather_hidden)
        return own

    def _pay(self, priced: _Priced, seconds: np.ndarray, segment: int, hidden: bool) -> None:
        unreachable = seconds >= self.unreachable_s
        paid = np.where(unreachable, self.unreachable_s, seconds * (self._problem.tie_hidden if hidden else 1.0))
        priced.fixed = priced.fixed + paid
        if hidden:
            priced.hidden[segment] = priced.hidden.get(segment, 0.0) + np.where(unreachable, 0.0, seconds)

    def _add_flow(self, flow: Flow, cost: np.ndarray) -> None:
        """Each demand pays the shortest path to it, in equal parts with the others that need any."""
        at = flow.supply_nodes[self._kept[flow.supply]]
        paths = [(d, path) for d in _different(flow.demands) if (path := self._path(flow, d, cost, at)).any()]
        for demand, path in paths:
            seconds = path * (flow.count / len(paths))
            a, b = flow.supply, demand.choice
            if b is None or b == a:
                self._pay(self._own[a], seconds, flow.segment, flow.hidden)
                continue
            pair = self._between.setdefault((min(a, b), max(a, b)), _Priced(np.zeros(1)))
            self._pay(pair, seconds if a < b else seconds.T, flow.segment, flow.hidden)

    def _path(self, flow: Flow, demand: Demand, cost: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Seconds of one value from where each candidate of the supply makes it, shape [supply] or [supply, demand]."""
        if demand.choice is None:
            return cost[np.ix_(at, demand.nodes)].min(axis=1)
        wanted = demand.nodes[self._kept[demand.choice]]
        return cost[at, wanted] if demand.choice == flow.supply else cost[np.ix_(at, wanted)]

    # --- bounds ---

    @property
    def hides(self) -> np.ndarray:
        """By segment, whether anything can be hidden."""
        found = {segment for priced in (*self._own, *self._between.values()) for segment, s in priced.hidden.items() if s.any()}
        return np.array([segment in found for segment in range(len(SEGMENTS))])

    def price(self, prices: Prices) -> None:
        """Let things count by these prices from now on. Messages start anew: old ones lead astray what has another price."""
        for sent in self._sent.values():
            sent.fill(0.0)
        self._base = prices.byte_s * self._over_bytes
        self._alone = [own.at(prices.weights) for own in self._own]
        self._pairs = {key: pair.at(prices.weights) for key, pair in self._between.items()}
        if not prices.is_free:
            for alone, static in zip(self._alone, self._static, strict=True):
                alone += prices.byte_s * static
            for j in np.flatnonzero(prices.term_s):
                for g, bytes_ in self._terms[j].items():
                    self._alone[g] += prices.term_s[j] * bytes_
        self._transposed = {(b, a): np.ascontiguousarray(pair.T) for (a, b), pair in self._pairs.items()}
        self._total = [alone.copy() for alone in self._alone]

    def sweep(self, times: int) -> None:
        """Pass messages over all pairs, forth and back by turns: each choice gives equal parts of what it has to those after it."""
        for k in range(times):
            forth = k % 2 == 0
            for g in range(len(self._own)) if forth else range(len(self._own) - 1, -1, -1):
                others = self._after[g] if forth else self._before[g]
                if others:
                    self._give(g, others, self._pairs if forth else self._transposed)

    def _give(self, g: int, others: Sequence[int], pairs: dict[Pair, np.ndarray]) -> None:
        total, sent = self._total, self._sent
        part = total[g] * self._part[g]
        for other in others:
            received = sent[other, g]
            received -= part
            message = np.minimum.reduce(pairs[g, other] - received[:, None])
            total[other] += message - sent[g, other]
            sent[g, other] = message
        total[g] = total[g] - len(others) * part

    def settle(self, passes: int, rise: float) -> None:
        """Pass messages until some more passes raise the bound by less than a part of it: at most so many."""
        before = -np.inf
        for _ in range(0, passes, _AT_ONCE):
            self.sweep(_AT_ONCE)
            now = self.plain_bound
            if now - before < rise * abs(now):
                break
            before = now

    @property
    def plain_bound(self) -> float:
        """A lower bound of the objective, once messages were passed: that of :meth:`proved` is never below it."""
        return self._base + sum(float(total.min()) for total in self._total)

    def proved(self) -> tuple[float, list[np.ndarray]]:
        """A lower bound of the objective, and of that of plans with each candidate: infinite where it is not allowed."""
        pairs, bound = {}, 0.0
        for (a, b), pair in self._pairs.items():
            left = pair - self._sent[a, b] - self._sent[b, a][:, None]
            least = float(left.min())
            pairs[a, b], bound = left - least, bound + least
        least_of = [float(total.min()) for total in self._total]
        raised = over_forests([total - least for total, least in zip(self._total, least_of, strict=True)], pairs)
        above = max(float(r.min()) for r in raised)
        bound += self._base + sum(least_of)
        found = [np.full(c.num_candidates, np.inf) for c in self._problem.choices]
        for floor, kept, values in zip(found, self._kept, raised, strict=True):
            floor[kept] = bound + np.maximum(values, above)
        return bound + above, found

    # --- plans ---

    def reading(self) -> Plane:
        """The plan that the messages lead to, choice by choice, improved one choice at a time."""
        at: list[int] = []
        for g, total in enumerate(self._total):
            cost = total.copy()
            for t in self._neighbours[g]:
                if t < g:
                    cost += self._pairs[t, g][at[t]] - self._sent[t, g] - self._sent[g, t][at[t]]
            at.append(int(cost.argmin()))
        for _ in range(_IMPROVEMENTS):
            if not self._improve(at):
                break
        return self._read(at)

    def _improve(self, at: list[int]) -> bool:
        """Take the best candidate of each choice given all others; whether any changed."""
        before = list(at)
        for g, alone in enumerate(self._alone):
            cost = alone.copy()
            for t in self._neighbours[g]:
                cost += self._pairs[t, g][at[t]] if t < g else self._pairs[g, t][:, at[t]]
            if cost.min() < cost[at[g]]:
                at[g] = int(cost.argmin())
        return at != before

    def _read(self, at: Sequence[int]) -> Plane:
        fixed, compute, hidden = 0.0, np.zeros(len(SEGMENTS)), np.zeros(len(SEGMENTS))
        parts = [(own, (at[g],)) for g, own in enumerate(self._own)]
        parts_of_pairs = [(pair, (at[a], at[b])) for (a, b), pair in self._between.items()]
        for priced, index in (*parts, *parts_of_pairs):
            fixed += float(priced.fixed[index])
            for total, seconds_of in ((compute, priced.compute), (hidden, priced.hidden)):
                for segment, seconds in seconds_of.items():
                    total[segment] += seconds[index]
        over = self._over_bytes + sum(float(static[i]) for static, i in zip(self._static, at, strict=True))
        terms = np.array([sum(float(b[at[g]]) for g, b in term.items()) for term in self._terms])
        chosen = tuple(int(kept[i]) for kept, i in zip(self._kept, at, strict=True))
        return Plane(fixed, compute, hidden, over, terms, chosen)


def _added(term: Sequence[tuple[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """A term with one entry a choice."""
    found: dict[int, np.ndarray] = {}
    for g, bytes_ in term:
        found[g] = found[g] + bytes_ if g in found else bytes_
    return found


def _different(demands: Sequence[Demand]) -> list[Demand]:
    return list({(d.choice, d.nodes.tobytes()): d for d in demands}.values())
