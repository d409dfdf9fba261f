"""Names of repeated layers written once: ``h.0.mlp.weight`` .. ``h.5.mlp.weight`` become ``h.*.mlp.weight``.

Only what is equal in everything else folds; a layer that differs keeps its own line, with the layers it stands for:
``h.[0,5].mlp.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Group(Generic[K]):
    """Equal things under one name pattern.

    Attributes:
        name: the pattern, or the name itself where it stands alone.
        key: what is equal among them.
        members: their names in order.
    """

    name: str
    key: K
    members: tuple[str, ...]


def fold(items: Iterable[tuple[str, K]]) -> tuple[Group[K], ...]:
    """Group (name, key) pairs with equal key whose names differ in numbers only; in order of first appearance."""
    grouped: dict[tuple[str, K], list[str]] = {}
    for name, key in items:
        grouped.setdefault((_NUMBER.sub("*", name), key), []).append(name)
    rivals: dict[str, int] = {}
    for pattern, _ in grouped:
        rivals[pattern] = rivals.get(pattern, 0) + 1
    return tuple(
        Group(_title(pattern, members, alone=rivals[pattern] == 1), key, tuple(members))
        for (pattern, key), members in grouped.items()
    )


def _title(pattern: str, members: list[str], *, alone: bool) -> str:
    if len(set(members)) == 1:
        return members[0]
    columns = list(zip(*(map(int, _NUMBER.findall(m)) for m in members), strict=True))
    parts = pattern.split("*")
    title = parts[0]
    for column, part in zip(columns, parts[1:], strict=True):
        distinct = sorted(set(column))
        title += str(distinct[0]) if len(distinct) == 1 else "*" if alone else f"[{_ranges(distinct)}]"
        title += part
    return title


def _ranges(numbers: list[int]) -> str:
    """Sorted distinct numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
