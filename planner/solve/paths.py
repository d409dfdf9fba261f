"""Shortest paths and cheapest trees in a network: how one value reaches all its consumers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.planner.solve.problem import Network

# A path of fewer arcs wins among equals: one all-reduce before a reduce-scatter and an all-gather of the same cost.
_FEWER_ARCS_S = 1e-12
# Terminals for which the cheapest tree is computed exactly (the effort grows as 3 ** terminals).
_EXACT_TERMINALS = 6


def weights(network: Network) -> np.ndarray:
    """Seconds of each arc plus a tie-break, shape [arcs]."""
    return network.seconds + _FEWER_ARCS_S


def distances(parts: Sequence[tuple[Network, np.ndarray]]) -> list[np.ndarray]:
    """Seconds of all shortest paths in the allowed part of each network, shape [nodes, nodes]; infinite where there is none.

    Networks of one size go together (Floyd and Warshall).
    """
    found: list[np.ndarray] = [np.empty(0)] * len(parts)
    of_size: dict[int, list[int]] = {}
    for i, (network, _) in enumerate(parts):
        of_size.setdefault(network.num_nodes, []).append(i)
    for n, members in of_size.items():
        cost = np.full((len(members), n, n), np.inf)
        cost[:, np.arange(n), np.arange(n)] = 0.0
        for own, i in zip(cost, members, strict=True):
            network, allowed = parts[i]
            own[network.tails[allowed], network.heads[allowed]] = weights(network)[allowed]
            found[i] = own
        for k in range(n):
            np.minimum(cost, cost[:, :, k, None] + cost[:, None, k, :], out=cost)
    return found


class Routes:
    """All shortest paths in the allowed part of a network (Floyd and Warshall)."""

    def __init__(self, network: Network, allowed: np.ndarray):
        n = network.num_nodes
        cost = np.full((n, n), np.inf)
        np.fill_diagonal(cost, 0.0)
        first = np.full((n, n), -1, dtype=np.int64)
        arcs = np.flatnonzero(allowed)
        tails, heads = network.tails[arcs], network.heads[arcs]
        cost[tails, heads] = weights(network)[arcs]
        first[tails, heads] = arcs
        for k in range(n):
            through = cost[:, k, None] + cost[None, k, :]
            better = through < cost
            if better.any():
                cost = np.where(better, through, cost)
                first = np.where(better, first[:, k, None], first)
        self._heads = network.heads
        self._first = first
        self.cost = cost

    def arcs(self, source: int, target: int) -> list[int]:
        """Arcs of the shortest path; empty where there is none or none is needed."""
        found = []
        while source != target:
            arc = int(self._first[source, target])
            if arc < 0:
                return []
            found.append(arc)
            source = int(self._heads[arc])
        return found

    def between(self, sources: Iterable[int], targets: Sequence[int]) -> np.ndarray:
        """Arcs on the shortest paths from each source to each target, ascending."""
        return np.array(sorted({a for s in sources for t in targets for a in self.arcs(s, t)}), dtype=np.int64)


def on_some_path(network: Network, allowed: np.ndarray, sources: Iterable[int], targets: Iterable[int]) -> np.ndarray:
    """Allowed arcs that lie on any path from a source to a target, ascending."""
    arcs = np.flatnonzero(allowed)
    tails, heads = network.tails[arcs], network.heads[arcs]
    ahead = _closure(network.num_nodes, tails, heads, sources)
    behind = _closure(network.num_nodes, heads, tails, targets)
    return arcs[ahead[tails] & behind[heads]]


def _closure(num_nodes: int, tails: np.ndarray, heads: np.ndarray, start: Iterable[int]) -> np.ndarray:
    seen = np.zeros(num_nodes, dtype=bool)
    seen[list(start)] = True
    while True:
        grown = seen.copy()
        grown[heads[seen[tails]]] = True
        if np.array_equal(grown, seen):
            return seen
        seen = grown


def cheapest_tree(network: Network, allowed: np.ndarray, root: int, terminals: Sequence[frozenset[int]]) -> list[int] | None:
    """Arcs of the cheapest tree from ``root`` that reaches every terminal.

    Args:
        network: nodes and arcs.
        allowed: arcs that may be used, shape [arcs].
        root: where the value is made.
        terminals: each a set of nodes of which one must be reached.

    Returns:
        Arc indices, ascending; None where some terminal cannot be reached.

    Source: Dreyfus and Wagner, "The Steiner problem in graphs" (1971), on directed arcs. Exact for up to six terminals that
    differ; beyond, terminals join one by one.
    """
    wanted = [t for t in dict.fromkeys(terminals) if root not in t]
    if not wanted:
        return []
    incoming = _incoming(network, allowed)
    if len(wanted) > _EXACT_TERMINALS:
        return _tree_one_by_one(network, incoming, root, wanted)
    tree = _tree_exact(network, incoming, root, wanted)
    return None if tree is None else sorted(tree)


def _incoming(network: Network, allowed: np.ndarray) -> list[list[tuple[int, int, float]]]:
    """Per node the allowed arcs into it as (tail, arc, weight)."""
    into: list[list[tuple[int, int, float]]] = [[] for _ in range(network.num_nodes)]
    weight = weights(network)
    for arc in np.flatnonzero(allowed).tolist():
        into[network.heads[arc]].append((int(network.tails[arc]), arc, float(weight[arc])))
    return into


def _relax(cost: list[float], trees: list[frozenset[int]], incoming: list[list[tuple[int, int, float]]]) -> None:
    """Let trees grow backwards along arcs: ``cost[v]`` is that of the best tree rooted at ``v`` (Dijkstra)."""
    queue = [(c, v) for v, c in enumerate(cost) if c < np.inf]
    heapq.heapify(queue)
    while queue:
        c, v = heapq.heappop(queue)
        if c > cost[v]:
            continue
        for tail, arc, w in incoming[v]:
            if c + w < cost[tail]:
                cost[tail] = c + w
                trees[tail] = trees[v] | {arc}
                heapq.heappush(queue, (cost[tail], tail))


def _tree_exact(
    network: Network, incoming: list[list[tuple[int, int, float]]], root: int, wanted: Sequence[frozenset[int]]
) -> frozenset[int] | None:
    full = (1 << len(wanted)) - 1
    best: dict[int, tuple[list[float], list[frozenset[int]]]] = {}
    for mask in range(1, full + 1):
        cost: list[float] = [np.inf] * network.num_nodes
        trees: list[frozenset[int]] = [frozenset()] * network.num_nodes
        if mask & (mask - 1) == 0:
            for node in wanted[mask.bit_length() - 1]:
                cost[node] = 0.0
        part = (mask - 1) & mask
        while part > mask ^ part:
            (cost_a, trees_a), (cost_b, trees_b) = best[part], best[mask ^ part]
            for v in range(network.num_nodes):
                if cost_a[v] + cost_b[v] < cost[v]:
                    cost[v] = cost_a[v] + cost_b[v]
                    trees[v] = trees_a[v] | trees_b[v]
            part = (part - 1) & mask
        _relax(cost, trees, incoming)
        best[mask] = cost, trees
    cost, trees = best[full]
    return trees[root] if cost[root] < np.inf else None


def _tree_one_by_one(
    network: Network, incoming: list[list[tuple[int, int, float]]], root: int, wanted: Sequence[frozenset[int]]
) -> list[int] | None:
    tree: set[int] = set()
    for terminal in wanted:
        inside = {root} | {int(network.heads[a]) for a in tree}
        cost = [0.0 if v in terminal else np.inf for v in range(network.num_nodes)]
        trees: list[frozenset[int]] = [frozenset()] * network.num_nodes
        _relax(cost, trees, incoming)
        start = min(inside, key=lambda v: (cost[v], v))
        if cost[start] == np.inf:
            return None
        tree |= trees[start]
    return sorted(tree)


def tree_path(network: Network, tree: Iterable[int], root: int, accepted: frozenset[int]) -> tuple[int, ...] | None:
    """Nodes from ``root`` to the accepted node that the tree reaches in the fewest arcs."""
    before = {int(network.heads[a]): int(network.tails[a]) for a in tree}
    found: list[tuple[int, ...]] = []
    for node in sorted(accepted):
        path = [node]
        while path[-1] != root and path[-1] in before and len(path) <= network.num_nodes:
            path.append(before[path[-1]])
        if path[-1] == root:
            found.append(tuple(reversed(path)))
    return min(found, key=len, default=None)
