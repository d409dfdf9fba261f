"""Bounds without a solver: messages between choices that share a value.

Overlap and memory have prices (:mod:`.bundle`). Then the objective is a sum over variables and over pairs of them: the choices, and
where the paths of a flow with several demands part (:mod:`.forks`). Each pass of messages moves cost between the pairs and the variables such that the sum
of all minima rises; it is a lower bound at any time, whatever the messages are. Forests of pairs (:mod:`.marginals`) then turn it into one for every
candidate, and the messages into a plan.

Source: sequential dual ascent for pairwise models, as in Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization" (2006) and "A new look at reweighted message passing" (2015). Measured on Llama-3-70B, 64x8 GPUs: after four passes (0.03 s) the bound is that of the relaxation (HiGHS: 0.1-0.4 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.solve.bundle import Plane, Prices
from meshwright.planner.solve.forks import Groups, Leg, forks_of, together
from meshwright.planner.solve.marginals import Slack, over_forests
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
        self._rank = [(g, -1) for g in range(len(problem.choices))]
        self._groups: dict[Pair, Groups] = {}
        self._between: dict[Pair, _Priced] = {}
        for index, flow in enumerate(problem.flows):
            allowed = flow.allowed & restriction.arcs[index] if index in restriction.arcs else flow.allowed
            self._add_flow(flow, cache.routes(flow.network, allowed).cost)
        self._order_all()
        self._sent = {(a, b): np.zeros(len(self._own[b].fixed)) for pair in self._between for a, b in (pair, pair[::-1])}
        self._static = [
            sum(c.memory_bytes.values(), np.zeros(c.num_candidates))[k] for c, k in zip(problem.choices, self._kept, strict=True)
        ]
        self._terms = [
            {g: bytes_[self._kept[g]] for g, bytes_ in _added(term).items()} for p in problem.peaks for term in p.terms
        ]
        self._over_bytes = sum(problem.fixed_bytes.values()) - float(problem.memory_limit_bytes or 0)
        self.price(Prices.none(problem))

    def _order_all(self) -> None:
        """The variables in order, and those around each one that come after and before it."""
        rank = self._rank
        self._order = sorted(range(len(rank)), key=rank.__getitem__)
        self._neighbours: list[list[int]] = [[] for _ in rank]
        for a, b in self._between:
            self._neighbours[a].append(b)
            self._neighbours[b].append(a)
        self._after = [
            sorted((n for n in around if rank[n] > rank[g]), key=rank.__getitem__) for g, around in enumerate(self._neighbours)
        ]
        self._before = [
            sorted((n for n in around if rank[n] < rank[g]), key=rank.__getitem__, reverse=True)
            for g, around in enumerate(self._neighbours)
        ]
        self._part = [0.5 * (1/max(len(a), len(b), 1)+1/max(1,len(a))) for a, b in zip(self._after, self._before, strict=True)]
        self._part_back = [0.5 * (1/max(len(a), len(b), 1)+1/max(1,len(b))) for a, b in zip(self._after, self._before, strict=True)]

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
        """The cheapest tree to all demands that need any path, exact for few of them."""
        at = flow.supply_nodes[self._kept[flow.supply]]
        demands = [d for d in _different(flow.demands) if self._path(flow, d, cost, at).any()]
        if len(demands) == 1:
            seconds = self._path(flow, demands[0], cost, at) * flow.count
            self._pay_between(flow, flow.supply, demands[0].choice, seconds)
            return
        for group in together(len(demands)):
            self._add_tree(flow, [demands[i] for i in group], cost, at, flow.count * len(group) / len(demands))

    def _add_tree(self, flow: Flow, demands: Sequence[Demand], cost: np.ndarray, at: np.ndarray, times: float) -> None:
        """The tree to some of the demands, which pays so many times every arc."""
        if len(demands) == 1:
            self._pay_between(flow, flow.supply, demands[0].choice, self._path(flow, demands[0], cost, at) * times)
            return
        forks, fork = forks_of(cost, at, len(demands)), len(self._own)
        self._own.append(_Priced(np.zeros(len(forks.between))))
        self._rank.append((flow.supply, fork))
        self._pay(self._own[fork], times * forks.between, flow.segment, flow.hidden)
        self._pay_leg(flow, flow.supply, fork, forks.supply, times * cost[np.ix_(at, forks.supply.nodes)])
        for demand, leg in zip(demands, forks.demands, strict=True):
            if demand.choice is None:
                least = cost[np.ix_(leg.nodes, demand.nodes)].min(axis=1)
                self._pay(self._own[fork], times * (least if leg.groups is None else least[leg.groups.index]), flow.segment, flow.hidden)
            else:
                wanted = demand.nodes[self._kept[demand.choice]]
                self._pay_leg(flow, demand.choice, fork, leg, times * cost[np.ix_(leg.nodes, wanted)].T)

    def _pay_leg(self, flow: Flow, choice: int, fork: int, leg: Leg, seconds: np.ndarray) -> None:
        """Let a choice and forks pay; seconds by candidate of the choice and node of the leg."""
        known = self._groups.get((fork, choice))
        if (choice, fork) in self._between and known is not leg.groups:  # a demand of the supply: fork by fork
            self._spread(choice, fork)
            seconds, leg = (seconds if leg.groups is None else seconds[:, leg.groups.index]), Leg(leg.nodes, None)
        elif leg.groups is not None:
            self._groups[fork, choice] = leg.groups
        self._pay_between(flow, choice, fork, seconds)

    def _spread(self, choice: int, fork: int) -> None:
        """Let a pair no longer be grouped."""
        groups = self._groups.pop((fork, choice), None)
        if groups is not None:
            old = self._between[choice, fork]
            spread = [{k: v[:, groups.index] for k, v in part.items()} for part in (old.hidden, old.compute)]
            self._between[choice, fork] = _Priced(old.fixed[:, groups.index], *spread)

    def _pay_between(self, flow: Flow, a: int, b: int | None, seconds: np.ndarray) -> None:
        """Let a pair pay; seconds by candidate of ``a`` and of ``b``, or of ``a`` alone where there is no other."""
        if b is None or b == a:
            self._pay(self._own[a], seconds, flow.segment, flow.hidden)
            return
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
            for alone, static in zip(self._alone, self._static, strict=False):
                alone += prices.byte_s * static
            for j in np.flatnonzero(prices.term_s):
                for g, bytes_ in self._terms[j].items():
                    self._alone[g] += prices.term_s[j] * bytes_
        self._pairs |= {(b, a): np.ascontiguousarray(pair.T) for (a, b), pair in self._pairs.items()}
        self._total = [alone.copy() for alone in self._alone]

    def sweep(self, times: int) -> None:
        """Pass messages over all pairs, forth and back by turns: each choice gives equal parts of what it has to those after it."""
        for k in range(times):
            forth = k % 2 == 0
            for g in self._order if forth else reversed(self._order):
                others = self._after[g] if forth else self._before[g]
                if others:
                    self._give(g, others, (self._part if forth else self._part_back)[g])

    def _give(self, g: int, others: Sequence[int], share: float) -> None:
        pairs, total, sent, groups = self._pairs, self._total, self._sent, self._groups
        part = total[g] * share
        for other in others:
            received = sent[other, g]
            received -= part
            if (g, other) in groups:
                received = groups[g, other].most(received)
            message = np.minimum.reduce(pairs[g, other] - received[:, None])
            if (other, g) in groups:
                message = message[groups[other, g].index]
            total[other] += message - sent[g, other]
            sent[g, other] = message
        total[g] = total[g] - len(others) * part

    def settle(self, passes: int, rise: float, enough_s: float = np.inf) -> None:
        """Pass messages until the bound is ``enough_s``, or some more passes raise it by less than a part of it: at most so many."""
        before = -np.inf
        for _ in range(0, passes, _AT_ONCE):
            self.sweep(_AT_ONCE)
            now = self.plain_bound
            if now >= enough_s or now - before < rise * abs(now):
                break
            before = now

    @property
    def plain_bound(self) -> float:
        """A lower bound of the objective, once messages were passed: that of :meth:`proved` is never below it."""
        return self._base + sum(float(total.min()) for total in self._total)

    def proved(self) -> tuple[float, list[np.ndarray]]:
        """A lower bound of the objective, and of that of plans with each candidate: infinite where it is not allowed."""
        pairs, bound = {}, 0.0
        for a, b in self._between:
            slack, least = Slack.of(self._pairs[a, b], self._sent[a, b], self._sent[b, a], self._groups.get((b, a)))
            pairs[a, b], bound = slack, bound + least
        least_of = [float(total.min()) for total in self._total]
        raised = over_forests([total - least for total, least in zip(self._total, least_of, strict=True)], pairs)
        above = max(float(r.min()) for r in raised)
        bound += self._base + sum(least_of)
        found = [np.full(c.num_candidates, np.inf) for c in self._problem.choices]
        for floor, kept, values in zip(found, self._kept, raised, strict=False):
            floor[kept] = bound + np.maximum(values, above)
        return bound + above, found

    # --- plans ---

    def reading(self) -> Plane:
        """The plan that the messages lead to, variable by variable, improved one at a time."""
        at = [-1] * len(self._total)
        for g in self._order:
            cost = self._total[g].copy()
            for t in self._before[g]:
                cost += self._row(t, g, at[t]) - self._sent[t, g] - self._sent[g, t][at[t]]
            at[g] = int(cost.argmin())
        for _ in range(_IMPROVEMENTS):
            if not self._improve(at):
                break
        return self._read(at)

    def _improve(self, at: list[int]) -> bool:
        """Take the best candidate of each variable given all others; whether any changed."""
        before = list(at)
        for g in self._order:
            cost = self._alone[g].copy()
            for t in self._neighbours[g]:
                cost += self._row(t, g, at[t])
            if cost.min() < cost[at[g]]:
                at[g] = int(cost.argmin())
        return at != before

    def _row(self, t: int, g: int, candidate: int) -> np.ndarray:
        """What a pair costs with a candidate of the first one, by candidate of the second."""
        of_first, of_second = self._groups.get((t, g)), self._groups.get((g, t))
        row = self._pairs[t, g][candidate if of_first is None else of_first.index[candidate]]
        return row if of_second is None else row[of_second.index]

    def _read(self, at: Sequence[int]) -> Plane:
        fixed, compute, hidden = 0.0, np.zeros(len(SEGMENTS)), np.zeros(len(SEGMENTS))
        parts = [(own, (at[g],)) for g, own in enumerate(self._own)]
        parts_of_pairs = [
            (pair, (at[a], at[b] if (b, a) not in self._groups else int(self._groups[b, a].index[at[b]])))
            for (a, b), pair in self._between.items()
        ]
        for priced, index in (*parts, *parts_of_pairs):
            fixed += float(priced.fixed[index])
            for total, seconds_of in ((compute, priced.compute), (hidden, priced.hidden)):
                for segment, seconds in seconds_of.items():
                    total[segment] += seconds[index]
        over = self._over_bytes + sum(float(static[i]) for static, i in zip(self._static, at, strict=False))
        terms = np.array([sum(float(b[at[g]]) for g, b in term.items()) for term in self._terms])
        chosen = tuple(int(kept[i]) for kept, i in zip(self._kept, at, strict=False))
        return Plane(fixed, compute, hidden, over, terms, chosen)


def _added(term: Sequence[tuple[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """A term with one entry a choice."""
    found: dict[int, np.ndarray] = {}
    for g, bytes_ in term:
        found[g] = found[g] + bytes_ if g in found else bytes_
    return found


def _different(demands: Sequence[Demand]) -> list[Demand]:
    return list({(d.choice, d.nodes.tobytes()): d for d in demands}.values())
