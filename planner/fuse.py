"""Group ops into clusters: what one kernel would run is decided once.

Ops are joined only where no change of placement between them could pay:

* views and casts of one placeholder belong to the placeholder: ``weight -> bfloat16 -> t`` is redistributed as a whole;
* pointwise ops of one phase and one iteration space (or broadcast into it) form a cluster, which a reduction may end:
  what reads the reduction's result starts another cluster, so that a partial sum may be completed in between;
* matmul, attention, convolution and norms stand alone, with views and casts of their result behind them where those
  accept every placement that the kernel makes;
* a view of a value that has other readers too goes to its one reader: both read the same redistributed copy. A view
  that makes its input smaller stays with what makes the input, one that makes it larger goes to its reader. A cast to a
  wider type is treated alike, and stands alone where it has several readers: what is redistributed is the narrow value.

``mm -> reshape -> add(residual) -> pow -> sum -> add eps -> rsqrt -> mul`` becomes
``[mm reshape] [add pow sum] [add rsqrt mul]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.graph import GraphInput, Op, OpGraph, Value
from meshwright.planner.ir.spec import Placement, R, Row, S
from meshwright.planner.join import join
from meshwright.planner.kinds import is_free, kind_of
from meshwright.planner.strided import Lifted, RowsFor, lifted

_FREE_ROLES = frozenset({"parameter", "input"})
"""Placeholders that may rest in any placement; the others are replicated."""

_MAX_WALK = 256
"""Clusters looked at when proving that a join makes no cycle; beyond it the join is refused."""


@dataclass(eq=False)
class _Group:
    """A cluster being built. ``style`` is ``pointwise``, ``kernel``, ``view`` or ``source``; ``is_read``: another cluster reads it;
    ``made`` are the values of its ops, ``first`` and ``last`` the numbers of its first and last op, -1 where it has none."""

    style: str
    phase: str
    source: GraphInput | None = None
    ops: dict[int, Op] = field(default_factory=dict)
    reads: dict[str, None] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    sealed: set[str] = field(default_factory=set)
    space: int = 1
    fallback: tuple[str, ...] = ()
    merged_into: _Group | None = None
    is_read: bool = False
    first: int = -1
    last: int = -1

    def take(self, i: int, op: Op) -> None:
        self.ops[i] = op
        self.made.update([out.name for out in op.outs if out is not None])
        self.first, self.last = i if self.first < 0 else min(self.first, i), max(self.last, i)


class _Grouping:
    """Assigns every op of a graph to a group, in one pass over the ops."""

    def __init__(self, graph: OpGraph, lifted: Lifted, apart: frozenset[str] = frozenset()):
        self.graph, self.lifted = graph, lifted
        self.groups: list[_Group] = []
        self._apart = apart
        self._of: dict[str, _Group] = {}
        """Op name or placeholder value name to its group."""
        self._prefix: dict[str, tuple[tuple[int, Op], ...]] = {}
        """Value name to the ops that make it and wait for its one reader."""
        self._late: dict[_Group, None] = {}
        """Groups that got more to wait for after they were read: their readers wait for what is behind them in the graph."""
        self._results = {o.value.name for o in graph.outputs if o.value is not None}
        self._index = {op.name: i for i, op in enumerate(graph.ops)}
        for placeholder in graph.inputs:
            self._of[placeholder.value.name] = self._new("source", graph.phase_of[placeholder.value.name], placeholder)
        self._absorbed: dict[str, tuple[Placement, ...]] = {i.value.name: self.rest_of(i) for i in graph.inputs}
        for i, op in enumerate(graph.ops):
            self._place(i, op)

    # --- groups ---

    def _new(self, style: str, phase: str, source: GraphInput | None = None) -> _Group:
        group = _Group(style, phase, source)
        self.groups.append(group)
        return group

    def _group_of(self, value: str) -> _Group | None:
        """The group that makes ``value``; None while that op still waits for its reader."""
        maker = self.graph.producer[value]
        group = self._of.get(maker.value.name if isinstance(maker, GraphInput) else maker.name)
        while group is not None and group.merged_into is not None:
            group = group.merged_into
        return group

    def _add(self, group: _Group, i: int, op: Op) -> None:
        """Put ``op`` and the ops waiting for it into ``group``."""
        for v in op.ins:
            for j, waiting in self._prefix.pop(v.name, ()):
                self._add(group, j, waiting)
        group.take(i, op)
        group.sealed.update(out.name for out in op.outs if out is not None and out.name in self._apart)
        self._of[op.name] = group
        for v in op.ins:
            if (maker := self._group_of(v.name)) is not None and maker is not group:
                maker.is_read = True
        group.reads.update(dict.fromkeys(v.name for v in op.ins if v.name not in group.made))

    def _merge(self, into: _Group, other: _Group) -> None:
        for i, op in other.ops.items():
            into.take(i, op)
        into.reads = {v: None for v in (*into.reads, *other.reads) if v not in into.made}
        into.sealed |= other.sealed
        into.space = max(into.space, other.space)
        into.is_read |= other.is_read
        other.merged_into = into
        other.ops = {}
        self._late.pop(other, None)

    # --- facts ---

    def rest_of(self, placeholder: GraphInput) -> tuple[Placement, ...]:
        """The placements a placeholder may rest in, replicated first."""
        value = placeholder.value
        if placeholder.role not in _FREE_ROLES:
            return (R,)
        plain = [S(d) for d, n in enumerate(value.shape) if n > 1]
        split = [S(d, k) for d in range(len(value.shape)) for k in sorted(self.lifted.splits.get((value.name, d), ()))]
        asked = [
            row.ins[slot]
            for op in self.graph.consumers.get(value.name, ())
            for slot, v in enumerate(op.ins)
            if v.name == value.name
            for row in self.lifted.rows[op.name] or ()
        ]
        return tuple(dict.fromkeys([R, *plain, *split, *(p for p in asked if p.is_shard)]))

    def _readers(self, value: str) -> tuple[Op, ...]:
        return self.graph.consumers.get(value, ())

    def _sole_reader(self, op: Op) -> Op | None:
        """The one op that reads the one result of ``op``, in the same phase; None where there is no such op."""
        if len(op.outs) != 1 or op.outs[0] is None or op.outs[0].name in self._results:
            return None
        readers = self._readers(op.outs[0].name)
        return readers[0] if len(readers) == 1 and readers[0].phase == op.phase else None

    def _is_only_use(self, value: Value) -> bool:
        return value.name not in self._results and len(self._readers(value.name)) == 1

    def _makes(self, value: Value) -> set[Placement]:
        """The placements in which the op that makes ``value`` can make it."""
        maker = self.graph.producer[value.name]
        assert isinstance(maker, Op)
        slot = next(k for k, out in enumerate(maker.outs) if out is not None and out.name == value.name)
        return {row.outs[slot] or R for row in self.lifted.rows[maker.name] or ()}

    def _accepts(self, op: Op, value: Value) -> set[Placement]:
        slot = next(k for k, v in enumerate(op.ins) if v.name == value.name)
        return {row.ins[slot] for row in self.lifted.rows[op.name] or ()}

    # --- placing one op ---

    def _place(self, i: int, op: Op) -> None:
        kind = kind_of(op)
        rows = self.lifted.rows[op.name]
        if rows is None:
            group = self._new("kernel", op.phase)
            group.fallback = (op.target,)
            self._add(group, i, op)
        elif self._absorb(i, op, kind) or self._postpone(i, op, kind) or (kind in ("view", "cast") and self._trail(i, op, kind)):
            return
        elif kind in ("pointwise", "cast", "reduction") and not is_free(op):
            self._place_pointwise(i, op, kind)
        else:
            style = {"view": "view", "cast": "view", "creation": "pointwise"}.get(kind, "kernel")
            group = self._new(style, op.phase)
            self._add(group, i, op)
            group.space = _space(op)

    def _absorb(self, i: int, op: Op, kind: str) -> bool:
        """Give a view or cast of one placeholder to the placeholder, where it follows every placement at rest."""
        names = {v.name for v in op.ins}
        if kind not in ("view", "cast") or len(names) != 1 or len(op.outs) != 1 or op.outs[0] is None:
            return False
        (name,) = names
        at_rest = self._absorbed.get(name)
        if at_rest is None:
            return False
        after: dict[Placement, list[Placement]] = {}
        for row in self.lifted.rows[op.name] or ():
            after.setdefault(row.ins[0], []).append(row.outs[0] or R)
        if any(p not in after for p in at_rest if p.split == 1):
            return False
        group = self._group_of(name)
        assert group is not None
        self._add(group, i, op)
        self._absorbed[op.outs[0].name] = tuple(dict.fromkeys(q for p in at_rest for q in after.get(p, ())))
        return True

    def _postpone(self, i: int, op: Op, kind: str) -> bool:
        """Let a view, a widening cast or a creation wait for its one reader, to be part of the reader's cluster."""
        reader = self._sole_reader(op)
        out = op.outs[0]
        if reader is None or out is None or kind not in ("view", "cast", "creation"):
            return False
        if self.lifted.rows[reader.name] is None:
            return False
        if kind != "creation":
            (value,) = {v.name: v for v in op.ins}.values() if len({v.name for v in op.ins}) == 1 else (None,)
            if value is None or not self._belongs_to_reader(op, value, out):
                return False
        is_kernel = kind_of(reader) in ("kernel", "view")
        if is_kernel and not {p for p in self._accepts(reader, out) if not p.is_partial} <= self._makes(out):
            return False
        before = tuple(entry for v in op.ins for entry in self._prefix.pop(v.name, ()))
        self._prefix[out.name] = (*before, (i, op))
        return True

    def _belongs_to_reader(self, op: Op, value: Value, out: Value) -> bool:
        """Whether redistributing the input of a view or cast is never worse than redistributing its result."""
        if value.name in self._prefix or out.size_bytes > value.size_bytes:
            return True
        if self._is_only_use(value) and self.graph.phase_of[value.name] == op.phase:
            return False
        return 2 * out.size_bytes >= value.size_bytes and kind_of(op) == "view"

    def _trail(self, i: int, op: Op, kind: str) -> bool:
        """Let a view or cast follow what makes its input."""
        value = op.ins[0]
        group = self._group_of(value.name)
        if len({v.name for v in op.ins}) > 1 or group is None or group.phase != op.phase or group.source is not None:
            return False
        if group.fallback:
            return False
        out_bytes = sum(out.size_bytes for out in op.outs if out is not None)
        if out_bytes > value.size_bytes and any(self._readers(out.name) for out in op.outs if out is not None):
            return False
        if not self._is_only_use(value) and 2 * out_bytes >= value.size_bytes:
            return False
        if group.style == "kernel" and not self._makes(value) <= self._accepts(op, value):
            return False
        self._add(group, i, op)
        if value.name in group.sealed:
            group.sealed.update(out.name for out in op.outs if out is not None)
        return True

    def _place_pointwise(self, i: int, op: Op, kind: str) -> None:
        sources = self._sources(op)
        chosen: list[_Group] = []
        space = max(_space(member) for member in (op, *self._waiting(op)))
        groups = {id(g): g for v in sources if (g := self._group_of(v)) is not None}
        for group in sorted(groups.values(), key=lambda g: -g.last):
            if group.style != "pointwise" or group.phase != op.phase or not self._fits(group, op, space, sources):
                continue
            if self._may_join([*chosen, group], sources):
                chosen.append(group)
        group = chosen[0] if chosen else self._new("pointwise", op.phase)
        for other in chosen[1:]:
            self._merge(group, other)
        if group.is_read:
            self._late[group] = None
        self._add(group, i, op)
        group.space = max(group.space, space)
        if kind == "reduction":
            group.sealed.update(out.name for out in op.outs if out is not None)

    def _waiting(self, op: Op) -> list[Op]:
        """The ops that wait to join the cluster of ``op``."""
        return [w for v in op.ins for _, w in self._prefix.get(v.name, ())]

    def _fits(self, group: _Group, op: Op, space: int, sources: list[str]) -> bool:
        """Whether a group iterates over the space of ``op``, give or take halves, or is broadcast into it for ``op`` alone."""
        if space <= 2 * group.space and group.space <= 2 * space:
            return True
        if group.space > space or space % max(group.space, 1):
            return False
        read = [v for v in sources if self._group_of(v) is group]
        own = [op, *self._waiting(op)]
        return all(
            any(r is o for o in own) or r.phase != op.phase or self._of.get(r.name) is group
            for v in read
            for r in self._readers(v)
        )

    def _sources(self, op: Op) -> list[str]:
        """The values that ``op`` and the ops waiting for it read from groups."""
        out: dict[str, None] = {}
        waiting = self._waiting(op)
        made = {v.name for w in waiting for v in w.outs if v is not None}
        for member in (*waiting, op):
            out.update(dict.fromkeys(v.name for v in member.ins if v.name not in made))
        return list(out)

    def _may_join(self, members: list[_Group], sources: Iterable[str]) -> bool:
        """Whether ``members`` and an op that reads ``sources`` can be one cluster: no sealed value inside, no cycle."""
        sealed = set().union(*(g.sealed for g in members))
        if sealed.intersection(sources) or any(sealed.intersection(g.reads) for g in members):
            return False
        inside = {id(g) for g in members}
        start = self._first_that_matters(min(g.first for g in members))
        todo = [g for v in (*sources, *(v for m in members for v in m.reads)) if (g := self._group_of(v)) is not None]
        todo = [g for g in todo if id(g) not in inside]
        seen: set[int] = set()
        for _ in range(_MAX_WALK):
            if not todo:
                return True
            group = todo.pop()
            if id(group) in inside:
                return False
            if id(group) in seen or group.last < start or group.source is not None:
                continue
            seen.add(id(group))
            todo.extend(g for v in group.reads if (g := self._group_of(v)) is not None)
        return not todo

    def _first_that_matters(self, start: int) -> int:
        """The op such that no group which ends before it waits for one that reaches ``start`` or beyond."""
        while (first := min((g.first for g in self._late if g.last >= start), default=start)) < start:
            start = first
        return start


