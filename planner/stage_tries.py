"""Combinations that a search over pipelines tries, and what became of those that it finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.on_mesh import Found, OnMesh, Task
from meshwright.planner.pipelined import PipelineRequest, Uncut

SIMPLER = 0.01
"""A schedule is taken only where it is faster than a simpler one by more than this part."""


@dataclass(order=True)
class Try:
    """A combination, and how far it has been worked out.

    Attributes:
        seconds: what its step is expected to take.
        order: of being made, to break ties.
        degree: ranks along the pipeline axis; ``micro_batches`` how many.
        where: the mesh inside a stage; ``link`` between stages.
        recompute: what the backward computes again.
        room: part of the memory limit that the solver may use.
        tries: how often that was lowered.
        bound_s: what any step with it takes at least.
        kernels_s: what its kernels alone take at least.
        once_s: about what its gradients and parameters take to be sent once per step.
        hides: whether what is done once per step counts as hidden behind compute.
        less: whether it was tried with more recomputation.
        on: where it is looked at, once it is; ``task`` its problem, and what is known of it.
        found: its solution, once there is one.
    """

    seconds: float
    order: int
    degree: int = field(compare=False)
    micro_batches: int = field(compare=False)
    where: LogicalMesh = field(compare=False)
    link: Link = field(compare=False)
    recompute: Recompute = field(compare=False, default_factory=Recompute)
    room: float = field(compare=False, default=1.0)
    tries: int = field(compare=False, default=0)
    bound_s: float = field(compare=False, default=0.0)
    kernels_s: float = field(compare=False, default=0.0)
    once_s: float = field(compare=False, default=0.0)
    hides: bool = field(compare=False, default=False)
    less: bool = field(compare=False, default=False)
    on: OnMesh | None = field(compare=False, default=None)
    task: Task | None = field(compare=False, default=None)
    found: Found | None = field(compare=False, default=None)


@dataclass
class Finished:
    """A combination cut into stages: its plan uncut, and the best way to cut it (the least memory where none fits)."""

    item: Try
    uncut: Uncut
    request: PipelineRequest
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.predicted.peak_memory_bytes <= self.uncut.limit_bytes

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_time_s


def sizes_of(found: Found | None) -> dict[str, object]:
    if found is None:
        return {}
    return {"method": found.solution.method, "variables": found.solution.columns, "constraints": found.solution.rows}


def alike(a: Try, b: Try) -> bool:
    return (a.degree, a.micro_batches, a.where) == (b.degree, b.micro_batches, b.where)


def best_of(found: Sequence[Finished]) -> Finished | None:
    """The fastest that fits, a simpler one where it is as fast within a margin; else the one that needs the least."""
    fitting = [f for f in found if f.fits]
    if not fitting:
        return min(found, key=lambda f: f.plan.predicted.peak_memory_bytes, default=None)
    best = fitting[0]
    for f in fitting[1:]:
        best = f if f.seconds < best.seconds * (1 - SIMPLER) else best
    return best
