"""A cluster's rows as arrays, and their legal combinations on a mesh.

Whether rows go together is looked at for all combinations at once: over each axis alone, and where two axes cut one dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.planner.cost.compute import Priced, priced_columns
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.cuts import Cuts, cuts_of_columns, divide, padded, piece_numels, stacked
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.kinds import signature_of
from meshwright.planner.solve.candidates import WHOLE_ROLES, Candidate, Edges, edges, pieces_exist
from meshwright.planner.solve.keep import Root, root_of


@dataclass(frozen=True)
class Expanded:
    """Candidates, and the rows that they are made of. What no size changes of them is worked out once.

    Attributes:
        candidates: the candidates.
        table: their cluster's rows.
        index: row of each candidate over each axis, in the order of ``table.rows``, int64 [candidates, axes].
        numbers: candidates of one signature have one number.
    """

    candidates: tuple[Candidate, ...]
    table: RowTable
    index: np.ndarray
    numbers: tuple[int, ...]
    _parts: dict[tuple[int, ...], Expanded] = field(default_factory=dict)
    _longer: dict[tuple[int, ...], Expanded] = field(default_factory=dict)
    _placed: dict[tuple[str, int], tuple[Placements, ...]] = field(default_factory=dict)

    def placed(self, what: str, slot: int = 0) -> tuple[Placements, ...]:
        """Placements of an input (``"in"``), a result (``"out"``) or the placeholder (``"rest"``) in every candidate."""
        key = what, slot
        if key not in self._placed:
            of = {"in": lambda c: c.ins[slot], "out": lambda c: c.outs[slot], "rest": lambda c: c.rest or ()}[what]
            self._placed[key] = tuple(map(of, self.candidates))
        return self._placed[key]

    def distinct(self, what: str, slot: int = 0) -> tuple[Placements, ...]:
        """The same, each once."""
        key = f"each {what}", slot
        if key not in self._placed:
            self._placed[key] = tuple(dict.fromkeys(self.placed(what, slot)))
        return self._placed[key]

    @cached_property
    def kept_at(self) -> np.ndarray:
        """Which candidates keep a copy, bool [candidates]."""
        return np.array([c.kept is not None for c in self.candidates])

    @cached_property
    def priced(self) -> Priced:
        """What has a price."""
        return self.table.priced(self.index)

    @cached_property
    def rest(self) -> Cuts:
        """How candidates cut a placeholder at rest, [candidates, axes]."""
        return self.table.rest().of_candidates(self.index)

    @cached_property
    def results(self) -> tuple[np.ndarray, Cuts]:
        """Global shapes of the ops' results for every candidate, and how they are cut, [candidates * results]."""
        shape = np.tile(padded([v.shape for _, _, v in self.table.results]), (len(self.index), 1))
        return shape, self.table.result_cuts().of_candidates(self.index)

    def cheapest_of_equals(self, seconds: np.ndarray) -> tuple[int, ...]:
        """Indices of the candidates that remain when of several with one signature only the fastest is kept."""
        if len(set(self.numbers)) == len(self.numbers):
            return tuple(range(len(self.numbers)))
        best: dict[int, int] = {}
        for i, (number, s) in enumerate(zip(self.numbers, seconds.tolist(), strict=True)):
            if s < seconds[best.setdefault(number, i)]:
                best[number] = i
        return tuple(sorted(best.values()))

    def taken(self, which: tuple[int, ...]) -> Expanded:
        """Some of the candidates."""
        if len(which) == len(self.candidates):
            return self
        if which not in self._parts:
            candidates, numbers = tuple(self.candidates[i] for i in which), tuple(self.numbers[i] for i in which)
            self._parts[which] = Expanded(candidates, self.table, self.index[list(which)], numbers)
        return self._parts[which]

    def followed_by(self, more: Expanded) -> Expanded:
        """These candidates and some more of their cluster."""
        key = tuple(map(id, more.candidates))
        if key not in self._longer:
            index = np.concatenate([self.index, more.index])
            self._longer[key] = Expanded(self.candidates + more.candidates, self.table, index, self.numbers + more.numbers)
        return self._longer[key]

    def result_bytes(self, numels: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """(op, result) to bytes of its largest piece, float64 [candidates], none where a copy of it is kept, which counts apart; from the
        elements of all, [candidates * results]."""
        root, results = self.table.root, self.table.results
        itemsize = np.array([v.dtype.itemsize for _, _, v in results])
        sizes = (numels.reshape(len(self.index), len(results)) * itemsize).astype(float).T
        found = {(m, k): size for (m, k, _), size in zip(results, sizes, strict=True)}
        for m, k, v in results if root is not None and self.kept_at.any() else ():
            if root is not None and v.name in root.views:
                found[m, k] = np.where(self.kept_at, 0.0, found[m, k])
        return found

    def rest_numels(self, shape: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Elements of the largest piece of a placeholder of this shape at rest, int64 [candidates]."""
        return piece_numels(padded([shape]), self.rest, sizes)


def product_of(per_axis: Sequence[Sequence[int]]) -> np.ndarray:
    """All combinations of one row per axis, int64 [combinations, axes]; the last axis changes fastest."""
    grids = np.meshgrid(*(np.array(rows, dtype=np.int64) for rows in per_axis), indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=1)


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
        self._ragged: np.ndarray = np.zeros(len(self._n), dtype=bool)
        self._storable: np.ndarray = np.ones(len(self._index), dtype=bool)
        if table.may_be_uneven:
            self._ragged = np.asarray((table.uneven[self._index[self._n]] | (self.cuts.dim < 0)).all(axis=1))
            self._storable = _storable(Cuts(table.rest().dim[self._index, 0], table.rest().split[self._index, 0]))
        self._found: dict[bytes, Expanded] = {}

    def expanded(self, even: np.ndarray, sizes: tuple[int, ...]) -> Expanded:
        """The combinations that are legal together; ``even``: whether what is cut twice has equal pieces, bool [twice]."""
        bad = ~even
        for at in np.flatnonzero(bad & self._ragged).tolist():
            v = int(self._v[at])
            placed = tuple(p for r in self._index[self._n[at]].tolist() for p in self._table.placed(r, v))
            bad[at] = not pieces_exist(self._table.shapes[v], placed, sizes)
        legal = self._storable.copy()
        legal[self._n[bad]] = False
        key = legal.tobytes()
        if key not in self._found:
            self._found[key] = self._table.expanded(self._index[legal])
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
    """

    def __init__(self, cluster: Cluster):
        self.rows, self.root = list(cluster.rows), root_of(cluster)
        self._cluster, self._source = replace(cluster), cluster.source  # a copy: this must not keep the cluster itself
        self.may_be_uneven = cluster.source is not None and cluster.source.role == "parameter"
        self.shapes, placed = _distinct_columns(cluster)
        self.shape, self.columns = padded(self.shapes), cuts_of_columns(placed, len(self.rows))
        self.uneven = np.array([row.uneven for row in self.rows])
        self.results = [(m, k, v) for m, op in enumerate(cluster.ops) for k, v in enumerate(op.outs) if v is not None]
        self._whole = tuple(i for i, row in enumerate(self.rows) if _is_whole(cluster, row))[:1]
        self._roots = None if self.root is None else _made_roots(cluster, self.root)
        self._edges = [edges(row) for row in self.rows]
        self._on: dict[int, tuple[int, ...]] = {}
        self._products: dict[tuple, _Product] = {}
        self._made: dict[tuple, tuple[Candidate, int]] = {}
        self._numbers: dict[tuple, int] = {}
        self._kept_at: dict[int, int] = {}
        self._of_rows: dict[str, tuple[int, Any]] = {}

    # --- legal rows and combinations ---

    def on(self, size: int) -> tuple[int, ...]:
        """Rows legal over one axis of ``size`` devices alone."""
        if size not in self._on:
            look_up_rows([self], [size])
        return self._on[size]

    def settle(self, size: int) -> bool:
        """Whether it is known which rows are legal over one axis; it is at once where everything must be whole."""
        if size not in self._on and (size == 1 or (self._source is not None and self._source.role in WHOLE_ROLES)):
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
        per_axis = [self.on(n) for n in sizes]
        for axis, want in enumerate(wanted):
            if want is not None:
                per_axis[axis] = tuple(r for r in per_axis[axis] if self._edges[r] in want)
        key = tuple(per_axis)
        if key not in self._products:
            self._products[key] = _Product(self, key)
        return self._products[key]

    def expanded(self, index: np.ndarray, paths: Sequence[tuple[Placements, ...] | None] | None = None) -> Expanded:
        """Candidates by their rows, and by the paths that their kept copies pass through."""
        made = [
            self._candidate(rows, path)
            for rows, path in zip(map(tuple, index.tolist()), paths or [None] * len(index), strict=True)
        ]
        return Expanded(tuple(c for c, _ in made), self, index, tuple(n for _, n in made))

    def _candidate(self, rows: tuple[int, ...], path: tuple[Placements, ...] | None) -> tuple[Candidate, int]:
        """What some rows make together, and the number of its signature."""
        found = self._made.get((rows, path))
        if found is None:
            candidate = Candidate.of(tuple(self.rows[r] for r in rows))
            candidate = candidate if path is None else replace(candidate, kept=path)
            number = self._numbers.setdefault(candidate.signature, len(self._numbers))
            found = self._made[rows, path] = candidate, number
        return found

    # --- what each row says, those that keep a copy among them ---

    def _once(self, what: str, work_out: Callable[[], Any]) -> Any:
        """What is worked out from all rows, again when there are more."""
        known = self._of_rows.get(what)
        if known is None or known[0] < len(self.rows):
            known = self._of_rows[what] = len(self.rows), work_out()
        return known[1]

    def rest(self) -> Cuts:
        """How each row cuts the placeholder, [rows, 1]."""
        return self._once("rest", lambda: cuts_of_columns([[row.rest or R for row in self.rows]], len(self.rows)))

    def result_cuts(self) -> Cuts:
        """How each row cuts what the ops make, [rows, results]."""
        return self._once(
            "results",
            lambda: cuts_of_columns([[row.members[m].outs[k] for row in self.rows] for m, k, _ in self.results], len(self.rows)),
        )

    def priced(self, index: np.ndarray) -> Priced:
        """What has a price under some candidates, given by their rows over each axis, int64 [candidates, axes]."""
        return Priced(self._once("priced", lambda: priced_columns(self._cluster, self.rows)), self.rows, index)

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
            shape = stacked([np.tile(t.shape, (len(t.columns.dim), 1)) for t in new])
            even = np.split(divide(shape, Cuts.stacked(flat), (size,)), np.cumsum([len(c.dim) for c in flat])[:-1])
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
    none = [k for k, e in enumerate(found) if not e.candidates]
    for k, again in zip(none, _all_expanded([tables[k].product(sizes, ()) for k in none], sizes), strict=True):
        found[k] = again
    return found


def _all_expanded(products: Sequence[_Product], sizes: tuple[int, ...]) -> list[Expanded]:
    distinct = list({id(p): p for p in products}.values())
    if not distinct:
        return []
    even = divide(stacked([p.shape for p in distinct]), Cuts.stacked([p.cuts for p in distinct]), sizes)
    parts = np.split(even, np.cumsum([len(p.shape) for p in distinct])[:-1])
    found = {id(product): product.expanded(part, sizes) for product, part in zip(distinct, parts, strict=True)}
    return [found[id(p)] for p in products]


_SHARED: weakref.WeakValueDictionary[tuple, RowTable] = weakref.WeakValueDictionary()


def _table(cluster: Cluster) -> RowTable:
    """The cluster's own, or that of one that computes the same with the same rows: the three projections of attention share it."""
    if cluster.source is not None:
        return RowTable(cluster)
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
    return id(cluster.rows), edge, ops, numbers(cluster.ins), numbers(cluster.outs)


table_of: Callable[[Cluster], RowTable] = Known(_table)


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