def _space(op: Op) -> int:
    """Size of the iteration space of an op: elements of its largest operand."""
    return max((v.numel for v in (*op.ins, *op.outs) if v is not None), default=1)


# --- from groups to clusters ------------------------------------------------------------------------------------------


class _Builder:
    """Makes clusters of groups; rows of equal groups are made once."""

    def __init__(self, graph: OpGraph, lifted: Lifted, rest_of: Callable[[GraphInput], tuple[Placement, ...]]):
        self._graph, self._lifted, self._rest_of = graph, lifted, rest_of
        self._results = {o.value.name for o in graph.outputs if o.value is not None}
        self._cache: dict[object, tuple[ClusterRow, ...]] = {}

    def cluster(self, group: _Group) -> Cluster:
        ops = tuple(group.ops[i] for i in sorted(group.ops))
        inside = {op.name for op in ops}
        made = {v.name: v for op in ops for v in op.outs if v is not None}
        if group.source is not None:
            made = {group.source.value.name: group.source.value, **made}
        ins = {v.name: v for op in ops for v in op.ins if v.name not in made}
        outs = tuple(v for v in made.values() if self._leaves(v.name, inside))
        name = group.source.value.name if group.source is not None else ops[-1].name
        rows = self._rows(group, ops, tuple(ins.values()), outs)
        return Cluster(name, group.phase, group.source, ops, tuple(ins.values()), outs, rows, group.fallback)

    def _leaves(self, value: str, inside: set[str]) -> bool:
        return value in self._results or any(op.name not in inside for op in self._graph.consumers.get(value, ()))

    def _rows(
        self, group: _Group, ops: tuple[Op, ...], ins: tuple[Value, ...], outs: tuple[Value, ...]
    ) -> tuple[ClusterRow, ...]:
        number = count()
        local: dict[str, int] = {}
        for v in (*([group.source.value] if group.source is not None else ()), *(v for op in ops for v in (*op.ins, *op.outs))):
            if v is not None and v.name not in local:
                local[v.name] = next(number)
        source = None if group.source is None else (group.source.value.name, self._rest_of(group.source))
        key = (
            tuple(
                (
                    self._lifted.signatures[op.name],
                    tuple(local[v.name] for v in op.ins),
                    tuple(v and local[v.name] for v in op.outs),
                )
                for op in ops
            ),
            tuple(local[v.name] for v in ins),
            tuple(local[v.name] for v in outs),
            None if source is None or group.source is None else (source[1], group.source.value.shape, group.source.value.dtype),
        )
        if key not in self._cache:
            rows = [self._lifted.rows[op.name] or (_replicated(op),) for op in ops]
            self._cache[key] = join(ops, rows, ins, outs, source)
        return self._cache[key]


