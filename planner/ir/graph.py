"""The captured program: a joint forward+backward FX graph, and a typed read-only view of it.

The FX graph is what the passes rewrite; :class:`OpGraph` is what planning reads. Both are of the *whole* batch on one
device (global shapes). Names are those of the FX nodes, so specs chosen on the view apply to the graph.

Conventions of the FX graph (established by ``trace`` and kept by ``remat``):

* every ``call_function`` target is an ``OpOverload``, or ``operator.getitem`` on a multi-result op;
* ``node.meta["val"]`` is a FakeTensor (or a tuple of them) with the global shape;
* ``node.meta["phase"]`` is ``"forward"`` or ``"backward"``; all forward nodes come before all backward nodes;
* placeholders come in the order of ``OpGraph.inputs``, the output node returns ``OpGraph.outputs`` in order.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import InputError


@lru_cache(maxsize=4096)
def _form_text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the global program.

    Attributes:
        name: the FX node's name; result ``i`` of an op with several results is ``"node#i"``.
        shape: global shape.
        dtype: element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {_form_text(self.dtype, self.shape)}"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call.

    Attributes:
        name: FX node name.
        target: overload name, ``"aten.mm.default"``.
        args: positional arguments; tensors stand as :class:`Value`, lists and tuples as tuples.
        kwargs: keyword arguments, as (name, value) pairs, likewise.
        ins: the tensor arguments in order of appearance (args, then kwargs); one that occurs twice stands twice.
        outs: the results; None where the op returns no tensor there (a masked-out gradient).
        phase: ``"forward"`` or ``"backward"``.
        forward_op: for a backward op, the forward op that it differentiates, where known.
        module_path: dotted path of the module that called it (``"model.layers.0.mlp"``), or ``""``.
        source: ``"file.py:12, in forward: x = self.up(x)"``, or ``""``.
        recompute_of: name of the forward op that this backward-phase op computes again, or None.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    ins: tuple[Value, ...]
    outs: tuple[Value | None, ...]
    phase: str = "forward"
    forward_op: str | None = None
    module_path: str = ""
    source: str = ""
    recompute_of: str | None = None

    def kwarg(self, name: str, default: Any = None) -> Any:
        return dict(self.kwargs).get(name, default)

    def arg(self, index: int, default: Any = None) -> Any:
        """Positional argument ``index``, or ``default`` where the call left it out."""
        return self.args[index] if index < len(self.args) else default

    def __str__(self) -> str:
        outs = ", ".join("-" if v is None else str(v) for v in self.outs)
        return f"{outs} = {self.target}({', '.join(v.name for v in self.ins)})"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A placeholder of the joint graph.

    Attributes:
        value: the tensor.
        role: ``"parameter"``, ``"buffer"``, ``"input"`` (batch), ``"tangent"`` (gradient of an output), ``"constant"``
            (tensor baked by capture) or ``"seed"`` (int64 scalar feeding random ops).
        name: parameter or buffer FQN; for batch inputs the path in the call (``"input_ids"``, ``"args[0]"``); for a
            tangent the path of its output.
        aliases: further FQNs of the same parameter (tied weights). Only one placeholder per tied group is used.
        trainable: for a parameter, whether it requires a gradient.
    """

    value: Value
    role: str
    name: str
    aliases: tuple[str, ...] = ()
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """A result of the joint graph.

    Attributes:
        value: the tensor, or None for a gradient that does not exist or a result that is no tensor.
        role: ``"mutation"`` (new value of a buffer), ``"output"`` (user output) or ``"gradient"``.
        name: buffer FQN; path in the output structure; FQN of the parameter or path of the input.
        constant: the object itself, where a user output is no tensor.
        differentiable: for a user output, whether a tangent placeholder exists for it.
    """

    value: Value | None
    role: str
    name: str
    constant: Any = None
    differentiable: bool = False


