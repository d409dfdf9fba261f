"""The peak as the solver sees it: a few points of a step, each linear in the candidates.

The fullest point of a typical plan is the *base*; what is alive there is charged to the choices themselves. Other points that other
plans have their peak at stand beside it as what they hold more than the base. Values count where they are made, copies of parameters
beside them; copies of activations are left to :mod:`.alive`, which walks the finished plan. If that finds more than the limit, the
point of its peak becomes one more (:func:`with_points`), with the copies that are read there, and the search is made again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placements, R
from meshwright.planner.solve.candidates import Candidate, piece_bytes, piece_numel
from meshwright.planner.solve.keep import root_of
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
    """Bytes of a choice by candidate, and when they are alive."""

    category: str
    choice: int
    bytes: np.ndarray
    spans: tuple[Span, ...]

    def count(self, point: int) -> int:
        return sum(s.count for s in self.spans if s.start <= point <= s.end)


@dataclass(frozen=True)
class Lives:
    """What no placement changes: points, and when each value with memory of its own is alive.

    Attributes:
        line: the points.
        root: value to the value whose memory it has.
        of: value to category and spans.
    """

    line: Timeline
    root: Mapping[str, str]
    of: Mapping[str, tuple[str, tuple[Span, ...]]]


_KNOWN: dict[int, tuple[weakref.ref[OpGraph], int, Lives]] = {}


def lives_of(graph: OpGraph, clusters: ClusterGraph) -> Lives:
    """The lives of a program's values; found once for all meshes."""
    known = _KNOWN.get(id(graph))
    if known is None or known[0]() is not graph or known[1] != len(clusters.repeats):
        key = id(graph)
        known = _KNOWN[key] = weakref.ref(graph, lambda _: _KNOWN.pop(key, None)), len(clusters.repeats), _lives(graph, clusters)
    return known[2]


def _lives(graph: OpGraph, clusters: ClusterGraph) -> Lives:
    line, root, late = Timeline(graph, clusters.repeats), roots(graph), late_makers(graph)
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
    return Lives(line, root, found)


class MemoryRows:
    """Memory of a problem at the points that can bind.

    Args:
        graph: the program.
        clusters: its clusters.
        class_of: choice of every cluster.
        candidates: of every choice.
        sizes: of the mesh axes.
    """

    def __init__(
        self,
        graph: OpGraph,
        clusters: ClusterGraph,
        class_of: Sequence[int],
        candidates: Sequence[Sequence[Candidate]],
        sizes: tuple[int, ...],
    ):
        self.graph, self.clusters, self.class_of = graph, clusters, class_of
        self.candidates, self.sizes = candidates, sizes
        self.lives = lives_of(graph, clusters)
        self.line = self.lives.line
        self._sizes_of: dict[tuple[int, int, int], np.ndarray] = {}
        self.items = [*self._made(), *self._gradients()]
        self.base, self.others = self._points()

    def _made(self) -> Iterator[_Item]:
        """Values where their producers make them."""
        for i, cluster in enumerate(self.clusters.clusters):
            g, root = self.class_of[i], root_of(cluster)
            for m, op in enumerate(cluster.ops):
                for k, value in enumerate(op.outs):
                    life = None if value is None else self.lives.of.get(value.name)
                    if value is not None and life is not None:
                        is_kept = root is not None and value.name in root.views
                        yield _Item(life[0], g, self._by_candidate(g, m, k, value, is_kept), life[1])

    def _by_candidate(self, g: int, m: int, k: int, value: Value, is_kept: bool) -> np.ndarray:
        """Bytes of a result; none for a value that is kept gathered, which counts apart."""
        key = (g, m, k)
        if key not in self._sizes_of:
            made = [tuple(row.members[m].outs[k] or R for row in c.rows) for c in self.candidates[g]]
            sizes = _piece_sizes(value, made, self.sizes)
            if is_kept:
                sizes[[c.kept is not None for c in self.candidates[g]]] = 0.0
            self._sizes_of[key] = sizes
        return self._sizes_of[key]

    def _gradients(self) -> Iterator[_Item]:
        """Gradients as their parameters rest."""
        choice = {
            c.source.value.name: (g, c.source) for g, c in zip(self.class_of, self.clusters.clusters, strict=True) if c.source
        }
        parameters = parameter_of(self.graph)
        for output in self.graph.outputs_of("gradient"):
            maker = "" if output.value is None else self.lives.root[output.value.name].partition("#")[0]
            if maker not in self.graph.by_name or parameters.get(output.name) not in choice:
                continue
            g, source = choice[parameters[output.name]]
            item = source.value.dtype.itemsize
            sizes = np.array(
                [float(piece_numel(source.value.shape, c.rest or (), self.sizes) * item) for c in self.candidates[g]]
            )
            yield _Item("gradients", g, sizes, tuple(self.line.spans(maker, (), to_end=True)))

    # --- which points ---

    def _profile(self, chosen: Sequence[int]) -> np.ndarray:
        return self.line.profile((span, float(i.bytes[chosen[i.choice]])) for i in self.items for span in i.spans)

    def _points(self) -> tuple[int, list[int]]:
        """The fullest point of the plan that shards most, and those of others in which it is another."""
        if not self.line.num_points:
            return 0, []
        total = [np.zeros(len(c)) for c in self.candidates]
        for item in self.items:
            total[item.choice] = total[item.choice] + item.bytes
        samples = [self._profile([int(np.argmin(t)) for t in total]), self._profile([int(np.argmax(t)) for t in total])]
        samples.append(self._profile([int(np.argsort(t, kind="stable")[len(t) // 2]) for t in total]))
        found: list[int] = []
        for profile in samples:
            last_forward = max((i for i, n in enumerate(self.line.names) if self.graph.by_name[n].phase == "forward"), default=0)
            parts = [profile, profile[last_forward:]]
            found += [int(np.argmax(profile)), last_forward + int(np.argmax(parts[1])), len(profile) - 1]
        distinct = list(dict.fromkeys(found))
        return distinct[0], distinct[1 : 1 + POINTS]

    # --- what the problem needs ---

    def at_base(self, choice: int) -> dict[str, np.ndarray]:
        """Category to bytes by candidate of what a choice holds at the base."""
        found: dict[str, np.ndarray] = {}
        for item in self._of_choice().get(choice, ()):
            count = item.count(self.base)
            if count:
                found[item.category] = found.get(item.category, np.zeros(len(item.bytes))) + count * item.bytes
        return found

    def _of_choice(self) -> dict[int, list[_Item]]:
        if not hasattr(self, "_items_by_choice"):
            self._items_by_choice: dict[int, list[_Item]] = {}
            for item in self.items:
                self._items_by_choice.setdefault(item.choice, []).append(item)
        return self._items_by_choice

    def peaks(self) -> tuple[Peak, ...]:
        """What other points hold more than the base."""
        found = [_term(self.more_at(point)) for point in self.others]
        terms = [t for t in found if sum(float(b.max()) for _, b in t) > 0]
        return (Peak(ELSEWHERE, 1.0, tuple(terms)),) if terms else ()

    def more_at(self, point: int) -> dict[int, np.ndarray]:
        """Choice to what it holds at a point more than at the base, in bytes by candidate."""
        more: dict[int, np.ndarray] = {}
        for item in self.items:
            count = item.count(point) - item.count(self.base)
            if count:
                more[item.choice] = more.get(item.choice, np.zeros(len(item.bytes))) + count * item.bytes
        return more


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
    return more


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