def _replicated(op: Op) -> Row:
    return Row((R,) * len(op.ins), tuple(None if v is None else R for v in op.outs))


def _in_order(groups: list[_Group], graph: OpGraph) -> list[_Group]:
    """Topological order: placeholders, then by phase and last op."""
    maker = {v.name: g for g in groups for op in g.ops.values() for v in op.outs if v is not None}
    rank = {id(g): (g.phase != "forward", g.source is None, n if g.source is not None else g.last) for n, g in enumerate(groups)}
    order: list[_Group] = []
    state: dict[int, bool] = {}
    for root in sorted(groups, key=lambda g: rank[id(g)]):
        stack = [(root, False)]
        while stack:
            group, done = stack.pop()
            if done:
                order.append(group)
                state[id(group)] = True
                continue
            if id(group) in state:
                assert state[id(group)], "clusters form a cycle"
                continue
            state[id(group)] = False
            stack.append((group, True))
            needs = {id(m): m for v in group.reads if (m := maker.get(v)) is not None and m is not group}
            stack.extend(
                (m, False) for m in sorted(needs.values(), key=lambda g: rank[id(g)], reverse=True) if not state.get(id(m))
            )
    return order


def _finish(
    groups: list[_Group], graph: OpGraph, lifted: Lifted, rest_of: Callable[[GraphInput], tuple[Placement, ...]]
) -> ClusterGraph:
    builder = _Builder(graph, lifted, rest_of)
    groups = [g for g in groups if g.merged_into is None]
    clusters = tuple(builder.cluster(g) for g in _in_order(groups, graph))
    return ClusterGraph(clusters, graph.outputs, tuple(range(len(clusters))))


