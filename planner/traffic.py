"""Bytes that the busiest pipeline rank sends or receives in one step."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import Collective
from meshwright.planner.stage_cuts import Profile


def moved_bytes(pipeline: Pipeline, found: Profile, inside: Sequence[Collective]) -> int:
    """Over the boundaries, activations one way and as many bytes of gradients the other; and a rank's part of the collectives.

    Args:
        pipeline: the stages.
        found: the program that they cut.
        inside: collectives of the whole program on one stage's devices, each counted by its larger side.
    """
    at = {name: i for i, name in enumerate(found.names)}
    crossing = [0.0, *(2 * float(found.alive_bytes[at[name]]) for name in pipeline.cuts), 0.0]
    by_rank = [0.0] * pipeline.degree
    for stage in range(pipeline.num_stages):
        rank = pipeline.rank_of(stage)
        for boundary, other in ((stage, stage - 1), (stage + 1, stage + 1)):
            if 0 <= other < pipeline.num_stages and pipeline.rank_of(other) != rank:
                by_rank[rank] += crossing[boundary]
    shared = sum(c.count * c.bytes for c in inside) / pipeline.degree
    return int(max(by_rank) + shared)
