"""Which level of recomputation a plan takes: one problem per level, a higher one only where memory makes the lower one slower.

    none fits as if there were no limit                        -> none
    none does not fit, selective does                          -> none in some blocks, selective in the first ones
    neither fits, full does                                    -> selective in some blocks, full in the first ones

The blocks that run first take the higher level: what the others keep is free again when these are computed again. How many
blocks, is looked for along the line between the two levels' peaks, then by halving.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.recompute import LEVELS, Recompute

PROBES = 4
"""Mixtures tried at most: each is a problem of its own."""

_NEAR = 0.85
"""Where to look next between a count that does not fit (0) and one that does (1), if the peaks do not tell."""

_HURTS = 0.02
"""Memory makes a level slower if it raises its bound by more than this part; then the most promising level is planned first."""

_A_LOOK = (1, 2)
"""So many meshes tell as a rule whether memory hurts."""

_FINE = 1 / 16
"""Mixtures closer than this part of all blocks are not told apart."""


class Recomputable(Protocol):
    """A program that can be had with different recomputation.

    Attributes:
        counts: how many of its parts, the first ones, may have another level than the rest.
        num_parts: how many parts there are.
    """

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def num_parts(self) -> int: ...

    def capture_at(self, recompute: Recompute) -> Capture:
        """The program with a choice of recomputation."""
        ...


Found = TypeVar("Found")


@dataclass(frozen=True)
class Tried(Generic[Found]):
    """A choice of recomputation, planned.

    Attributes:
        recompute: the choice.
        found: the plan; None where none fits.
        step_time_s: its time; infinite where none fits.
        floor_bytes: lower bound of any plan's memory.
        free_peak_bytes: the peak of the best plan without a limit; infinite where it is not known.
        is_free: whether no more recomputation can help: the limit makes the plan no slower.
    """

    recompute: Recompute
    found: Found | None
    step_time_s: float
    floor_bytes: float
    free_peak_bytes: float
    is_free: bool


Try = Callable[[Recompute], Tried[Found]]
# Lower bounds of any plan's time with a choice, within the memory limit and without one: on the first few meshes, or on all. Those above
# what else is known of need not be tight.
Promise = Callable[[Recompute, int | None, float], tuple[float, float]]


def best(
    program: Recomputable,
    limit_bytes: int,
    attempt: Try[Found],
    promise: Promise,
    *,
    training: bool,
    is_beaten: Callable[[float], bool] = lambda bound_s: False,
) -> list[Tried[Found]]:
    """All choices that were tried, the best one first; none where all are beaten.

    Args:
        program: the program.
        limit_bytes: memory per device.
        attempt: plans one choice.
        promise: bounds of one choice, far cheaper than a plan.
        training: whether there is a backward at all.
        is_beaten: whether something else is known that no plan of any choice can beat, which take at least so many seconds; asked where
            memory makes all of them slower.
    """
    known: dict[str, Tried[Found]] = {}
    for level in _most_promising_first(promise, is_beaten) if training else LEVELS[:1]:
        if not any(t.is_free and LEVELS.index(lower) < LEVELS.index(level) for lower, t in known.items()):
            known[level] = attempt(Recompute(level))
    tried = [known[level] for level in LEVELS if level in known]
    if not tried:
        return []
    chosen = min(range(len(tried)), key=lambda i: tried[i].step_time_s)
    if chosen and tried[chosen].found is not None:
        tried += _mixtures(program, limit_bytes, attempt, tried[chosen - 1], tried[chosen])
    return sorted(tried, key=lambda t: t.step_time_s)


def _most_promising_first(promise: Promise, is_beaten: Callable[[float], bool]) -> Iterator[str]:
    """The levels; in their order unless memory makes the first one slower wherever one looks."""
    for few in _A_LOOK:
        if _is_unhurt(promise(Recompute(LEVELS[0]), few, math.inf)):
            yield from LEVELS
            return
    bounds: dict[str, float] = {}
    for level in (*LEVELS[:0:-1], LEVELS[0]):  # from the one that memory hurts least: what is above its bound need not be known
        promised = promise(Recompute(level), None, min(bounds.values(), default=math.inf))
        bounds[level] = promised[0]
    if _is_unhurt(promised):
        yield from LEVELS
    elif not is_beaten(min(bounds.values())):
        yield from sorted(LEVELS, key=bounds.__getitem__)


def _is_unhurt(promised: tuple[float, float]) -> bool:
    bound_s, free_bound_s = promised
    return bound_s <= free_bound_s * (1 + _HURTS)


def _mixtures(
    program: Recomputable, limit_bytes: int, attempt: Try[Found], lower: Tried[Found], higher: Tried[Found]
) -> list[Tried[Found]]:
    """Plans between two levels: the fewest blocks at the higher one with which a plan fits."""
    tried: list[Tried[Found]] = []
    few, many = 0, program.num_parts
    fewest, most = lower.free_peak_bytes, higher.free_peak_bytes
    if math.isinf(fewest):
        fewest = most + lower.floor_bytes - higher.floor_bytes
    while len(tried) < PROBES and many - few > max(1, _FINE * program.num_parts):
        n = _between(program.counts, few, many, _share(fewest, most, limit_bytes))
        if n is None:
            break
        found = attempt(Recompute(higher.recompute.level, n, lower.recompute.level))
        tried.append(found)
        if math.isfinite(found.step_time_s):  # fewer blocks computed again are no slower, but for the solver's gap
            many, most = n, found.free_peak_bytes
        else:
            few, fewest = n, found.free_peak_bytes
    return tried


def _share(fewest: float, most: float, limit: float) -> float:
    """Where between the two ends the peak meets the limit, if it is a straight line; where it does not, because the best plan of the
    fuller end has to be sharded more to fit, near that end."""
    return (fewest - limit) / (fewest - most) if math.inf > fewest > limit > most else _NEAR


def _between(counts: Sequence[int], few: int, many: int, share: float) -> int | None:
    """The allowed count at a place between two others."""
    inside = [n for n in counts if few < n < many]
    if not inside:
        return None
    return inside[min(bisect_left(inside, few + share * (many - few)), len(inside) - 1)]
