"""The planning problem as plain data: choices, flows between them, memory. No tensors, no ops, no solver.

Minimise, over one candidate ``x`` per choice,

    sum over segments (forward, backward):  compute + exposed + max(0, hidden - compute)

* *compute*: seconds of the chosen candidates;
* *exposed*, *hidden*: seconds of the arcs bought. Each flow brings one value from the node (placement) where the
  supplying choice makes it to the node that each demand wants, over arcs that are bought once for all demands;
* memory per device, by category: linear in ``x``, plus peaks (the largest of many linear terms), at most the limit.

A choice stands for ``count`` tied clusters, a flow for ``count`` values. Source: the flow form of PLANNER_FACTS §0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

SEGMENTS = ("forward", "backward")


@dataclass(frozen=True)
class Choice:
    """Clusters that take the same candidate.

    Attributes:
        name: of the first cluster.
        count: number of clusters.
        segment: index in ``SEGMENTS`` of the phase in which they compute.
        compute_s: seconds of one cluster by candidate, shape [candidates].
        memory_bytes: category to bytes of all the clusters together by candidate, shape [candidates].
        gather_s: seconds of gathering once per step what one cluster's candidate keeps gathered, shape [candidates]; None where
            none does. It is communication of the choice's segment.
        gather_hidden: whether that can be issued ahead.
    """

    name: str
    count: int
    segment: int
    compute_s: np.ndarray
    memory_bytes: Mapping[str, np.ndarray] = field(default_factory=dict)
    gather_s: np.ndarray | None = None
    gather_hidden: bool = True

    @property
    def num_candidates(self) -> int:
        return len(self.compute_s)

    @cached_property
    def static_bytes(self) -> np.ndarray:
        """Bytes that are there all the time, of all categories, shape [candidates]."""
        return sum(self.memory_bytes.values(), np.zeros(self.num_candidates))


@dataclass(frozen=True)
class Network:
    """Placements of one value and the one-axis steps between them.

    Attributes:
        num_nodes: number of nodes.
        tails: node where each arc starts, shape [arcs].
        heads: node where each arc ends, shape [arcs].
        seconds: cost of each arc for one value, positive, shape [arcs].
    """

    num_nodes: int
    tails: np.ndarray
    heads: np.ndarray
    seconds: np.ndarray

    @property
    def num_arcs(self) -> int:
        return len(self.tails)

    @cached_property
    def median_s(self) -> float:
        """The median cost of an arc; 0 without arcs."""
        return float(np.median(self.seconds)) if self.num_arcs else 0.0


@dataclass(frozen=True)
class Demand:
    """Where one consumer wants the value.

    Attributes:
        choice: the consuming choice; None for a result of the graph, which accepts any of ``nodes``.
        nodes: node wanted by each candidate of ``choice``, shape [candidates]; or the nodes accepted.
    """

    choice: int | None
    nodes: np.ndarray


@dataclass(frozen=True)
class Flow:
    """One value (or ``count`` tied ones) brought from its producer to all its consumers of one phase.

    Attributes:
        name: of the first value.
        count: number of values, or how much they count.
        segment: index in ``SEGMENTS`` of the consumers' phase.
        hidden: whether its collectives can be issued ahead.
        network: nodes and arcs.
        allowed: arcs that may be used, shape [arcs].
        supply: the producing choice.
        supply_nodes: node at which each candidate of ``supply`` makes the value, shape [candidates].
        demands: the consumers.
    """

    name: str
    count: float
    segment: int
    hidden: bool
    network: Network
    allowed: np.ndarray
    supply: int
    supply_nodes: np.ndarray
    demands: tuple[Demand, ...]


@dataclass(frozen=True)
class Peak:
    """A category of memory that is the largest of several terms, each linear in the candidates.

    Attributes:
        category: its name.
        weight: how many of the largest are alive at once.
        terms: each a tuple of (choice, bytes by candidate); the term is the sum over its choices.
    """

    category: str
    weight: float
    terms: tuple[tuple[tuple[int, np.ndarray], ...], ...]


@dataclass(frozen=True)
class Problem:
    """Everything the solver needs.

    Attributes:
        choices: what is chosen.
        flows: values between choices.
        peaks: memory that is a maximum.
        fixed_bytes: category to bytes that no choice changes.
        memory_limit_bytes: limit per device; None for no limit.
        tie_memory_s_per_byte: tiny price of static memory that breaks ties between equally fast plans.
        tie_hidden: tiny price per second of hidden communication, likewise.
    """

    choices: tuple[Choice, ...]
    flows: tuple[Flow, ...]
    peaks: tuple[Peak, ...] = ()
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    tie_memory_s_per_byte: float = 0.0
    tie_hidden: float = 1e-6


@dataclass(frozen=True)
class Restriction:
    """What a strategy, pins or axis names take away from a problem.

    Attributes:
        allowed: choice to which candidates remain, shape [candidates]; choices not listed are free.
        arcs: flow to which arcs remain, shape [arcs]; flows not listed are free.
        avoid: choice to candidates that are taken only where nothing else is possible, shape [candidates]; decided before time
            is looked at.
        notes: sentences for the plan.
    """

    allowed: Mapping[int, np.ndarray] = field(default_factory=dict)
    arcs: Mapping[int, np.ndarray] = field(default_factory=dict)
    avoid: Mapping[int, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def merged(self, other: Restriction) -> Restriction:
        """Both restrictions at once."""
        return Restriction(
            _both(self.allowed, other.allowed),
            _both(self.arcs, other.arcs),
            {**self.avoid, **{k: v | self.avoid[k] if k in self.avoid else v for k, v in other.avoid.items()}},
            self.notes + other.notes,
        )


def _both(a: Mapping[int, np.ndarray], b: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    return {**a, **{k: v & a[k] if k in a else v for k, v in b.items()}}
