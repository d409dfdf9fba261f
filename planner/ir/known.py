"""What is worked out once per object and forgotten with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Fact = TypeVar("Fact")


class Known(Generic[Thing, Fact]):
    """A function of objects that cannot be compared cheaply, each asked for many times: ``Known(f)(x)`` is ``f(x)``.

    ``x`` must not change, and ``f(x)`` must not refer to it if it is to be forgotten.
    """

    def __init__(self, work_out: Callable[[Thing], Fact]):
        self._work_out = work_out
        self._known: dict[int, tuple[weakref.ref[Thing], Fact]] = {}

    def __call__(self, thing: Thing) -> Fact:
        key = id(thing)
        known = self._known.get(key)
        if known is None or known[0]() is not thing:
            fact = self._work_out(thing)
            known = self._known[key] = weakref.ref(thing, lambda _: self._known.pop(key, None)), fact
        return known[1]
