"""Memory of a finished plan: what is alive at every point of a step, and the peak.

============== =====================================================================================================
parameters     the piece at rest; ``optimizer`` its state, ``buffers``, ``inputs`` likewise, all the time
accumulated    gradients of earlier passes, in the parameter's own placement, all the time: where the caller adds up several passes
kept           copies of parameters that are gathered for the whole step
activations    forward values until the backward has read them for the last time, where their producer made them
working        values that only one phase reads; activations brought to another placement, while something reads that
gathered       copies of parameters while something reads them, and the largest once more for what is fetched ahead
gradients      in the parameter's own placement, from when they are made
communication  gradients on their way to that placement: at most two large ones or two buckets; the last bucket's buffer
outputs        what the call returns, until the backward is done: the caller may hold it
============== =====================================================================================================

One op at a time, as generated code runs; compiled code holds less. Gradients of an earlier step are freed before the forward
(``zero_grad``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from meshwright.planner.ir.buffers import GATHER_BYTES, REDUCE_BYTES
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placement, Placements
from meshwright.planner.ir.verify import kept_values, parameter_behind, path_of
from meshwright.planner.solve.candidates import piece_bytes, piece_numel
from meshwright.planner.solve.liveness import Span, late_makers, roots, timeline_of
from meshwright.planner.solve.memory import Trained, parameters_with_gradient, rest_bytes
from meshwright.planner.solve.problem import SEGMENTS
from meshwright.planner.solve.results import parameter_of

FLYING = 2
"""Largest gradients, or buckets of small ones, that are on their way at once (``passes.schedule``)."""


@dataclass(frozen=True)
class Peak:
    """The moment of most memory.

    Attributes:
        bytes: category to bytes then.
        at: the op that runs then; ``""`` for a program without ops.
    """

    bytes: Mapping[str, int]
    at: str


def peak_of(plan: Plan, graph: OpGraph, clusters: ClusterGraph, made: Mapping[str, Placements], trained: Trained) -> Peak:
    """The peak of a plan.

    Args:
        plan: the plan.
        graph: the program.
        clusters: its clusters: how much blocks stand for.
        made: placement in which every value is made.
        trained: what training holds per parameter element.
    """
    return _Step(plan, graph, clusters, made).peak(trained)


def beside_saved(
    plan: Plan,
    graph: OpGraph,
    clusters: ClusterGraph,
    made: Mapping[str, Placements],
    over_time: Mapping[str, Placement],
    count: int,
    reduced_later: Container[str] = (),
) -> tuple[list[str], dict[str, np.ndarray]]:
    """What one micro-batch holds while it runs, besides what its forward saves for its backward.

    Args:
        plan, graph, clusters, made: as for :func:`peak_of`.
        over_time: placement of values over the axis of micro-batches; what is not listed is replicated.
        count: number of micro-batches.
        reduced_later: value names of the parameters whose gradients are reduced between devices after all micro-batches.

    Returns:
        The op at each point, and bytes by category, float64 [points].
    """
    step = _Step(plan, graph, clusters, made, over_time, count, reduced_later)
    profiles = step.profiles() if graph.ops else {}
    return step.line.names, {k: p for k, p in profiles.items() if k in ("working", "gathered", "communication")}


@dataclass
class _Step:
    plan: Plan
    graph: OpGraph
    clusters: ClusterGraph
    made: Mapping[str, Placements]
    over_time: Mapping[str, Placement] = field(default_factory=dict)
    count: int = 1
    reduced_later: Container[str] = ()
    held: dict[str, list[tuple[Span, float]]] = field(default_factory=dict)
    kind: dict[str, str] = field(default_factory=dict)
    ahead: list[tuple[str, str, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.plan.mesh.sizes
        self.line = timeline_of(self.graph, self.clusters.repeats)
        self.root = roots(self.graph)
        self.late = late_makers(self.graph)
        self.values = {v.name: v for op in self.graph.ops for v in op.outs if v is not None}
        self.placeholders = {i.value.name: i for i in self.graph.inputs}
        self.kept = kept_values(self.plan, self.graph).keys()
        self.readers: dict[str, list[str]] = {}
        self.copies: dict[tuple[str, str, Placements], list[str]] = {}

    def peak(self, trained: Trained) -> Peak:
        rest = self._at_rest(trained)
        if not self.graph.ops:
            return Peak(rest, "")
        profiles = self.profiles()
        at = int(np.argmax(sum(profiles.values(), np.zeros(self.line.num_points))))
        now = {category: round(float(p[at])) for category, p in profiles.items()}
        return Peak({**rest, **{k: n for k, n in now.items() if n > 0}}, self.line.names[at])

    def profiles(self) -> dict[str, np.ndarray]:
        """Bytes at each point by category."""
        self._read()
        ends = self._results()
        self._values(ends)
        self._copied()
        profiles = {category: self.line.profile(spans) for category, spans in self.held.items()}
        self._gradients(profiles)
        for phase in SEGMENTS:
            self._fetched_ahead(phase, profiles)
        return profiles

    def _hold(self, category: str, spans: list[Span], size: float) -> None:
        self.held.setdefault(category, []).extend((span, size) for span in spans)

    def _bytes(self, value: Value, placements: Placements) -> int:
        over_time = self.over_time.get(value.name)
        if over_time is None or not over_time.is_shard:
            return piece_bytes(value, placements, self.sizes)
        return piece_bytes(value, (over_time, *placements), (self.count, *self.sizes))

    def _at_rest(self, trained: Trained) -> dict[str, int]:
        total: dict[str, int] = {}
        with_gradient = parameters_with_gradient(self.graph)
        for name, source in self.placeholders.items():
            numel = piece_numel(source.value.shape, self.plan.inputs[name], self.sizes)
            for category, size in rest_bytes(source, numel, trained, name in with_gradient).items():
                total[category] = total.get(category, 0) + size * self.clusters.times(name)
        for name, placements in self.plan.kept.items():
            value = self.values.get(name) or self.placeholders[name].value
            size = self._bytes(value, placements) * self.clusters.times(parameter_behind(self.graph, name))
            total["kept"] = total.get("kept", 0) + size
        return total

    def _read(self) -> None:
        """Who reads each value where it is made, and who a copy of it."""
        for op in self.graph.ops:
            for v, wanted in zip(op.ins, self.plan.ops[op.name].ins, strict=True):
                path = path_of(self.plan, v, op.phase, self.made[v.name], wanted)
                if all(_is_slice(a, b) for a, b in pairwise(path)):
                    self.readers.setdefault(self.root[v.name], []).append(op.name)
                else:
                    self.copies.setdefault((v.name, op.phase, wanted), []).append(op.name)
        for (name, _, _), readers in self.copies.items():
            self.readers.setdefault(self.root[name], []).append(readers[0])

    def _results(self) -> set[str]:
        """Values that stay where they are made; results in another placement are held apart."""
        stay: set[str] = set()
        parameters = parameter_of(self.graph)
        self.shrinking: dict[str, tuple[float, float]] = {}
        self.small = 0.0
        for output, final in zip(self.graph.outputs, self.plan.outputs, strict=True):
            if output.value is None or final is None or self.root[output.value.name] in self.placeholders:
                continue
            root, made = self.root[output.value.name], self.made[output.value.name]
            before, after = self._bytes(output.value, made), self._bytes(output.value, final)
            is_gradient = output.role == "gradient" and output.name in parameters
            self.kind[root] = "gradients" if is_gradient else "outputs"
            if is_gradient and parameters[output.name] in self.reduced_later:
                stay.add(root)
                continue
            if is_gradient and made != final and before < REDUCE_BYTES:
                self.small += before * self.clusters.times(root)
            if is_gradient and after < before:
                self.shrinking[root] = float(before), float(after)
            elif made == final or is_gradient:
                stay.add(root)
            else:
                self._hold("outputs", self.line.spans(self._maker(root), (), to_end=True), after)
        return stay

    def _maker(self, root: str) -> str:
        name = root.partition("#")[0]
        return self.late.get(name, name)

    def _values(self, stay: set[str]) -> None:
        for name, value in self.values.items():
            readers = self.readers.get(name, [])
            if self.root[name] != name or name in self.kept or (name in self.shrinking and not readers):
                continue
            spans = self.line.spans(self._maker(name), readers, to_end=name in stay)
            saved = self._phase(name.partition("#")[0]) == "forward" and any(self._phase(r) == "backward" for r in readers)
            category = self.kind[name] if name in stay else "activations" if saved else "working"
            self._hold(category, spans, self._bytes(value, self.made[name]))

    def _phase(self, op: str) -> str:
        return self.graph.by_name[op].phase

    def _copied(self) -> None:
        for (name, phase, wanted), readers in self.copies.items():
            value = self.values.get(name) or self.placeholders[name].value
            root = self.root[name]
            parameter = root in self.placeholders or root.partition("#")[0] in self.late
            size = self._bytes(value, wanted)
            self._hold("gathered" if parameter else "working", self.line.spans(readers[0], readers), size)
            if parameter:
                piece = size if _is_put_in_order(self.made[name], wanted) else self._bytes(value, self.made[name])
                self.ahead.append((phase, readers[0], size, piece, self.clusters.times(name)))
            path = path_of(self.plan, value, phase, self.made[name], wanted)
            for between in path[1:-1]:
                spans = self.line.spans(readers[0], readers[:1])
                self._hold("working", spans, max(0, self._bytes(value, between) - size))

    def _fetched_ahead(self, phase: str, profiles: dict[str, np.ndarray]) -> None:
        """Copies of parameters that are under way or there before their first reader: the largest, or a buffer of small ones with
        the pieces that it is gathered from, or with the copies that are taken out of it; no more than is still to be read."""
        ahead = [(first, size, piece, times) for at, first, size, piece, times in self.ahead if at == phase]
        if not ahead:
            return
        start = next(op.name for op in self.graph.ops if op.phase == phase)
        yet = self.line.profile((s, float(size * n)) for first, size, _, n in ahead for s in self.line.spans(start, (first,)))
        small = [(size * n, piece * n) for _, size, piece, n in ahead if size < GATHER_BYTES]
        buffer = min(GATHER_BYTES, sum(size for size, _ in small))
        share = sum(piece for _, piece in small) / max(1, sum(size for size, _ in small))
        most = max(buffer, *(size for _, size, _, _ in ahead))
        under_way = np.where(yet >= yet.max(), buffer * share, 0.0)
        profiles["gathered"] = profiles["gathered"] + np.minimum(yet, most) + under_way

    def _gradients(self, profiles: dict[str, np.ndarray]) -> None:
        """Reduced gradients, those on their way, and the buffer of the last ones."""
        raw: list[tuple[Span, float]] = []
        zero = np.zeros(self.line.num_points)
        for root, (before, after) in self.shrinking.items():
            spans = self.line.spans(self._maker(root), (), to_end=True)
            raw += [(s, before) for s in spans]
            profiles["gradients"] = profiles.get("gradients", zero) + self.line.profile((s, after) for s in spans)
        on_the_way = zero
        if raw:
            on_the_way = np.minimum(self.line.profile(raw), FLYING * max(float(REDUCE_BYTES), *(size for _, size in raw)))
        if raw or self.small:
            on_the_way[-1] += min(self.small, REDUCE_BYTES)
            profiles["communication"] = on_the_way


def _is_put_in_order(src: Placements, dst: Placements) -> bool:
    """Whether pieces that were gathered do not lie one behind the other, so that the whole is a copy beside the buffer."""
    return any(p.is_shard and (p.dim > 0 or p.split > 1) and q.is_replicate for p, q in zip(src, dst, strict=True))


def _is_slice(src: Placements, dst: Placements) -> bool:
    """Whether a step only takes a piece of what is there."""
    return all(p == q or (p.is_replicate and q.is_shard) for p, q in zip(src, dst, strict=True))
