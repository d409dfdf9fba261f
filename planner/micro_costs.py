"""Prices of a step that runs in micro-batches: kernels and collectives of their size, as often as they run.

```
mm [64, 512] x [512, 512], 4 micro-batches:   4 x the seconds of [16, 512] x [512, 512]
all_gather of a parameter for its use:        4 x        its gradient, all-reduced:       1 x (summed over micro-batches first)
all_reduce of an activation [64, 512]:        4 x that of [16, 512]
```

The axis of micro-batches is one more mesh axis, as in the passes; only that its pieces come one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from meshwright.planner.cost import CostModel
from meshwright.planner.cost.compute import Priced
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.cuts import Cuts
from meshwright.planner.ir.graph import Op, OpGraph, Value
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.redistribute import KINDS, step_kind
from meshwright.planner.ir.spec import Placement, Placements, R, Row
from meshwright.planner.micro import TimeSpecs


class TimeRows:
    """Where a program's values lie over the axis of micro-batches, ready to be priced on any mesh.

    Args:
        graph: the program.
        times: where its values lie.
        count: number of micro-batches.
        whole: parameters whose gradients are summed whole over micro-batches and scattered once per step.

    Attributes:
        made: placement of every value over the axis.
        late: values that are known only when all micro-batches have run.
        whole: values that nothing but the gradients of such parameters is made of.
    """

    def __init__(self, graph: OpGraph, times: TimeSpecs, count: int, whole: Collection[str] = ()):
        self.count, self._times = count, times
        self.made: dict[str, Placement] = {i.value.name: times.inputs.get(i.value.name, R) for i in graph.inputs}
        for op in graph.ops:
            self.made.update((v.name, p) for v, p in zip(op.outs, self.row(op).outs, strict=True) if v and p is not None)
        self.late = self._complete(graph)
        self.whole = _lead_to(graph, whole) if whole else frozenset[str]()
        self._of_cluster: dict[tuple[str, int], tuple[ClusterRow, int]] = {}
        self._rows: dict[ClusterRow, ClusterRow] = {}

    def row(self, op: Op) -> Row:
        """An op's row over the axis of micro-batches."""
        spec = self._times.ops.get(op.name)
        if spec is None:
            return Row((R,) * len(op.ins), tuple(None if v is None else R for v in op.outs))
        return Row(tuple(p[0] for p in spec.ins), tuple(None if p is None else p[0] for p in spec.outs))

    def of_cluster(self, cluster: Cluster) -> tuple[ClusterRow, int]:
        """A cluster's row over the axis of micro-batches, equal ones as one object, and how often it runs."""
        key = cluster.name, len(cluster.ops)
        if key not in self._of_cluster:
            row, runs = self._over_time(cluster)
            self._of_cluster[key] = self._rows.setdefault(row, row), runs
        return self._of_cluster[key]

    def _over_time(self, cluster: Cluster) -> tuple[ClusterRow, int]:
        members = tuple(self.row(op) for op in cluster.ops)
        wanted: dict[str, Placement] = {}
        for op, member in zip(cluster.ops, members, strict=True):
            for v, p in zip(op.ins, member.ins, strict=True):
                wanted.setdefault(v.name, p)
        row = ClusterRow(
            tuple(wanted.get(v.name, self.made[v.name]) for v in cluster.ins),
            tuple(self.made[v.name] for v in cluster.outs),
            members,
            None if cluster.source is None else self.made[cluster.source.value.name],
        )
        finishes = cluster.outs and all(v.name in self.late for v in cluster.outs)
        return row, 1 if finishes else self.count

    def is_once(self, value: str) -> bool:
        """Whether a value is brought to where it is needed once per step, however many micro-batches there are."""
        return value in self.late or (self.made[value].is_partial and value in self.whole)

    def _complete(self, graph: OpGraph) -> set[str]:
        """Values that are known only when all micro-batches have run; what inputs alone make, a pre-pass knows before."""
        found: set[str] = set()
        known = {i.value.name for i in graph.inputs if i.role in ("input", "buffer", "constant")}
        for op in graph.ops:
            if all(v.name in known for v in op.ins):
                known.update(v.name for v in op.outs if v is not None)
                continue
            pairs = [(v.name, p) for v, p in zip(op.ins, self.row(op).ins, strict=True) if v.name not in known]
            summed = any(self.made[name] != R == p for name, p in pairs)
            if summed or any(v.name in found for v in op.ins):
                found.update(v.name for v in op.outs if v is not None)
        return found


