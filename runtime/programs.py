"""A lowered program bound to one rank of one mesh: which tensors go in, what comes out, and for which calls it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.passes import lower
from meshwright.passes.program import LocalProgram
from meshwright.passes.unreduced import waiting
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, local_slice
from meshwright.runtime.boxed import Boxed, boxed, in_a_list
from meshwright.runtime.compile import compile_program, compiled_later
from meshwright.runtime.device import use_device_kernels
from meshwright.runtime.direct_calls import call_directly
from meshwright.runtime.fused_bias import fuse_biases
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.inplace import reduce_in_place
from meshwright.runtime.inputs import Call, CallBinder
from meshwright.runtime.interface import Interface, interface_of
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


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One rank's program before it is made callable, whether it was captured here or read from files.

    Attributes:
        interface: what goes in and out.
        plan: where everything lies.
        constants: values of the constant placeholders by value name, on the rank's device.
        lowered: the rank's graphs as passes made them, over process groups of the given names; new ones at each call.
        fake_mode: that the graphs' fake values belong to.
        restore: from the leaves of the model's output to the output.
        structure: the form of the output, for those who want to write it.
        waiting: gradients of parameters that can wait to be reduced, by name, with the path from there to where they end; None where
            the graphs are as they were written.
        unreduced: as ``lowered``, without the reductions of these.
    """

    interface: Interface
    plan: Plan
    constants: Mapping[str, torch.Tensor]
    lowered: Callable[[Sequence[str]], LocalProgram]
    fake_mode: Any
    restore: Callable[[list[Any]], Any]
    structure: Any
    waiting: Mapping[str, tuple[Placements, ...]] | None = None
    unreduced: Callable[[Sequence[str]], LocalProgram] | None = None


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
        source: what it was made from.
        local: this rank's graphs, on its device.
        mesh: what it is bound to.
        call: the call that it is for, as this rank passes it (pieces under ``batch="local"``).
        outputs: the user outputs, in the order of the output structure's leaves.
        forward: callable of ``local.forward``; ``again`` likewise (compiled where asked).
        backward: likewise; takes its arguments in one list, which it empties, so that what was saved is freed on the way.
        copies: gathered parameters that live until the parameters change.
        waiting: the gradients that it leaves unreduced, as in ``RankProgram``.
    """

    source: RankProgram
    local: LocalProgram
    mesh: DeviceMesh
    call: Call
    outputs: tuple[Output, ...]
    forward: Callable[..., Sequence[torch.Tensor]]
    backward: Boxed | None
    again: Callable[..., Sequence[torch.Tensor]] | None
    copies: KeptCopies
    waiting: Mapping[str, tuple[Placements, ...]] = field(default_factory=dict)

    @property
    def interface(self) -> Interface:
        return self.source.interface

    @property
    def plan(self) -> Plan:
        return self.source.plan

    @property
    def modes(self) -> tuple[bool, ...]:
        """Training mode of every module, in the order of ``modules()``."""
        return self.interface.modes

    @property
    def inputs(self) -> Mapping[str, str]:
        """Path of each batch input to its value name."""
        return self.interface.call

    @cached_property
    def placements(self) -> Mapping[str, Placements]:
        """Where each input lies, by value name."""
        return self.interface.placements

    @cached_property
    def roles(self) -> Mapping[str, tuple[str, str]]:
        """Role and name of every placeholder by value name."""
        return {i.value: (i.role, i.name) for i in self.interface.inputs}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """FQNs of the parameters that it makes gradients for, one per tied group."""
        return tuple(i.name for i in self.interface.of("parameter") if i.trainable)

    @cached_property
    def trainable(self) -> frozenset[str]:
        """The same, aliases included."""
        return frozenset(name for i in self.interface.of("parameter") if i.trainable for name in (i.name, *i.aliases))

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
        piece = local_slice(whole, self.placements[name], mesh_shape(self.mesh).sizes, coordinate_of(self.mesh))
        return piece.to(device_of(self.mesh)).contiguous()

    def structure(self, results: Sequence[torch.Tensor], *, whole: bool = False) -> Any:
        """The model's own output structure from the forward's results; ``whole`` gathers what is spread."""
        return self.source.restore([self._output(o, results, whole) for o in self.outputs])

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


def captured_program(capture: Capture, plan: Plan, mesh: DeviceMesh, binder: CallBinder, modes: tuple[bool, ...]) -> RankProgram:
    """The program of this rank, of a capture.

    Raises:
        InputError: the plan is for another program or another mesh.
    """
    check_plan(capture, plan, mesh_shape(mesh))

    def lowered(groups: Sequence[str], reduces: bool = True) -> LocalProgram:
        with LOWERING:
            return lower(capture, plan, coordinate_of(mesh), groups, device=device_of(mesh), reduces=reduces)

    return RankProgram(
        interface=interface_of(capture, plan, binder, modes),
        plan=plan,
        constants=constants_of(capture, mesh),
        lowered=lowered,
        fake_mode=capture.fake_mode,
        restore=partial(pytree.tree_unflatten, treespec=capture.out_spec),
        structure=capture.out_spec,
        waiting=waiting(plan, capture.graph),
        unreduced=partial(lowered, reduces=False),
    )


def bind_program(program: RankProgram, mesh: DeviceMesh, *, batch: str, compile: bool, reduces: bool = True) -> BoundProgram:
    """Make a rank's program callable; ``reduces``: whether gradients that could wait are reduced."""
    lowered = program.lowered if reduces or program.unreduced is None else program.unreduced
    local = use_device_kernels(lowered(group_names(mesh)), device_of(mesh))
    if compile:
        forward, one_by_one = compile_program(local, program.fake_mode)
        backward = None if one_by_one is None else in_a_list(one_by_one)
        again = None if local.again is None else compiled_later(local.again, program.fake_mode)
    else:
        local = reduce_in_place(fuse_biases(local))
        call_directly(local.graphs)
        again = None if local.again is None else local.again.forward
        forward, backward = local.forward.forward, None if local.backward is None else boxed(local.backward)
    return BoundProgram(
        source=program,
        local=local,
        mesh=mesh,
        call=program.interface.planned_call(batch, mesh_shape(mesh).sizes),
        outputs=_outputs(program.interface, local, mesh),
        forward=forward,
        backward=backward,
        again=again,
        copies=KeptCopies(program.interface.kept),
        waiting={} if reduces or program.waiting is None else program.waiting,
    )


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


def constants_of(capture: Capture, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The capture's constants on this rank's device, by value name."""
    return {
        i.value.name: capture.constants[i.name].detach().to(device_of(mesh)).contiguous()
        for i in capture.graph.inputs_of("constant")
    }


def _outputs(interface: Interface, local: LocalProgram, mesh: DeviceMesh) -> tuple[Output, ...]:
    has_loss = any(out.is_scalar for out in interface.outputs)
    found = []
    for out, index in zip(interface.outputs, local.outputs, strict=True):
        spread = None
        if out.placements is not None and out.shape and (has_loss or out.is_spread):
            spread = (torch_placements(out.placements, mesh_shape(mesh).sizes, f"output {out.name}"), out.shape)
        found.append(Output(index, out.constant, out.differentiable, spread))
    return tuple(found)
