"""Named strategies: what each says of the one problem, whose restrictions :mod:`.restrict` makes of it.

A strategy says, per mesh axis, how the batch, the parameters at rest and the parameters in use lie on it, and whether
computation follows the batch.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.mesh import MeshShape


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
