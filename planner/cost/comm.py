"""Seconds of a collective over one mesh axis, by size, with the algorithm that the library would pick."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeVar

import numpy as np

from meshwright.planner.cost.formulas import compiled
from meshwright.planner.cost.links import Algorithm, algorithms_of
from meshwright.planner.ir.hardware import Link

Size = TypeVar("Size", float, np.ndarray)


def _hops(algorithm: Algorithm, kind: str, group: int) -> float:
    if algorithm.hops == "tree":
        return math.log2(group)
    if algorithm.hops == "ring":
        return (2 if kind == "all_reduce" else 1) * (group - 1)
    return 0.0


def algorithm_s(algorithm: Algorithm, link: Link, kind: str, group: int, size_bytes: Size) -> Size:
    """Seconds of ``kind`` by one algorithm, for one buffer or for each of several.

    Args:
        algorithm: how.
        link: over what.
        kind: which collective.
        group: ranks in the group.
        size_bytes: the larger of a rank's input and output.
    """
    volume = size_bytes if algorithm.once else compiled(f"{kind}_volume")(size_bytes, group)
    return compiled("collective_s")(
        link.latency_s,
        algorithm.base,
        algorithm.hop,
        _hops(algorithm, kind, group),
        volume,
        algorithm.fraction,
        link.bytes_per_s,
    )


@lru_cache(maxsize=1 << 16)
def collective_s(link: Link, kind: str, group: int, size_bytes: int) -> float:
    """Seconds of ``kind`` over ``link``: that of the fastest algorithm; 0 in a group of one.

    Raises:
        KeyError: ``kind`` is no collective.
    """
    if group == 1:
        return 0.0
    return min(float(algorithm_s(a, link, kind, group, size_bytes)) for a in _usable(link, kind, group))


def collectives_s(link: Link, kind: str, group: int, sizes_bytes: np.ndarray) -> np.ndarray:
    """Likewise for several buffers in a group of more than one, float64 [buffers]."""
    sizes = sizes_bytes.astype(float)
    return np.min([algorithm_s(a, link, kind, group, sizes) for a in _usable(link, kind, group)], axis=0)


def _usable(link: Link, kind: str, group: int) -> list[Algorithm]:
    found = [a for a in algorithms_of(link) if kind in a.kinds and group >= a.min_group]
    if not found:
        raise KeyError(kind)
    return found
