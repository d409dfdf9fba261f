"""The program of the whole model from one with few copies of a block: those in the middle are alike but for their numbers.

    forward    0 1 2 3 4 next          ->   0 1 2 [3 4 5] 6 7 next
    backward   next 4 3 2 1 0          ->   next 7 6 [5 4 3] 2 1 0

A copy of a block takes a place in the order of ops that depends on its neighbours alone. So where copies 1, 2 and 3 follow each
other at one distance, op by op, and read each other alike, further ones go between 2 and 3 at the same distance. That is far
quicker than to copy, recompute and order nodes once for each of a hundred blocks; where it is not so, they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from meshwright.planner.correspond import RANDOM, Unlike, child_of
from meshwright.planner.ir.graph import GraphInput, GraphOutput, Op, OpGraph, Value
from meshwright.planner.splice import Order, copy_name, input_place, result_place

FEW = 5
"""Instances of a block that show what any number does: the first, the last, and three between them."""

_MIDDLE = 2
_RANDOM = str(RANDOM)


@dataclass(frozen=True)
class Stretch:
    """Where copies go.

    Attributes:
        path: dotted path of the list of blocks.
        first: index in it of the block that is copied.
        names: of the block's nodes.
        instances: how many of the block the program has, with the block itself.
        start: number of the first of the ``FEW`` that are looked at.
        extra: how many copies are added.
    """

    path: str
    first: int
    names: tuple[str, ...]
    instances: int
    start: int
    extra: int

    @property
    def pivot(self) -> int:
        """Number of the copy behind which others go."""
        return self.start + _MIDDLE

    def copy_under(self, name: str) -> int | None:
        """Number of the copy that a dotted name is of."""
        child = child_of(name + ".", self.path)
        k = -1 if child is None else child[0] - self.first
        return k if 0 <= k < self.instances else None


_Place = tuple[str, str, int]
"""Name of a node of the block, what follows the number of the copy in the copy's name, and that number."""


class _Names:
    """Names of the program, and what becomes of them.

    What belongs to a copy reads its neighbours, wherever it is: all that it names goes as many copies on as it does (``shift``). To
    everything else (None) the copies behind the pivot are the last ones, and those before it the first.
    """

    def __init__(self, view: OpGraph, stretch: Stretch):
        self.pivot, self.extra = stretch.pivot, stretch.extra
        self._stretch = stretch
        self.places: dict[str, _Place] = {}
        for base in stretch.names:
            self.places.update((copy_name(base, k), (base, "", k)) for k in range(stretch.instances))
        again = [(op.name, self.places[op.recompute_of]) for op in view.ops if op.recompute_of in self.places]
        self.places.update((name, (base, "_r", k)) for name, (base, _, k) in again)
        self._paths: dict[tuple[str, int | None], str] = {}
        self._values: dict[tuple[str, int | None], Value] = {}
        self._made: dict[str, Value] = {}
        self._known: dict[str, _Place | None] = {}

    def shift_of(self, k: int | None, further: int) -> int | None:
        """How far what belongs to copy ``k`` goes: ``further`` for a copy made of it, else as far as copies go before it."""
        return None if k is None else further or self._moved(k)

    def _moved(self, k: int) -> int:
        return self.extra if k > self.pivot else 0

    def _parsed(self, name: str) -> _Place | None:
        """The place of a node or value, with what follows the number in its whole name."""
        if name not in self._known:
            node, hash_, slot = name.partition("#")
            place = self.places.get(node)
            self._known[name] = place and (place[0], place[1] + hash_ + slot, place[2])
        return self._known[name]

    def name(self, name: str, shift: int | None) -> str:
        """A node's or a value's name."""
        place = self._parsed(name)
        if place is None:
            return name
        base, rest, k = place
        return copy_name(base, k + (self._moved(k) if shift is None else shift)) + rest

    def value(self, value: Value, shift: int | None) -> Value:
        found = self._values.get((value.name, shift))
        if found is None:
            name = self.name(value.name, shift)
            found = value if name == value.name else self._made.setdefault(name, Value(name, value.shape, value.dtype))
            self._values[value.name, shift] = found
        return found

    def path(self, name: str, shift: int | None) -> str:
        """Dotted name of a module, parameter or buffer."""
        found = self._paths.get((name, shift))
        if found is None:
            found, k = name, self._stretch.copy_under(name)
            if k is not None:
                rest = name[len(self._stretch.path) + 1 :].partition(".")
                index = self._stretch.first + k + (self._moved(k) if shift is None else shift)
                found = f"{self._stretch.path}.{index}{rest[1]}{rest[2]}"
            self._paths[name, shift] = found
        return found


