"""The peak as the solver sees it: a few points of a step, each linear in the candidates.

The fullest point of a typical plan is the *base*; what is alive there is charged to the choices themselves. Other points that other
plans have their peak at stand beside it as what they hold more than the base. Values count where they are made, copies of parameters
beside them; copies of activations are left to :mod:`.alive`, which walks the finished plan. If that finds more than the limit, the
point of its peak becomes one more (:func:`with_points`), with the copies that are read there, and the search is made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.cuts import Cuts, piece_numels, stacked
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placements
from meshwright.planner.solve.candidates import piece_bytes
from meshwright.planner.solve.combine import Expanded
from meshwright.planner.solve.layout import Layout
from meshwright.planner.solve.liveness import Span, Timeline, late_makers, roots
from meshwright.planner.solve.network import PlacementNetwork
from meshwright.planner.solve.problem import SEGMENTS, Peak, Problem
from meshwright.planner.solve.results import parameter_of

Term = tuple[tuple[int, np.ndarray], ...]
"""One term of a peak: choice and its bytes by candidate."""

ELSEWHERE = "elsewhere"
"""Category of what other points than the base hold more."""

POINTS = 4
"""Points beside the base at most: each is a row."""


class PointTables(Protocol):
    """What of a problem's tables is needed to look at more points; see :class:`~meshwright.planner.solve.tables.Tables`."""

    @property
    def clusters(self) -> ClusterGraph: ...
    @property
    def mesh(self) -> MeshShape: ...
    @property
    def class_of(self) -> tuple[int, ...]: ...
    @property
    def values(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def networks(self) -> tuple[PlacementNetwork, ...]: ...
    @property
    def readers(self) -> tuple[tuple[tuple[str, int, int], ...], ...]: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def points(self) -> MemoryRows: ...
    def first(self, choice: int) -> Cluster: ...


@dataclass(frozen=True)
class _Item:
    """What is alive of a choice.

    Attributes:
        category: of memory.
        choice: it.
        result: which op's which result; None for the gradient of a parameter, as that rests.
        times: how many of the choice's clusters it is of.
        spans: when they are alive.
    """

    category: str
    choice: int
    result: tuple[int, int] | None
    times: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Alive:
    """What no placement changes: points, and what is alive at them.

    Attributes:
        line: the points.
        last_forward: the last point of the forward.
        items: what has memory of its own.
        starts, ends, counts: of the items' spans, int64 [spans].
        of: item of each span, int64 [spans].
    """

    line: Timeline
    last_forward: int
    items: tuple[_Item, ...]
    starts: np.ndarray
    ends: np.ndarray
    counts: np.ndarray
    of: np.ndarray

    def at(self, point: int) -> list[int]:
        """How many of each item are alive at a point."""
        counts = np.where((self.starts <= point) & (point <= self.ends), self.counts, 0)
        return np.bincount(self.of, counts, len(self.items)).astype(np.int64).tolist()

    def profile(self, sizes: np.ndarray) -> np.ndarray:
        """Bytes alive at every point, float64 [points]; ``sizes`` are those of the items."""
        change, weights = self.line.num_points + 1, sizes[self.of] * self.counts
        return (np.bincount(self.starts, weights, change) - np.bincount(self.ends + 1, weights, change))[:-1].cumsum()


def _alive(layout: Layout, graph: OpGraph, clusters: ClusterGraph) -> _Alive:
    line = Timeline(graph, clusters.repeats)
    found: dict[tuple[str, int, tuple[int, int] | None], list[tuple[Span, ...]]] = {}
    for key, spans in (*_made(layout, graph, clusters, line), *_gradients(layout, graph, clusters, line)):
        found.setdefault(key, []).append(spans)
    items = tuple(_Item(*key, len(spans), tuple(itertools.chain(*spans))) for key, spans in found.items())
    numbers = [(s.start, s.end, s.count, i) for i, item in enumerate(items) for s in item.spans]
    arrays = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
    last = max((i for i, n in enumerate(line.names) if graph.by_name[n].phase == "forward"), default=0)
    return _Alive(line, last, items, *arrays)


_Living = tuple[tuple[str, int, "tuple[int, int] | None"], tuple[Span, ...]]


def _made(layout: Layout, graph: OpGraph, clusters: ClusterGraph, line: Timeline) -> Iterator[_Living]:
    """Values where their producers make them."""
    lives = _lives(graph, line)
    for g, cluster in zip(layout.class_of, clusters.clusters, strict=True):
        for m, op in enumerate(cluster.ops):
            for k, value in enumerate(op.outs):
                if value is not None and value.name in lives:
                    category, spans = lives[value.name]
                    yield (category, g, (m, k)), spans


def _lives(graph: OpGraph, line: Timeline) -> dict[str, tuple[str, tuple[Span, ...]]]:
    """Values with memory of their own to category and spans."""
    root, late = roots(graph), late_makers(graph)
    readers: dict[str, list[str]] = {}
    for op in graph.ops:
        for v in op.ins:
            readers.setdefault(root[v.name], []).append(op.name)
    stay = {root[o.value.name] for o in graph.outputs if o.value is not None and o.role != "gradient"}
    found: dict[str, tuple[str, tuple[Span, ...]]] = {}
    for op in graph.ops:
        for value in op.outs:
            if value is None or root[value.name] != value.name:
                continue
            read = readers.get(value.name, [])
            saved = op.phase == "forward" and any(graph.by_name[r].phase == "backward" for r in read)
            spans = line.spans(late.get(op.name, op.name), read, to_end=value.name in stay)
            found[value.name] = "activations" if saved else "working", tuple(spans)
    return found


def _gradients(layout: Layout, graph: OpGraph, clusters: ClusterGraph, line: Timeline) -> Iterator[_Living]:
    """Gradients, which lie as their parameters rest."""
    choice = {c.source.value.name: g for g, c in zip(layout.class_of, clusters.clusters, strict=True) if c.source}
    parameters, root = parameter_of(graph), roots(graph)
    for output in graph.outputs_of("gradient"):
        maker = "" if output.value is None else root[output.value.name].partition("#")[0]
        if maker in graph.by_name and parameters.get(output.name) in choice:
            yield ("gradients", choice[parameters[output.name]], None), tuple(line.spans(maker, (), to_end=True))


class MemoryRows:
    """Memory of a problem at the points that can bind.

    Args:
        graph: the program.
        clusters: its clusters.
        layout: its classes.
        expanded: candidates of every class.
        sizes: of the mesh axes.

    Attributes:
        line: the points.
        base: the fullest point of a typical plan.
        others: further points at which other plans have their peak.
    """

    def __init__(
        self,
        graph: OpGraph,
        clusters: ClusterGraph,
        layout: Layout,
        expanded: Sequence[Expanded],
        sizes: tuple[int, ...],
    ):
        self._alive = layout.once("alive", lambda: _alive(layout, graph, clusters))
        self.line = self._alive.line
        results = _result_bytes(expanded, sizes)
        rests: dict[int, np.ndarray] = {}
        for item in self._alive.items:
            if item.result is None and item.choice not in rests:
                source = clusters.clusters[layout.members[item.choice][0]].source
                assert source is not None
                numels = expanded[item.choice].rest_numels(source.value.shape, sizes)
                rests[item.choice] = numels.astype(float) * source.value.dtype.itemsize
        self._bytes = [
            rests[item.choice] if item.result is None else results[item.choice][item.result] for item in self._alive.items
        ]
        self.base, self.others = self._points([len(e.candidates) for e in expanded])
        self._at_base = self._alive.at(self.base)

    # --- which points ---

    def _profile(self, chosen: Sequence[int]) -> np.ndarray:
        sizes = [float(b[chosen[item.choice]]) for item, b in zip(self._alive.items, self._bytes, strict=True)]
        return self._alive.profile(np.array(sizes))

    def _points(self, num_candidates: Sequence[int]) -> tuple[int, list[int]]:
        """The fullest point of the plan that shards most, and those of others in which it is another."""
        if not self.line.num_points:
            return 0, []
        total = [np.zeros(n) for n in num_candidates]
        for item, size in zip(self._alive.items, self._bytes, strict=True):
            total[item.choice] += item.times * size
        samples = [self._profile([int(np.argmin(t)) for t in total]), self._profile([int(np.argmax(t)) for t in total])]
        samples.append(self._profile([int(np.argsort(t, kind="stable")[len(t) // 2]) for t in total]))
        found: list[int] = []
        last_forward = self._alive.last_forward
        for profile in samples:
            parts = [profile, profile[last_forward:]]
            found += [int(np.argmax(profile)), last_forward + int(np.argmax(parts[1])), len(profile) - 1]
        distinct = list(dict.fromkeys(found))
        return distinct[0], distinct[1 : 1 + POINTS]

    # --- what the problem needs ---

    def at_base(self) -> dict[int, dict[str, np.ndarray]]:
        """Choice to category to bytes by candidate of what it holds at the base."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for item, count, size in zip(self._alive.items, self._at_base, self._bytes, strict=True):
            if count:
                of_choice = found.setdefault(item.choice, {})
                of_choice[item.category] = of_choice.get(item.category, 0.0) + count * size
        return found

    def peaks(self) -> tuple[Peak, ...]:
        """What other points hold more than the base."""
        found = [_term(self.more_at(point)) for point in self.others]
        terms = [t for t in found if sum(float(b.max()) for _, b in t) > 0]
        return (Peak(ELSEWHERE, 1.0, tuple(terms)),) if terms else ()

    def more_at(self, point: int) -> dict[int, np.ndarray]:
        """Choice to what it holds at a point more than at the base, in bytes by candidate."""
        more: dict[int, np.ndarray] = {}
        for item, here, base, size in zip(self._alive.items, self._alive.at(point), self._at_base, self._bytes, strict=True):
            if here != base:
                more[item.choice] = more.get(item.choice, 0.0) + (here - base) * size
        return more


def _result_bytes(expanded: Sequence[Expanded], sizes: tuple[int, ...]) -> list[dict[tuple[int, int], np.ndarray]]:
    """Per class (op, result) to bytes by candidate."""
    distinct = list({id(e): e for e in expanded}.values())
    shapes, cuts = zip(*(e.results for e in distinct), strict=True)
    numels = np.split(piece_numels(stacked(shapes), Cuts.stacked(cuts), sizes), np.cumsum([len(s) for s in shapes])[:-1])
    found = {id(e): e.result_bytes(n) for e, n in zip(distinct, numels, strict=True)}
    return [found[id(e)] for e in expanded]


def _term(more: Mapping[int, np.ndarray]) -> Term:
    return tuple(sorted(more.items(), key=lambda entry: entry[0]))


def _piece_sizes(value: Value, placements: Sequence[Placements], sizes: tuple[int, ...]) -> np.ndarray:
    known: dict[Placements, float] = {}
    return np.array(
        [known.setdefault(p, float(piece_bytes(value, p, sizes))) if p not in known else known[p] for p in placements]
    )


def with_points(tables: PointTables, problem: Problem, ops: Mapping[str, int]) -> Problem:
    """``problem`` with what is held while some ops run: values, and the copies of activations that those ops' clusters read.

    A copy counts as far as it is larger than what it is made from, so that no plan that fits is lost.

    Args:
        tables: what the problem was built from.
        problem: it, or what it became.
        ops: names of ops, with the bytes that are held there whatever is chosen.
    """
    found = [(point, op, more) for op, more in ops.items() for point, at in enumerate(tables.points.line.names) if at == op]
    terms = [_with_constant(_term(_held_at(tables, point, op)), more) for point, op, more in found]
    terms = [t for t in terms if t]
    if not terms:
        return problem
    others = [p for p in problem.peaks if p.category != ELSEWHERE]
    known = [t for p in problem.peaks if p.category == ELSEWHERE for t in p.terms]
    return replace(problem, peaks=(*others, Peak(ELSEWHERE, 1.0, (*known, *terms))))


def _with_constant(term: Term, size: int) -> Term:
    """The term with bytes that do not depend on the choice."""
    return tuple((g, b + size if k == 0 else b) for k, (g, b) in enumerate(term))


def _held_at(tables: PointTables, point: int, op: str) -> dict[int, np.ndarray]:
    more = tables.points.more_at(point)
    for i, cluster in enumerate(tables.clusters.clusters):
        if all(member.name != op for member in cluster.ops):
            continue
        for slot, value in enumerate(cluster.ins):
            for g, sizes in _copied(tables, value, cluster.phase, ("in", tables.class_of[i], slot)):
                more[g] = more.get(g, np.zeros(len(sizes))) + sizes
    if point == tables.points.line.num_points - 1:
        for g, sizes in _under_way(tables):
            more[g] = more.get(g, np.zeros(len(sizes))) + sizes
    return more


def _under_way(tables: PointTables) -> Iterator[tuple[int, np.ndarray]]:
    """What gradients hold in the buffer of the last reductions, where all that are to be reduced have room in it."""
    found: list[tuple[int, np.ndarray]] = []
    for k, flow in enumerate(tables.problem.flows):
        if any(kind == "grad" for kind, _, _ in tables.readers[k]):
            value, nodes = tables.first(flow.supply).outs[0], tables.networks[k].nodes
            value = next((v for v in tables.first(flow.supply).outs if v.name in tables.values[k]), value)
            split = np.array([any(p.is_partial and n > 1 for p, n in zip(ps, tables.mesh.sizes, strict=True)) for ps in nodes])
            sizes = _piece_sizes(value, nodes, tables.mesh.sizes) * split
            found.append((flow.supply, flow.count * sizes[flow.supply_nodes]))
    if sum(float(sizes.max()) for _, sizes in found) <= REDUCE_BYTES:
        yield from found


def _copied(tables: PointTables, value: Value, phase: str, reader: tuple[str, int, int]) -> Iterator[tuple[int, np.ndarray]]:
    """By how much a reader's copy of an activation is larger than the piece it is made from, as a sum over two choices."""
    for k, flow in enumerate(tables.problem.flows):
        source = tables.first(flow.supply).source
        if value.name not in tables.values[k] or SEGMENTS[flow.segment] != phase or reader not in tables.readers[k]:
            continue
        if source is not None and source.role == "parameter":
            continue
        demand = flow.demands[tables.readers[k].index(reader)]
        if demand.choice is not None and demand.choice != flow.supply:
            sizes = _piece_sizes(value, tables.networks[k].nodes, tables.mesh.sizes)
            yield demand.choice, sizes[demand.nodes]
            yield flow.supply, -sizes[flow.supply_nodes]