@dataclass(frozen=True)
class OpGraph:
    """Read-only view of the joint graph, in execution order."""

    inputs: tuple[GraphInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[GraphOutput, ...]

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[str, Op | GraphInput]:
        """Value name to what makes it."""
        made: dict[str, Op | GraphInput] = {i.value.name: i for i in self.inputs}
        for op in self.ops:
            made.update((v.name, op) for v in op.outs if v is not None)
        return made

    @cached_property
    def consumers(self) -> dict[str, tuple[Op, ...]]:
        """Value name to the ops that read it, each once, in order."""
        read: dict[str, dict[str, Op]] = {}
        for op in self.ops:
            for v in op.ins:
                read.setdefault(v.name, {})[op.name] = op
        return {name: tuple(ops.values()) for name, ops in read.items()}

    @cached_property
    def phase_of(self) -> dict[str, str]:
        """Value name to the phase that makes it (tangents: backward; other inputs: forward)."""
        phases = {i.value.name: "backward" if i.role == "tangent" else "forward" for i in self.inputs}
        for op in self.ops:
            phases.update((v.name, op.phase) for v in op.outs if v is not None)
        return phases

    @cached_property
    def saved(self) -> tuple[Value, ...]:
        """Values made by forward ops and read by backward ops: the activations kept for the backward."""
        phase = self.phase_of
        made = {v.name for op in self.ops if op.phase == "forward" for v in op.outs if v is not None}
        kept: dict[str, Value] = {}
        for op in self.ops:
            if op.phase == "backward":
                kept.update((v.name, v) for v in op.ins if v.name in made and phase[v.name] == "forward")
        return tuple(kept.values())

    def inputs_of(self, role: str) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.role == role)

    def outputs_of(self, role: str) -> tuple[GraphOutput, ...]:
        return tuple(o for o in self.outputs if o.role == role)

    @cached_property
    def hash(self) -> str:
        """sha256 over the program: ops, arguments, shapes, dtypes, roles and names; not module paths or source lines."""
        h = hashlib.sha256()
        h.update("".join([f"{line}\n" for line in self.lines()]).encode())
        return h.hexdigest()

    def lines(self) -> Iterator[str]:
        """The program as text, one statement a line."""
        for i in self.inputs:
            yield f"{i.role} {i.name!r} {' '.join(i.aliases)} {i.value}"
        for op in self.ops:
            outs = ", ".join(["-" if v is None else f"{v.name}: {_form_text(v.dtype, v.shape)}" for v in op.outs])
            args = [a.name if type(a) is Value else _arg_text(a) for a in op.args]
            if op.kwargs:
                args += [f"{k}={_arg_text(v)}" for k, v in op.kwargs]
            yield f"{outs} = {op.target}({', '.join(args)})"
        for o in self.outputs:
            yield f"{o.role} {o.name!r} {o.value.name if o.value is not None else repr(o.constant)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _arg_text(arg: Any) -> str:
    if isinstance(arg, Value):
        return arg.name
    if isinstance(arg, tuple):
        return f"[{', '.join([_arg_text(a) for a in arg])}]"
    return str(arg)


@dataclass(frozen=True)
class Repeat:
    """A repeated block of which a capture holds two: *block 1*, and its copy, which stand for ``copies + 1`` of the model.

    The forward of block 1 stands for ``copies`` and that of its copy for one; in the backward it is the other way round. So
    a value is counted as often as it goes to a next block of the same kind, and parameters and kernels ``copies + 1`` times.

    Where the first of the alike blocks are recomputed otherwise than the others, each of the two groups has a record of its
    own, and the program holds block 1 and three copies: the first two stand for one group, the last two for the other.

    Attributes:
        path: dotted path of the list of blocks.
        first: index in the list, of the program as of the whole model, of the first block that stands for others.
        total: length of the list.
        copies: how many copies of block 1 the whole model has.
        instance: name of an FX node that belongs to a captured block, to that block's position: ``position`` is block 1, the
            next one its copy. Nodes that compute a forward op again in the backward are not listed.
        apart: values that go from block to block through a sum over all of them: no kernel makes and reads one.
        crossing: values computed again that go from block to block: no kernel does where one would span several blocks.
        planned_at: number of the copy that is block 1 here: 0, or 2 in the record of a second group.
        whole_at: number of the copy that it is in the whole model.
    """

    path: str
    first: int
    total: int
    copies: int
    instance: Mapping[str, int]
    apart: frozenset[str] = frozenset()
    crossing: frozenset[str] = frozenset()
    planned_at: int = 0
    whole_at: int = 0

    @property
    def position(self) -> int:
        """Position of block 1 among the blocks of the program."""
        return self.first + self.planned_at

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of block 1's nodes without the number of the copy that it is."""
        ending = f"__{self.planned_at}" if self.planned_at else ""
        return tuple(n.removesuffix(ending) for n, at in self.instance.items() if at == self.position)

    def planned(self, name: str, k: int = 0) -> str:
        """Name in the program of block 1's node ``name`` (without number), or with ``k`` 1 of its copy's."""
        return f"{name}__{self.planned_at + k}" if self.planned_at + k else name

    def whole(self, name: str, k: int) -> str:
        """Name in the whole model of the node ``name`` of copy ``k``."""
        return f"{name}__{self.whole_at + k}" if self.whole_at + k else name


