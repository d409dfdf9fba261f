"""The plan: everything the runtime, the reports and export need to know, frozen, hashed, readable JSON.

A plan says for every op of the captured graph which placements it reads and writes, for every parameter where it rests,
and for every change of placement which path of collectives it takes. A hand-written plan is a legal input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import PlanFormatError
from meshwright.planner.ir.json_lines import json_lines
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.ir.spec import Placements, format_placements, parse_placements

if TYPE_CHECKING:
    from meshwright.planner.ir.graph import OpGraph

SCHEMA_VERSION = 1

KEPT = "kept"
"""Phase of the path by which a copy that is kept for the whole step is made: see :attr:`Plan.kept`."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Placements that an op reads (one per ``Op.ins``) and makes (one per ``Op.outs``, None for a missing result)."""

    ins: tuple[Placements, ...]
    outs: tuple[Placements | None, ...]

    def __str__(self) -> str:
        ins = ",".join(map(format_placements, self.ins))
        return f"{ins}->{','.join('-' if p is None else format_placements(p) for p in self.outs)}"

    @classmethod
    def parse(cls, text: str) -> OpSpec:
        ins, arrow, outs = text.partition("->")
        if not arrow:
            raise PlanFormatError(f"op spec {text!r} has no '->'")
        return cls(
            tuple(parse_placements(t) for t in ins.split(",") if t),
            tuple(None if t == "-" else parse_placements(t) for t in outs.split(",")),
        )


def _texts(specs: Iterable[OpSpec]) -> list[str]:
    """The specs as text, each object once: copied blocks share theirs."""
    known: dict[int, str] = {}
    found = []
    for spec in specs:
        if id(spec) not in known:
            known[id(spec)] = str(spec)
        found.append(known[id(spec)])
    return found


def _flat(record: Any) -> dict[str, Any]:
    """A record's fields by name, not copied: ``asdict`` takes ten times as long."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that the plan predicts: ``count`` equal ones.

    Attributes:
        kind: ``all_gather``, ``all_reduce``, ``reduce_scatter`` or ``all_to_all``; ``broadcast``, ``scatter`` and ``gather`` of one
            controller.
        axis: index of the mesh axis it runs over.
        bytes: bytes of the larger of the local input and the local output.
        time_s: predicted seconds of one.
        hidden: whether it can be issued ahead and hide behind compute (a parameter's gather, a gradient's reduction).
        count: how many.
    """

    kind: str
    axis: int
    bytes: int
    time_s: float
    hidden: bool
    count: int = 1


