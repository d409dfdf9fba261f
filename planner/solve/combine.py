"""A cluster's rows as arrays, and their legal combinations on a mesh.

Whether rows go together is looked at for all combinations at once: over each axis alone, and where two axes cut one dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.planner.cost.compute import Columns, Priced
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.cuts import Cuts, cuts_of_columns, divide, padded, repeated, split_at, stacked
from meshwright.planner.ir.graph import GraphInput, Value
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.kinds import signature_of
from meshwright.planner.solve.candidates import WHOLE_ROLES, Candidate, Edges, edges, pieces_exist
from meshwright.planner.solve.expanded import Expanded
from meshwright.planner.solve.keep import Root, root_of


def product_of(per_axis: Sequence[tuple[int, ...]]) -> np.ndarray:
    """All combinations of one row per axis, int64 [combinations, axes], read-only; the last axis changes fastest."""
    return _product_of(tuple(per_axis))


@lru_cache(maxsize=1 << 12)
def _product_of(per_axis: tuple[tuple[int, ...], ...]) -> np.ndarray:
    grids = np.meshgrid(*(np.array(rows, dtype=np.int64) for rows in per_axis), indexing="ij")
    found = np.stack([grid.ravel() for grid in grids], axis=1)
    found.setflags(write=False)
    return found


class _Product:
    """Rows that are legal over each axis alone, combined. Sizes have a say only where several axes cut one dim of a value.

    Attributes:
        shape: of the values that are cut twice, one after the other, int64 [twice, dims].
        cuts: how they are cut, [twice, axes].
    """

    def __init__(self, table: RowTable, per_axis: Sequence[tuple[int, ...]]):
        self._table, self._index = table, product_of(per_axis)
        dim, split = table.columns.dim[self._index], table.columns.split[self._index]
        self._n, self._v = np.nonzero(_cut_twice(dim))
        self.shape, self.cuts = table.shape[self._v], Cuts(dim[self._n, :, self._v], split[self._n, :, self._v])
        self._ragged: np.ndarray | None = None
        self._storable: np.ndarray = np.ones(len(self._index), dtype=bool)
        if table.may_be_uneven:
            self._ragged = np.asarray((table.uneven[self._index[self._n]] | (self.cuts.dim < 0)).all(axis=1))
            self._storable = _storable(Cuts(table.rest().dim[self._index, 0], table.rest().split[self._index, 0]))
        self._found: dict[bytes, Expanded] = {}
        self._alone: Expanded | None = None

    def alone(self) -> Expanded:
        """All combinations that can be stored: where nothing is cut twice no size has a say."""
        if self._alone is None:
            self._alone = Expanded(self._table, self._index[self._storable])
        return self._alone

    def expanded(self, even: np.ndarray, sizes: tuple[int, ...]) -> Expanded:
        """The combinations that are legal together; ``even``: whether what is cut twice has equal pieces, bool [twice]."""
        bad = ~even
        for at in np.flatnonzero(bad & self._ragged).tolist() if self._ragged is not None else ():
            v = int(self._v[at])
            placed = tuple(p for r in self._index[self._n[at]].tolist() for p in self._table.placed(r, v))
            bad[at] = not pieces_exist(self._table.shapes[v], placed, sizes)
        legal = self._storable.copy()
        legal[self._n[bad]] = False
        key = legal.tobytes()
        if key not in self._found:
            self._found[key] = Expanded(self._table, self._index[legal])
        return self._found[key]


class RowTable:
    """The rows of a cluster, or of several that are alike, and what no mesh changes of them.

    Attributes:
        rows: the cluster's rows, and behind them those that keep a copy of what a parameter's cluster makes, as they are asked for
            (see :mod:`meshwright.planner.solve.keep`).
        root: what of a parameter can be kept.
        may_be_uneven: whether pieces may be uneven: of a parameter.
        shapes: of the cluster's values that some row cuts.
        shape: the same as an array, int64 [columns, dims].
        columns: how each of the cluster's own rows cuts them, [rows, columns].
        uneven: whether a row may be uneven, bool [rows].
        results: (op, result) to its value.
        source: the placeholder, if it is one's.
        result_shape: of the results, int64 [results, dims].
        result_unit: bytes of an element of each result, float64 [results].
        are_unlike: whether all of the cluster's own rows read or make something else.
        is_view: whether a result only looks at a kept copy in another way, bool [results].
    """

    def __init__(self, cluster: Cluster):
        self.rows, self.root = list(cluster.rows), root_of(cluster)
        self._cluster, self.source = replace(cluster), cluster.source  # a copy: this must not keep the cluster itself
        self.may_be_uneven = cluster.source is not None and cluster.source.role == "parameter"
        self.shapes, placed = _distinct_columns(cluster)
        self.shape, self.columns = padded(self.shapes), cuts_of_columns(placed, len(self.rows))
        self.uneven = np.array([row.uneven for row in self.rows])
        self.results = [(m, k, v) for m, op in enumerate(cluster.ops) for k, v in enumerate(op.outs) if v is not None]
        self.result_shape = padded([v.shape for _, _, v in self.results])
        self.result_unit = np.array([v.dtype.itemsize for _, _, v in self.results], dtype=float)
        self.is_view = np.array([self.root is not None and v.name in self.root.views for _, _, v in self.results], dtype=bool)
        self._whole = tuple(i for i, row in enumerate(self.rows) if _is_whole(cluster, row))[:1]
        self._roots = None if self.root is None else _made_roots(cluster, self.root)
        self._edges = [edges(row) for row in self.rows]
        self._on: dict[int, tuple[int, ...]] = {}
        self._wanted: dict[tuple[int, frozenset[Edges]], tuple[int, ...]] = {}
        self._products: dict[tuple, _Product] = {}
        self._made: dict[tuple, Candidate] = {}
        self.are_unlike = len(set(self._edges)) == len(self._edges)
        self._kept_at: dict[int, int] = {}
        self._of_rows: dict[Hashable, tuple[int, Any]] = {}

    # --- legal rows and combinations ---

    def on(self, size: int) -> tuple[int, ...]:
        """Rows legal over one axis of ``size`` devices alone."""
        if size not in self._on:
            look_up_rows([self], [size])
        return self._on[size]

    def settle(self, size: int) -> bool:
        """Whether it is known which rows are legal over one axis; it is at once where everything must be whole."""
        if size not in self._on and (size == 1 or (self.source is not None and self.source.role in WHOLE_ROLES)):
            self._on[size] = self._whole
        return size in self._on

    def tell(self, size: int, even: np.ndarray) -> None:
        """Say whether each column of each row has equal pieces over one axis, bool [rows, columns]."""
        self._on[size] = self._legal(even, size)

    def _legal(self, even: np.ndarray, size: int) -> tuple[int, ...]:
        found = np.asarray(even.all(axis=1))
        for r in np.flatnonzero(~found & self.uneven).tolist() if self.may_be_uneven else ():
            found[r] = all(pieces_exist(shape, self.placed(r, v), (size,)) for v, shape in enumerate(self.shapes))
        rests = (self.rows[r].rest for r in range(len(found)))
        return tuple(
            r
            for r, (ok, rest) in enumerate(zip(found.tolist(), rests, strict=True))
            if ok and (rest is None or not rest.is_partial)
        )

    def placed(self, row: int, column: int) -> Placements:
        """How a row cuts a value."""
        dim, split = int(self.columns.dim[row, column]), int(self.columns.split[row, column])
        return (R if dim < 0 else S(dim, split),)

    def product(self, sizes: tuple[int, ...], wanted: Sequence[frozenset[Edges] | None]) -> _Product:
        """The rows of each axis combined: those that are wanted there."""
        key = tuple([self._of_those(n, want) for n, want in zip(sizes, wanted or (None,) * len(sizes), strict=True)])
        if key not in self._products:
            self._products[key] = _Product(self, key)
        return self._products[key]

    def _of_those(self, size: int, want: frozenset[Edges] | None) -> tuple[int, ...]:
        """Rows legal over one axis alone: those that are wanted."""
        if want is None:
            return self.on(size)
        if (size, want) not in self._wanted:
            self._wanted[size, want] = tuple(r for r in self.on(size) if self._edges[r] in want)
        return self._wanted[size, want]

    def candidate(self, rows: tuple[int, ...], path: tuple[Placements, ...] | None) -> Candidate:
        """What some rows make together, with the path of a kept copy."""
        found = self._made.get((rows, path))
        if found is None:
            found = self._made[rows, path] = Candidate.of(tuple([self.rows[r] for r in rows]), path)
        return found

    # --- what each row says, those that keep a copy among them ---

    def _once(self, what: Hashable, work_out: Callable[[], Any]) -> Any:
        """What is worked out from all rows, again when there are more."""
        known = self._of_rows.get(what)
        if known is None or known[0] < len(self.rows):
            known = self._of_rows[what] = len(self.rows), work_out()
        return known[1]

    def rest(self) -> Cuts:
        """How each row cuts the placeholder, [rows, 1]."""
        return self._once("rest", lambda: cuts_of_columns([[row.rest or R for row in self.rows]], len(self.rows)))

    def placed_by_row(self, what: str, *at: int) -> list[Placement]:
        """Placement of a value in each row; see :meth:`Expanded.placed`."""
        return self._once((what, at), lambda: [_placement_in(row, what, *at) for row in self.rows])

    def edge_numbers(self) -> list[int]:
        """A number of each row, the same of those that read and make the same."""

        def work_out() -> list[int]:
            seen: dict[Edges, int] = {}
            return [seen.setdefault(edges(row), len(seen)) for row in self.rows]

        return self._once("edges", work_out)

    def result_cuts(self) -> Cuts:
        """How each row cuts what the ops make, [rows, results]."""
        return self._once(
            "results",
            lambda: cuts_of_columns([[row.members[m].outs[k] for row in self.rows] for m, k, _ in self.results], len(self.rows)),
        )

    def priced(self, index: np.ndarray) -> Priced:
        """What has a price under some candidates, given by their rows over each axis, int64 [candidates, axes]."""
        return Priced(self._once("priced", lambda: Columns(self._cluster, self.rows)), self.rows, index)

    # --- rows whose readers find a kept copy ---

    def kept(self, row: int) -> int:
        """The row that rests and casts as one of the cluster's does, and makes all that is behind ``root`` whole."""
        if row not in self._kept_at:
            root, rests = self.root, self.rows[row]
            assert root is not None
            whole = next(r for r in self.rows if r.rest == R and all(p.is_replicate for p in r.outs))
            pairs = enumerate(zip(rests.members, whole.members, strict=True))
            members = tuple(above if m in root.above else behind for m, (above, behind) in pairs)
            self._kept_at[row] = len(self.rows)
            self.rows.append(replace(rests, outs=whole.outs, members=members))
        return self._kept_at[row]

    def made(self, rows: Sequence[int]) -> Placements:
        """Where rows of the cluster make what can be kept."""
        assert self._roots is not None
        return tuple(self._roots[r] for r in rows)


