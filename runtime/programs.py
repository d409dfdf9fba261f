"""A lowered program bound to one rank of one mesh: which tensors go in, what comes out, and for which calls it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.passes import lower
from meshwright.passes.program import LocalProgram
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture, GraphOutput
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, even_local_shape, local_slice
from meshwright.planner.ir.verify import parameter_behind
from meshwright.runtime.boxed import Boxed, boxed, in_a_list
from meshwright.runtime.compile import compile_program, compiled_later
from meshwright.runtime.device import use_device_kernels
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.inplace import reduce_in_place
from meshwright.runtime.inputs import Call, CallBinder, PlainLeaf, TensorLeaf
from meshwright.runtime.kept import KeptCopies
from meshwright.runtime.mesh import coordinate_of, device_of, group_names, mesh_shape, torch_placements


@dataclass(frozen=True)
class Request:
    """A program that does not exist yet: what a planner is asked for at a call that no program is for.

    Attributes:
        module: the model on the meta device, with the training modes and ``requires_grad`` flags of now.
        args: positional arguments of the call, global shapes, on the meta device.
        kwargs: keyword arguments, likewise.
        training: whether a backward is wanted.
        precision: as the first plan's.
        pins: where every parameter rests, by FQN: the new plan must leave them there.
        pipeline: the stages and micro-batches of the first program; None where it has none.
        homes: the stages that hold each parameter, by FQN: the new cuts must keep their readers there.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    precision: str | None
    pins: Mapping[str, Placements]
    pipeline: Pipeline | None = None
    homes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


LOWERING = threading.Lock()
"""Ranks that are threads of one process share a capture's fake mode, which takes one thread at a time."""

Replan = Callable[[Request], tuple[Capture, Plan]]


@dataclass(frozen=True, slots=True)
class Output:
    """A user output of a program.

    Attributes:
        index: its index in the forward's results, or None where it is no tensor.
        constant: the object itself, where it is no tensor.
        differentiable: whether the backward takes a tangent for it.
        spread: torch placements and global shape, where it is returned as a DTensor; None for a plain tensor.
    """

    index: int | None
    constant: Any
    differentiable: bool
    spread: tuple[Any, tuple[int, ...]] | None


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program that this rank can run.

    Attributes:
        capture: what was captured; its graph is the global program.
        plan: where everything lies.
        local: this rank's graphs, on its device.
        mesh: what it is bound to.
        modes: training mode of every module, in the order of ``modules()``.
        call: the call that it is for, as this rank passes it (pieces under ``batch="local"``).
        inputs: path of each batch input to its value name.
        outputs: the user outputs, in the order of the output structure's leaves.
        constants: values of the constant placeholders by value name.
        trainable: FQNs of the parameters that it makes gradients for, aliases included.
        forward: callable of ``local.forward``; ``again`` likewise (compiled where asked).
        backward: likewise; takes its arguments in one list, which it empties, so that what was saved is freed on the way.
        roles: role and name of every placeholder by value name.
        gradient_placements: where each gradient ends, by its name.
        copies: gathered parameters that live until the parameters change.
    """

    capture: Capture
    plan: Plan
    local: LocalProgram
    mesh: DeviceMesh
    modes: tuple[bool, ...]
    call: Call
    inputs: Mapping[str, str]
    outputs: tuple[Output, ...]
    constants: Mapping[str, torch.Tensor]
    trainable: frozenset[str]
    forward: Callable[..., Sequence[torch.Tensor]]
    backward: Boxed | None
    roles: Mapping[str, tuple[str, str]]
    gradient_placements: Mapping[str, Placements]
    again: Callable[..., Sequence[torch.Tensor]] | None
    copies: KeptCopies

    def run_forward(self, flat: Sequence[torch.Tensor], parameters: Mapping[str, Any]) -> list[torch.Tensor]:
        """New buffers, outputs and saved values; what is kept of parameters is gathered only where they have changed."""
        local, copies = self.local, self.copies.fresh(parameters)
        if self.again is not None and copies is not None:
            return list(self.again(*flat, *copies))
        results = list(self.forward(*flat))
        end = len(results) - len(local.saved)
        start = end - len(local.kept)
        if local.kept:
            self.copies.keep(results[start:end], parameters)
        return results[:start] + results[end:]

    @property
    def differentiates(self) -> bool:
        return self.backward is not None

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's contiguous piece of the batch input ``name``, on its device."""
        piece = local_slice(whole, self.plan.inputs[name], mesh_shape(self.mesh).sizes, coordinate_of(self.mesh))
        return piece.to(device_of(self.mesh)).contiguous()

    def structure(self, results: Sequence[torch.Tensor], *, whole: bool = False) -> Any:
        """The model's own output structure from the forward's results; ``whole`` gathers what is spread."""
        return pytree.tree_unflatten([self._output(o, results, whole) for o in self.outputs], self.capture.out_spec)

    def _output(self, out: Output, results: Sequence[torch.Tensor], whole: bool) -> Any:
        if out.index is None:
            return out.constant
        local = results[out.index]
        if out.spread is None:
            return local
        placements, shape = out.spread
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        return gather_whole(spread) if whole else spread


