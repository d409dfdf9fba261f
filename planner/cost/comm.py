"""Seconds of a collective over one mesh axis, by size, with the algorithm that the library would pick."""

from __future__ import annotations

import math
from functools import lru_cache

from meshwright.planner.cost.formulas import compiled
from meshwright.planner.cost.links import Algorithm, algorithms_of
from meshwright.planner.ir.hardware import Link


def _hops(algorithm: Algorithm, kind: str, group: int) -> float:
    if algorithm.hops == "tree":
        return math.log2(group)
    if algorithm.hops == "ring":
        return (2 if kind == "all_reduce" else 1) * (group - 1)
    return 0.0


def algorithm_s(algorithm: Algorithm, link: Link, kind: str, group: int, size_bytes: float) -> float:
    """Seconds of ``kind`` by one algorithm.

    Args:
        algorithm: how.
        link: over what.
        kind: which collective.
        group: ranks in the group.
        size_bytes: the larger of a rank's input and output.
    """
    volume = size_bytes if algorithm.once else compiled(f"{kind}_volume")(size_bytes, group)
    return float(
        compiled("collective_s")(
            link.latency_s,
            algorithm.base,
            algorithm.hop,
            _hops(algorithm, kind, group),
            volume,
            algorithm.fraction,
            link.bytes_per_s,
        )
    )


@lru_cache(maxsize=1 << 16)
def collective_s(link: Link, kind: str, group: int, size_bytes: int) -> float:
    """Seconds of ``kind`` over ``link``: that of the fastest algorithm; 0 in a group of one.

    Raises:
        KeyError: ``kind`` is no collective.
    """
    if group == 1:
        return 0.0
    usable = [a for a in algorithms_of(link) if kind in a.kinds and group >= a.min_group]
    if not usable:
        raise KeyError(kind)
    return min(algorithm_s(a, link, kind, group, size_bytes) for a in usable)