def look_up_rows(tables: Sequence[RowTable], sizes: Iterable[int]) -> None:
    """Find the rows of several clusters that are legal over one axis, for all of them at once."""
    for size in dict.fromkeys(sizes):
        new = [table for table in dict.fromkeys(tables) if not table.settle(size)]
        if new:
            flat = [Cuts(t.columns.dim.reshape(-1, 1), t.columns.split.reshape(-1, 1)) for t in new]
            shape = stacked([repeated(t.shape, len(t.columns.dim)) for t in new])
            even = split_at(divide(shape, Cuts.stacked(flat), (size,)), [len(c.dim) for c in flat])
            for table, part in zip(new, even, strict=True):
                table.tell(size, part.reshape(table.columns.dim.shape))


def expand_all(
    tables: Sequence[RowTable], sizes: tuple[int, ...], wanted: Sequence[Sequence[frozenset[Edges] | None]]
) -> list[Expanded]:
    """All legal combinations of rows on a mesh, for several clusters; the one that replicates everything is among them.

    Args:
        tables: of the clusters.
        sizes: mesh axis sizes; over an axis of size 1 everything is ``R``.
        wanted: per cluster and axis, the rows to keep by what they read and make, or None for all. Where they allow nothing, all are
            kept.

    Returns:
        Candidates in the order of their rows' product.
    """
    look_up_rows(tables, sizes)
    products = [table.product(sizes, want) for table, want in zip(tables, wanted, strict=True)]
    found = _all_expanded(products, sizes)
    none = [k for k, e in enumerate(found) if not len(e)]
    for k, again in zip(none, _all_expanded([tables[k].product(sizes, ()) for k in none], sizes), strict=True):
        found[k] = again
    return found


