"""Carry ``S(d;k)`` from the views that make it to the ops that do not mind it.

A rule sees one op. ``[B,S,H] -> [B*S,H]`` turns a sequence shard ``S(1)`` into ``S(0;B)``; the matmul behind it shards
its rows, and which rows a rank has is all the same to it. So wherever ``S(d;k)`` arrives at an op that computes each
index of ``d`` alone, the op's row for the plain shard is also a row for ``S(d;k)``, on every value that shares the dim:

    mm: S(0),R -> S(0)   and k = 4 arrives at its first input   gives also   S(0;4),R -> S(0;4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshwright.planner.ir.graph import GraphInput, Op, OpGraph
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.spec import Placement, Row, S
from meshwright.planner.kinds import argument, kind_of, packet, signature_of

RowsFor = Callable[[Op], tuple[Row, ...] | None]
Dim = tuple[str, int]
"""(value name, dim)."""

_INDIFFERENT_KERNELS = frozenset(
    f"aten.{name}"
    for name in [
        "mm",
        "bmm",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "embedding",
        "embedding_dense_backward",
        "nll_loss_forward",
        "nll_loss_backward",
        "gather",
    ]
)
"""Kernels that compute each index of a sharded dim alone, but for the dims of ``_ordered_dims``."""

_ORDERED_POINTWISE = frozenset({"meshwright.uniform"})


def _ordered_dims(op: Op) -> set[tuple[bool, int, int]]:
    """(is an input, slot, dim) along which the op depends on where an element lies."""
    name = packet(op.target)
    if name in ("aten.embedding", "aten.nll_loss_forward"):
        return {(True, 0, len(op.ins[0].shape) - 1 if name.endswith("forward") else 0)}
    if name == "aten.nll_loss_backward":
        return {(True, 1, len(op.ins[1].shape) - 1), (False, 0, len(op.ins[1].shape) - 1)}
    if name == "aten.embedding_dense_backward":
        return {(False, 0, 0)}
    if name == "aten.gather":
        dim = argument(op, "dim", 0) % max(len(op.ins[0].shape), 1)
        return {(True, 0, dim), (True, 1, dim), (False, 0, dim)}
    return set()


def _is_indifferent(op: Op) -> bool:
    name = packet(op.target)
    kind = kind_of(op)
    if kind == "pointwise":
        return name not in _ORDERED_POINTWISE
    return kind in ("view", "cast", "reduction") or name in _INDIFFERENT_KERNELS


def linked_dims(op: Op, row: Row) -> list[tuple[bool, int, int]] | None:
    """The dims that ``row`` cuts alike, as (is an input, slot, dim); None where their order matters to the op.

    Only dims of equal length are one dim: where a view merges, splits or narrows a dim, the view's own rows say what
    becomes of ``S(d;k)``.
    """
    at = [(True, i, p) for i, p in enumerate(row.ins)] + [(False, i, p) for i, p in enumerate(row.outs) if p is not None]
    cut = [(is_in, i, p.dim) for is_in, i, p in at if p.is_shard]
    if not cut or any(p.split > 1 for _, _, p in at) or not _is_indifferent(op):
        return None
    lengths = {_value_shape(op, is_in, slot)[dim] for is_in, slot, dim in cut}
    if len(lengths) > 1 or not _ordered_dims(op).isdisjoint(cut):
        return None
    return cut


def _value_shape(op: Op, is_in: bool, slot: int) -> tuple[int, ...]:
    value = op.ins[slot] if is_in else op.outs[slot]
    assert value is not None
    return value.shape


def _name(op: Op, is_in: bool, slot: int) -> str:
    value = op.ins[slot] if is_in else op.outs[slot]
    assert value is not None
    return value.name


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rows of all ops with one signature.

    Attributes:
        rows: the rows.
        links: linked dims of each row (None: not liftable).
        seeds: the rows that turn split shards into plain ones, or back.
        asked: the rows of the rule itself that have split shards alone.
    """

    rows: tuple[Row, ...]
    links: tuple[list[tuple[bool, int, int]] | None, ...]
    seeds: tuple[Row, ...]
    asked: tuple[Row, ...]

    @classmethod
    def of(cls, op: Op, rows: tuple[Row, ...]) -> _Rules:
        placed = [[p for p in (*r.ins, *r.outs) if p is not None and p.is_shard] for r in rows]
        seeds = tuple(r for r, at in zip(rows, placed, strict=True) if {p.split > 1 for p in at} == {True, False})
        asked = tuple(r for r, at in zip(rows, placed, strict=True) if {p.split > 1 for p in at} == {True})
        return cls(rows, tuple(linked_dims(op, r) for r in rows), seeds, asked)


