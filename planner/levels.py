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

_ROUGH, _CLOSE = -0.1, 0.03
"""Bounds so much below the lowest, or above it, are tight enough: to see whether other plans are better at all; to tell the levels apart."""

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


def _nothing(bound_s: float) -> float:
    return math.inf


@dataclass(frozen=True)
class Asks(Generic[Found]):
    """What is asked of choices.

    Attributes:
        attempt: plans one.
        promise: lower bounds of any plan's time with one, within the memory limit and without one, far cheaper than a plan; those above
            so many seconds by more than a part need not be tight, or those below by less than it where it is negative.
        is_hurt: whether memory makes all plans on so many meshes slower by more than a part; cheaper still.
        beats: what plans must take at least for something else to be clearly better, given about what they do; infinite where there is
            nothing. It is asked once, and only where memory makes all plans slower: then no bound above it need be known.
    """

    attempt: Callable[[Recompute], Tried[Found]]
    promise: Callable[[Recompute, float, float], tuple[float, float]]
    is_hurt: Callable[[Recompute, int, float], bool]
    beats: Callable[[float], float] = _nothing


def best(program: Recomputable, limit_bytes: int, asks: Asks[Found], *, training: bool) -> list[Tried[Found]]:
    """All choices that were tried, the best one first; none where all are beaten.

    Args:
        program: the program.
        limit_bytes: memory per device.
        asks: what tells of them.
        training: whether there is a backward at all.
    """
    known: dict[str, Tried[Found]] = {}
    for level in _most_promising_first(asks) if training else LEVELS[:1]:
        if not any(t.is_free and LEVELS.index(lower) < LEVELS.index(level) for lower, t in known.items()):
            known[level] = asks.attempt(Recompute(level))
    tried = [known[level] for level in LEVELS if level in known]
    if not tried:
        return []
    chosen = min(range(len(tried)), key=lambda i: tried[i].step_time_s)
    if chosen and tried[chosen].found is not None:
        tried += _mixtures(program, limit_bytes, asks.attempt, tried[chosen - 1], tried[chosen])
    return sorted(tried, key=lambda t: t.step_time_s)


def _most_promising_first(asks: Asks[Found]) -> Iterator[str]:
    """The levels; in their order unless memory makes the first one slower wherever one looks; none where all are beaten."""
    if not all(asks.is_hurt(Recompute(LEVELS[0]), few, _HURTS) for few in _A_LOOK):
        yield from LEVELS
        return
    bounds, is_unhurt, beaten_s = _promised(asks, _ROUGH, asks.beats)
    if _are_beaten(asks, bounds, beaten_s):
        return
    if not is_unhurt and sum(map(math.isfinite, bounds.values())) > 1:
        bounds, is_unhurt, _ = _promised(asks, _CLOSE)
    yield from LEVELS if is_unhurt else sorted(LEVELS, key=bounds.__getitem__)


def _are_beaten(asks: Asks[Found], bounds: dict[str, float], beaten_s: float) -> bool:
    """Whether all levels take at least so many seconds; bounds below that are made as tight as that takes."""
    for level, bound_s in bounds.items():
        if math.isfinite(beaten_s) and bound_s < beaten_s:
            bounds[level] = asks.promise(Recompute(level), beaten_s, 0.0)[0]
        if bounds[level] < beaten_s:
            return False
    return True


def _promised(
    asks: Asks[Found], close: float, beats: Callable[[float], float] = lambda bound_s: math.inf
) -> tuple[dict[str, float], bool, float]:
    """Lower bounds of the levels, whether memory makes the first one no slower, and what they must be for something else to beat all."""
    bounds: dict[str, float] = {}
    beaten_s = math.inf
    for level in (*LEVELS[:0:-1], LEVELS[0]):  # from the one that memory hurts least: what is above its bound need not be known
        promised = asks.promise(Recompute(level), min([*bounds.values(), beaten_s]), close)
        bounds[level] = promised[0]
        if math.isinf(beaten_s) and math.isfinite(promised[0]):
            beaten_s, beats = beats(promised[0] / (1 + min(close, 0.0))), lambda bound_s: math.inf
    return bounds, _is_unhurt(promised), beaten_s


def _is_unhurt(promised: tuple[float, float]) -> bool:
    bound_s, free_bound_s = promised
    return math.isfinite(bound_s) and bound_s <= free_bound_s * (1 + _HURTS)


def _mixtures(
    program: Recomputable,
    limit_bytes: int,
    attempt: Callable[[Recompute], Tried[Found]],
    lower: Tried[Found],
    higher: Tried[Found],
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