def _all_expanded(products: Sequence[_Product], sizes: tuple[int, ...]) -> list[Expanded]:
    distinct = {id(p): p for p in products}
    twice = [p for p in distinct.values() if len(p.shape)]
    found = {key: p.alone() for key, p in distinct.items() if not len(p.shape)}
    if twice:
        even = divide(stacked([p.shape for p in twice]), Cuts.stacked([p.cuts for p in twice]), sizes)
        parts = split_at(even, [len(p.shape) for p in twice])
        found.update((id(p), p.expanded(part, sizes)) for p, part in zip(twice, parts, strict=True))
    return [found[id(p)] for p in products]


_SHARED: weakref.WeakValueDictionary[tuple, RowTable] = weakref.WeakValueDictionary()


def _table(cluster: Cluster) -> RowTable:
    """The cluster's own, or that of one that computes the same with the same rows: the three projections of attention share it, and so
    do their weights."""
    key = _likeness(cluster)
    table = _SHARED.get(key)
    if table is None:
        table = _SHARED[key] = RowTable(cluster)
    return table


def _likeness(cluster: Cluster) -> tuple:
    """What clusters must share to be alike up to names: their rows, what their ops compute, and how they are wired."""
    number: dict[str, int] = {}

    def numbers(values: Iterable[Value | None]) -> tuple[int | None, ...]:
        return tuple(None if v is None else number.setdefault(v.name, len(number)) for v in values)

    edge = tuple((v.shape, v.dtype) for v in (*cluster.ins, *cluster.outs))
    ops = tuple((signature_of(op), numbers(op.ins), numbers(op.outs)) for op in cluster.ops)
    wired = numbers(cluster.ins), numbers(cluster.outs)
    return id(cluster.rows), edge, ops, wired, None if cluster.source is None else _of_placeholder(cluster, cluster.source)


