"""What a plan costs at least if it uses a candidate: proved by a relaxation's duals.

The duals of a relaxation turn the cost of any plan into

    bound  +  sum over choices: r(candidate)  +  sum over links: s(supplying candidate, wanting candidate)  +  more,    all >= 0

where a link is one demand of one flow: ``s`` is the length of the shortest path between the two nodes less the difference of
their potentials. A single relaxation has many duals, and in most of them nearly all ``r`` are zero: the cost of a bad candidate
is in the links around it. So the sums are minimised exactly over forests of links, once for every candidate at once (two passes
of messages); what is outside of the forest counts as zero. The highest of several forests counts.

Source: reduced-cost fixing; min-marginals of trees as in tree-reweighted message passing (Wainwright, Jaakkola, Willsky, 2005).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.solve.forks import Groups

FORESTS, FEW = 4, 2
"""Forests tried, and those tried where many bounds are asked for; each prefers links that no forest before it had. Measured after 16 passes of
messages on problems of ResNet-152, Llama-3-70B and T5-3B: two leave 1-4 % more candidates within 3 % of the bound than four, in two thirds of
the time."""

# What cannot be reached costs infinitely much, and says as much as this.
_MUCH = 1e30


@dataclass(frozen=True)
class Link:
    """One demand of one flow in a program.

    Attributes:
        supply: the producing choice.
        demand: the consuming choice; None for a result of the graph.
        supply_nodes: node by candidate of ``supply``, shape [candidates].
        demand_nodes: node by candidate of ``demand``; or the nodes accepted.
        tails: node where each usable arc starts, shape [arcs].
        heads: node where each usable arc ends, shape [arcs].
        columns: the flow's column of each usable arc, shape [arcs].
        shares: row that lets the arc be bought once for several demands, -1 where it is paid alone, shape [arcs].
        rows: row that conserves the flow at each node, -1 where there is none, shape [nodes].
    """

    supply: int
    demand: int | None
    supply_nodes: np.ndarray
    demand_nodes: np.ndarray
    tails: np.ndarray
    heads: np.ndarray
    columns: np.ndarray
    shares: np.ndarray
    rows: np.ndarray

    def slack(self, cost: np.ndarray, duals: np.ndarray) -> np.ndarray:
        """``s`` between the nodes of the link, float64 [nodes, nodes]; for a result of the graph the least one, [nodes].

        Args:
            cost: of the columns.
            duals: of the rows.
        """
        length = cost[self.columns] - np.where(self.shares >= 0, duals[self.shares], 0.0)
        potential = np.where(self.rows >= 0, duals[self.rows], 0.0)
        n = len(self.rows)
        sources = np.unique(self.supply_nodes)
        distance = np.full((len(sources), n), np.inf)
        distance[np.arange(len(sources)), sources] = 0.0
        weight = np.full((n, n), np.inf)
        weight[self.tails, self.heads] = np.maximum(length, 0.0)
        used = np.unique(self.heads)
        while True:
            through = (distance[:, :, None] + weight[None, :, used]).min(axis=1)
            if not (through < distance[:, used] - 1e-12).any():
                break
            distance[:, used] = np.minimum(distance[:, used], through)
        found = np.full((n, n), np.inf)
        found[sources] = distance
        if self.demand is None:
            return np.maximum(found[:, self.demand_nodes].min(axis=1) - potential, 0.0)
        return np.maximum(found - potential[:, None] + potential[None, :], 0.0)


@dataclass(frozen=True)
class Slack:
    """What a pair of variables costs above the least it can.

    Attributes:
        matrix: by candidate of the first and group of the second, at least 0.
        groups: of the second's candidates; None where each is one of its own.
        offset: what a candidate of the second has beside its group, at least 0, shape [candidates]; 0 without groups.
    """

    matrix: np.ndarray
    groups: Groups | None = None
    offset: np.ndarray | float = 0.0

    @classmethod
    def of(
        cls, matrix: np.ndarray, from_first: np.ndarray, from_second: np.ndarray, groups: Groups | None
    ) -> tuple[Slack, float]:
        """What is left of a pair after messages to the second and to the first, and its least."""
        if groups is None:
            left = matrix - from_first - from_second[:, None]
            least = float(left.min())
            left -= least
            return cls(left), least
        most = groups.most(from_first)
        left = matrix - most - from_second[:, None]
        least = float(left.min())
        left -= least
        return cls(left, groups, most[groups.index] - from_first), least

    def to_second(self, first: np.ndarray) -> np.ndarray:
        """Least sum with each candidate of the second, given the cost of those of the first."""
        least = (first[:, None] + self.matrix).min(axis=0)
        return least if self.groups is None else least[self.groups.index] + self.offset

    def to_first(self, second: np.ndarray) -> np.ndarray:
        """Least sum with each candidate of the first, given the cost of those of the second."""
        second = second if self.groups is None else self.groups.least(second + self.offset)
        return (self.matrix + second).min(axis=1)


def proved_costs(
    links: Sequence[Link], columns: Sequence[np.ndarray], cost: np.ndarray, bound: float, reduced: np.ndarray, duals: np.ndarray
) -> list[np.ndarray]:
    """A lower bound of the objective of every plan with a candidate, by choice and candidate; infinite where it is not allowed.

    Args:
        links: of the program.
        columns: choice to column by candidate, -1 where it is not allowed.
        cost: the objective that was minimised.
        bound: its minimum over the relaxation.
        reduced: reduced costs of the columns.
        duals: of the rows.
    """
    kept = [np.flatnonzero(c >= 0) for c in columns]
    alone = [reduced[c[k]] - reduced[c[k]].min() for c, k in zip(columns, kept, strict=True)]
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for link in links:
        slack = link.slack(cost, duals)
        a, at = link.supply, link.supply_nodes[kept[link.supply]]
        if link.demand is None:
            alone[a] = alone[a] + slack[at]
        elif link.demand == a:
            alone[a] = alone[a] + slack[at, link.demand_nodes[kept[a]]]
        else:
            b = link.demand
            matrix = slack[np.ix_(at, link.demand_nodes[kept[b]])]
            key = (min(a, b), max(a, b))
            pairs[key] = pairs.get(key, 0.0) + (matrix if a < b else matrix.T)
    best = over_forests(alone, {key: Slack(matrix) for key, matrix in pairs.items()})
    found = [np.full(len(c), np.inf) for c in columns]
    for floor, k, values in zip(found, kept, best, strict=True):
        floor[k] = bound + values
    return found


def over_forests(alone: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], Slack], forests: int = FORESTS) -> list[np.ndarray]:
    """Lower bounds of a sum over choices and pairs by candidate: the highest of those over several forests of pairs.

    Args:
        alone: choice to cost by candidate, at least 0.
        pairs: (a, b), a below b, to cost by candidate of both.
        forests: how many.
    """
    best = [np.full(len(a), -np.inf) for a in alone]
    uses = dict.fromkeys(pairs, 0)
    says = {key: float(np.minimum(slack.matrix, _MUCH).mean()) for key, slack in pairs.items()}
    for _ in range(forests):
        forest = _forest(len(alone), says, uses)
        for marginal, floor in zip(_marginals(alone, pairs, forest), best, strict=True):
            np.maximum(floor, marginal, out=floor)
    return best


# A forest: (child, parent, pair), parents before their children.
_Forest = list[tuple[int, int, tuple[int, int]]]


def root_of(parent: list[int], i: int) -> int:
    """Which member stands for the tree that ``i`` is in, given the parent of each, a root's being itself; paths are made shorter."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _forest(size: int, says: Mapping[tuple[int, int], float], uses: dict[tuple[int, int], int]) -> _Forest:
    """A spanning forest of the pairs that say most and were used least; counts its pairs in ``uses``."""
    weight = {key: (uses[key], -much) for key, much in says.items()}
    parent = list(range(size))

    neighbours: list[list[int]] = [[] for _ in range(size)]
    for a, b in sorted(says, key=weight.__getitem__):
        if root_of(parent, a) != root_of(parent, b):
            parent[root_of(parent, a)] = root_of(parent, b)
            neighbours[a].append(b)
            neighbours[b].append(a)
            uses[a, b] += 1
    forest: _Forest = []
    seen = [False] * size
    for start in range(size):
        if seen[start]:
            continue
        seen[start] = True
        todo = [start]
        while todo:
            at = todo.pop()
            for other in neighbours[at]:
                if not seen[other]:
                    seen[other] = True
                    forest.append((other, at, (min(other, at), max(other, at))))
                    todo.append(other)
    return forest


def _marginals(alone: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], Slack], forest: _Forest) -> list[np.ndarray]:
    """Least sum over the forest (and all choices outside of its trees at their least) with each candidate fixed.

    Every tree is minimised by itself: the other trees add their own minima.
    """
    total = [a.copy() for a in alone]
    up: dict[int, np.ndarray] = {}
    for child, parent, key in reversed(forest):
        up[child] = (pairs[key].to_second if key[0] == child else pairs[key].to_first)(total[child])
        total[parent] = total[parent] + up[child]
    for child, parent, key in forest:
        above = np.subtract(total[parent], up[child], out=np.full(len(total[parent]), np.inf), where=np.isfinite(up[child]))
        total[child] = total[child] + (pairs[key].to_second if key[0] == parent else pairs[key].to_first)(above)
    children = {child for child, _, _ in forest}
    roots = [g for g in range(len(total)) if g not in children]
    least = [float(t.min()) for t in total]
    every = sum(least[r] for r in roots)
    top: dict[int, int] = {}
    for child, parent, _ in forest:
        top[child] = top.get(parent, parent)
    return [t + (every - least[top.get(g, g)]) for g, t in enumerate(total)]
