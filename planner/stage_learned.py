"""What combinations of a search for stages say of the others, once they are looked at: the least that these take, and what is likely."""

from __future__ import annotations

import math

from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.stage_tries import Try

_Cut = tuple[Recompute, int, MeshShape, bool]

_PER_HALVING = 0.04
"""Part by which communication is expected to make a step longer each time that sequence or model are cut in two, until it is known."""


class Learned:
    """What was foreseen of combinations, by what others have in common with them."""

    def __init__(self) -> None:
        self._spent: dict[tuple[int, int], float] = {}
        self._hurt: dict[tuple[Recompute, int, int], float] = {}
        self._work: dict[_Cut, list[tuple[int, float]]] = {}

    def add(self, item: Try, share: float, free_s: float, bound_s: float) -> None:
        """What was foreseen of one.

        Args:
            item: the combination.
            share: seconds of a step per second of work.
            free_s: the least work without a memory limit, in seconds.
            bound_s: likewise with it.
        """
        if math.isfinite(free_s):
            self._work.setdefault(_cut_alike(item), []).append((item.micro_batches, free_s))
        if 0 < item.kernels_s <= free_s * share < math.inf:
            inside, flying = _cut_inside(item), _in_flight(item)
            spent = max(1.0, (free_s * share - item.once_s) / item.kernels_s)
            self._spent[inside] = min(spent, self._spent.get(inside, math.inf))
            self._hurt[flying] = min(max(1.0, bound_s / free_s), self._hurt.get(flying, math.inf))

    def least_work_s(self, item: Try) -> float:
        """Seconds that its work takes at least: smaller micro-batches are no less work than larger ones, and a memory limit makes it none
        the less."""
        known = self._work.get(_cut_alike(item), ())
        return max((work_s for count, work_s in known if count <= item.micro_batches), default=0.0)

    def likely_s(self, item: Try) -> float:
        """Seconds of a step that are likely, by what others that are cut alike communicate, and what memory costs others in flight alike."""
        return (item.kernels_s * self._likely_spent(item) + item.once_s) * self._hurt.get(_in_flight(item), 1.0)

    def _likely_spent(self, item: Try) -> float:
        """Step over kernels, at least as much as of what is cut into fewer pieces."""
        inside = _cut_inside(item)
        if inside in self._spent:
            return self._spent[inside]
        known = [spent for pieces, spent in self._spent.items() if pieces[0] <= inside[0] and pieces[1] <= inside[1]]
        return max(known, default=1.0 + _PER_HALVING * math.log2(inside[0] * inside[1]))


def _cut_inside(item: Try) -> tuple[int, int]:
    """Into how many pieces the sequence is cut, and what is left of a micro-batch."""
    axes = dict(zip(item.where.mesh.names, item.where.mesh.sizes, strict=True))
    sequence, data = axes.get("cp", 1), axes.get("dp", 1)
    return sequence, item.where.mesh.num_devices // (sequence * data)


def _in_flight(item: Try) -> tuple[Recompute, int, int]:
    """What says how much micro-batches in flight hold."""
    return item.recompute, item.degree, item.micro_batches


def _cut_alike(item: Try) -> _Cut:
    """What combinations have in common that differ in their number of micro-batches and their memory alone."""
    return item.recompute, item.degree, item.where.mesh, item.hides
