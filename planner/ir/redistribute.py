"""Steps that change a value's placement over one mesh axis, and which collective each one is.

============== ============= ==============================================
from           to            collective
============== ============= ==============================================
``S``          ``R``         ``all_gather``
``R``          ``S``         ``slice`` (no communication)
``P``          ``R``         ``all_reduce``
``P``          ``S``         ``reduce_scatter``
``S``          another ``S`` ``all_to_all``
============== ============= ==============================================

*Where* a value is redistributed is the plan's choice; *which* collective a step becomes is this table.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.ir.spec import Placement, Placements, R, divides

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
KINDS = ("slice", *COLLECTIVES)


def step_kind(src: Placement, dst: Placement) -> str | None:
    """The name of the one-axis step ``src -> dst``; None where no such step exists (nothing becomes partial).

    >>> from meshwright.planner.ir.spec import P, R, S
    >>> step_kind(P, S(0)), step_kind(S(0), R), step_kind(R, S(1)), step_kind(R, P)
    ('reduce_scatter', 'all_gather', 'slice', None)
    """
    if src == dst or dst.is_partial:
        return None
    if src.is_replicate:
        return "slice"
    if src.is_partial:
        if dst.is_replicate:
            return "all_reduce"
        return "reduce_scatter"
    return "all_gather" if dst.is_replicate else "all_to_all"


def _buried(placements: Sequence[Placement], axis: int) -> bool:
    """Whether a later axis cuts the very pieces that ``axis`` made, so that ``axis`` cannot change alone."""
    p = placements[axis]
    return p.is_shard and any(q == p for q in placements[axis + 1 :])


def legal_step(src: Placements, axis: int, dst: Placement) -> bool:
    """Whether axis ``axis`` of ``src`` may change to ``dst`` while the other axes stay.

    ``S(0)S(0)`` must give up axis 1 before axis 0, and ``RS(0)`` cannot shard dim 0 over axis 0 first.
    """
    if step_kind(src[axis], dst) is None or _buried(src, axis):
        return False
    return not _buried((*src[:axis], dst, *src[axis + 1 :]), axis)


def step_axis(src: Placements, dst: Placements) -> int:
    """The one axis in which ``src`` and ``dst`` differ."""
    (axis,) = (i for i, (p, q) in enumerate(zip(src, dst, strict=True)) if p != q)
    return axis


def default_path(
    src: Placements, dst: Placements, shape: Sequence[int], sizes: Sequence[int], *, uneven: bool = False
) -> tuple[Placements, ...]:
    """A legal path of one-axis steps, for plans that name no path: fewest steps, reductions and slices first.

    Args:
        src: present placements.
        dst: wanted placements.
        shape: global shape.
        sizes: mesh axis sizes.
        uneven: whether pieces on the way may be uneven (parameters at rest).

    Returns:
        The placements passed through, ``src`` first and ``dst`` last.

    Raises:
        ValueError: no legal path exists (``dst`` is partial where ``src`` is not).
    """
    order = {"slice": 0, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 3, "all_gather": 4}
    frontier: list[tuple[Placements, ...]] = [(src,)]
    seen = {src}
    while frontier:
        grown: list[tuple[int, tuple[Placements, ...]]] = []
        for path in frontier:
            here = path[-1]
            if here == dst:
                return path
            for axis, want in enumerate(dst):
                for to in dict.fromkeys((want, R)):
                    there = (*here[:axis], to, *here[axis + 1 :])
                    if not legal_step(here, axis, to) or there in seen:
                        continue
                    if not uneven and there != dst and not divides(shape, there, sizes):
                        continue
                    kind = step_kind(here[axis], to)
                    assert kind is not None
                    grown.append((order[kind], (*path, there)))
        frontier = []
        for _, path in sorted(grown, key=lambda item: item[0]):
            if path[-1] not in seen:
                seen.add(path[-1])
                frontier.append(path)
    raise ValueError(f"no path from {src} to {dst}: a value cannot become partial")
