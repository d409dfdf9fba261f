"""Parameters as DTensors at rest, and a module tree that holds them under their original names."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, R, local_shape, local_slice
from meshwright.runtime.checks import fingerprint
from meshwright.runtime.mesh import (
    broadcast_tensor,
    coordinate_of,
    device_of,
    gather_objects,
    mesh_shape,
    torch_placements,
)


class Part(nn.Module):
    """A submodule of the original model: holds its parameters, buffers and children, and cannot be called by itself.

    Attributes:
        original: class name of the module it stands for.
    """

    def __init__(self, original: str):
        super().__init__()
        self.original = original

    def _get_name(self) -> str:
        return self.original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"{self.original} is a part of a parallel module and was compiled with it: call the parallel module as a whole"
        )


class StandIn(nn.Parameter):
    """An empty parameter for the optimizer of a rank whose stages have none: torch refuses an empty list. It has no name."""


def class_name(module: nn.Module) -> str:
    """The name of the class of the module that was written or stands for it."""
    return module.original if isinstance(module, Part) else type(module).__name__


@dataclass(frozen=True)
class PlacedState:
    """A model's parameters and buffers on this rank.

    Attributes:
        parameters: by every FQN; tied ones are one object.
        buffers: by every FQN.
        unloaded: FQNs of parameters and buffers that have no values yet (the model was on the meta device).
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    unloaded: frozenset[str]


def resting_placements(graph: OpGraph, plan: Plan) -> dict[str, Placements]:
    """Where each parameter of the captured program rests, by every FQN."""
    return {
        name: plan.inputs[given.value.name] for given in graph.inputs_of("parameter") for name in (given.name, *given.aliases)
    }


def place_state(
    model: nn.Module,
    rests: Mapping[str, Placements],
    mesh: DeviceMesh,
    *,
    held: Container[str] | None = None,
    everyone: DeviceMesh | None = None,
) -> PlacedState:
    """Each rank's pieces of a model's parameters, and whole buffers.

    Real values are equal on all ranks afterwards: where any rank's differ from the first rank's, the first rank's win.
    Collective.

    Args:
        model: on a real device, or on the meta device.
        rests: placements by FQN; a parameter that is not listed is replicated.
        mesh: where to.
        held: FQNs of the parameters that this rank holds; None: all.
        everyone: the mesh over which values must agree; None: ``mesh``.

    Raises:
        InputError: a placement that DTensor cannot represent, or the first rank alone has no values.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    uniform = _Agreed(everyone or mesh, {**named, **buffers})
    mine = {id(p) for name, p in named.items() if held is None or name in held}
    made: dict[int, nn.Parameter] = {}
    for name, p in {id(p): (name, p) for name, p in reversed(named.items())}.values():
        values = uniform.values(name, p)
        if id(p) in mine:
            made[id(p)] = _place_parameter(name, p, values, rests.get(name, (R,) * mesh.ndim), mesh)
    copies = {id(b): _place_buffer(uniform.values(name, b), mesh) for name, b in buffers.items()}
    placed = {name: p for name, p in named.items() if id(p) in mine}
    return PlacedState(
        parameters={name: made[id(p)] for name, p in placed.items()},
        buffers={name: copies[id(b)] for name, b in buffers.items()},
        unloaded=frozenset(name for name, t in {**placed, **buffers}.items() if t.is_meta and name not in uniform.differing),
    )


class _Agreed:
    """Values that all ranks agree on: this rank's where all are equal, else the first rank's."""

    def __init__(self, mesh: DeviceMesh, tensors: Mapping[str, torch.Tensor]):
        self.mesh = mesh
        prints = {name: None if t.is_meta else fingerprint(t) for name, t in tensors.items()}
        everyone = gather_objects(prints, mesh)
        self.differing = {name for name in prints if any(theirs.get(name) != everyone[0].get(name) for theirs in everyone)}
        for name in self.differing:
            if everyone[0].get(name) is None:
                raise InputError(
                    f"{name} has values on some ranks but is on the meta device on the first rank, whose values count: "
                    "build the model with real values on the first rank, or on the meta device everywhere"
                )

    def values(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        if name not in self.differing:
            return mine.detach()
        if mine.is_meta:
            mine = torch.empty_like(mine, device=device_of(self.mesh))
        whole = mine.detach().to(device_of(self.mesh), copy=True, memory_format=torch.contiguous_format)
        broadcast_tensor(whole, self.mesh)
        return whole


def _place_parameter(name: str, p: torch.Tensor, whole: torch.Tensor, placements: Placements, mesh: DeviceMesh) -> nn.Parameter:
    sizes, coordinate, device = mesh_shape(mesh).sizes, coordinate_of(mesh), device_of(mesh)
    if whole.is_meta:
        local = torch.empty(local_shape(p.shape, placements, sizes, coordinate), dtype=p.dtype, device=device)
    else:
        local = piece_of(whole, placements, sizes, coordinate, device)
    spread = torch_placements(placements, sizes, f"parameter {name}")
    stride = torch.empty(p.shape, device="meta").stride()
    with torch.no_grad():
        placed = DTensor.from_local(local, mesh, spread, run_check=False, shape=p.shape, stride=stride)
    return nn.Parameter(placed, requires_grad=p.requires_grad)


def piece_of(
    whole: torch.Tensor, placements: Placements, sizes: Sequence[int], coordinate: Sequence[int], device: torch.device
) -> torch.Tensor:
    """A contiguous copy of this rank's piece on ``device``; shares nothing with ``whole``."""
    piece = local_slice(whole.detach(), placements, sizes, coordinate)
    return piece.to(device, copy=True, memory_format=torch.contiguous_format)


def _place_buffer(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if whole.is_meta:
        return torch.empty_like(whole, device=device_of(mesh))
    return whole.to(device_of(mesh), copy=True, memory_format=torch.contiguous_format)


# --- tree ---------------------------------------------------------------------------------------------------------


def fill_tree(root: nn.Module, model: nn.Module, state: PlacedState) -> None:
    """Give ``root`` the modules, parameters and buffers of ``model`` under the same names.

    A module that occurs under several names stays one module; training modes and persistence of buffers are kept. A
    parameter that this rank does not hold is None.
    """
    parts: dict[int, nn.Module] = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        part = parts.setdefault(id(module), Part(class_name(module)))
        part.training = module.training
        if path:
            parent, _, leaf = path.rpartition(".")
            root.get_submodule(parent)._modules[leaf] = part
        prefix = f"{path}." if path else ""
        for name, p in module._parameters.items():
            part._parameters[name] = None if p is None else state.parameters.get(prefix + name)
        for name, b in module._buffers.items():
            part._buffers[name] = None if b is None else state.buffers[prefix + name]
        part._non_persistent_buffers_set |= module._non_persistent_buffers_set


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on the meta device: enough to capture it again.

    Raises:
        InputError: the model cannot be deep-copied.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    memo.update((id(b), b.detach().to("meta")) for b in model.buffers())
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so it cannot be captured again for "
            "another call; make it deep-copyable"
        ) from error
