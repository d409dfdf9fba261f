"""Micro-batches as a restriction: what devices share must divide in every micro-batch, not only in the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import Placement, Placements, divides
from meshwright.planner.solve.candidates import Candidate
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.tables import Tables

_divides = lru_cache(maxsize=1 << 16)(divides)


def restrict_to_micro_batches(
    tables: Tables, inputs: Mapping[str, Placement], ops: Mapping[str, OpSpec], count: int
) -> Restriction:
    """Take away the candidates that cut a piece of a micro-batch unevenly.

    Args:
        tables: the problem and its meaning.
        inputs: placement of batch inputs over the axis of micro-batches.
        ops: likewise of the ops.
        count: number of micro-batches.
    """
    sizes = (count, *tables.mesh.sizes)
    allowed: dict[int, np.ndarray] = {}
    for choice, candidates in enumerate(tables.candidates):
        cluster = tables.first(choice)
        mask = np.array([_fits(cluster, c, inputs, ops, sizes) for c in candidates])
        if not mask.all():
            allowed[choice] = mask
    return Restriction(allowed)


def _fits(
    cluster: Cluster, candidate: Candidate, inputs: Mapping[str, Placement], ops: Mapping[str, OpSpec], sizes: tuple[int, ...]
) -> bool:
    source = cluster.source
    if source is not None and candidate.rest is not None and source.value.name in inputs:
        whole: Placements = (inputs[source.value.name], *candidate.rest)
        if not _divides(source.value.shape, whole, sizes):
            return False
    for k, op in enumerate(cluster.ops):
        spec = ops.get(op.name)
        if spec is None:
            continue
        rows = [row.members[k] for row in candidate.rows]
        read = [(v, spec.ins[i], tuple(row.ins[i] for row in rows)) for i, v in enumerate(op.ins)]
        made = [(v, spec.outs[i], tuple(row.outs[i] for row in rows)) for i, v in enumerate(op.outs) if v is not None]
        for v, over_time, placed in (*read, *made):
            if over_time is not None and over_time[0].is_shard and not _divides(v.shape, (*over_time, *placed), sizes):
                return False
    return True