def _of_placeholder(cluster: Cluster, source: GraphInput) -> tuple:
    """What else placeholders' clusters must share: what it is for, how it is read, and which ops are computed again."""
    first = {op.name: m for m, op in enumerate(cluster.ops)}
    reads = [v.name == source.value.name for v in (*cluster.outs, *(v for op in cluster.ops for v in op.ins))]
    again = [first.get(op.recompute_of or op.name, m) for m, op in enumerate(cluster.ops)]
    return source.role, source.value.shape, source.value.dtype, tuple(reads), tuple(again)


table_of: Callable[[Cluster], RowTable] = Known(_table)


def _placement_in(row: ClusterRow, what: str, *at: int) -> Placement:
    if what == "rest":
        return row.rest or R
    if what in ("in", "out"):
        return (row.ins if what == "in" else row.outs)[at[0]]
    member, slot = row.members[at[0]], at[1]
    placement = (member.ins if what == "op in" else member.outs)[slot]
    assert placement is not None
    return placement


def _made_roots(cluster: Cluster, root: Root) -> tuple[Placement, ...]:
    """Where each row makes what can be kept."""
    at = next((m for m, op in enumerate(cluster.ops) if op.outs[0] == root.value), None)
    made = (row.rest if at is None else row.members[at].outs[0] for row in cluster.rows)
    return tuple(p or R for p in made)


def _is_whole(cluster: Cluster, row: ClusterRow) -> bool:
    return all(placement_in(row) == R for _, placement_in in _occurrences(cluster))


def _distinct_columns(cluster: Cluster) -> tuple[list[tuple[int, ...]], list[tuple[Placement, ...]]]:
    """Shapes of the values inside or at the edge of a cluster, and how each row places them; without those that no row cuts, and those
    that are like another."""
    columns: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {}
    for value, placement_in in _occurrences(cluster):
        if value.name not in columns:
            columns[value.name] = value.shape, tuple(placement_in(row) for row in cluster.rows)
    kept = [c for c in dict.fromkeys(columns.values()) if any(p.is_shard for p in c[1])]
    return [shape for shape, _ in kept], [placed for _, placed in kept]


def _occurrences(cluster: Cluster) -> Iterator[tuple[Value, Callable[[ClusterRow], Placement]]]:
    """(value, row -> its placement) for the placeholder, inputs, results and all members' results."""
    if cluster.source is not None:
        yield cluster.source.value, lambda row: row.rest or R
    for k, value in enumerate(cluster.ins):
        yield value, lambda row, k=k: row.ins[k]  # type: ignore[misc]
    for k, value in enumerate(cluster.outs):
        yield value, lambda row, k=k: row.outs[k]  # type: ignore[misc]
    for m, op in enumerate(cluster.ops):
        for k, out in enumerate(op.outs):
            if out is not None:
                yield out, lambda row, m=m, k=k: row.members[m].outs[k] or R  # type: ignore[misc]


def _cut_twice(dim: np.ndarray) -> np.ndarray:
    """Whether several axes cut one dim of a value, bool [combinations, values]; ``dim`` is [combinations, axes, values]."""
    found = np.zeros((dim.shape[0], dim.shape[2]), dtype=bool)
    for axis in range(dim.shape[1]):
        found |= ((dim[:, axis + 1 :] == dim[:, axis, None]) & (dim[:, axis, None] >= 0)).any(axis=1)
    return found


def _storable(rest: Cuts) -> np.ndarray:
    """Whether DTensor stores placements right, bool [combinations]; see :func:`~meshwright.planner.solve.candidates.storable`."""
    found = np.ones(len(rest.dim), dtype=bool)
    for axis in range(rest.num_axes):
        again = (rest.dim[:, axis + 1 :] == rest.dim[:, axis, None]).any(axis=1)
        found &= ~((rest.split[:, axis] > 1) & again)
    return found
