"""What a program is to its caller: which tensors go in and out, by role and name, and where they lie.

Together with a rank's generated graphs this is all that running needs. It is plain data, so that a program that was just captured and
one that was read from files run by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture, GraphOutput, loss_of, no_loss
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, even_local_shape
from meshwright.planner.ir.verify import parameter_behind
from meshwright.runtime.inputs import Call, CallBinder, PlainLeaf, TensorLeaf


@dataclass(frozen=True, slots=True)
class Given:
    """One input of a program.

    Attributes:
        value: name of the value in the program.
        role: as in ``GraphInput.role``.
        name: FQN, or path in the call, as there; ``aliases`` further FQNs.
        shape: global shape.
        dtype: element type.
        trainable: whether the program makes a gradient for this parameter.
        placements: where it lies.
    """

    value: str
    role: str
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    placements: Placements


@dataclass(frozen=True, slots=True)
class Result:
    """One leaf of the model's output.

    Attributes:
        name: its path.
        shape, dtype, placements: of the whole tensor; None where it is no tensor.
        constant: the object itself, where it is no tensor.
        differentiable: whether the backward takes a tangent for it.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    placements: Placements | None
    constant: Any
    differentiable: bool

    @property
    def is_scalar(self) -> bool:
        """Whether it may be a loss."""
        return self.shape == () and self.dtype is not None and self.dtype.is_floating_point

    @property
    def is_spread(self) -> bool:
        """Whether it lies in pieces."""
        return self.placements is not None and not all(p.is_replicate for p in self.placements)


@dataclass(frozen=True)
class Interface:
    """A program as its caller sees it.

    Attributes:
        inputs: its inputs, in the capture's order.
        outputs: the leaves of its output, in order.
        call: path of each tensor of a call to its value name.
        plain: path of each other leaf of a call to its ``repr``.
        mutations: FQNs of the buffers that get new values.
        gradients: where each gradient ends, by name.
        kept: parameters that gathered copies are kept of.
        loss: index of the loss in ``outputs``; None where there is none.
        training: whether there is a backward.
        modes: training mode of every module, in the order of ``modules()``.
        precision: as in the plan.
        wants_gradient: paths of the call's tensors for which a gradient is made.
    """

    inputs: tuple[Given, ...]
    outputs: tuple[Result, ...]
    call: dict[str, str]
    plain: dict[str, str]
    mutations: tuple[str, ...]
    gradients: dict[str, Placements]
    kept: tuple[str, ...]
    loss: int | None
    training: bool
    modes: tuple[bool, ...]
    precision: str | None
    wants_gradient: tuple[str, ...]

    def of(self, role: str) -> tuple[Given, ...]:
        """The inputs of one role."""
        return tuple(i for i in self.inputs if i.role == role)

    @property
    def loss_index(self) -> int:
        """Index of the loss in ``outputs``.

        Raises:
            InputError: the model returns none.
        """
        if self.loss is None:
            raise no_loss((o.name, o.shape) for o in self.outputs if o.shape is not None)
        return self.loss

    @property
    def placements(self) -> dict[str, Placements]:
        """Where every input lies, by value name."""
        return {i.value: i.placements for i in self.inputs}

    @property
    def rests(self) -> dict[str, Placements]:
        """Where every parameter rests, by every FQN."""
        return {name: i.placements for i in self.of("parameter") for name in (i.name, *i.aliases)}

    def planned_call(self, batch: str, sizes: Sequence[int]) -> Call:
        """The call that it is for, as a rank passes it.

        Args:
            batch: ``"global"``, or ``"local"``: pieces.
            sizes: of the mesh.
        """
        given = {i.value: i for i in self.inputs}
        tensors: Call = {
            path: _leaf(given[value], batch, sizes, path in self.wants_gradient) for path, value in self.call.items()
        }
        return {**tensors, **{path: PlainLeaf(text) for path, text in self.plain.items()}}


def _leaf(given: Given, batch: str, sizes: Sequence[int], wants_gradient: bool) -> TensorLeaf:
    shape = even_local_shape(given.shape, given.placements, sizes) if batch == "local" else given.shape
    return TensorLeaf(shape, given.dtype, wants_gradient)


def interface_of(capture: Capture, plan: Plan, binder: CallBinder, modes: tuple[bool, ...]) -> Interface:
    """The interface of a captured program."""
    graph = capture.graph
    placeholders, plain = binder.captured(capture)
    placed = list(zip(graph.outputs, plan.outputs, strict=True))
    outputs = tuple(_result(out, placements) for out, placements in placed if out.role == "output")
    behind = {parameter_behind(graph, value) for value in plan.kept}
    wanting = {o.name for o in graph.outputs_of("gradient") if o.value is not None}
    return Interface(
        inputs=tuple(
            Given(i.value.name, i.role, i.name, i.aliases, i.value.shape, i.value.dtype, i.trainable, plan.inputs[i.value.name])
            for i in graph.inputs
        ),
        outputs=outputs,
        call={path: i.value.name for path, i in placeholders.items()},
        plain={path: repr(value) for path, value in plain.items()},
        mutations=tuple(o.name for o in graph.outputs_of("mutation")),
        gradients={out.name: p for out, p in placed if out.role == "gradient" and p is not None},
        kept=tuple(i.name for i in graph.inputs_of("parameter") if i.value.name in behind),
        loss=_loss_index(capture),
        training=capture.training,
        modes=modes,
        precision=plan.precision,
        wants_gradient=tuple(path for path, i in placeholders.items() if i.name in wanting),
    )


def _result(out: GraphOutput, placements: Placements | None) -> Result:
    if out.value is None:
        return Result(out.name, None, None, None, out.constant, out.differentiable)
    return Result(out.name, out.value.shape, out.value.dtype, placements, None, out.differentiable)


def _loss_index(capture: Capture) -> int | None:
    try:
        loss = loss_of(capture.graph)
    except InputError:
        return None
    return next(i for i, o in enumerate(capture.graph.outputs_of("output")) if o is loss)