# --- ops ----------------------------------------------------------------------------------------------------------


class _Ops:
    """Ops, and their copies further on."""

    def __init__(self, view: OpGraph, names: _Names):
        self.names = names
        found: dict[_Place, Any] = {}
        for op in view.ops:
            if op.target == _RANDOM and op.name in names.places:
                found[names.places[op.name]] = op.args[1]
        steps = {found[b, r, k + 1] - n for (b, r, k), n in found.items() if k == names.pivot and (b, r, k + 1) in found}
        if len(steps) > 1:
            raise Unlike("random calls of the blocks are numbered unevenly")
        self._step = steps.pop() if steps else 0
        self._last = max((number for (_, _, k), number in found.items() if k == 0), default=None)

    def made(self, op: Op, further: int = 0) -> Op:
        """What becomes of an op, or the copy of it that is ``further`` ones on."""
        names = self.names
        place = names.places.get(op.name)
        shift = names.shift_of(None if place is None else place[2], further)
        if shift == 0:
            return op

        ins = tuple([names.value(v, shift) for v in op.ins])
        outs = tuple([v and names.value(v, shift) for v in op.outs])
        forward_op = op.forward_op and names.name(op.forward_op, shift)
        path = names.path(op.module_path, shift)
        again = op.recompute_of and names.name(op.recompute_of, shift)
        is_random = op.target == _RANDOM
        if (ins, outs, forward_op, path, again, is_random) == (
            op.ins,
            op.outs,
            op.forward_op,
            op.module_path,
            op.recompute_of,
            False,
        ):
            return op
        values = iter(ins)
        args = _with(op.args, values)
        if is_random:
            args = (args[0], self._numbered(args[1], shift), *args[2:])
        kwargs = _with(op.kwargs, values) if op.kwargs else ()
        name = names.name(op.name, shift)
        return Op(name, op.target, args, kwargs, ins, outs, op.phase, forward_op, path, op.source, again)

    def _numbered(self, number: int, shift: int | None) -> int:
        """Number of a random call: those of later copies, and of what comes after the blocks, move on."""
        if shift is None:
            shift = self.names.extra if self._last is not None and number > self._last else 0
        return number + self._step * shift


def _with(args: tuple[Any, ...], values: Iterator[Value]) -> tuple[Any, ...]:
    """Arguments with other values in the place of those in them, in order."""
    return tuple([next(values) if type(x) is Value else _with(x, values) if type(x) is tuple else x for x in args])


class _Phase:
    """The ops of one phase, in order."""

    def __init__(self, ops: Sequence[Op], maker: _Ops, *, is_falling: bool):
        self._ops, self._maker, self._names, self._is_falling = ops, maker, maker.names, is_falling
        self._at = {place: i for i, op in enumerate(ops) if (place := self._names.places.get(op.name)) is not None}
        self._middle = [(base, again) for base, again, k in self._at if k == self._names.pivot]
        self._period = len(self._middle)

    def stretched(self) -> list[Op]:
        """With copies in their places.

        Raises:
            Unlike: those that are there do not follow each other at one distance, or are not alike.
        """
        if not self._at:
            return [self._maker.made(op) for op in self._ops]
        self._check()
        extra, grown = self._names.extra, self._period * self._names.extra
        found: list[Op | None] = [None] * (len(self._ops) + grown)
        for i, op in enumerate(self._ops):
            self._put(found, i + grown * self._is_behind(i, op), self._maker.made(op))
        for base, again in self._middle:
            i = self._at[base, again, self._names.pivot]
            for further in range(1, extra + 1):
                at = i + self._period * (extra - further if self._is_falling else further)
                self._put(found, at, self._maker.made(self._ops[i], further))
        return [op for op in found if op is not None]

    def _put(self, found: list[Op | None], at: int, op: Op) -> None:
        if found[at] is not None:
            raise Unlike("copies of a block are in each other's way")
        found[at] = op

    def _check(self) -> None:
        pivot = self._names.pivot
        step = -self._period if self._is_falling else self._period
        for base, again in self._middle:
            places = [self._at.get((base, again, k)) for k in (pivot - 1, pivot, pivot + 1)]
            for i, j in pairwise(places):
                if i is None or j is None or j - i != step or self._maker.made(self._ops[i], 1) != self._ops[j]:
                    raise Unlike(f"copies of {base}{again} do not follow each other alike")
        count = sum(k in (pivot - 1, pivot + 1) for _, _, k in self._at)
        if count != 2 * self._period:
            raise Unlike("an op of a block is missing in a copy")
        before, behind = (pivot + 1, pivot) if self._is_falling else (pivot, pivot + 1)
        self._last_before = max(self._at[base, again, before] for base, again in self._middle)
        self._first_behind = min(self._at[base, again, behind] for base, again in self._middle)

    def _is_behind(self, i: int, op: Op) -> bool:
        """Whether an op moves on because copies go before it."""
        place = self._names.places.get(op.name)
        if place is not None:
            return (place[2] > self._names.pivot) != self._is_falling
        if self._first_behind <= i <= self._last_before:
            raise Unlike(f"{op.name} stands among the blocks")
        return i > self._last_before