def fuse(graph: OpGraph, rows_for: RowsFor, apart: frozenset[str] = frozenset()) -> ClusterGraph:
    """Group the ops of ``graph`` into clusters and give each its rows.

    Args:
        graph: the captured program.
        rows_for: an op's rows over one mesh axis, the replicated one first; None where no rule is known.
        apart: names of values that no cluster both makes and reads.

    Returns:
        Clusters in execution order, forward before backward, every cluster in a class of its own. Ops without a rule
        stand alone, are replicated and named in ``Cluster.fallback``.
    """
    rows = lifted(graph, rows_for)
    grouping = _Grouping(graph, rows, apart)
    return _finish(grouping.groups, graph, rows, grouping.rest_of)


def trivial_clusters(graph: OpGraph, rows_for: RowsFor) -> ClusterGraph:
    """One cluster per op and per placeholder: what :func:`fuse` must not be worse than."""
    rows = lifted(graph, rows_for)
    grouping = _Grouping(graph, rows)
    groups = [_Group("source", graph.phase_of[i.value.name], i) for i in graph.inputs]
    for i, op in enumerate(graph.ops):
        fallback = (op.target,) if rows.rows[op.name] is None else ()
        groups.append(_Group("kernel", op.phase, None, reads={v.name: None for v in op.ins}, fallback=fallback))
        groups[-1].take(i, op)
    return _finish(groups, graph, rows, grouping.rest_of)