def bind_program(
    capture: Capture,
    plan: Plan,
    mesh: DeviceMesh,
    binder: CallBinder,
    modes: tuple[bool, ...],
    *,
    batch: str,
    compile: bool,
) -> BoundProgram:
    """Lower ``capture`` as ``plan`` says for this rank and make it callable.

    Raises:
        InputError: the plan is for another program or another mesh.
    """
    check_plan(capture, plan, mesh_shape(mesh))
    with LOWERING:
        local = lower(capture, plan, coordinate_of(mesh), group_names(mesh), device=device_of(mesh))
    local = use_device_kernels(local, device_of(mesh))
    if compile:
        forward, one_by_one = compile_program(local, capture)
        backward = None if one_by_one is None else in_a_list(one_by_one)
        again = None if local.again is None else compiled_later(local.again, capture)
    else:
        local = reduce_in_place(local)
        again = None if local.again is None else local.again.forward
        forward, backward = local.forward.forward, None if local.backward is None else boxed(local.backward)
    placeholders, plain = binder.captured(capture)
    wanting = {o.name for o in capture.graph.outputs_of("gradient") if o.value is not None}
    call: Call = {
        path: TensorLeaf(
            _call_shape(given.value.shape, plan.inputs[given.value.name], mesh, batch), given.value.dtype, given.name in wanting
        )
        for path, given in placeholders.items()
    }
    call.update((path, PlainLeaf(repr(value))) for path, value in plain.items())
    return BoundProgram(
        capture=capture,
        plan=plan,
        local=local,
        mesh=mesh,
        modes=modes,
        call=call,
        inputs={path: given.value.name for path, given in placeholders.items()},
        outputs=_outputs(capture, plan, local, mesh),
        constants=constants_of(capture, mesh),
        trainable=frozenset(name for i in capture.graph.inputs_of("parameter") if i.trainable for name in (i.name, *i.aliases)),
        forward=forward,
        backward=backward,
        roles={i.value.name: (i.role, i.name) for i in capture.graph.inputs},
        gradient_placements={
            out.name: placements
            for out, placements in zip(capture.graph.outputs, plan.outputs, strict=True)
            if out.role == "gradient" and placements is not None
        },
        again=again,
        copies=KeptCopies(_kept_parameters(capture, plan)),
    )


def _kept_parameters(capture: Capture, plan: Plan) -> list[str]:
    """FQNs of the parameters that gathered copies are kept of."""
    behind = {parameter_behind(capture.graph, value) for value in plan.kept}
    return [i.name for i in capture.graph.inputs_of("parameter") if i.value.name in behind]


def check_plan(capture: Capture, plan: Plan, shape: MeshShape) -> None:
    """Refuse a plan that is for something else.

    Raises:
        InputError: another program, mesh, precision or phase.
    """
    if plan.graph_hash != capture.graph.hash:
        raise InputError(
            f"the plan is for another model or batch: it was made for program {plan.graph_hash[:12]} ({plan.model or 'unnamed'}), "
            f"this model and batch give program {capture.graph.hash[:12]}; plan again, or pass the model, example inputs and "
            "options that the plan was made with"
        )
    if plan.mesh.sizes != shape.sizes:
        raise InputError(f"the plan is for a mesh of {plan.mesh}, found one of {shape}: plan again for this mesh")


def _call_shape(shape: tuple[int, ...], placements: Placements, mesh: DeviceMesh, batch: str) -> tuple[int, ...]:
    return even_local_shape(shape, placements, mesh_shape(mesh).sizes) if batch == "local" else shape


def constants_of(capture: Capture, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The capture's constants on this rank's device, by value name."""
    return {
        i.value.name: capture.constants[i.name].detach().to(device_of(mesh)).contiguous()
        for i in capture.graph.inputs_of("constant")
    }


def _outputs(capture: Capture, plan: Plan, local: LocalProgram, mesh: DeviceMesh) -> tuple[Output, ...]:
    named = [
        (out, placements) for out, placements in zip(capture.graph.outputs, plan.outputs, strict=True) if out.role == "output"
    ]
    has_loss = any(_is_loss(out) for out, _ in named)
    found = []
    for (out, placements), index in zip(named, local.outputs, strict=True):
        spread = None
        if out.value is not None and placements is not None and out.value.shape and (has_loss or not _whole(placements)):
            spread = (torch_placements(placements, mesh_shape(mesh).sizes, f"output {out.name}"), out.value.shape)
        found.append(Output(index, out.constant, out.differentiable, spread))
    return tuple(found)


def _whole(placements: Placements) -> bool:
    return all(p.is_replicate for p in placements)


def _is_loss(out: GraphOutput) -> bool:
    return out.value is not None and out.value.shape == () and out.value.dtype.is_floating_point
