"""Clusters: ops that run as one kernel and are decided together.

A cluster's internal values never change placement. Its rows are the joins of its ops' rows over the internal values.
A placeholder stands in a cluster of its own together with the views and casts of it (``weight -> t``,
``weight -> bfloat16 -> t``): what is redistributed is then the cast, transposed value that the consumer reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.planner.ir.graph import GraphInput, GraphOutput, Op, Repeat, Value
from meshwright.planner.ir.spec import Placement, Placements, Row


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One legal way to run a cluster over one mesh axis.

    Attributes:
        ins: one placement per ``Cluster.ins``.
        outs: one placement per ``Cluster.outs``.
        members: the row of each op, in the order of ``Cluster.ops``.
        rest: for a placeholder's cluster, the placement of the placeholder itself; else None.
        uneven: whether the row holds where the axis does not divide a sharded dim.
    """

    ins: Placements
    outs: Placements
    members: tuple[Row, ...]
    rest: Placement | None = None
    uneven: bool = False


@dataclass(frozen=True)
class Cluster:
    """Ops decided together.

    Attributes:
        name: name of its last op, or of its placeholder.
        phase: ``"forward"`` or ``"backward"`` (a placeholder's cluster: that of the placeholder).
        source: the placeholder, for a placeholder's cluster.
        ops: its ops in execution order.
        ins: the values it reads from other clusters, each once.
        outs: the values of it that other clusters or the graph's outputs read, each once. For a placeholder's cluster
            this may include the placeholder's own value.
        rows: what is legal over one axis.
        fallback: targets of ops in it that have no rule.
    """

    name: str
    phase: str
    source: GraphInput | None
    ops: tuple[Op, ...]
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    rows: tuple[ClusterRow, ...]
    fallback: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterGraph:
    """All clusters in execution order, and which of them are tied.

    Attributes:
        clusters: every op of the graph is in exactly one; every placeholder has one.
        outputs: the graph's results.
        class_of: per cluster, the index of its class. Clusters of one class have equal ins, outs and rows up to names,
            in the same order, and take the same candidate: they are the same place of repeated blocks.
        weight: per cluster, how many clusters of the model it stands for; empty: each for itself alone.
        value_weight: name of a value to how many values it stands for, where that is not one.
        repeats: the blocks of the program that stand for more than themselves.
    """

    clusters: tuple[Cluster, ...]
    outputs: tuple[GraphOutput, ...]
    class_of: tuple[int, ...]
    weight: tuple[int, ...] = ()
    value_weight: Mapping[str, int] = field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """``weight``, ones where it is empty."""
        return self.weight or (1,) * len(self.clusters)

    def times(self, value: str) -> int:
        """How many values of the model a value stands for."""
        return self.value_weight.get(value, 1)

    @cached_property
    def producer(self) -> dict[str, tuple[int, int]]:
        """Value name to (cluster index, index among its outs)."""
        return {v.name: (i, k) for i, c in enumerate(self.clusters) for k, v in enumerate(c.outs)}
