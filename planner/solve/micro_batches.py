"""Micro-batches as a restriction: what devices share must divide in every micro-batch, not only in the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import Placement, Placements, divides
from meshwright.planner.solve.expanded import Expanded
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
    known: dict[tuple, np.ndarray] = {}
    for choice, expanded in enumerate(tables.expanded):
        cluster = tables.first(choice)
        over_time = [ops.get(op.name) for op in cluster.ops]
        of_source = None if cluster.source is None else inputs.get(cluster.source.value.name)
        key = id(expanded), of_source, *over_time
        if key not in known:
            known[key] = _fits(cluster, expanded, of_source, over_time, sizes)
        if not known[key].all():
            allowed[choice] = known[key]
    return Restriction(allowed)


def _fits(
    cluster: Cluster,
    expanded: Expanded,
    of_source: Placement | None,
    over_time: Sequence[OpSpec | None],
    sizes: tuple[int, ...],
) -> np.ndarray:
    """Whether a candidate cuts pieces of micro-batches evenly, bool [candidates].

    Args:
        cluster: whose candidates.
        expanded: the candidates.
        of_source: how the axis of micro-batches cuts the placeholder, if it is one's.
        over_time: how that axis cuts what the ops read and make.
        sizes: number of micro-batches, and of the mesh axes.
    """
    values: list[tuple[Value, Placements | None, tuple]] = []
    if cluster.source is not None and of_source is not None:
        values.append((cluster.source.value, (of_source,), ("rest",)))
    for k, (op, spec) in enumerate(zip(cluster.ops, over_time, strict=True)):
        if spec is not None:
            values += [(v, spec.ins[i], ("op in", k, i)) for i, v in enumerate(op.ins)]
            values += [(v, spec.outs[i], ("op out", k, i)) for i, v in enumerate(op.outs) if v is not None]
    found: np.ndarray = np.ones(len(expanded), dtype=bool)
    for value, before, at in values:
        if before is not None and (before[0].is_shard or at == ("rest",)):
            placed = expanded.placed(*at)
            found &= np.array([_divides(value.shape, (*before, *p), sizes) for p in placed.distinct])[placed.number]
    return found
