"""The network of one value: its possible placements as nodes, legal one-axis steps as priced arcs.

``PP`` to ``RR`` may go ``PP -> PS(0) -> S(0)``... : hierarchical collectives are just paths, so nothing lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cuts import Cuts, divide, padded, split_at
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.redistribute import KINDS, step_kind
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.solve.candidates import pieces_exist
from meshwright.planner.solve.problem import Network


class StepCosts(Protocol):
    """What pricing steps needs of the cost model."""

    def steps_s(self, steps: Steps) -> tuple[np.ndarray, np.ndarray]: ...

    def sort_of(self, value: Value) -> object: ...


@dataclass(frozen=True)
class PlacementNetwork:
    """A :class:`Network` together with what its nodes and arcs mean.

    Attributes:
        nodes: placements by node.
        axes: mesh axis that an arc changes, int64 [arcs].
        kinds: which step it is, index in :data:`~meshwright.planner.ir.redistribute.KINDS`, int64 [arcs].
        bytes: the larger of its input and output on a rank, int64 [arcs].
        network: tails, heads and seconds.
    """

    nodes: tuple[Placements, ...]
    axes: np.ndarray
    kinds: np.ndarray
    bytes: np.ndarray
    network: Network

    @cached_property
    def arcs(self) -> tuple[tuple[int, str, int], ...]:
        """(axis, kind, bytes) by arc."""
        kinds = [KINDS[k] for k in self.kinds.tolist()]
        return tuple(zip(self.axes.tolist(), kinds, self.bytes.tolist(), strict=True))

    @cached_property
    def index(self) -> dict[Placements, int]:
        """Placements to node."""
        return {p: i for i, p in enumerate(self.nodes)}

    def are(self, axes: Iterable[int], kinds: Iterable[str]) -> np.ndarray:
        """Whether an arc is one of some kinds over one of some axes, bool [arcs]."""
        is_kind, is_axis = np.zeros(len(KINDS), dtype=bool), np.zeros(len(self.nodes[0]), dtype=bool)
        is_kind[[KINDS.index(k) for k in kinds]] = True
        is_axis[list(axes)] = True
        return is_kind[self.kinds] & is_axis[self.axes]


@dataclass(frozen=True)
class Wish:
    """A value whose network is wanted.

    Attributes:
        value: the tensor.
        used: placements in which it is made or wanted, each once; always nodes.
        uneven: whether nodes in between may have uneven pieces (parameters at rest and their gradients).
    """

    value: Value
    used: tuple[Placements, ...]
    uneven: bool


def networks_of(wishes: Sequence[Wish], costs: StepCosts, sizes: tuple[int, ...]) -> list[PlacementNetwork]:
    """The network of each value over every combination of the placements used on each axis, and ``R``; equal ones are one object."""
    keys = [(w.value.shape, w.value.dtype, w.used, w.uneven, costs.sort_of(w.value)) for w in wishes]
    first = dict(zip(reversed(keys), reversed(wishes), strict=True))
    distinct = {key: first[key] for key in dict.fromkeys(keys)}
    built = dict(zip(distinct, _priced(list(distinct.values()), costs, sizes), strict=True))
    return [built[key] for key in keys]


def _priced(wishes: Sequence[Wish], costs: StepCosts, sizes: tuple[int, ...]) -> list[PlacementNetwork]:
    """One network per wish; all arcs are priced at once."""
    if not wishes:
        return []
    lattices = [_lattice(w.used, len(sizes)) for w in wishes]
    there = _There(lattices, wishes, sizes)
    steps = there.steps(lattices)
    size, seconds = costs.steps_s(steps)
    first = np.repeat(np.cumsum(there.num_nodes) - there.num_nodes, there.num_steps)
    parts = zip(
        there.nodes(lattices),
        *(split_at(a, there.num_steps.tolist()) for a in (steps.axes, steps.kinds, size)),
        *(split_at(a, there.num_steps.tolist()) for a in (steps.tails - first, steps.heads - first, seconds)),
        strict=True,
    )
    return [PlacementNetwork(nodes, ax, k, b, Network(len(nodes), t, h, s)) for nodes, ax, k, b, t, h, s in parts]


@dataclass(frozen=True)
class _Lattice:
    """All combinations of some placements, and the steps between them, as far as no size has a say.

    Attributes:
        nodes: those that are used, then the others.
        num_used: how many are used.
        cuts: how each is cut, [nodes, axes].
        tails, heads, axes, kinds: of the legal steps, by tail, axis and then in the order of the placements on that axis, int64 [steps].
    """

    nodes: tuple[Placements, ...]
    num_used: int
    cuts: Cuts
    tails: np.ndarray
    heads: np.ndarray
    axes: np.ndarray
    kinds: np.ndarray


@lru_cache(maxsize=1 << 11)
def _lattice(used: tuple[Placements, ...], num_axes: int) -> _Lattice:
    per_axis = [tuple(dict.fromkeys((*(p[a] for p in used), R))) for a in range(num_axes)]
    nodes = tuple(dict.fromkeys((*used, *itertools.product(*per_axis))))
    codes = {p: k for k, p in enumerate(dict.fromkeys(itertools.chain(*per_axis)))}
    at = np.array([[codes[p] for p in node] for node in nodes], dtype=np.int64)
    kind = np.array([[_kind(src, dst) for dst in codes] for src in codes])
    is_shard = np.array([p.is_shard for p in codes])[at]
    weight = len(codes) ** np.arange(num_axes)
    whole, found = at @ weight, []
    for axis, choices in enumerate(per_axis):
        rest = whole - at[:, axis] * weight[axis]  # tells apart what lies on the other axes
        buried = is_shard[:, axis] & (at[:, axis + 1 :] == at[:, axis, None]).any(axis=1)
        here, step = at[:, axis], kind[at[:, axis, None], at[None, :, axis]]
        tails, heads = np.nonzero((rest[:, None] == rest) & (step >= 0) & ~buried[:, None] & ~buried)
        order = np.array([choices.index(p) if p in choices else -1 for p in codes])[here[heads]]
        found.append((tails, np.full(len(tails), axis), order, heads, step[tails, heads]))
    tails, axes, order, heads, kinds = (np.concatenate(part) for part in zip(*found, strict=True))
    by = np.lexsort((order, axes, tails))
    return _Lattice(nodes, len(used), Cuts.of(nodes, num_axes), tails[by], heads[by], axes[by], kinds[by])


@lru_cache(maxsize=1 << 10)
def _kind(src: Placement, dst: Placement) -> int:
    kind = step_kind(src, dst)
    return -1 if kind is None else KINDS.index(kind)


_ALL_TO_ALL = KINDS.index("all_to_all")


class _There:
    """What there is of the lattices of some values on a mesh: nodes whose pieces exist, steps over axes of more than one device.

    Attributes:
        num_nodes: how many nodes of each lattice there are, int64 [wishes].
        num_steps: how many steps, int64 [wishes].
    """

    def __init__(self, lattices: Sequence[_Lattice], wishes: Sequence[Wish], sizes: tuple[int, ...]):
        self._wishes, lengths = wishes, np.array([len(f.nodes) for f in lattices])
        self._start = np.cumsum(lengths) - lengths
        self._of = np.repeat(np.arange(len(wishes)), lengths)
        self._cuts = Cuts.stacked([f.cuts for f in lattices])
        even = divide(padded([w.value.shape for w in wishes])[self._of], self._cuts, sizes)
        exists = even | (np.arange(len(even)) - self._start[self._of] < np.array([f.num_used for f in lattices])[self._of])
        for at in np.flatnonzero(~exists & np.array([w.uneven for w in wishes])[self._of]).tolist():
            k = int(self._of[at])
            exists[at] = pieces_exist(wishes[k].value.shape, lattices[k].nodes[at - self._start[k]], sizes)
        self._even, self._exists, self._is_axis = even, exists, np.array(sizes) > 1
        self.num_nodes = np.add.reduceat(exists, self._start, dtype=np.int64)
        self.num_steps = np.zeros_like(self.num_nodes)

    def nodes(self, lattices: Sequence[_Lattice]) -> list[tuple[Placements, ...]]:
        """The nodes of each."""
        exists = split_at(self._exists, [len(f.nodes) for f in lattices])
        return [
            f.nodes if num == len(f.nodes) else tuple(itertools.compress(f.nodes, e.tolist()))
            for f, e, num in zip(lattices, exists, self.num_nodes.tolist(), strict=True)
        ]

    def steps(self, lattices: Sequence[_Lattice]) -> Steps:
        """All nodes and steps, those of each lattice behind those of the one before."""
        lengths = [len(f.tails) for f in lattices]
        of = np.repeat(np.arange(len(lattices)), lengths)
        tails, heads = (np.concatenate(a) + self._start[of] for a in ([f.tails for f in lattices], [f.heads for f in lattices]))
        axes, kinds = (np.concatenate(a) for a in ([f.axes for f in lattices], [f.kinds for f in lattices]))
        kept = self._exists[tails] & self._exists[heads] & self._is_axis[axes]
        kept &= (kinds != _ALL_TO_ALL) | (self._even[tails] & self._even[heads])
        self.num_steps = np.bincount(of[kept], minlength=len(lattices))
        number, values = np.cumsum(self._exists) - 1, tuple([w.value for w in self._wishes])
        ends = number[tails[kept]], number[heads[kept]]
        return Steps(values, self._of[self._exists], self._cuts[self._exists], *ends, axes[kept], kinds[kept])


def without_dominated(network: Network, allowed: np.ndarray) -> np.ndarray:
    """``allowed`` less the arcs that two cheaper allowed arcs replace at no higher cost, shape [arcs].

    ``P -> R`` goes where ``P -> S(0) -> R`` costs the same. Both replacing arcs must be strictly cheaper than the arc, so
    that arcs do not replace one another in a circle.
    """
    n = network.num_nodes
    cost = np.full((n, n), np.inf)
    cost[network.tails[allowed], network.heads[allowed]] = network.seconds[allowed]
    arcs = np.flatnonzero(allowed)
    first, second, seconds = cost[network.tails[arcs]], cost[:, network.heads[arcs]].T, network.seconds[arcs, None]
    replaced = (first + second <= seconds * (1 + 1e-12)) & (first < seconds) & (second < seconds)
    keep = allowed.copy()
    keep[arcs] = ~replaced.any(axis=1)
    return keep