class MicroCosts:
    """Seconds of a whole step on one hardware and mesh.

    Args:
        hardware: device, and one link per axis.
        mesh: axis sizes.
        rows: where the program's values lie over the axis of micro-batches.
        shared: which values travel in shared buffers.

    Attributes:
        once: prices of what is done once per step, for the whole batch.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, rows: TimeRows, shared: SharedBuffers | None = None):
        self.hardware, self.mesh, self.time, self.count = hardware, mesh, rows, rows.count
        self.once = CostModel(hardware, mesh, shared)
        longer = replace(hardware, links=(hardware.links[0], *hardware.links))
        self._model = CostModel(longer, MeshShape((rows.count, *mesh.sizes), ("time", *mesh.names)), shared)

    @property
    def overlaps(self) -> bool:
        """Whether communication can run beside kernels."""
        return self.once.overlaps

    # --- kernels ---

    def cluster_costs(self, cluster: Cluster, candidates: Sequence[tuple[ClusterRow, ...]]) -> np.ndarray:
        """Seconds of a cluster per step under each candidate, float64 [candidates]."""
        row, runs = self.time.of_cluster(cluster)
        return runs * self._model.cluster_costs(cluster, [(row, *candidate) for candidate in candidates])

    def clusters_costs(self, parts: Sequence[tuple[Cluster, Priced]]) -> list[np.ndarray]:
        """Likewise for several clusters at once; those that share candidates and run alike share the array."""
        over_time = [self.time.of_cluster(cluster) for cluster, _ in parts]
        longer: dict[tuple[int, int], Priced] = {}
        for (cluster, priced), (row, _) in zip(parts, over_time, strict=True):
            if (id(priced), id(row)) not in longer:
                longer[id(priced), id(row)] = _after(row, cluster, priced)
        timed = [(cluster, longer[id(priced), id(row)]) for (cluster, priced), (row, _) in zip(parts, over_time, strict=True)]
        once = self._model.clusters_costs(timed)
        keys = [(id(s), runs) for s, (_, runs) in zip(once, over_time, strict=True)]
        found = {key: key[1] * s for key, s in dict(zip(keys, once, strict=True)).items()}
        return [found[key] for key in keys]

    # --- collectives ---

    def runs_of(self, value: Value, kind: str) -> int:
        """How often a step of a redistribution is taken per step of training."""
        placed = self.time.made[value.name]
        if value.name in self.time.late or (placed.is_partial and (kind != "reduce_scatter" or value.name in self.time.whole)):
            return 1
        return self.count

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]:
        """Kind, bytes and seconds per step of changing one axis of a value's placement; see :meth:`CostModel.step_s`."""
        placed = self.time.made[value.name]
        kind = step_kind(src[axis], dst)
        runs = self.runs_of(value, kind or "")
        over_time = placed if placed.is_shard and runs > 1 else R
        kind_, size, seconds = self._model.step_s(value, (over_time, *src), axis + 1, dst)
        return kind_, size, runs * seconds

    def steps_s(self, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and seconds per step of training of many steps; each what :meth:`step_s` says of it.

        The model gets every node twice: of the whole batch, and behind those of one micro-batch.
        """
        runs = np.array([[self.runs_of(v, kind) for kind in KINDS] for v in steps.values])[steps.of[steps.tails], steps.kinds]
        placed = Cuts.of([(self.time.made[v.name],) for v in steps.values], 1)[steps.of]
        whole, num_nodes = Cuts(np.full_like(placed.dim, -1), np.ones_like(placed.split)), len(steps.of)
        twice = Cuts(
            np.concatenate([np.hstack([time.dim, steps.cuts.dim]) for time in (whole, placed)]),
            np.concatenate([np.hstack([time.split, steps.cuts.split]) for time in (whole, placed)]),
        )
        moved = np.where(runs > 1, num_nodes, 0)
        of, tails, heads = np.tile(steps.of, 2), steps.tails + moved, steps.heads + moved
        size, seconds = self._model.steps_s(Steps(steps.values, of, twice, tails, heads, steps.axes + 1, steps.kinds))
        return size, runs * seconds

    def sort_of(self, value: Value) -> object:
        """What tells apart values whose steps cost otherwise although they look alike."""
        name = value.name
        return self.time.made[name], name in self.time.late, name in self.time.whole, self.once.sort_of(value)


def _after(row: ClusterRow, cluster: Cluster, priced: Priced) -> Priced:
    """The same with one row for all candidates over an axis before the others."""
    rows = [*priced.rows[: priced.columns.num_rows], row]  # behind them the cluster's table may have got more
    first = np.full((len(priced), 1), len(rows) - 1, dtype=np.int64)
    return Priced(priced.columns.and_row(cluster, row), rows, np.hstack([first, priced.index]))


def _lead_to(graph: OpGraph, parameters: Collection[str]) -> frozenset[str]:
    """Values of the backward that nothing but gradients of ``parameters`` is made of."""
    names = {n for i in graph.inputs_of("parameter") if i.name in parameters for n in (i.name, *i.aliases)}
    other = {o.value.name for o in graph.outputs if o.value is not None and not (o.role == "gradient" and o.name in names)}
    ends = {o.value.name for o in graph.outputs if o.value is not None} - other
    found: set[str] = set()
    for op in reversed(graph.ops):
        for v in (v for v in op.outs if v is not None and op.phase == "backward" and v.name not in other):
            readers = graph.consumers.get(v.name, ())
            if (readers or v.name in ends) and all(w.name in found for r in readers for w in r.outs if w is not None):
                found.add(v.name)
    return frozenset(found)