# --- inputs and results -------------------------------------------------------------------------------------------

_Entry = TypeVar("_Entry", GraphInput, GraphOutput)


class _Entries:
    """Inputs and results, and those of further copies."""

    def __init__(self, names: _Names, stretch: Stretch):
        self._names, self._stretch = names, stretch

    def input(self, entry: GraphInput, further: int = 0) -> GraphInput:
        shift = self._names.shift_of(self.copy_of_input(entry), further)
        aliases = tuple(self._names.path(name, shift) for name in entry.aliases)
        return replace(entry, value=self._names.value(entry.value, shift), name=self._state(entry, shift), aliases=aliases)

    def output(self, entry: GraphOutput, further: int = 0) -> GraphOutput:
        shift = self._names.shift_of(self.copy_of_output(entry), further)
        value = entry.value and self._names.value(entry.value, shift)
        return replace(entry, value=value, name=self._state(entry, shift))

    def _state(self, entry: GraphInput | GraphOutput, shift: int | None) -> str:
        is_state = entry.role in ("parameter", "buffer", "mutation", "gradient")
        return self._names.path(entry.name, shift) if is_state else entry.name

    def copy_of_input(self, entry: GraphInput) -> int | None:
        place = self._names.places.get(entry.value.name)
        return None if place is None else place[2]

    def copy_of_output(self, entry: GraphOutput) -> int | None:
        return None if entry.role == "output" else self._stretch.copy_under(entry.name)

    def all_of(
        self, entries: Sequence[_Entry], copy_of: Callable[[_Entry], int | None], made: Callable[..., _Entry]
    ) -> list[_Entry]:
        """Entries with those of further copies.

        Raises:
            Unlike: those of two copies are not alike.
        """
        pivot = self._names.pivot
        for k in (pivot - 1, pivot):
            if [made(e, 1) for e in entries if copy_of(e) == k] != [e for e in entries if copy_of(e) == k + 1]:
                raise Unlike("parameters or results of the blocks are not alike")
        found: list[_Entry] = []
        for entry in entries:
            found.append(made(entry))
            if copy_of(entry) == pivot:
                found += [made(entry, further) for further in range(1, self._names.extra + 1)]
        return found


def stretched(view: OpGraph, stretch: Stretch, order: Order) -> OpGraph:
    """A program with further copies of a block.

    Args:
        view: the program, with a few.
        stretch: where they go, and how many.
        order: (role, first name) of the whole model's parameters and buffers to their position.

    Raises:
        Unlike: the copies that are there do not tell what further ones do.
    """
    names = _Names(view, stretch)
    maker, entries = _Ops(view, names), _Entries(names, stretch)
    count = sum(op.phase == "forward" for op in view.ops)
    forward = _Phase(view.ops[:count], maker, is_falling=False).stretched()
    backward = _Phase(view.ops[count:], maker, is_falling=True).stretched()
    inputs = entries.all_of(view.inputs, entries.copy_of_input, entries.input)
    outputs = entries.all_of(view.outputs, entries.copy_of_output, entries.output)
    inputs.sort(key=lambda entry: input_place(entry, order))
    outputs.sort(key=lambda entry: result_place(entry, order))
    return OpGraph(tuple(inputs), (*forward, *backward), tuple(outputs))
