"""Named strategies as restrictions on the one problem.

A strategy says, per mesh axis, how the batch, the parameters at rest and the parameters in use lie on it, and whether
computation follows the batch. Everything else (which op computes what, which collectives) is still solved for. Each is feasible for every model, because every cluster can
run replicated: what a strategy cannot do to a parameter it leaves replicated, and says so in the plan's notes.

======== ================================ ================================================ =======================
name     batch                            parameters at rest                               parameters in use
======== ================================ ================================================ =======================
ddp      sharded over all axes            replicated                                       whole
zero1, 2 sharded over all axes            sharded over as many devices as possible         gathered once per step and kept
zero3    sharded over all axes            sharded over as many devices as possible         gathered whole, in each phase
hsdp     sharded over all axes            last axis: as zero3; others: replicated          gathered whole, in each phase
tp       last axis: whole; others: as ddp last axis: sharded wherever the ops can use it   never gathered
zero1+tp last axis: whole; others: zero1  last axis: as tp; others: as zero1               kept whole over the others
======== ================================ ================================================ =======================

``data_parallel`` is ddp run by one controller. ``tp`` shards activations between the layers that it cuts along the sequence where that is
faster; ``tp+sp`` everywhere it can, ``tp-sp`` nowhere. Strategies in pipeline stages are one of these inside every stage
(:data:`IN_STAGES`). An axis that the user's degrees give to tensor or context parallelism has that in any strategy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.ir.cluster import ClusterRow
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R, S
from meshwright.planner.solve.candidates import Candidate
from meshwright.planner.solve.follow import rows_following_batch, whole_placements
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.tables import Tables


@dataclass(frozen=True)
class AxisRule:
    """What may happen on one mesh axis.

    Attributes:
        batch: ``"sharded"`` (dim 0 of every batch input), ``"whole"``, ``"batch only"`` (one of these two), ``"sequence only"``
            (dim 1 of every batch input, or whole) or ``"free"``.
        rest: ``"sharded"`` (where possible), ``"whole"``, ``"preferred"`` (sharded where some op can use the shard as it
            is) or ``"free"``.
        use: ``"whole"`` (ops read whole parameters), ``"in place"`` (parameters are never gathered) or ``"free"``.
        keep: what is gathered of parameters that are sharded at rest: ``"kept"`` for the whole step, ``"never"`` kept, or ``"free"``.
            A frozen parameter has nothing that is worth sharding then, and rests whole under ``"kept"``.
        compute: ``"follows batch"`` or ``"follows sequence"`` (see :mod:`meshwright.planner.solve.follow`) or ``"free"``.
        sequence: ``"whole"`` (no op works on a piece of the sequence), ``"sharded"`` (every op that can, where the alternative is to
            work on the whole) or ``"free"``.
    """

    batch: str = "free"
    rest: str = "free"
    use: str = "free"
    compute: str = "free"
    keep: str = "free"
    sequence: str = "free"


@dataclass(frozen=True)
class Strategy:
    """A named restriction.

    Attributes:
        name: what users write.
        title: one line for people.
        data: the rule of data axes.
        model: the rule of the model axis (the one named ``tp``, or the last with more than one device); None if all axes are
            data axes. Where it shards the batch it is a data axis too, and always the last: the one inside a node.
        aliases: other names.
        compared: whether it is solved beside every plan for comparison.
        one_controller: whether the first device hands out batch and parameters for every call, see ``Plan.one_controller``.
        whole_gradients: whether gradients of kept parameters are summed whole over micro-batches, see ``Pipeline.whole_gradients``.
    """

    name: str
    title: str
    data: AxisRule = AxisRule()
    model: AxisRule | None = None
    aliases: tuple[str, ...] = ()
    compared: bool = True
    one_controller: bool = False
    whole_gradients: bool = False

    def rules(self, mesh: MeshShape, uses: Sequence[AxisRule] = ()) -> tuple[AxisRule, ...]:
        """The rule of every axis of ``mesh``; an axis named for tensor parallelism is the model axis, if there is one.

        Args:
            mesh: the logical mesh.
            uses: what the user wants each axis for: one for tensor or context parallelism is no data axis, whatever the strategy.
        """
        active = [a for a, n in enumerate(mesh.sizes) if n > 1]
        rules = [self.data] * mesh.num_axes
        if self.model is not None and active:
            is_model = self.model.batch != "sharded"
            named = [a for a in active if is_model and AXIS_NAMES.get(mesh.names[a]) is _MODEL_AXIS]
            rules[(named or active)[-1]] = self.model
        return tuple(_used(rule, use) for rule, use in zip(rules, uses or [AxisRule()] * mesh.num_axes, strict=True))


def _used(rule: AxisRule, use: AxisRule) -> AxisRule:
    """A strategy's rule on an axis that the user wants for something."""
    if rule.batch == "sharded" and use.batch == "whole":
        return _IN_PLACE
    if rule.batch == "sharded" and use.batch == "sequence only":
        return replace(rule, batch="sequence only", compute="free")
    return rule


