"""The network of one value: its possible placements as nodes, legal one-axis steps as priced arcs.

``PP`` to ``RR`` may go ``PP -> PS(0) -> S(0)``... : hierarchical collectives are just paths, so nothing lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.redistribute import legal_step, step_kind
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.solve.candidates import even, pieces_exist
from meshwright.planner.solve.problem import Network


class StepCosts(Protocol):
    """What pricing a step needs of the cost model."""

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]: ...

    def sort_of(self, value: Value) -> object: ...


@dataclass(frozen=True)
class PlacementNetwork:
    """A :class:`Network` together with what its nodes and arcs mean.

    Attributes:
        nodes: placements by node.
        arcs: (axis, kind, bytes) by arc.
        network: tails, heads and seconds.
    """

    nodes: tuple[Placements, ...]
    arcs: tuple[tuple[int, str, int], ...]
    network: Network

    def index(self) -> dict[Placements, int]:
        return {p: i for i, p in enumerate(self.nodes)}


class Networks:
    """Builds networks of values, each distinct one once."""

    def __init__(self, costs: StepCosts, sizes: tuple[int, ...]):
        self._costs = costs
        self._sizes = sizes
        self._built: dict[tuple, PlacementNetwork] = {}

    def of(self, value: Value, used: Iterable[Placements], *, uneven: bool) -> PlacementNetwork:
        """The network of ``value`` over every combination of the placements used on each axis, and ``R``.

        Args:
            value: the tensor.
            used: placements in which it is made or wanted; always nodes.
            uneven: whether nodes in between may have uneven pieces (parameters at rest and their gradients).
        """
        known = tuple(dict.fromkeys(used))
        key = (value.shape, value.dtype, known, uneven, self._costs.sort_of(value))
        if key not in self._built:
            self._built[key] = self._build(value, known, uneven)
        return self._built[key]

    def _build(self, value: Value, used: tuple[Placements, ...], uneven: bool) -> PlacementNetwork:
        per_axis = [tuple(dict.fromkeys((*(p[a] for p in used), R))) for a in range(len(self._sizes))]
        nodes = list(dict.fromkeys(used))
        known = set(nodes)
        for p in itertools.product(*per_axis):
            if p not in known and self._exists(value, p, uneven):
                nodes.append(p)
        return self._connect(value, tuple(nodes), per_axis)

    def _exists(self, value: Value, p: Placements, uneven: bool) -> bool:
        return even(value.shape, p, self._sizes) or (uneven and pieces_exist(value.shape, p, self._sizes))

    def _connect(self, value: Value, nodes: tuple[Placements, ...], per_axis: list[Placements]) -> PlacementNetwork:
        index = {p: i for i, p in enumerate(nodes)}
        is_even = [even(value.shape, p, self._sizes) for p in nodes]
        tails, heads, seconds, arcs = [], [], [], []
        for tail, src in enumerate(nodes):
            for axis, choices in enumerate(per_axis):
                for dst in choices:
                    head = index.get((*src[:axis], dst, *src[axis + 1 :]))
                    if head is None or self._sizes[axis] == 1 or not legal_step(src, axis, dst):
                        continue
                    if step_kind(src[axis], dst) == "all_to_all" and not (is_even[tail] and is_even[head]):
                        continue
                    kind, size, cost = self._costs.step_s(value, src, axis, dst)
                    tails.append(tail)
                    heads.append(head)
                    seconds.append(cost)
                    arcs.append((axis, kind, size))
        network = Network(len(nodes), np.array(tails, dtype=np.int64), np.array(heads, dtype=np.int64), np.array(seconds))
        return PlacementNetwork(nodes, tuple(arcs), network)


def without_dominated(network: Network, allowed: np.ndarray) -> np.ndarray:
    """``allowed`` less the arcs that two cheaper allowed arcs replace at no higher cost, shape [arcs].

    ``P -> R`` goes where ``P -> S(0) -> R`` costs the same. Both replacing arcs must be strictly cheaper than the arc, so
    that arcs do not replace one another in a circle.
    """
    n = network.num_nodes
    cost = np.full((n, n), np.inf)
    cost[network.tails[allowed], network.heads[allowed]] = network.seconds[allowed]
    keep = allowed.copy()
    for arc in np.flatnonzero(allowed):
        i, j, w = network.tails[arc], network.heads[arc], network.seconds[arc]
        detour = cost[i, :] + cost[:, j]
        keep[arc] = not np.any((detour <= w * (1 + 1e-12)) & (cost[i, :] < w) & (cost[:, j] < w))
    return keep