@dataclass
class Capture:
    """A model captured once, for planning and rewriting.

    Attributes:
        gm: the joint graph; see the module docstring for its conventions. Treat as immutable: passes copy it.
        graph: the typed view of ``gm``.
        in_spec: tree spec of ``(args, kwargs)`` of the call that was captured; leaves that are tensors are the
            ``"input"`` placeholders in order, other leaves were baked in (their values are ``baked_inputs``).
        out_spec: tree spec of the model's output; its leaves are the ``"output"`` results in order.
        baked_inputs: leaf index to value, for leaves of the call that are no tensors.
        training: whether a backward was captured.
        precision: None, or ``"bf16-mixed"``.
        constants: values of the ``"constant"`` placeholders by name.
        fake_mode: the FakeTensorMode of ``gm``'s ``meta["val"]``.
        repeats: the blocks that stand for more than themselves; empty for a capture of the whole model.
    """

    gm: fx.GraphModule
    graph: OpGraph
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    baked_inputs: dict[int, Any] = field(default_factory=dict)
    training: bool = True
    precision: str | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fake_mode: Any = None
    repeats: tuple[Repeat, ...] = ()


def loss_of(graph: OpGraph) -> GraphOutput:
    """The output that a training step minimises; of a program for inference, its one 0-dim float output or that called ``loss``.

    Raises:
        InputError: there is none, or there are several and none is called ``loss``.
    """
    outputs = graph.outputs_of("output")
    floats = [o for o in outputs if o.value is not None and o.value.shape == () and o.value.dtype.is_floating_point]
    has_gradient = any(o.differentiable for o in outputs)
    scalars = [o for o in floats if o.differentiable or not has_gradient]
    named = [o for o in scalars if o.name.split(".")[-1].strip("[]'\"") == "loss"]
    chosen = named or scalars
    if len(chosen) == 1:
        return chosen[0]
    raise no_loss((o.name, o.value.shape) for o in outputs if o.value is not None)


def no_loss(outputs: Iterable[tuple[str, Sequence[int]]]) -> InputError:
    """The error for a model without a loss; ``outputs`` are the names and shapes of what it returns."""
    found = ", ".join(f"{name}: {list(shape)}" for name, shape in outputs) or "nothing"
    return InputError(
        f"a step needs the loss, and the model returns {found}: return one 0-dim loss that depends on the parameters (or call one "
        "of several 'loss'), computed inside forward"
    )


# --- from FX ------------------------------------------------------------------------------------------------------


def fx_value(node: fx.Node) -> Value:
    """The :class:`Value` of a node with one tensor result, or of a ``getitem`` on a multi-result op."""
    val = node.meta["val"]
    return Value(value_name(node), tuple(val.shape), val.dtype)


def value_name(node: fx.Node) -> str:
    """Name of a node's value: its own name, or ``"producer#i"`` for a ``getitem``."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"{source.name}#{index}"
    return node.name


def op_of(node: fx.Node, known: dict[fx.Node, Value]) -> Op:
    """The typed view of one ``call_function`` node (not a ``getitem``); ``known``: values that were made already, added to."""
    ins: list[Value] = []

    def convert(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            value = known.get(arg)
            if value is None:
                value = known[arg] = fx_value(arg)
            ins.append(value)
            return value
        if isinstance(arg, list | tuple):
            return tuple(convert(a) for a in arg)
        return arg

    args = tuple(convert(a) for a in node.args)
    kwargs = tuple((k, convert(v)) for k, v in node.kwargs.items())
    val = node.meta["val"]
    if isinstance(val, list | tuple):
        outs = tuple(
            Value(f"{node.name}#{i}", tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for i, v in enumerate(val)
        )
    else:
        known[node] = Value(node.name, tuple(val.shape), val.dtype)
        outs = (known[node],)
    meta = node.meta
    return Op(
        name=node.name,
        target=str(node.target),
        args=args,
        kwargs=kwargs,
        ins=tuple(ins),
        outs=outs,
        phase=meta.get("phase", "forward"),
        forward_op=meta.get("forward_op"),
        module_path=meta.get("module_path", ""),
        source=meta.get("source", ""),
        recompute_of=meta.get("recompute_of"),
    )


def ops_of(graph: fx.Graph, same: Mapping[str, Op] | None = None) -> tuple[Op, ...]:
    """The typed view of every op of an FX graph, in order; ``same``: by name those that are viewed already."""
    known: dict[fx.Node, Value] = {}
    same = same or {}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return tuple([same.get(n.name) or op_of(n, known) for n in nodes])
