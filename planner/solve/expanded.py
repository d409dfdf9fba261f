"""Candidates of a cluster as arrays: what they read, make, hold and cost, all of them at once, as far as no size changes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from meshwright.planner.cost.compute import Priced
from meshwright.planner.ir.cuts import Cuts, padded, repeated, stacked
from meshwright.planner.ir.spec import Placements, R
from meshwright.planner.solve.candidates import Candidate

if TYPE_CHECKING:
    from meshwright.planner.solve.combine import RowTable

Fact = TypeVar("Fact")


@dataclass(frozen=True, eq=False)
class Expanded:
    """Candidates: the rows that they are made of. What no size changes of them is worked out once.

    Attributes:
        table: their cluster's rows.
        index: row of each candidate over each axis, in the order of ``table.rows``, int64 [candidates, axes].
        paths: what placements the copy passes through that each candidate keeps, None where it keeps none; empty where none does.
    """

    table: RowTable
    index: np.ndarray
    paths: tuple[tuple[Placements, ...] | None, ...] = ()
    _parts: dict[tuple[int, ...], Expanded] = field(default_factory=dict)
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, what: Hashable, work_out: Callable[[], Fact]) -> Fact:
        """Anything else that no mesh changes, by name: worked out once."""
        if what not in self._known:
            self._known[what] = work_out()
        return self._known[what]

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def candidates(self) -> Sequence[Candidate]:
        """The candidates, each made when it is asked for."""
        return _Candidates(self)

    @cached_property
    def columns(self) -> list[list[int]]:
        """Over each axis, the row of each candidate."""
        return self.index.T.tolist()

    def placed(self, what: str, *at: int) -> Placed:
        """Placements of a value in the candidates: of an input (``"in"``), a result (``"out"``) or the placeholder (``"rest"``), or what an op
        reads (``"op in"``) or makes (``"op out"``); ``at``: of which op, and the slot."""
        if (what, at) not in self._known:
            of = self.table.placed_by_row(what, *at)
            self._known[what, at] = Placed.of(list(zip(*[[of[r] for r in column] for column in self.columns], strict=True)))
        return self._known[what, at]

    @cached_property
    def kept_at(self) -> np.ndarray:
        """Which candidates keep a copy, bool [candidates]."""
        return np.array([p is not None for p in self.paths]) if self.paths else np.zeros(len(self), dtype=bool)

    @cached_property
    def priced(self) -> Priced:
        """What has a price."""
        return self.table.priced(self.index)

    @cached_property
    def held(self) -> Held:
        """What candidates hold in memory."""
        return Held.of(self)

    @cached_property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(len(self)))

    @cached_property
    def _numbers(self) -> Sequence[int]:
        """Candidates of one signature, which is what each of their rows reads and makes and the path of the copy, have one number."""
        if not self.paths and self.table.are_unlike:
            return self._all
        edge = self.table.edge_numbers()
        signatures = zip(*[[edge[r] for r in column] for column in self.columns], self.paths or (None,) * len(self), strict=True)
        seen: dict[tuple, int] = {}
        return [seen.setdefault(signature, len(seen)) for signature in signatures]

    @cached_property
    def _are_unlike(self) -> bool:
        """Whether all signatures differ."""
        return self._numbers is self._all or len(set(self._numbers)) == len(self)

    def cheapest_of_equals(self, seconds: np.ndarray) -> tuple[int, ...]:
        """Indices of the candidates that remain when of several with one signature only the fastest is kept."""
        if self._are_unlike:
            return self._all
        best: dict[int, int] = {}
        for i, (number, s) in enumerate(zip(self._numbers, seconds.tolist(), strict=True)):
            if s < seconds[best.setdefault(number, i)]:
                best[number] = i
        return tuple(sorted(best.values()))

    def taken(self, which: tuple[int, ...]) -> Expanded:
        """Some of the candidates."""
        if len(which) == len(self):
            return self
        if which not in self._parts:
            paths = tuple([self.paths[i] for i in which]) if self.paths else ()
            self._parts[which] = Expanded(self.table, self.index[list(which)], paths)
        return self._parts[which]

    def followed_by(self, index: np.ndarray, paths: Sequence[tuple[Placements, ...]]) -> Expanded:
        """These candidates, none of which keeps a copy, and some more of their cluster that do: their rows, and the paths of the copies."""
        return Expanded(self.table, np.concatenate([self.index, index]), (*(None,) * len(self), *paths))


class _Candidates(Sequence[Candidate]):
    """The candidates of an :class:`Expanded`, made when they are asked for: most never are."""

    def __init__(self, expanded: Expanded):
        self._table, self._index, self._paths = expanded.table, expanded.index, expanded.paths

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Candidate]:
        rows, paths = map(tuple, self._index.tolist()), self._paths or (None,) * len(self)
        return map(self._table.candidate, rows, paths)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._table.candidate(tuple(self._index[at].tolist()), self._paths[at] if self._paths else None)


@dataclass(frozen=True)
class Placed:
    """Placements of a value in some candidates.

    Attributes:
        distinct: the placements, each once.
        number: which of them a candidate has, int64 [candidates], read-only.
    """

    distinct: tuple[Placements, ...]
    number: np.ndarray

    @classmethod
    def of(cls, placements: Sequence[Placements]) -> Placed:
        seen: dict[Placements, int] = {}
        number = np.array([seen.setdefault(p, len(seen)) for p in placements], dtype=np.int64)
        number.setflags(write=False)
        return cls(tuple(seen), number)


@dataclass(frozen=True)
class Held:
    """What candidates of a cluster hold in memory, one behind the other: for each what its ops make; then for each the placeholder at rest;
    then for each the copy that it keeps.

    Attributes:
        shape: global shapes, int64 [pieces, dims].
        cuts: how they are cut, [pieces, axes].
        unit: bytes of an element of a result, none where a copy of it is kept, which counts apart; one for a placeholder and for a kept
            copy, and none where there is no copy; float64 [pieces].
    """

    shape: np.ndarray
    cuts: Cuts
    unit: np.ndarray

    @classmethod
    def of(cls, expanded: Expanded) -> Held:
        table, num = expanded.table, len(expanded.index)
        shape, cuts = repeated(table.result_shape, num), table.result_cuts().of_candidates(expanded.index)
        unit = repeated(table.result_unit, num)
        if table.source is None:
            return cls(shape, cuts, unit)
        parts = [(shape, cuts), (repeated(padded([table.source.value.shape]), num), table.rest().of_candidates(expanded.index))]
        units = [unit, np.ones(num)]
        if table.root is not None:
            kept_at, num_axes = expanded.kept_at, expanded.index.shape[1]
            paths = [(R,) * num_axes if path is None else path[-1] for path in expanded.paths or (None,) * num]
            parts.append((repeated(padded([table.root.value.shape]), num), Cuts.of(paths, num_axes)))
            units = [
                np.where(np.repeat(kept_at, len(table.is_view)) & repeated(table.is_view, num), 0.0, unit),
                np.ones(num),
                kept_at,
            ]
        shapes, all_cuts = zip(*parts, strict=True)
        return cls(stacked(shapes), Cuts.stacked(all_cuts), np.concatenate(units))