class Lifted:
    """Rows of every op of a graph, with the ``S(d;k)`` rows that its surroundings ask for.

    Attributes:
        rows: op name to rows; None where no rule is known.
        splits: (value name, dim) to the numbers of groups that occur there.
        signatures: op name to an id of (signature, rows): ops of one id have equal rows.
    """

    def __init__(self, graph: OpGraph, rows_for: RowsFor):
        self._graph = graph
        self._ids: dict[object, int] = {}
        self._key: dict[str, object] = {}
        self._rules: dict[object, _Rules | None] = {}
        self._rule_of = {op.name: self._rule(op, rows_for) for op in graph.ops}
        self._natural: dict[tuple[str, Placement], bool] = {}
        self.splits: dict[Dim, set[int]] = {}
        self._spread()
        self.rows: dict[str, tuple[Row, ...] | None] = {}
        self.signatures: dict[str, int] = {}
        cache: dict[object, tuple[Row, ...] | None] = {}
        for op in graph.ops:
            key = (self._key[op.name], self._arriving(op))
            if key not in cache:
                cache[key] = self._lift(op)
            self.rows[op.name] = cache[key]
            self.signatures[op.name] = self._ids.setdefault(key, len(self._ids))
        del self._graph, self._ids, self._key, self._rules, self._rule_of, self._natural  # what is kept must not hold the graph

    def _rule(self, op: Op, rows_for: RowsFor) -> _Rules | None:
        key = signature_of(op)
        key = (self._ids.setdefault(key, len(self._ids)), tuple(op.ins.index(v) for v in op.ins))
        self._key[op.name] = key
        if key not in self._rules:
            rows = rows_for(op)
            self._rules[key] = None if rows is None else _Rules.of(op, tuple(rows))
        return self._rules[key]

    # --- which splits matter ---

    def _seeds(self) -> Iterable[tuple[Dim, int]]:
        """Split shards that a view makes of, or into, a plain shard that some op wants."""
        for op in self._graph.ops:
            rule = self._rule_of[op.name]
            for row in rule.seeds if rule is not None else ():
                split = [(op.ins[i].name, p) for i, p in enumerate(row.ins) if p.split > 1]
                split += [(_name(op, False, i), p) for i, p in enumerate(row.outs) if p is not None and p.split > 1]
                plain = [(op.ins[i].name, p) for i, p in enumerate(row.ins) if p.is_shard and p.split == 1]
                plain += [
                    (_name(op, False, i), p) for i, p in enumerate(row.outs) if p is not None and p.is_shard and p.split == 1
                ]
                if any(self._wanted(name, p, op.name) for name, p in plain):
                    yield from (((name, p.dim), p.split) for name, p in split)

    def _wanted(self, name: str, p: Placement, beside: str) -> bool:
        """Whether an op other than a view makes or reads value ``name`` in placement ``p``, maybe behind views."""
        key = (name, p)
        if key in self._natural:
            return self._natural[key]
        self._natural[key] = False
        maker = self._graph.producer[name]
        if isinstance(maker, GraphInput):
            self._natural[key] = True
            return True
        for op in (maker, *self._graph.consumers.get(name, ())):
            if op.name != beside and self._wanted_by(op, name, p):
                self._natural[key] = True
                break
        return self._natural[key]

    def _wanted_by(self, op: Op, name: str, p: Placement) -> bool:
        rule = self._rule_of[op.name]
        if rule is None:
            return False
        for row in rule.rows:
            at = [(v.name, q) for v, q in zip(op.ins, row.ins, strict=True)]
            at += [(v.name, q) for v, q in zip(op.outs, row.outs, strict=True) if v is not None and q is not None]
            if (name, p) not in at:
                continue
            if kind_of(op) != "view":
                return True
            others = [(n, q) for n, q in at if n != name and q.is_shard and q.split == 1]
            if any(self._wanted(n, q, op.name) for n, q in others):
                return True
        return False

    def _spread(self) -> None:
        """Carry the seeds along linked dims to everything they reach; what a rule asks for only through the views beside it."""
        self._carry(list(self._seeds()), lambda op: True)
        self._carry(list(self._asked()), lambda op: kind_of(op) == "view")

    def _asked(self) -> Iterable[tuple[Dim, int]]:
        """Split shards that a kernel wants for itself (stripes of queries); one hop away they are redistributed."""
        for op in self._graph.ops:
            rule = self._rule_of[op.name]
            for row in rule.asked if rule is not None else ():
                yield from (((v.name, p.dim), p.split) for v, p in zip(op.ins, row.ins, strict=True) if p.split > 1)
                yield from (
                    ((v.name, p.dim), p.split)
                    for v, p in zip(op.outs, row.outs, strict=True)
                    if v is not None and p is not None and p.split > 1
                )

    def _carry(self, seeds: list[tuple[Dim, int]], through: Callable[[Op], bool]) -> None:
        if not seeds:
            return
        touching: dict[Dim, list[list[Dim]]] = {}
        for op in filter(through, self._graph.ops):
            rule = self._rule_of[op.name]
            for link in rule.links if rule is not None else ():
                if link is not None:
                    dims = [(_name(op, is_in, slot), dim) for is_in, slot, dim in link]
                    for d in dims:
                        touching.setdefault(d, []).append(dims)
        todo = seeds
        while todo:
            dim, k = todo.pop()
            known = self.splits.setdefault(dim, set())
            if k in known:
                continue
            known.add(k)
            todo.extend((other, k) for dims in touching.get(dim, ()) for other in dims)

    # --- rows ---

    def _arriving(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """Per row of the op, the splits that arrive at its linked dims."""
        rule = self._rule_of[op.name]
        if rule is None or not self.splits:
            return ()
        out = []
        for link in rule.links:
            found: set[int] = set()
            for is_in, slot, dim in link or ():
                found |= self.splits.get((_name(op, is_in, slot), dim), set())
            out.append(tuple(sorted(found)))
        return tuple(out) if any(out) else ()

    def _lift(self, op: Op) -> tuple[Row, ...] | None:
        rule = self._rule_of[op.name]
        if rule is None:
            return None
        rows = dict.fromkeys(rule.rows)
        for row, splits in zip(rule.rows, self._arriving(op), strict=False):
            rows.update(dict.fromkeys(_with_split(row, k) for k in splits))
        return tuple(rows)


def _with_split(row: Row, k: int) -> Row:
    """``row`` with every plain shard ``S(d)`` replaced by ``S(d;k)``."""
    ins = tuple(S(p.dim, k) if p.is_shard else p for p in row.ins)
    return Row(ins, tuple(S(p.dim, k) if p is not None and p.is_shard else p for p in row.outs), False)


def _nothing(_: OpGraph) -> dict[RowsFor, Lifted]:
    return {}


_LIFTED: Known[OpGraph, dict[RowsFor, Lifted]] = Known(_nothing)


def lifted(graph: OpGraph, rows_for: RowsFor) -> Lifted:
    """The rows of a graph, worked out once; an op's own rows must stay what they are."""
    known = _LIFTED(graph)
    if rows_for not in known:
        known[rows_for] = Lifted(graph, rows_for)
    return known[rows_for]
