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
from meshwright.planner.solve.expanded import Expanded
from meshwright.planner.solve.layout import Layout
from meshwright.planner.solve.liveness import Span, Timeline, late_makers, roots, timeline_of
from meshwright.planner.solve.network import PlacementNetwork
from meshwright.planner.solve.problem import SEGMENTS, Peak, Problem
from meshwright.planner.solve.results import parameter_of

Term = tuple[tuple[int, np.ndarray], ...]
"""One term of a peak: choice and its bytes by candidate."""

ELSEWHERE = "elsewhere"
"""Category of what other points than the base hold more."""

_CATEGORIES = ("activations", "working", "gradients")

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
        choice, slot, times, category: of the items, int64 [items]: which of its choice's results an item is, -1 for none; the category's
            number in ``_CATEGORIES``.
        starts, ends, counts: of the items' spans, int64 [spans].
        of: item of each span, int64 [spans].
    """

    line: Timeline
    last_forward: int
    items: tuple[_Item, ...]
    choice: np.ndarray
    slot: np.ndarray
    times: np.ndarray
    category: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    counts: np.ndarray
    of: np.ndarray

    def at(self, point: int) -> np.ndarray:
        """How many of each item are alive at a point, float64 [items]."""
        counts = np.where((self.starts <= point) & (point <= self.ends), self.counts, 0)
        return np.bincount(self.of, counts, len(self.items))

    def profile(self, sizes: np.ndarray) -> np.ndarray:
        """Bytes alive at every point, float64 [points]; ``sizes`` are those of the items."""
        change, weights = self.line.num_points + 1, sizes[self.of] * self.counts
        return (np.bincount(self.starts, weights, change) - np.bincount(self.ends + 1, weights, change))[:-1].cumsum()


def _alive(layout: Layout, graph: OpGraph, clusters: ClusterGraph) -> _Alive:
    line = timeline_of(graph, clusters.repeats)
    found: dict[tuple[str, int, tuple[int, int] | None], list[tuple[Span, ...]]] = {}
    for key, spans in (*_made(layout, graph, clusters, line), *_gradients(layout, graph, clusters, line)):
        found.setdefault(key, []).append(spans)
    items = tuple(_Item(*key, len(spans), tuple(itertools.chain(*spans))) for key, spans in found.items())
    numbers = [(s.start, s.end, s.count, i) for i, item in enumerate(items) for s in item.spans]
    arrays = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
    last = max((i for i, n in enumerate(line.names) if graph.by_name[n].phase == "forward"), default=0)
    slots = [_slots(clusters.clusters[group[0]]) for group in layout.members]
    facts = [
        (i.choice, -1 if i.result is None else slots[i.choice][i.result], i.times, _CATEGORIES.index(i.category)) for i in items
    ]
    return _Alive(line, last, items, *np.array(facts, dtype=np.int64).reshape(-1, 4).T, *arrays)


def _slots(cluster: Cluster) -> dict[tuple[int, int], int]:
    """(op, result) to its place among what all ops make."""
    made = ((m, k) for m, op in enumerate(cluster.ops) for k, v in enumerate(op.outs) if v is not None)
    return {key: slot for slot, key in enumerate(made)}


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


class Sizes:
    """Bytes of what candidates hold, of all classes at once.

    Args:
        expanded: candidates of every class.
        sizes: of the mesh axes.

    Attributes:
        num: how many candidates a class has, int64 [classes].
        first: how many there are before them, int64 [classes].
        flat: bytes of what all of them hold, elements of placeholders and kept copies, float64 [pieces]; see :class:`Held`.
        start: where a class's begin in ``flat``, int64 [classes].
        num_results: how many results a class has, int64 [classes].
    """

    def __init__(self, expanded: Sequence[Expanded], sizes: tuple[int, ...]):
        distinct = {id(e): e for e in expanded}
        held = [e.held for e in distinct.values()]
        numels = piece_numels(stacked([h.shape for h in held]), Cuts.stacked([h.cuts for h in held]), sizes)
        self.flat = numels * np.concatenate([h.unit for h in held])
        starts = dict(zip(distinct, itertools.accumulate((len(h.unit) for h in held), initial=0), strict=False))
        self.start = np.array([starts[id(e)] for e in expanded])
        self.num, self.num_results = np.array([(len(e.index), len(e.table.results)) for e in expanded]).T
        self.first = np.cumsum(self.num) - self.num

    def at_rest(self, choice: int) -> np.ndarray:
        """Elements of the largest piece of a placeholder at rest, float64 [candidates]."""
        return self._part(choice, 0)

    def kept(self, choice: int) -> np.ndarray:
        """Elements of the largest piece of the copy that is kept, 0 where there is none, float64 [candidates]."""
        return self._part(choice, 1)

    def _part(self, choice: int, number: int) -> np.ndarray:
        num = self.num[choice]
        start = self.start[choice] + num * (self.num_results[choice] + number)
        return self.flat[start : start + num]


class MemoryRows:
    """Memory of a problem at the points that can bind.

    Args:
        graph: the program.
        clusters: its clusters.
        layout: its classes.
        sizes: of what candidates hold.

    Attributes:
        line: the points.
        base: the fullest point of a typical plan.
        others: further points at which other plans have their peak.
    """

    def __init__(self, graph: OpGraph, clusters: ClusterGraph, layout: Layout, sizes: Sizes):
        self._alive = layout.once("alive", lambda: _alive(layout, graph, clusters))
        self.line, self._num, self._first = self._alive.line, sizes.num, sizes.first
        choice, slot = self._alive.choice, self._alive.slot
        num, width, rests = sizes.num[choice], sizes.num_results[choice], slot < 0
        self._start = np.cumsum(num) - num  # of each item's candidates among those of all items
        self._of = np.repeat(np.arange(len(num)), num)
        within = np.arange(len(self._of)) - self._start[self._of]
        begin, step = sizes.start[choice] + np.where(rests, num * width, slot), np.where(rests, 1, width)
        itemsize = np.array(layout.once("itemsize", lambda: _itemsizes(layout, clusters)))
        self._bytes = sizes.flat[begin[self._of] + within * step[self._of]] * np.where(rests, itemsize[choice], 1)[self._of]
        self._candidate = sizes.first[choice][self._of] + within  # among those of all choices
        self.base, self.others = self._points()
        self._at_base = self._alive.at(self.base)

    # --- which points ---

    def _sums(self, times: np.ndarray, more: np.ndarray | int = 0, rows: int = 1) -> np.ndarray:
        """Bytes of all items, each some times, by candidate of all choices, float64 [rows, candidates]; ``more``: the row of each item."""
        num = int(self._num.sum())
        at = self._candidate + np.broadcast_to(more, times.shape)[self._of] * num
        return np.bincount(at, times[self._of] * self._bytes, rows * num).reshape(rows, num)

    def _profile(self, chosen: np.ndarray) -> np.ndarray:
        return self._alive.profile(self._bytes[self._start + chosen[self._alive.choice]])

    def _points(self) -> tuple[int, list[int]]:
        """The fullest point of the plan that shards most, and those of others in which it is another."""
        if not self.line.num_points:
            return 0, []
        total = self._sums(self._alive.times)[0]
        choice = np.repeat(np.arange(len(self._num)), self._num)
        ascending, descending = np.lexsort((total, choice)), np.lexsort((-total, choice))
        picked = [ascending[self._first], descending[self._first], ascending[self._first + self._num // 2]]
        found: list[int] = []
        last_forward = self._alive.last_forward
        for profile in (self._profile(each - self._first) for each in picked):
            found += [int(np.argmax(profile)), last_forward + int(np.argmax(profile[last_forward:])), len(profile) - 1]
        distinct = list(dict.fromkeys(found))
        return distinct[0], distinct[1 : 1 + POINTS]

    # --- what the problem needs ---

    def at_base(self) -> dict[int, dict[str, np.ndarray]]:
        """Choice to category to bytes by candidate of what it holds at the base."""
        held, category = self._sums(self._at_base, self._alive.category, len(_CATEGORIES)), self._alive.category
        alive = self._at_base > 0
        found: dict[int, dict[str, np.ndarray]] = {}
        for g, k in dict.fromkeys(zip(self._alive.choice[alive].tolist(), category[alive].tolist(), strict=True)):
            found.setdefault(g, {})[_CATEGORIES[k]] = self._of_choice(held[k], g)
        return found

    def _of_choice(self, by_candidate: np.ndarray, g: int) -> np.ndarray:
        first = self._first[g]
        return by_candidate[first : first + self._num[g]]

    def peaks(self) -> tuple[Peak, ...]:
        """What other points hold more than the base."""
        found = [_term(self.more_at(point)) for point in self.others]
        terms = [t for t in found if sum(float(b.max()) for _, b in t) > 0]
        return (Peak(ELSEWHERE, 1.0, tuple(terms)),) if terms else ()

    def more_at(self, point: int) -> dict[int, np.ndarray]:
        """Choice to what it holds at a point more than at the base, in bytes by candidate."""
        more = self._alive.at(point) - self._at_base
        by_candidate = self._sums(more)[0]
        return {g: self._of_choice(by_candidate, g) for g in dict.fromkeys(self._alive.choice[more != 0].tolist())}


def _itemsizes(layout: Layout, clusters: ClusterGraph) -> list[int]:
    """Bytes of an element of each class's placeholder; 0 for other classes."""
    sources = [clusters.clusters[group[0]].source for group in layout.members]
    return [0 if source is None else source.value.dtype.itemsize for source in sources]


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
