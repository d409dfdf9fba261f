"""From a capture and a plan to one rank's forward and backward programs: the list of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from meshwright.passes.base import dump, run_passes
from meshwright.passes.bucket import BucketCollectives
from meshwright.passes.overlap import OverlapCollectives
from meshwright.passes.pool_results import PoolResults
from meshwright.passes.program import LocalProgram
from meshwright.passes.rewrite import RewriteForRank
from meshwright.passes.schedule import ScheduleCollectives
from meshwright.passes.split import split
from meshwright.passes.unreduced import unreduced
from meshwright.passes.verify import VerifyProgram, collectives_of, sequence_hash
from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.verify import verify_plan


def lower(
    capture: Capture,
    plan: Plan,
    coordinate: Sequence[int],
    group_names: Sequence[str],
    *,
    device: torch.device | None = None,
    bucket_bytes: int = REDUCE_BYTES,
    times_s: dict[str, float] | None = None,
    reduces: bool = True,
) -> LocalProgram:
    """Lower ``capture`` as ``plan`` says, for the rank at ``coordinate``. Needs no process group.

    Args:
        capture: the program; left as it is.
        plan: what to do.
        coordinate: this rank's coordinate on the plan's mesh, one index per axis.
        group_names: name of this rank's process group along each axis.
        device: where the program will run; None: as captured.
        bucket_bytes: largest buffer that small collectives may share; 0: each travels alone.
        times_s: filled with the seconds that each pass took.
        reduces: whether gradients end reduced; otherwise those that can wait do (``passes.unreduced``).

    Returns:
        The rank's program. All ranks' programs have the same text but for integer constants.

    Raises:
        VerifyError: the plan is illegal for the program, or a pass broke an invariant.
    """
    sizes = plan.mesh.sizes
    if len(coordinate) != len(sizes) or any(not 0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
        raise VerifyError(f"coordinate {tuple(coordinate)} is not on mesh {plan.mesh}")
    if len(group_names) != len(sizes):
        raise VerifyError(f"{len(sizes)} group names are needed, one per axis of mesh {plan.mesh}; found {tuple(group_names)}")
    verify_plan(plan, capture.graph)
    plan = plan if reduces else unreduced(plan, capture.graph)
    label = f"rank-{'-'.join(map(str, coordinate))}"
    passes = (
        RewriteForRank(capture, plan, tuple(coordinate), tuple(group_names), device),
        OverlapCollectives(),
        PoolResults.of(plan, bucket_bytes),
        BucketCollectives(bucket_bytes),
        ScheduleCollectives(plan),
        VerifyProgram(plan, capture.graph),
    )
    joint = run_passes(passes, capture.gm, label, times_s)
    shapes = {n.meta["value"]: tuple(n.meta["val"].shape) for n in joint.graph.nodes if n.op == "placeholder"}
    halves = split(joint, capture.graph, training=capture.training)
    graphs = [g for g in (halves.forward, halves.backward) if g is not None]
    for name in ("forward", "again", "backward"):
        if getattr(halves, name) is not None:
            dump(getattr(halves, name), label, f"99_{name}")
    collectives = tuple(c for g in graphs for c in collectives_of(g.graph.nodes))
    linked = {f.name: getattr(halves, f.name) for f in fields(halves)}
    return LocalProgram(**linked, input_shapes=shapes, collectives=collectives, sequence_hash=sequence_hash(collectives))
