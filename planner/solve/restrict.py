"""What named strategies, and what axes are for, take away from a problem.

Everything that a strategy does not say (which op computes what, which collectives) is still solved for. Each is feasible for every model,
because every cluster can run replicated: what a strategy cannot do to a parameter it leaves replicated, and says so in the plan's notes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.planner.ir.cluster import ClusterRow
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.solve.candidates import Candidate
from meshwright.planner.solve.follow import rows_following_batch, whole_placements
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.strategies import AxisRule
from meshwright.planner.solve.tables import Tables

_GATHERS = frozenset({"all_gather", "all_to_all"})
_LISTED = 4


def restrict(tables: Tables, rules: Sequence[AxisRule], name: str) -> Restriction:
    """What ``rules`` take away.

    Args:
        tables: the problem and its meaning.
        rules: one per mesh axis.
        name: of the strategy, for messages.

    Raises:
        InputError: the batch cannot be sharded as the strategy demands.
    """
    rules = [r if n > 1 else AxisRule() for r, n in zip(rules, tables.mesh.sizes, strict=True)]
    work = _Work(tables, rules, name)
    work.batch()
    work.rest()
    work.use()
    work.scatter()
    work.compute()
    work.sequence()
    return Restriction(work.allowed, work.arcs, work.avoid, tuple(work.notes))


def batch_length(graph: OpGraph) -> tuple[GraphInput, int] | None:
    """The first batch input with dims, and its length along dim 0."""
    for source in graph.inputs_of("input"):
        if source.value.shape:
            return source, source.value.shape[0]
    return None


class _Work:
    def __init__(self, tables: Tables, rules: Sequence[AxisRule], name: str):
        self.tables = tables
        self.rules = rules
        self.name = name
        self.allowed: dict[int, np.ndarray] = {}
        self.arcs: dict[int, np.ndarray] = {}
        self.avoid: dict[int, np.ndarray] = {}
        self.notes: list[str] = []

    def _axes(self, attribute: str, *values: str) -> list[int]:
        return [a for a, rule in enumerate(self.rules) if getattr(rule, attribute) in values]

    def _keep(self, choice: int, mask: np.ndarray) -> None:
        self.allowed[choice] = self.allowed.get(choice, np.ones(len(mask), dtype=bool)) & mask

    def batch(self) -> None:
        """Place dim 0 of the batch inputs."""
        found = batch_length(self.tables.graph)
        if found is None:
            return
        first, length = found
        sharded = self._axes("batch", "sharded")
        parts = math.prod(self.tables.mesh.sizes[a] for a in sharded)
        if length % parts:
            raise InputError(
                f"strategy {self.name!r} shards the batch over {parts} devices of mesh {self.tables.mesh}, but input {first.name!r} "
                f"has {length} samples (shape {list(first.value.shape)}), which {parts} does not divide: "
                f"use a batch of a multiple of {parts}, a smaller mesh, or strategy 'auto'"
            )
        for choice in self.tables.sources("input"):
            source = self.tables.first(choice).source
            assert source is not None
            in_batch = bool(source.value.shape) and source.value.shape[0] == length
            mask = np.array([self._batch_ok(c.rest or (), in_batch) for c in self.tables.candidates[choice]])
            if mask.any():
                self._keep(choice, mask)
            else:
                self.notes.append(
                    f"{self.name}: input {source.name!r} cannot be sharded along its batch dim and is placed freely"
                )

    def _batch_ok(self, rest: Placements, in_batch: bool) -> bool:
        for p, rule in zip(rest, self.rules, strict=True):
            if rule.batch == "sharded" and p != (S(0) if in_batch else R):
                return False
            if rule.batch == "whole" and p != R:
                return False
            if rule.batch == "batch only" and p not in ((R, S(0)) if in_batch else (R,)):
                return False
            if rule.batch == "sequence only" and p not in ((R, S(1)) if in_batch else (R,)):
                return False
        return True

    def rest(self) -> None:
        """Place the parameters at rest."""
        whole, sharded, preferred = (self._axes("rest", kind) for kind in ("whole", "sharded", "preferred"))
        replicated: list[str] = []
        for choice in self.tables.sources("parameter"):
            source = self.tables.first(choice).source
            candidates = self.tables.candidates[choice]
            assert source is not None
            mask = np.array([all(_rest(c)[a] == R for a in whole) and self._keeps(c) for c in candidates])
            if sharded:
                ranks = [
                    _sharding_rank(c, source, sharded, self.tables.mesh) if ok else ()
                    for c, ok in zip(candidates, mask, strict=True)
                ]
                mask &= np.array([rank == max(ranks) for rank in ranks])
                if max(ranks)[0] == 1:
                    replicated.append(source.name)
            self._keep(choice, mask)
            if preferred and len(source.value.shape) > 1:
                self._prefer(choice, candidates, mask, preferred)
        if replicated:
            self.notes.append(
                f"{self.name}: {len(replicated)} parameters cannot be cut into non-empty pieces and rest whole: {_some(replicated)}"
            )

    def _keeps(self, candidate: Candidate) -> bool:
        """Whether a parameter's candidate keeps what the rules want kept, and nothing that they do not."""
        rest, kept = _rest(candidate), candidate.kept
        for a, rule in enumerate(self.rules):
            is_kept = kept is not None and kept[0][a] != kept[-1][a]
            if is_kept and (rule.keep == "never" or rule.use == "in place"):
                return False
            if rule.keep == "kept" and rest[a].is_shard and not is_kept:
                return False
        return True

    def _prefer(self, choice: int, candidates: Sequence[Candidate], mask: np.ndarray, axes: Sequence[int]) -> None:
        """Avoid resting whole where some allowed candidate does not."""
        whole = np.array([any(_rest(c)[a] == R for a in axes) for c in candidates])
        if (mask & ~whole).any():
            self.avoid[choice] = whole

    def use(self) -> None:
        """Whole parameters for ops, or no gathers."""
        whole, in_place = self._axes("use", "whole"), self._axes("use", "in place")
        if not (whole or in_place):
            return
        parameters = set(self.tables.sources("parameter"))
        for index, flow in enumerate(self.tables.problem.flows):
            if flow.supply not in parameters:
                continue
            network, made = self.tables.networks[index], self._made_whole(index)
            for demand in flow.demands:
                if demand.choice is not None and demand.choice not in parameters:
                    self._keep(demand.choice, np.array([all(network.nodes[n][a] in made for a in whole) for n in demand.nodes]))
            if in_place:
                self.arcs[index] = ~network.are(in_place, _GATHERS)

    def scatter(self) -> None:
        """Where parameters rest sharded by demand, their gradients are scattered, not reduced whole and then cut: under micro-batches the
        whole sums would be held for the step."""
        axes = self._axes("rest", "sharded")
        late = self._late_choices() if axes else set[int]()
        parameters = set(self.tables.sources("parameter"))
        for index, flow in enumerate(self.tables.problem.flows):
            network = self.tables.networks[index]
            if not axes or flow.supply in parameters or not all(d.choice in late for d in flow.demands):
                continue
            taken = [d.choice for d in flow.demands if d.choice in parameters]
            forbidden = {a for a in axes if network.are([a], ["reduce_scatter"]).any()}
            forbidden = {a for a in forbidden if all(self._always_sharded(choice, a) for choice in taken if choice is not None)}
            mask = ~network.are(forbidden, ["all_reduce"])
            self.arcs[index] = self.arcs[index] & mask if index in self.arcs else mask

    def _always_sharded(self, choice: int, axis: int) -> bool:
        """Whether every candidate left to a parameter cuts it over an axis."""
        candidates = self.tables.candidates[choice]
        allowed = self.allowed.get(choice, np.ones(len(candidates), dtype=bool))
        return all(_rest(c)[axis].is_shard for c, ok in zip(candidates, allowed, strict=True) if ok)

    def _late_choices(self) -> set[int]:
        """Parameters, and what leads to their gradients alone."""
        late = set(self.tables.sources("parameter"))
        flows = [f for f in self.tables.problem.flows if f.supply not in late]
        readers: dict[int, set[int | None]] = {}
        for flow in flows:
            readers.setdefault(flow.supply, set()).update(d.choice for d in flow.demands)
        grown = True
        while grown:
            more = {c for c, read in readers.items() if c not in late and read and all(r in late for r in read)}
            late |= more
            grown = bool(more)
        return late

    def _made_whole(self, index: int) -> frozenset[Placement]:
        """Placements that the parameter of a flow is made in without being cut."""
        cluster = self.tables.first(self.tables.problem.flows[index].supply)
        slots = [k for k, v in enumerate(cluster.outs) if v.name in self.tables.values[index]]
        return whole_placements(cluster, slots[0]) if slots else frozenset({R})

    def compute(self) -> None:
        """Let every cluster that computes take the row that follows the batch or the sequence."""
        for axis, rule in enumerate(self.rules):
            along = followed(self.tables.graph, rule.compute)
            if along is None:
                continue
            rows = rows_following_batch(self.tables.clusters, along[1], self.tables.mesh.sizes[axis], along[0])
            for choice, members in enumerate(self.tables.members):
                if self.tables.first(choice).source is not None:
                    continue
                mask = np.zeros(len(self.tables.candidates[choice]), dtype=bool)
                for row in {(rows[i].ins, rows[i].outs) for i in members}:
                    mask |= np.array([(c.rows[axis].ins, c.rows[axis].outs) == row for c in self.tables.candidates[choice]])
                if (mask & self.allowed.get(choice, mask)).any():
                    self._keep(choice, mask)

    def sequence(self) -> None:
        """Forbid the rows that follow the samples, and those that follow the sequence, or avoid work on the whole of it."""
        batch, length = batch_length(self.tables.graph), sequence_length(self.tables.graph)
        axes = self._axes("sequence", "whole", "sharded")
        if axes and (batch is None or length is None):
            raise InputError(
                f"strategy {self.name!r} says how activations lie along the sequence, and no input of the model has one (token ids [batch, "
                "sequence] or vectors [batch, sequence, width]): use 'tp'"
            )
        for axis in axes:
            assert batch is not None and length is not None
            size, clusters = self.tables.mesh.sizes[axis], self.tables.clusters
            samples = rows_following_batch(clusters, batch[1], size)
            along = rows_following_batch(clusters, length, size, dim=1)
            for choice, members in enumerate(self.tables.members):
                cut = {(along[i].ins, along[i].outs) for i in members if _cuts(along[i])}
                if self.tables.first(choice).source is not None or not cut:
                    continue
                over_axis = [(row.ins, row.outs) for row in (c.rows[axis] for c in self.tables.candidates[choice])]
                others = {(samples[i].ins, samples[i].outs) for i in members if _cuts(samples[i])} - cut
                if self.rules[axis].sequence == "whole":
                    others |= cut
                else:
                    self._avoid(choice, np.array([not _cuts(c.rows[axis]) for c in self.tables.candidates[choice]]))
                mask = np.array([row not in others for row in over_axis])
                if (mask & self.allowed.get(choice, mask)).any():
                    self._keep(choice, mask)

    def _avoid(self, choice: int, whole: np.ndarray) -> None:
        """Avoid some candidates, if others are left."""
        if (self.allowed.get(choice, ~whole) & ~whole).any():
            self.avoid[choice] = whole


