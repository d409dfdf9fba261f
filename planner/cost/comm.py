"""Seconds of a collective over one mesh axis, by size: as it was measured, or with the algorithm that the library would pick."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeVar

import numpy as np

from meshwright.planner.cost.formulas import FORMULAS, collective_s as formula_s
from meshwright.planner.cost.links import Algorithm, algorithms_of
from meshwright.planner.ir.hardware import Link, Measured

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
    volume = size_bytes if algorithm.once else FORMULAS[f"{kind}_volume"](size_bytes, group)
    return formula_s(
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
    """Seconds of ``kind`` over ``link``: measured, else that of the fastest algorithm; 0 in a group of one.

    Raises:
        KeyError: ``kind`` is no collective.
    """
    if group == 1:
        return 0.0
    known = measured_s(link, kind, group, size_bytes)
    if known is not None:
        return known
    return min(float(algorithm_s(a, link, kind, group, size_bytes)) for a in _usable(link, kind, group))


def collectives_s(link: Link, kind: str, group: int, sizes_bytes: np.ndarray) -> np.ndarray:
    """Likewise for several buffers in a group of more than one, float64 [buffers]."""
    sizes = sizes_bytes.astype(float)
    measured = _measured(link, kind)
    if measured:
        return _as_measured_s(measured, group, sizes)
    return np.min([algorithm_s(a, link, kind, group, sizes) for a in _usable(link, kind, group)], axis=0)


def _usable(link: Link, kind: str, group: int) -> list[Algorithm]:
    found = [a for a in algorithms_of(link) if kind in a.kinds and group >= a.min_group]
    if not found:
        raise KeyError(kind)
    return found


def measured_s(link: Link, kind: str, group: int, size_bytes: int) -> float | None:
    """Seconds of ``kind`` as it was measured over ``link``; None where it was not. Also of kinds that no plan chooses, as broadcasts."""
    measured = _measured(link, kind)
    return float(_as_measured_s(measured, group, np.array([size_bytes], dtype=float))[0]) if measured else None


@lru_cache(maxsize=1 << 10)
def _measured(link: Link, kind: str) -> tuple[Measured, ...]:
    """What was measured of a kind of collective, by ascending groups."""
    return tuple(sorted((m for m in link.measured if m.kind == kind), key=lambda m: m.group))


def _as_measured_s(measured: tuple[Measured, ...], group: int, sizes: np.ndarray) -> np.ndarray:
    """Between two groups that were measured, as the logarithm of the group; outside of them in proportion to the hops of a ring."""
    above = next((i for i, m in enumerate(measured) if m.group >= group), len(measured))
    if 0 < above < len(measured):
        low, high = measured[above - 1], measured[above]
        part = math.log2(group / low.group) / math.log2(high.group / low.group)
        return (1 - part) * _by_size_s(low, sizes) + part * _by_size_s(high, sizes)
    nearest = measured[min(above, len(measured) - 1)]
    return _by_size_s(nearest, sizes) * (group - 1) / (nearest.group - 1)


def _by_size_s(measured: Measured, sizes: np.ndarray) -> np.ndarray:
    """Straight lines between the sizes that were measured, the last one going on; below the first as that."""
    at, seconds = np.array(measured.sizes_bytes, dtype=float), np.array(measured.seconds)
    found = np.interp(sizes, at, seconds)
    if len(at) == 1:
        return found * np.maximum(1.0, sizes / at[0])
    slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
    return found + np.maximum(sizes - at[-1], 0.0) * slope
