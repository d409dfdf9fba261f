"""Better plans by moving many choices at once.

Variables and pairs of them, as :mod:`.pairwise` says. As long as some variables stay where they are, the others can be moved to the very
best place together if no cycle of pairs runs through them alone: trees are minimised exactly. Each time others stay.

Source: exchange over induced forests, as in Fix, Chen, Boros, Zabih, "Approximate MRF inference using bounded treewidth subgraphs" (2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.solve.forks import Groups
from meshwright.planner.solve.marginals import root_of

Edge = tuple[int, int, Groups | None, Groups | None]
"""From one variable to another: number of the pair, the other one, how the one's and the other's candidates are grouped for each other."""


@dataclass(frozen=True)
class Sum:
    """A sum over variables and pairs.

    Attributes:
        alone: cost of each variable by candidate.
        pairs: cost of pair ``k`` at ``2 k`` by candidate, or group of them, of its first variable and its second; at ``2 k + 1`` the other
            way round.
        edges: those from each variable.
    """

    alone: Sequence[np.ndarray]
    pairs: Sequence[np.ndarray]
    edges: Sequence[Sequence[Edge]]

    def row(self, edge: Edge, candidate: int) -> np.ndarray:
        """What a pair costs with a candidate of the variable that an edge leads to, by candidate of the one that it comes from."""
        number, _, mine, theirs = edge
        row = self.pairs[number ^ 1][candidate if theirs is None else theirs.index[candidate]]
        return row if mine is None else row[mine.index]

    def given(self, variable: int, at: Sequence[int], fixed: Sequence[bool] | None = None) -> np.ndarray:
        """Cost of a variable's candidates with the others where they are; with those alone that are fixed, if that is said."""
        cost = self.alone[variable].copy()
        for edge in self.edges[variable]:
            if fixed is None or fixed[edge[1]]:
                cost += self.row(edge, at[edge[1]])
        return cost

    def move_each(self, order: Sequence[int], at: list[int]) -> bool:
        """Move each variable to its best place given all others, one after the other; whether any moved."""
        before = list(at)
        for g in order:
            cost = self.given(g, at)
            if cost.min() < cost[at[g]]:
                at[g] = int(cost.argmin())
        return at != before

    def move_forest(self, order: Sequence[int], at: list[int]) -> bool:
        """Move variables that have no cycle among them together; whether any moved.

        Args:
            order: the variables; those that come first are taken first.
            at: candidate of each; changed.
        """
        before = list(at)
        stays, trees = self._forest(order)
        costs = {g: self.given(g, at, stays) for g in trees}
        done: set[int] = set()
        for root in trees:
            if root not in done:
                self._move_tree(_from_root(root, trees), costs, at, done)
        return at != before

    def _forest(self, order: Sequence[int]) -> tuple[list[bool], dict[int, list[Edge]]]:
        """Whether each variable stays; and the edges between those that do not."""
        stays, parent, trees = [True] * len(self.alone), list(range(len(self.alone))), dict[int, list[Edge]]()

        for g in order:
            around = [edge for edge in self.edges[g] if not stays[edge[1]]]
            roots = {root_of(parent, edge[1]) for edge in around}
            if len(roots) < len(around):
                continue
            stays[g], trees[g] = False, around
            for number, other, mine, theirs in around:
                trees[other].append((number ^ 1, g, theirs, mine))
            for r in roots:
                parent[r] = g
        return stays, trees

    def _move_tree(
        self, tree: Sequence[tuple[int, Edge | None]], costs: dict[int, np.ndarray], at: list[int], done: set[int]
    ) -> None:
        """Move the variables of a tree, given each with the edge to its parent, parents first."""
        best: dict[int, np.ndarray] = {}
        for g, up in reversed(tree):
            done.add(g)
            if up is not None:
                total = costs[g][:, None] + self._matrix(up)
                best[g] = total.argmin(axis=0)
                costs[up[1]] += total[best[g], np.arange(total.shape[1])]
        for g, up in tree:
            at[g] = int(costs[g].argmin()) if up is None else int(best[g][at[up[1]]])

    def _matrix(self, edge: Edge) -> np.ndarray:
        """What a pair costs by candidate of the variable that the edge comes from and of the one that it leads to."""
        number, _, mine, theirs = edge
        matrix = self.pairs[number]
        matrix = matrix if mine is None else matrix[mine.index]
        return matrix if theirs is None else matrix[:, theirs.index]


def _from_root(root: int, trees: dict[int, list[Edge]]) -> list[tuple[int, Edge | None]]:
    """The variables of one tree with the edge to the parent, parents first."""
    found: list[tuple[int, Edge | None]] = [(root, None)]
    for g, up in found:
        for number, other, mine, theirs in trees[g]:
            if up is None or other != up[1]:
                found.append((other, (number ^ 1, g, theirs, mine)))
    return found
