"""What an op was taken apart into, written down once and read again for arguments of the same kind.

    native_batch_norm(x, w, b, m, v)   ->   0 = x, 1 = w, 2 = b, 3 = m, 4 = v
                                            5 = _to_copy(0);  6 = sum(5);  ...;  18 = add(16, 17);  3 is now 18
                                            (13, 14, 15)

Torch takes ops apart in several layers of Python, for every batch normalisation of a model anew. What comes out depends on
the arguments' shapes, strides and types alone, so that a script of it stands for all calls that agree in these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.planner.remember import NoKind, is_plain, kind_of_argument


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a script: its arguments come first, then what its ops make."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """An op of a script.

    Attributes:
        func: the op.
        args, kwargs: with slots in the place of tensors.
        out: what it gave when the script was written: a tensor, or several and None.
        first: number of the slot of its first tensor; the others follow.
    """

    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    first: int


@dataclass(frozen=True, slots=True)
class Written:
    """An argument that from now on reads as what an op has made."""

    argument: int
    new: int


@dataclass(frozen=True, slots=True)
class Script:
    """What an op was taken apart into.

    Attributes:
        steps: in order.
        result: with slots in the place of tensors.
        seen: slots that somebody else sees: made, and returned or written.
    """

    steps: tuple[Made | Written, ...]
    result: Any
    seen: frozenset[int]

    def given(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """What the op gives, from the tensors in the slots."""

        def filled(x: Any) -> Any:
            if type(x) is Slot:
                return tensors[x.number]
            return type(x)([filled(y) for y in x]) if type(x) in (list, tuple) else x

        return filled(self.result)


def tensors_of(args: Any) -> list[torch.Tensor]:
    """The tensors in arguments, each once."""
    found: dict[int, torch.Tensor] = {}
    pending = [args]
    while pending:
        x = pending.pop()
        if isinstance(x, torch.Tensor):
            found.setdefault(id(x), x)
        elif isinstance(x, list | tuple | dict):
            pending += reversed(list(x.values() if isinstance(x, dict) else x))
    return list(found.values())


def call_kind(func: Any, args: Any, kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Hashable | None:
    """What decides how an op is taken apart; None where more does than can be told. ``tensors`` are those of the arguments."""
    number = {id(t): i for i, t in enumerate(tensors)}
    memories: dict[int, int] = {}

    def kind(x: Any) -> Hashable:
        if isinstance(x, list | tuple):
            return tuple(map(kind, x))
        if not isinstance(x, torch.Tensor):
            return kind_of_argument(x)
        memory = memories.setdefault(x.untyped_storage()._cdata, number[id(x)])
        return (number[id(x)], memory, x.requires_grad, x._is_view(), kind_of_argument(x))

    try:
        key = (
            func,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            kind(args),
            tuple((k, kind(v)) for k, v in kwargs.items()),
        )
        hash(key)
    except TypeError:  # NoKind, or an argument that has no hash
        return None
    return key


class Writing:
    """A script while it is written.

    Args:
        arguments: the tensors of the call, each once.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]):
        self._count = len(arguments)
        self._tensors = list(arguments)
        self._slots = {id(t): i for i, t in enumerate(arguments)}
        self._steps: list[Made | Written] = []
        self._is_of_use = True

    def give_up(self) -> None:
        """Something happens that a script does not say."""
        self._is_of_use = False

    def op(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """An op that was run."""
        try:
            said = self._slotted(args), {k: self._slotted(v) for k, v in kwargs.items()}
        except NoKind:
            self.give_up()
            return
        self._steps.append(Made(func, *said, out, len(self._tensors)))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self._slots[id(x)] = len(self._tensors)
                self._tensors.append(x)

    def write(self, tensor: torch.Tensor, new: torch.Tensor, sharing: Sequence[int]) -> None:
        """``tensor`` reads as ``new`` from now on; ``sharing``: ``id`` of the tensors in its memory."""
        at, by = self._slots.get(id(tensor), self._count), self._slots.get(id(new))
        if at >= self._count or by is None or any(self._slots.get(i, 0) >= self._count for i in sharing):
            self.give_up()
        else:
            self._steps.append(Written(at, by))

    def _slotted(self, x: Any) -> Any:
        """An argument with slots in the place of tensors.

        Raises:
            NoKind: a tensor was made elsewhere.
        """
        if isinstance(x, torch.Tensor):
            if id(x) not in self._slots:
                raise NoKind("a tensor from outside")
            return Slot(self._slots[id(x)])
        return type(x)([self._slotted(y) for y in x]) if type(x) in (list, tuple) else x

    def end(self, result: Any) -> Script | None:
        """The script, with what the op gave; None where it would not say all."""
        try:
            returned = self._slotted(result)
        except NoKind:
            return None
        seen = {self._slots[id(t)] for t in tensors_of(result)} | {s.new for s in self._steps if isinstance(s, Written)}
        seen -= set(range(self._count))
        if not self._is_of_use or not self._are_apart(seen):
            return None
        return Script(tuple(self._steps), returned, frozenset(seen))

    def _are_apart(self, seen: set[int]) -> bool:
        """Whether tensors are fake, and in memory that is neither the arguments' nor that of another one of them."""
        tensors = [self._tensors[i] for i in seen]
        memories = {t.untyped_storage()._cdata for t in (*self._tensors[: self._count], *tensors)}
        mine = {t.untyped_storage()._cdata for t in self._tensors[: self._count]}
        return len(memories) == len(mine) + len(tensors) and all(map(is_plain, tensors))
