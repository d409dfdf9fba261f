"""When values are alive in one training step, whatever their placements.

A step is a row of *points*: one per op, in order. Where a captured block stands for many, its copy's backward is run over twice,
as the first and as the last of the blocks it stands for; in between memory changes evenly, so that a peak is at one of the two:

    forward    0 | 1 (times K) | 1'               backward   last | 1' as block K | 1' as block 1 | 1 (block 0 of the group) | 0

A value is alive from the op that makes it to the last that reads it, views included. What is saved by K blocks is alive K times until
the blocks' backwards free it one after the other; their gradients come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.graph import Op, OpGraph, Repeat
from meshwright.planner.ir.known import Known
from meshwright.planner.kinds import kind_of


@dataclass(frozen=True, slots=True)
class Span:
    """Alive from point ``start`` to point ``end``, both included, ``count`` times."""

    start: int
    end: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class _Place:
    """An op of a block that stands for others: which record, and whether it is of block 1 or of its copy."""

    repeat: int
    is_copy: bool


class Timeline:
    """The points of a program, and spans of its values.

    Attributes:
        num_points: number of points.
        names: op at each point.
    """

    def __init__(self, graph: OpGraph, repeats: Sequence[Repeat] = ()):
        self._ops = graph.by_name
        self._repeats = tuple(repeats)
        self._places = dict(self._placed(graph))
        self._again = self._passes(graph)
        self.names: list[str] = []
        self._at: dict[str, list[int]] = {}
        self._passed: dict[int, tuple[int, int]] = {}
        copied: dict[int, list[str]] = {}
        for name, place in self._places.items():
            if place.is_copy and self._ops[name].phase == "backward":
                copied.setdefault(place.repeat, []).append(name)
        for op in graph.ops:
            self._append(op.name)
            for r in self._again.get(op.name, ()):
                self._second_pass(r, copied.get(r, ()))
        self.num_points = len(self.names)

    # --- points ---

    def _placed(self, graph: OpGraph) -> Iterable[tuple[str, _Place]]:
        blocks = [(r, repeat.instance, repeat.position) for r, repeat in enumerate(self._repeats)]
        for op in graph.ops:
            name = op.recompute_of or op.name
            for r, instance, first in blocks:
                at = instance.get(name)
                if at == first or at == first + 1:
                    yield op.name, _Place(r, at == first + 1)

    def _passes(self, graph: OpGraph) -> dict[str, list[int]]:
        """The last backward op of each copy that stands for several, to its record."""
        last: dict[int, str] = {}
        for op in graph.ops:
            place = self._places.get(op.name)
            if place is not None and place.is_copy and op.phase == "backward" and self._repeats[place.repeat].copies > 1:
                last[place.repeat] = op.name
        found: dict[str, list[int]] = {}
        for r, name in last.items():
            found.setdefault(name, []).append(r)
        return found

    def _append(self, name: str) -> None:
        self._at.setdefault(name, []).append(len(self.names))
        self.names.append(name)

    def _second_pass(self, r: int, backward: Iterable[str]) -> None:
        """The backward ops of a copy once more."""
        end = len(self.names) - 1
        self._passed[r] = (end, end + 1)
        for name in backward:
            self._append(name)

    # --- spans ---

    def spans(self, maker: str, readers: Iterable[str], *, to_end: bool = False) -> list[Span]:
        """When a value is alive.

        Args:
            maker: the op that makes it.
            readers: ops that read it, or a view of it.
            to_end: whether it stays for good.
        """
        names, place = [*readers], self._places.get(maker)
        last = self.num_points - 1
        if place is None or place.repeat not in self._passed:
            start = self._at[maker][0]
            return [Span(start, last if to_end else max((self._at[r][-1] for r in names), default=start))]
        if self._ops[maker].phase == "forward":
            return self._of_forward(maker, names, place, to_end)
        return self._of_backward(maker, names, place, to_end)

    def _of_forward(self, maker: str, readers: list[str], place: _Place, to_end: bool) -> list[Span]:
        start, copies = self._at[maker][0], self._repeats[place.repeat].copies
        late = [r for r in readers if self._ops[r].phase == "backward"]
        if to_end:
            return [Span(start, self.num_points - 1, 1 if place.is_copy else copies)]
        if not late:
            return [Span(start, max((self._at[r][0] for r in readers), default=start))]
        if place.is_copy:
            return [Span(start, max(self._at[r][0] for r in late))]
        first_end, second = self._passed[place.repeat]
        own = [r for r in late if self._places.get(r) == place]
        cross = [r for r in late if self._places.get(r) == _Place(place.repeat, True)]
        if own:
            twin = max((self._at[t][1] for t in map(self._twin, own) if t in self._at), default=second)
            rest = Span(second, max(self._at[r][0] for r in own))
            return [Span(start, first_end, copies), Span(second, twin), rest]
        if cross:
            ends = [max(self._at[r][k] for r in cross) for k in (0, 1)]
            return [Span(start, first_end, copies - 1), Span(start, ends[0]), Span(second, ends[1])]
        return [Span(start, max(self._at[r][-1] for r in late), copies)]

    def _twin(self, name: str) -> str:
        """The op of the copy that is like one of block 1."""
        op, repeat = self._ops[name], self._repeats[self._places[name].repeat]
        original = op.recompute_of or name
        ending = f"__{repeat.planned_at}" if repeat.planned_at else ""
        return repeat.planned(original.removesuffix(ending), 1) + ("_r" if op.recompute_of else "")

    def _of_backward(self, maker: str, readers: list[str], place: _Place, to_end: bool) -> list[Span]:
        at, last = self._at[maker], self.num_points - 1
        if not place.is_copy:
            return [Span(at[0], last if to_end else max((self._at[r][-1] for r in readers), default=at[0]))]
        first_end, second = self._passed[place.repeat]
        if to_end:
            between = self._repeats[place.repeat].copies - 2
            return [Span(at[0], last), *([Span(second, last, between)] if between else []), Span(at[1], last)]
        same = [r for r in readers if self._places.get(r) == place]
        crossing = len(same) < len(readers)
        ends = [max((self._at[r][k] for r in same), default=at[k]) for k in (0, 1)]
        later = max((self._at[r][-1] for r in readers), default=at[1])
        return [Span(at[0], first_end if crossing else ends[0]), Span(at[1], max(ends[1], later))]

    def profile(self, spans: Iterable[tuple[Span, float]]) -> np.ndarray:
        """Bytes alive at every point, shape [points], of spans with the bytes of one."""
        change = np.zeros(self.num_points + 1)
        for span, size in spans:
            change[span.start] += size * span.count
            change[span.end + 1] -= size * span.count
        return change[:-1].cumsum()


def _no_lines(_: OpGraph) -> dict[tuple[int, ...], Timeline]:
    return {}


_LINES: Known[OpGraph, dict[tuple[int, ...], Timeline]] = Known(_no_lines)


def timeline_of(graph: OpGraph, repeats: Sequence[Repeat] = ()) -> Timeline:
    """The points of a program, worked out once."""
    known, key = _LINES(graph), tuple(map(id, repeats))
    if key not in known:
        known[key] = Timeline(graph, repeats)  # holds the repeats, so that no others get their numbers
    return known[key]


def _roots(graph: OpGraph) -> dict[str, str]:
    root = {i.value.name: i.value.name for i in graph.inputs}
    for op in graph.ops:
        for v in op.outs:
            if v is not None:
                root[v.name] = root[op.ins[0].name] if op.ins and kind_of(op) == "view" else v.name
    return root


roots: Callable[[OpGraph], Mapping[str, str]] = Known(_roots)
"""Value to the value whose memory it has: its own, or that of what it is a view of."""


def _late_makers(graph: OpGraph) -> dict[str, str]:
    inputs = {i.value.name for i in graph.inputs if i.role != "tangent"}
    free: dict[str, Op] = {}
    for op in graph.ops:
        if kind_of(op) in ("view", "cast", "pointwise") and all(
            v.name in inputs or v.name.partition("#")[0] in free for v in op.ins
        ):
            free[op.name] = op
    first: dict[str, str] = {}
    for op in reversed(graph.ops):
        for v in op.ins:
            source = v.name.partition("#")[0]
            if source in free:
                first[source] = first.get(op.name, op.name) if op.name in free else op.name
    return {name: first.get(name, name) for name in free}


late_makers: Callable[[OpGraph], Mapping[str, str]] = Known(_late_makers)
"""Op that is made from placeholders alone, cheaply, to the first op that needs it: lowering runs it just before that."""
