"""What of a problem no mesh changes: its classes, the flows of values between them, and when what they make is alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.known import Known
from meshwright.planner.solve.memory import parameters_with_gradient
from meshwright.planner.solve.precision import unreduced_values
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.results import ends_free, has_loss, parameter_of, phase_of_result
from meshwright.planner.solve.segments import hidden_values

# A consumer of a value: ("in", class, slot), ("grad", class, 0), ("whole", 0, 0) or ("free", 0, 0).
Reader = tuple[str, int, int]

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Group:
    """Values that make one flow.

    Attributes:
        supply: class that makes them.
        slot: which of its results they are.
        phase: of the readers.
        readers: who reads them.
        names: the values.
        count: how many values of the model they stand for.
    """

    supply: int
    slot: int
    phase: str
    readers: tuple[Reader, ...]
    names: tuple[str, ...]
    count: int


class Layout:
    """The classes of a program and how they are connected.

    Attributes:
        clusters: the program.
        class_of: class of every cluster, from 0 on by first occurrence.
        members: class to its clusters' indices.
        with_gradient: value names of the parameters that get a gradient.
        hidden: (value, phase) whose redistribution can hide.
        unreduced: values below float32 that only lead to parameters' float32 gradients.
        groups: values by producing class, result, phase and readers, in execution order.
        results: the reader that each result of the graph is, in the graph's order; None where there is no tensor.
    """

    def __init__(self, graph: OpGraph, clusters: ClusterGraph, class_of: Sequence[int]):
        labels = {label: g for g, label in enumerate(dict.fromkeys(class_of))}
        self.class_of = tuple(labels[label] for label in class_of)
        found: list[list[int]] = [[] for _ in labels]
        for i, g in enumerate(self.class_of):
            found[g].append(i)
        self.members = tuple(map(tuple, found))
        self.with_gradient = parameters_with_gradient(graph)
        self.hidden, self.unreduced = hidden_values(graph, clusters), unreduced_values(graph)
        self._known: dict[str, Any] = {}
        readers = self._readers(clusters)
        self.results = tuple(self._results(graph, clusters, readers))
        self.groups = tuple(self._groups(clusters, readers))

    def once(self, what: str, work_out: Callable[[], Fact]) -> Fact:
        """Anything else that no mesh changes, by name: worked out once."""
        if what not in self._known:
            self._known[what] = work_out()
        return self._known[what]

    def _readers(self, clusters: ClusterGraph) -> dict[tuple[str, str], dict[Reader, None]]:
        found: dict[tuple[str, str], dict[Reader, None]] = {}
        for i, cluster in enumerate(clusters.clusters):
            for slot, value in enumerate(cluster.ins):
                found.setdefault((value.name, cluster.phase), {})["in", self.class_of[i], slot] = None
        return found

    def _results(
        self, graph: OpGraph, clusters: ClusterGraph, readers: dict[tuple[str, str], dict[Reader, None]]
    ) -> list[Reader | None]:
        """Results of the graph, which become readers too."""
        placeholder, loss = parameter_of(graph), has_loss(graph)
        source_class = {c.source.value.name: self.class_of[i] for i, c in enumerate(clusters.clusters) if c.source is not None}
        found: list[Reader | None] = []
        for output in graph.outputs:
            parameter = placeholder.get(output.name) if output.role == "gradient" else None
            if output.value is None or (parameter is not None and parameter not in source_class):
                found.append(None)  # clusters may be a part of the program, and a parameter outside
                continue
            reader: Reader = ("free" if ends_free(output, loss) else "whole", 0, 0)
            if parameter is not None:
                reader = ("grad", source_class[parameter], 0)
            readers.setdefault((output.value.name, phase_of_result(output)), {})[reader] = None
            found.append(reader)
        return found

    def _groups(self, clusters: ClusterGraph, readers: dict[tuple[str, str], dict[Reader, None]]) -> list[Group]:
        found: dict[tuple[int, int, str, tuple[Reader, ...]], list[str]] = {}
        for i, cluster in enumerate(clusters.clusters):
            for slot, value in enumerate(cluster.outs):
                for phase in SEGMENTS:
                    read = readers.get((value.name, phase))
                    if read:
                        found.setdefault((self.class_of[i], slot, phase, tuple(sorted(read))), []).append(value.name)
        return [Group(*key, tuple(names), sum(map(clusters.times, names))) for key, names in found.items()]


def layout_of(graph: OpGraph, clusters: ClusterGraph, class_of: Sequence[int]) -> Layout:
    """The layout of a program, worked out once for all meshes.

    Args:
        graph: the program.
        clusters: its clusters.
        class_of: class of every cluster, any labels.
    """
    known, key = _LAYOUTS(clusters), tuple(class_of)
    if key not in known:
        known[key] = Layout(graph, clusters, key)
    return known[key]


def _none(_: ClusterGraph) -> dict[tuple[int, ...], Layout]:
    return {}


_LAYOUTS: Known[ClusterGraph, dict[tuple[int, ...], Layout]] = Known(_none)