@dataclass(frozen=True, slots=True)
class Redistribution:
    """One value brought from the placement it was made in to one that is needed.

    Attributes:
        value: name of the value.
        phase: phase of the ops that need it: a value read in both phases is redistributed in each; ``"kept"``: once for the
            whole step, see :attr:`Plan.kept`.
        path: the placements passed through, first that of the producer; neighbours differ in one mesh axis.
    """

    value: str
    phase: str
    path: tuple[Placements, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one training step (or one inference call) is predicted to take, per device.

    Attributes:
        compute_s: kernels.
        exposed_s: communication that nothing hides.
        hidden_s: communication that can be issued ahead.
        step_time_s: the whole step: exposed, plus the longer of compute and hidden, phase by phase.
        memory_bytes: bytes at the peak by category: ``parameters``, ``gradients``, ``optimizer``, ``activations``, ...
        peak_at: the op that runs at the peak; ``""`` where it is not known.
        moved_bytes: with stages, what the busiest device sends or receives per step, inside its stages and over their boundaries.
        in_flight_bytes: with stages, the most that a rank keeps for later backwards between two actions. ``activations`` at the peak are
            less where the peak is within a backward, which frees what it has read.
    """

    compute_s: float
    exposed_s: float
    hidden_s: float
    step_time_s: float
    memory_bytes: Mapping[str, int]
    peak_at: str = ""
    moved_bytes: int = 0
    in_flight_bytes: int = 0

    @property
    def peak_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True)
class Fallback:
    """Ops that run replicated because no rule is known for them.

    Attributes:
        target: overload name.
        count: how many such ops.
        time_s: what they cost per step, replicated.
        bytes: bytes of their results, replicated.
    """

    target: str
    count: int
    time_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """A named strategy beside the chosen plan.

    Attributes:
        strategy: its name.
        fits: whether it fits the memory limit.
        step_time_s: predicted, or None where it cannot be planned at all.
        peak_memory_bytes: predicted, or None likewise.
        reason: why it does not fit or exist, or ``""``.
        mesh: sizes of the logical mesh on which it is best.
    """

    strategy: str
    fits: bool
    step_time_s: float | None
    peak_memory_bytes: int | None
    reason: str = ""
    mesh: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MeshTried:
    """One logical mesh that was considered.

    Attributes:
        sizes: of its axes.
        names: of its axes.
        links: link name of each axis.
        verdict: ``"chosen"``; ``"slower"`` (solved); ``"excluded"`` (a bound shows that it cannot be better, within the gap);
            ``"infeasible"`` (nothing fits); ``"impossible"`` (the batch or a pin does not suit it); or ``"not better"`` (three axes,
            tried without all of their candidates, so that nothing is proved).
        bound_s: proved lower bound of the time of every plan on it; None where nothing fits or nothing is proved.
        step_time_s: predicted time of its best plan, where it was solved.
        reason: what excluded it.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    links: tuple[str, ...]
    verdict: str
    bound_s: float | None = None
    step_time_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InputInfo:
    """What a placeholder is, for reports: they see the plan alone.

    Attributes:
        role: as in ``GraphInput.role``.
        name: FQN or path in the call.
        shape: global shape.
        dtype: dtype name without ``torch.``.
        aliases: further FQNs of a tied parameter.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What an op is, for reports.

    Attributes:
        target: overload name.
        phase: ``"forward"`` or ``"backward"``.
        module_path: dotted path of the module that called it.
        shape: global shape of its first result.
    """

    target: str
    phase: str
    module_path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A complete plan for one captured program on one mesh.

    Attributes:
        graph_hash: :attr:`OpGraph.hash` of the program it is for.
        model: the model's class name, for people.
        mesh: logical mesh.
        device: device name; ``links`` the link name of each mesh axis.
        memory_limit_bytes: the limit it was planned under.
        strategy: the name asked for (``"auto"``, ``"ddp"``, ...).
        precision: None or ``"bf16-mixed"``.
        optimizer: name of the optimizer whose state was counted.
        training: whether it has a backward.
        accumulate: how many passes the caller adds up before a step of the optimizer; more than one: their sums were counted.
        inputs: placement of every placeholder by value name: parameters and buffers at rest, batch, tangents.
        ops: spec of every op by name.
        outputs: final placement of every result of the graph, in order; None where there is no tensor. A parameter's
            gradient ends in the parameter's own placement.
        redistributions: the paths; one that is not listed takes :func:`~meshwright.planner.ir.redistribute.default_path`.
        collectives: predicted collectives of one step, grouped.
        predicted: predicted time and memory.
        bound_s: proved lower bound of the objective; ``objective_s`` its value for this plan; ``gap`` their relative
            distance (0 where proved optimal).
        fallbacks: ops without a rule.
        alternatives: the named strategies beside it.
        meshes: the logical meshes that were considered, the chosen one first; empty for a hand-written plan.
        solver: phases and sizes: ``{"trace_s": ..., "solve_s": ..., "variables": ...}``.
        folded: ``{"classes": ..., "clusters": ..., "blocks": ...}``: what was decided once for many; ``"captured"``: the lists of
            modules of which only some were traced and the others copied.
        notes: sentences the reader must know (options ignored, limits reached).
        kernel_s: predicted seconds of each kernel, by the name of its last op; what collectives are placed by.
        input_info: what each placeholder is, by value name; for reports only.
        op_info: what each op is, by name; for reports only.
        pipeline: stages, schedule and micro-batches; None: every rank runs the whole program. With stages, ``mesh`` is the
            mesh inside each of them.
        recompute: what the backward computes again: ``graph_hash`` is that of the program in which it does.
        kept: value made from one parameter alone to the placements that all its readers find it in: it is brought there once per
            optimizer step and kept for the whole of it (ZeRO-1 and 2). The path there is listed with phase ``"kept"``.
        one_controller: whether the mesh's first device hands out batch and parameters for every call and gathers the outputs (data
            parallelism as ``torch.nn.DataParallel`` does it).
    """

    graph_hash: str
    model: str
    mesh: MeshShape
    device: str
    links: tuple[str, ...]
    memory_limit_bytes: int
    strategy: str
    precision: str | None
    optimizer: str
    training: bool
    inputs: Mapping[str, Placements]
    ops: Mapping[str, OpSpec]
    outputs: tuple[Placements | None, ...]
    redistributions: tuple[Redistribution, ...]
    collectives: tuple[Collective, ...]
    predicted: Prediction
    objective_s: float
    bound_s: float
    gap: float
    fallbacks: tuple[Fallback, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    meshes: tuple[MeshTried, ...] = ()
    solver: Mapping[str, Any] = field(default_factory=dict)
    folded: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kernel_s: Mapping[str, float] = field(default_factory=dict)
    input_info: Mapping[str, InputInfo] = field(default_factory=dict)
    op_info: Mapping[str, OpInfo] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    recompute: Recompute = field(default_factory=Recompute)
    kept: Mapping[str, Placements] = field(default_factory=dict)
    one_controller: bool = False
    accumulate: int = 1
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def hash(self) -> str:
        """sha256 of what the plan *does* (program, mesh, placements, paths), not of times, solver or notes."""
        return self._hash_of(self.to_json_dict())

    def _hash_of(self, data: Mapping[str, Any]) -> str:
        does = {
            k: data[k]
            for k in ("schema_version", "graph_hash", "mesh", "precision", "inputs", "ops", "outputs", "redistributions")
        }
        if self.pipeline is not None:
            does["pipeline"] = data["pipeline"]
        if self.recompute != Recompute():
            does["recompute"] = data["recompute"]
        if self.kept:
            does["kept"] = data["kept"]
        if self.one_controller:
            does["one_controller"] = True
        return hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()

    @cached_property
    def paths(self) -> dict[tuple[str, str, Placements], tuple[Placements, ...]]:
        """(value, phase, wanted placements) to the listed path."""
        return {(r.value, r.phase, r.path[-1]): r.path for r in self.redistributions}

    def to_json_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        return {
            "schema_version": self.schema_version,
            "graph_hash": self.graph_hash,
            "model": self.model,
            "mesh": {"sizes": list(self.mesh.sizes), "names": list(self.mesh.names)},
            "device": self.device,
            "links": list(self.links),
            "memory_limit_bytes": self.memory_limit_bytes,
            "strategy": self.strategy,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "training": self.training,
            "inputs": {k: format_placements(v) for k, v in self.inputs.items()},
            "ops": dict(zip(self.ops, _texts(self.ops.values()), strict=True)),
            "outputs": [None if p is None else format_placements(p) for p in self.outputs],
            "redistributions": [[r.value, r.phase, *map(format_placements, r.path)] for r in self.redistributions],
            "collectives": [asdict(c) for c in self.collectives],
            "predicted": {**asdict(self.predicted), "memory_bytes": dict(self.predicted.memory_bytes)},
            "objective_s": self.objective_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "fallbacks": [asdict(f) for f in self.fallbacks],
            "alternatives": [asdict(a) for a in self.alternatives],
            "meshes": [asdict(m) for m in self.meshes],
            "solver": dict(self.solver),
            "folded": dict(self.folded),
            "notes": list(self.notes),
            "kernel_s": dict(self.kernel_s),
            "input_info": {k: _flat(v) for k, v in self.input_info.items()},
            "op_info": {k: _flat(v) for k, v in self.op_info.items()},
            "pipeline": None if self.pipeline is None else self.pipeline.to_json_dict(),
            "recompute": self.recompute.to_json_dict(),
            "kept": {k: format_placements(v) for k, v in self.kept.items()},
            **({"one_controller": True} if self.one_controller else {}),
            **({"accumulate": self.accumulate} if self.accumulate > 1 else {}),
        }

    def to_json(self) -> str:
        """The plan as JSON text, with its hash; a line for each entry of a table."""
        with collector.paused():
            data = self.to_json_dict()
            return json_lines({**data, "hash": self._hash_of(data)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back.

        Raises:
            PlanFormatError: not JSON, of another schema version, a field missing or malformed, or the hash differs.
        """
        try:
            data = json.loads(text)
        except ValueError as e:
            raise PlanFormatError(f"a plan must be JSON: {e}") from None
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise PlanFormatError(f"plan has schema version {found!r}, this version reads {SCHEMA_VERSION}: plan again")
        stated = data.pop("hash", None)
        try:
            plan = cls(
                **{
                    **data,
                    "mesh": MeshShape(tuple(data["mesh"]["sizes"]), tuple(data["mesh"]["names"])),
                    "links": tuple(data["links"]),
                    "inputs": {k: parse_placements(v) for k, v in data["inputs"].items()},
                    "ops": {k: OpSpec.parse(v) for k, v in data["ops"].items()},
                    "outputs": tuple(None if p is None else parse_placements(p) for p in data["outputs"]),
                    "redistributions": tuple(
                        Redistribution(v, phase, tuple(map(parse_placements, path)))
                        for v, phase, *path in data["redistributions"]
                    ),
                    "collectives": tuple(Collective(**c) for c in data["collectives"]),
                    "predicted": Prediction(**data["predicted"]),
                    "fallbacks": tuple(Fallback(**f) for f in data["fallbacks"]),
                    "alternatives": tuple(_record(Alternative, a) for a in data["alternatives"]),
                    "meshes": tuple(_record(MeshTried, m) for m in data.get("meshes", ())),
                    "notes": tuple(data["notes"]),
                    "input_info": {k: _record(InputInfo, v) for k, v in data.get("input_info", {}).items()},
                    "op_info": {k: _record(OpInfo, v) for k, v in data.get("op_info", {}).items()},
                    "pipeline": Pipeline.from_json_dict(data["pipeline"]) if data.get("pipeline") else None,
                    "recompute": Recompute.from_json_dict(data.get("recompute", {})),
                    "kept": {k: parse_placements(v) for k, v in data.get("kept", {}).items()},
                }
            )
        except PlanFormatError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanFormatError(f"plan is malformed: {type(e).__name__}: {e}") from None
        if stated is not None and stated != plan.hash:
            raise PlanFormatError(
                f"plan hash is {plan.hash[:12]} but the file states {str(stated)[:12]}: it was edited; delete its 'hash' field if that was meant"
            )
        return plan

    def described(self, graph: OpGraph) -> Plan:
        """This plan with ``input_info`` and ``op_info`` filled from the program it is for."""
        inputs = {
            i.value.name: InputInfo(i.role, i.name, i.value.shape, _dtype_name(i.value.dtype), i.aliases) for i in graph.inputs
        }
        ops = {
            op.name: OpInfo(op.target, op.phase, op.module_path, next((v.shape for v in op.outs if v), ())) for op in graph.ops
        }
        return replace(self, input_info=inputs, op_info=ops)

    def report(self, *, width: int | None = None) -> str:
        """The plan as a text table for people; ``width`` in columns (default: the terminal's, or 120)."""
        from meshwright.report import report  # the one import upwards: a method where people look for it

        return report(self, width=width)

    def verify(self, model: Any, *args: Any, **options: Any) -> Any:
        """Check the plan without its cluster; arguments, result and errors are those of :func:`meshwright.verify`."""
        return import_module("meshwright.verifying").verify(self, model, *args, **options)  # by name: it stands above this layer

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`.

        Raises:
            PlanFormatError: see :meth:`from_json`, or the file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as e:
            raise PlanFormatError(f"plan file {path} cannot be read: {e.strerror}") from None


Record = TypeVar("Record", InputInfo, OpInfo, Alternative, MeshTried)


def _record(kind: type[Record], data: Mapping[str, Any]) -> Record:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return kind(**fields)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
