"""The cheapest tree of one flow as a sum over pairs: with one more variable, the place where its paths part.

The cost of a tree from a supply to several demands is no sum over pairs, as arcs are bought once for all demands. It becomes one with
a variable for its forks: a tree to two demands parts at one node, ``s -> v``, ``v -> a``, ``v -> b``; one to three at two nodes, in one
of three ways, ``s -> v``, ``v -> a``, ``v -> w``, ``w -> b``, ``w -> c``. The least over the forks is the tree's cost exactly, as a
tree to k leaves has at most k - 1 forks (Hwang, Richards, Winter, "The Steiner Tree Problem", 1992).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Demands of one tree that is exact.
_TOGETHER = 3


class Groups:
    """Where many candidates of a variable are alike for another one: which ones.

    Attributes:
        index: group of each candidate, shape [candidates].
    """

    def __init__(self, index: np.ndarray):
        self.index = index
        self._order = np.argsort(index, kind="stable")
        self._starts = np.searchsorted(index[self._order], np.arange(int(index.max()) + 1))

    def most(self, values: np.ndarray) -> np.ndarray:
        """The largest value of each group, shape [groups]."""
        return np.maximum.reduceat(values[self._order], self._starts)

    def least(self, values: np.ndarray) -> np.ndarray:
        """The smallest value of each group, shape [groups]."""
        return np.minimum.reduceat(values[self._order], self._starts)


@dataclass(frozen=True)
class Leg:
    """What a tree pays between its forks and the supply, or a demand.

    Attributes:
        nodes: where the leg can start or end at forks, each once.
        groups: which of them each fork has; None where it is the fork of the same number.
    """

    nodes: np.ndarray
    groups: Groups | None

    @classmethod
    def of(cls, node: np.ndarray) -> Leg:
        nodes, index = np.unique(node, return_inverse=True)
        return cls(nodes, None) if len(nodes) == len(node) else cls(nodes, Groups(index))


@dataclass(frozen=True)
class Forks:
    """All forks of trees to two or three demands.

    Attributes:
        between: seconds from the first place where the tree parts to the last, shape [forks].
        supply: the leg from the supply to the first place.
        demands: the leg from where it parts from the others to each demand.
    """

    between: np.ndarray
    supply: Leg
    demands: tuple[Leg, ...]


@dataclass(frozen=True)
class _Shape:
    """Where trees from some nodes can part, whatever the paths cost.

    Attributes:
        first, last: where a tree parts first and last, shape [forks].
        supply, demands: as of :class:`Forks`.
    """

    first: np.ndarray
    last: np.ndarray
    supply: Leg
    demands: tuple[Leg, ...]


def forks_of(cost: np.ndarray, sources: np.ndarray, num_demands: int) -> Forks:
    """The forks of trees from some nodes.

    Args:
        cost: seconds of shortest paths, shape [nodes, nodes]; infinite where there is none.
        sources: nodes where the value can be made.
        num_demands: 2 or 3.
    """
    reaches = np.isfinite(cost)
    shape = _shape(reaches.tobytes(), len(cost), reaches[sources].any(axis=0).tobytes(), num_demands)
    return Forks(cost[shape.first, shape.last], shape.supply, shape.demands)


@lru_cache(maxsize=1 << 12)
def _shape(reaches: bytes, num_nodes: int, reached: bytes, num_demands: int) -> _Shape:
    """Forks by which nodes reach which, and which the supply reaches; many values have the same."""
    nodes = np.flatnonzero(np.frombuffer(reached, dtype=bool))
    if num_demands == 2:
        leg = Leg.of(nodes)
        return _Shape(nodes, nodes, leg, (leg, leg))
    among = np.frombuffer(reaches, dtype=bool).reshape(num_nodes, num_nodes)[np.ix_(nodes, nodes)]
    tails, heads = np.nonzero(among & ~np.eye(len(nodes), dtype=bool))
    first = np.concatenate([nodes, *(nodes[tails],) * 3])
    last = np.concatenate([nodes, *(nodes[heads],) * 3])
    alone = np.repeat([0, 0, 1, 2], [len(nodes), *(len(tails),) * 3])
    return _Shape(first, last, Leg.of(first), tuple(Leg.of(np.where(alone == d, first, last)) for d in range(3)))


def together(num_demands: int) -> Iterator[range]:
    """The demands of one flow, as many together as trees are exact for."""
    for start in range(0, num_demands, _TOGETHER):
        yield range(start, min(start + _TOGETHER, num_demands))
