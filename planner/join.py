"""Rows of a cluster from the rows of its ops: a relational join over the values inside.

Each op is a table whose columns are the values it touches and whose lines are its rows. The join of the tables is every
way to run all ops without changing a value's placement in between; projecting it on what crosses the cluster's border
gives the cluster's rows. ``exp: S(0)->S(0), S(1)->S(1)`` joined with ``sum over dim 1: S(0)->S(0), S(1)->P`` is
``S(0)->S(0), S(1)->P``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.ir.cluster import ClusterRow
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import Placement, Row

MAX_ROWS = 32
"""Most rows kept of one cluster: beyond it those with the fewest sharded values are dropped. Of twenty models' clusters none has more than ten,
but for sums of many layers in one kernel, each of which may be partial in one operand or the other."""

_MOST_LINES = 4 * MAX_ROWS
"""Likewise of lines while ops are joined: in a kernel of a hundred ops their number would double with every few."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One consistent choice for the ops joined so far: ``placements`` of the live columns, the ``members``."""

    placements: tuple[Placement, ...]
    members: tuple[Row, ...]
    replicated: int
    uneven: bool


def op_columns(op: Op) -> tuple[list[str], list[tuple[bool, int]]]:
    """The values an op touches, each once, and where each first stands: (is an input, index)."""
    names: dict[str, tuple[bool, int]] = {}
    for slot, v in enumerate(op.ins):
        names.setdefault(v.name, (True, slot))
    for slot, out in enumerate(op.outs):
        if out is not None:
            names.setdefault(out.name, (False, slot))
    return list(names), list(names.values())


def _op_lines(op: Op, rows: Sequence[Row], where: list[tuple[bool, int]]) -> list[tuple[tuple[Placement, ...], Row]]:
    """The rows of one op over its columns; rows that give one value two placements are left out."""
    lines = []
    for row in rows:
        placed: dict[str, Placement] = {}
        if all(placed.setdefault(v.name, p) == p for v, p in zip(op.ins, row.ins, strict=True)):
            at = [row.ins[slot] if is_in else row.outs[slot] for is_in, slot in where]
            if None not in at:
                lines.append((tuple(p for p in at if p is not None), row))
    return lines


def _holds_unevenly(row: Row) -> bool:
    """Whether a row holds for uneven pieces: it is marked so, or it cuts nothing."""
    return row.uneven or not any(p is not None and p.is_shard for p in (*row.ins, *row.outs))


def _step(columns: list[str], lines: list[_Line], op: Op, rows: Sequence[Row]) -> tuple[list[str], list[_Line]]:
    """Join one op's table to what is joined so far."""
    names, where = op_columns(op)
    position = {name: i for i, name in enumerate(columns)}
    shared = [i for i, name in enumerate(names) if name in position]
    fresh = [i for i, name in enumerate(names) if name not in position]
    keys = [position[names[i]] for i in shared]
    by_key: dict[tuple[Placement, ...], list[tuple[tuple[Placement, ...], Row]]] = {}
    for at, row in _op_lines(op, rows, where):
        by_key.setdefault(tuple(at[i] for i in shared), []).append((tuple(at[i] for i in fresh), row))
    joined = [
        _Line(
            line.placements + extra,
            (*line.members, row),
            line.replicated + sum(p.is_replicate for p in extra),
            line.uneven and _holds_unevenly(row),
        )
        for line in lines
        for extra, row in by_key.get(tuple(line.placements[i] for i in keys), ())
    ]
    return columns + [names[i] for i in fresh], joined


def _project(columns: list[str], lines: list[_Line], keep: set[str]) -> tuple[list[str], list[_Line]]:
    """Drop the columns that nothing reads any more; of lines that become equal keep the one that shards most."""
    kept = [i for i, name in enumerate(columns) if name in keep]
    best: dict[tuple[Placement, ...], _Line] = {}
    for line in lines:
        key = tuple(line.placements[i] for i in kept)
        old = best.get(key)
        if old is None or (line.replicated, not line.uneven) < (old.replicated, not old.uneven):
            best[key] = _Line(key, line.members, line.replicated, line.uneven)
    return [columns[i] for i in kept], list(best.values())


def _rank(line: _Line) -> tuple[bool, int]:
    """Order of the rows: all replicated first, then those that shard most."""
    return (not all(p.is_replicate for p in line.placements), sum(p.is_replicate for p in line.placements))


def _best(lines: list[_Line], most: int) -> list[_Line]:
    """At most so many lines: the all replicated one, then those with the most values that are sharded."""
    if len(lines) <= most:
        return lines

    def rank(line: _Line) -> tuple[bool, int]:
        return not all(p.is_replicate for p in line.placements), -sum(p.is_shard for p in line.placements)

    return sorted(lines, key=rank)[:most]


def join(
    ops: Sequence[Op],
    rows: Sequence[Sequence[Row]],
    ins: Sequence[Value],
    outs: Sequence[Value],
    source: tuple[str, Sequence[Placement]] | None = None,
) -> tuple[ClusterRow, ...]:
    """Every row of the cluster of ``ops``.

    Args:
        ops: in execution order.
        rows: the rows of each op.
        ins: values read from outside.
        outs: values read outside.
        source: for a placeholder's cluster, the placeholder's value name and the placements it may rest in.

    Returns:
        Rows with distinct (ins, outs, rest), the replicated one first, at most ``MAX_ROWS``.
    """
    columns: list[str] = []
    lines = [_Line((), (), 0, True)]
    border = {v.name for v in (*ins, *outs)}
    if source is not None:
        columns = [source[0]]
        lines = [_Line((p,), (), int(p.is_replicate), True) for p in source[1]]
        border.add(source[0])
    last_use = {name: i for i, op in enumerate(ops) for name in op_columns(op)[0]}
    for i, (op, own) in enumerate(zip(ops, rows, strict=True)):
        columns, lines = _step(columns, lines, op, own)
        columns, lines = _project(columns, lines, border | {name for name in columns if last_use.get(name, -1) > i})
        lines = _best(lines, _MOST_LINES)
    lines = sorted(_best(lines, MAX_ROWS), key=_rank)
    position = {name: i for i, name in enumerate(columns)}
    at_ins, at_outs = [position[v.name] for v in ins], [position[v.name] for v in outs]
    return tuple(
        ClusterRow(
            tuple(line.placements[i] for i in at_ins),
            tuple(line.placements[i] for i in at_outs),
            line.members,
            None if source is None else line.placements[position[source[0]]],
            line.uneven,
        )
        for line in lines
    )