_REPLICAS = AxisRule(batch="sharded", rest="whole", use="whole", compute="follows batch")
_SHARDED = AxisRule(batch="sharded", rest="sharded", use="whole", compute="follows batch", keep="never")
_KEPT = AxisRule(batch="sharded", rest="sharded", use="whole", compute="follows batch", keep="kept")
_IN_PLACE = AxisRule("whole", "preferred", "in place", keep="never")

# By name and by alias.
STRATEGIES: Mapping[str, Strategy] = {
    name: s
    for s in (
        Strategy("auto", "the fastest plan that fits"),
        Strategy("ddp", "replicated parameters, sharded batch", _REPLICAS),
        Strategy(
            "data_parallel",
            "as ddp, but the first device hands out batch and parameters for every call: for comparison",
            _REPLICAS,
            compared=False,
            one_controller=True,
        ),
        Strategy(
            "zero1",
            "optimizer state sharded, parameters gathered and gradients scattered once per step",
            _KEPT,
            whole_gradients=True,
        ),
        Strategy(
            "zero2",
            "as zero1, but every micro-batch scatters its gradients: they are never held whole",
            _KEPT,
            compared=False,
        ),
        Strategy(
            "zero3",
            "parameters, gradients and optimizer state sharded, gathered for use",
            _SHARDED,
            aliases=("fsdp",),
        ),
        Strategy("hsdp", "as zero3 inside a node, replicated across nodes", _REPLICAS, _SHARDED, compared=False),
        Strategy(
            "tp",
            "parameters sharded along the ops' own dims",
            _REPLICAS,
            _IN_PLACE,
        ),
        Strategy(
            "tp+sp",
            "as tp, activations sharded along the sequence between the layers that are cut",
            _REPLICAS,
            replace(_IN_PLACE, sequence="sharded"),
            compared=False,
        ),
        Strategy(
            "tp-sp",
            "as tp, activations whole between the layers that are cut",
            _REPLICAS,
            replace(_IN_PLACE, sequence="whole"),
            compared=False,
        ),
        Strategy(
            "zero1+tp", "zero1 over the batch, tensor parallelism inside", _KEPT, _IN_PLACE, compared=False, whole_gradients=True
        ),
    )
    for name in (s.name, *s.aliases)
}

IN_STAGES: Mapping[str, str] = {"pipeline": "auto", "model_parallel": "auto", "ddp+pipeline": "ddp", "3d": "zero1+tp"}
"""Strategies that cut the program into pipeline stages, and the strategy inside each stage."""

# What degrees are called, and axis names taken as the user's hint of use when respect_axis_names=True.
_DATA_AXIS = AxisRule(batch="batch only", use="whole")
_SEQUENCE_AXIS = AxisRule(batch="sequence only", use="whole")
_MODEL_AXIS = AxisRule(batch="whole")
DEGREES: Mapping[str, AxisRule] = {"dp": _DATA_AXIS, "cp": _SEQUENCE_AXIS, "tp": _MODEL_AXIS}

# The same where many meshes of three axes are looked at: computation follows what the axis cuts, which leaves the others to decide.
ROLES: Mapping[str, AxisRule] = {
    "dp": replace(_DATA_AXIS, compute="follows batch"),
    "cp": replace(_SEQUENCE_AXIS, compute="follows sequence"),
    "tp": _MODEL_AXIS,
}
AXIS_NAMES: Mapping[str, AxisRule] = {
    "dp": _DATA_AXIS,
    "data": _DATA_AXIS,
    "fsdp": _DATA_AXIS,
    "cp": _SEQUENCE_AXIS,
    "tp": _MODEL_AXIS,
    "model": _MODEL_AXIS,
}

_GATHERS = frozenset({"all_gather", "all_to_all"})
_LISTED = 4


def strategy_named(name: str) -> Strategy:
    """Look a strategy up by name or alias.

    Raises:
        InputError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise InputError(f"strategy {name!r} is unknown: use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def axis_name_rules(mesh: MeshShape) -> tuple[AxisRule, ...]:
    """The rules that the axes' names ask for; other names are free."""
    return tuple(AXIS_NAMES.get(name, AxisRule()) for name in mesh.names)


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
