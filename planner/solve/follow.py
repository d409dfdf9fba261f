"""Data parallelism spelled out: which row each cluster takes over an axis when computation simply follows the batch.

``input_ids S(0) -> embedding S(0) -> mm S(0) -> ... -> weight gradient P``: in execution order every cluster takes the row that
moves the fewest bytes, given how its operands come out of the clusters before it and that parameters are whole. Sums over the
batch come out partial and are completed where they are needed (a loss, the statistics of a batch norm).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.ir.cluster import Cluster, ClusterGraph, ClusterRow
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.solve.candidates import even

# Bytes moved by a change of placement, in units of the value's size. A slice is free but not taken without need; a sum is
# completed rather than scattered, because what is scattered here would be gathered by the next reader.
_GATHER, _REDUCE, _EXCHANGE, _SLICE = 1.0, 1.0, 1.5, 1e-3


def rows_following_batch(clusters: ClusterGraph, batch: int, size: int, dim: int = 0) -> tuple[ClusterRow, ...]:
    """The row of every cluster over one axis of ``size`` devices that shards the batch; found once per program.

    Args:
        clusters: in execution order.
        batch: length of dim ``dim`` of the batch inputs.
        size: devices along the axis.
        dim: 0 for samples, 1 for the sequence.
    """
    known = _FOUND(clusters)
    if (batch, size, dim) not in known:
        known[batch, size, dim] = _rows(clusters, batch, size, dim)
    return known[batch, size, dim]


def _none(_: ClusterGraph) -> dict[tuple[int, int, int], tuple[ClusterRow, ...]]:
    return {}


_FOUND: Known[ClusterGraph, dict[tuple[int, int, int], tuple[ClusterRow, ...]]] = Known(_none)


def _rows(clusters: ClusterGraph, batch: int, size: int, dim: int) -> tuple[ClusterRow, ...]:
    made: dict[str, Placement] = {}
    chosen: list[ClusterRow] = []
    fitting: dict[tuple, list[ClusterRow]] = {}
    known: dict[tuple, ClusterRow] = {}
    parameters = {
        v.name: whole_placements(c, k)
        for c in clusters.clusters
        if c.source is not None and c.source.role == "parameter"
        for k, v in enumerate(c.outs)
    }
    for cluster in clusters.clusters:
        if cluster.source is not None:
            row = _at_rest(cluster, batch, size, dim)
        else:
            fits = id(cluster.rows), *[v.shape for v in cluster.ins], *[v.shape for v in cluster.outs]
            reads = [(made[v.name], parameters.get(v.name)) for v in cluster.ins]
            key = fits, *[v.dtype for v in cluster.ins], *reads
            if key not in known:
                if fits not in fitting:
                    fitting[fits] = _fitting(cluster, size)
                known[key] = _cheapest(cluster, fitting[fits], reads)
            row = known[key]
        chosen.append(row)
        made.update((v.name, p) for v, p in zip(cluster.outs, row.outs, strict=True))
    return tuple(chosen)


def whole_placements(cluster: Cluster, slot: int) -> frozenset[Placement]:
    """Placements in which a placeholder's cluster makes its result ``slot`` from the whole placeholder, without communication.

    ``R``; and where a view widens it, as ``[1, 1, H] -> [B, 1, H]`` does a class token, the widened dim sharded.
    """
    return frozenset({R, *(row.outs[slot] for row in cluster.rows if row.rest == R and not row.outs[slot].is_partial)})


def _at_rest(cluster: Cluster, batch: int, size: int, dim: int) -> ClusterRow:
    """Batch inputs are cut along ``dim``, everything else is whole."""
    assert cluster.source is not None
    value = cluster.source.value
    cut = cluster.source.role == "input" and len(value.shape) > dim and value.shape[dim] == batch
    wanted = S(dim) if cut else R
    fits = [row for row in cluster.rows if row.rest == wanted and _is_even(cluster.outs, row.outs, size)]
    return fits[0] if fits else cluster.rows[0]


def _fitting(cluster: Cluster, size: int) -> list[ClusterRow]:
    """The rows that cut what the cluster reads and makes evenly."""
    values = (*cluster.ins, *cluster.outs)
    placed = zip(*[(*row.ins, *row.outs) for row in cluster.rows], strict=True)
    is_even = [{p: even(v.shape, (p,), (size,)) for p in set(column)} for v, column in zip(values, placed, strict=True)]
    return [row for row in cluster.rows if all(e[p] for e, p in zip(is_even, (*row.ins, *row.outs), strict=True))]


def _cheapest(
    cluster: Cluster, rows: Sequence[ClusterRow], reads: Sequence[tuple[Placement, frozenset[Placement] | None]]
) -> ClusterRow:
    """Of ``rows``, those of a cluster that fit, the one that moves least; the cluster's first where none can be had. ``reads``: how each value
    that it reads is made, and how it may be read if it is a parameter."""
    prices = [
        {dst: 0.0 if src is dst else price_of_change(value, src, dst, allowed) for dst in {row.ins[k] for row in rows}}
        for k, (value, (src, allowed)) in enumerate(zip(cluster.ins, reads, strict=True))
    ]
    least, best = float("inf"), cluster.rows[0]
    for row in rows:
        moved = sum([price[dst] for price, dst in zip(prices, row.ins, strict=True)])
        if moved < least:
            least, best = moved, row
    return best


def price_of_change(value: Value, src: Placement, dst: Placement, allowed: frozenset[Placement] | None) -> float:
    """Price of a change of placement; infinite where it cannot be, or ``dst`` is not among those ``allowed``."""
    if src == dst:
        return 0.0
    if dst.is_partial or (allowed is not None and dst not in allowed):
        return float("inf")
    if src.is_replicate:
        return _SLICE * value.size_bytes
    if src.is_partial:
        return (_REDUCE if dst.is_replicate else _REDUCE + _SLICE) * value.size_bytes
    return (_GATHER if dst.is_replicate else _EXCHANGE) * value.size_bytes


def _is_even(values: tuple[Value, ...], placements: Placements, size: int) -> bool:
    return all(even(v.shape, (p,), (size,)) for v, p in zip(values, placements, strict=True))