def _cuts(row: ClusterRow) -> bool:
    """Whether a row works on pieces of anything."""
    return any(p.is_shard for p in (*row.ins, *row.outs))


def sequence_length(graph: OpGraph) -> int | None:
    """Length along dim 1 of the first batch input of token ids [batch, sequence, ...] or vectors [batch, sequence, width]."""
    shapes = ((i.value.shape, i.value.dtype.is_floating_point) for i in graph.inputs_of("input"))
    return next((s[1] for s, is_float in shapes if (len(s) == 3 if is_float else len(s) > 1)), None)


def followed(graph: OpGraph, compute: str) -> tuple[int, int] | None:
    """The dim of the batch inputs that ``AxisRule.compute`` says to follow, and its length; None for no dim, or where no input has it."""
    if compute == "follows batch":
        found = batch_length(graph)
        return None if found is None else (0, found[1])
    length = sequence_length(graph) if compute == "follows sequence" else None
    return None if length is None else (1, length)


def _rest(candidate: Candidate) -> Placements:
    assert candidate.rest is not None
    return candidate.rest


def _sharding_rank(candidate: Candidate, source: GraphInput, axes: Sequence[int], mesh: MeshShape) -> tuple:
    """How well a candidate shards a parameter over ``axes``: over many devices, all along dim 0, else along the largest dim."""
    placed = [(a, _rest(candidate)[a]) for a in axes if _rest(candidate)[a].is_shard]
    devices = math.prod(mesh.sizes[a] for a, _ in placed)
    shape = source.value.shape
    return (
        devices,
        all(p.split == 1 for _, p in placed),
        len({p.dim for _, p in placed}) <= 1,
        all(p.dim == 0 for _, p in placed),
        min((shape[p.dim] for _, p in placed), default=0),
    )


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def replicated_under(tables: Tables, restriction: Restriction, chosen: Sequence[int], name: str) -> tuple[str, ...]:
    """A note on parameters that a preference could not shard."""
    left = [
        source.name
        for choice, avoided in sorted(restriction.avoid.items())
        if avoided[chosen[choice]]
        for i in tables.members[choice]
        if (source := tables.clusters.clusters[i].source) is not None
    ]
    if not left:
        return ()
    return (f"{name}: {len(left)} parameters rest whole because no op can use their shards without gathering: {_some(left)}",)
