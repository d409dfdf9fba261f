"""Gradients that wait: added up over several backward passes, reduced once in the last.

Between passes ``.grad`` says what it is: a DTensor with ``Partial`` placements, so that ``zero_grad`` drops it like any other. It is
as large as the reduced gradient. Source of the words and of what users expect: ``DistributedDataParallel.no_sync``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.spec import Placements
from meshwright.runtime.dtensor import local_of, wrap_like
from meshwright.runtime.mesh import mesh_shape, torch_placements
from meshwright.runtime.step import Made, Return

Paths = Mapping[str, tuple[Placements, ...]]

_watched = False


def waits(grad: Any) -> bool:
    """Whether a gradient is not reduced yet."""
    return isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)


def refuse_waiting(parameters: Iterable[torch.Tensor]) -> None:
    """Raise InputError if gradients of some wait."""
    waiting = sum(waits(p.grad) for p in parameters)
    if waiting:
        raise InputError(
            f"gradients of {waiting} parameters were added up under no_sync() and are not reduced over the devices: run forward and "
            "backward of the last pass outside of it, or drop them with zero_grad()"
        )


def watch_optimizers() -> None:
    """Let every optimizer refuse to step with gradients that wait."""
    global _watched
    if not _watched:
        register_optimizer_step_pre_hook(_before_step)
        _watched = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    refuse_waiting(p for group in optimizer.param_groups for p in group["params"])


def return_waiting(name: str, parameter: DTensor, start: Placements) -> Return:
    """A DTensor that says that it waits."""
    mesh = parameter.device_mesh
    placements = torch_placements(start, mesh_shape(mesh).sizes, f"gradient of {name}")

    def give_back(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())

    return Return(name, give_back)


def add_to_waiting(made: Made, parameters: Mapping[str, Any], paths: Paths) -> Made:
    """A pass that is not the last: what is new joins what waits.

    Args:
        made: the program's local gradients by name; owned by the caller.
        parameters: by name.
        paths: of the gradients that can wait, as ``passes.unreduced.waiting`` finds them.

    Returns:
        What is left for autograd to add.
    """
    left = dict(made)
    for name in paths.keys() & made.keys():
        parameter = parameters[name]
        grad = parameter.grad
        if grad is None:
            continue
        if waits(grad):
            local_of(grad).add_(made[name])
            del left[name]
            continue
        if _is_first(parameter.device_mesh, paths[name]):  # a reduced gradient of before counts once
            left[name] = made[name].add_(local_of(grad))
        parameter.grad = None
    return left


def reduce_waiting(made: Made, parameters: Mapping[str, Any], paths: Paths) -> Made:
    """The last pass: what is new and what waits is summed over the devices. Collective; arguments and result as above."""
    mesh: DeviceMesh | None = None
    names = [name for name in made if name in paths]
    for name in names:
        parameter = parameters[name]
        mesh = parameter.device_mesh
        if waits(parameter.grad):
            made[name].add_(local_of(parameter.grad))
            parameter.grad = None
    depth = max((len(paths[name]) - 1 for name in names), default=0)
    for step in range(depth):
        over: dict[int, list[torch.Tensor]] = {}
        for name in names:
            if step < len(paths[name]) - 1:
                over.setdefault(_axis(paths[name], step), []).append(made[name])
        for axis, tensors in sorted(over.items()):
            assert mesh is not None
            _sum(tensors, mesh, axis)
    return made


def settle_waiting(made: Made, parameters: Mapping[str, Any]) -> Made:
    """A pass whose forward began before anything waited: what waits by now is reduced by itself. Collective."""
    late = [parameters[name] for name in made if name in parameters and waits(parameters[name].grad)]
    over: dict[int, list[torch.Tensor]] = {}
    for parameter in late:
        for axis, p in enumerate(parameter.grad.placements):
            if isinstance(p, Partial):
                over.setdefault(axis, []).append(local_of(parameter.grad))
    for axis, tensors in sorted(over.items()):
        _sum(tensors, late[0].device_mesh, axis)
    for parameter in late:
        parameter.grad = wrap_like(local_of(parameter.grad), parameter)
    return made


def _axis(path: Sequence[Placements], step: int) -> int:
    return next(i for i, (a, b) in enumerate(zip(path[step], path[step + 1], strict=True)) if a != b)


def _is_first(mesh: DeviceMesh, path: Sequence[Placements]) -> bool:
    """Whether this rank is the first along every axis over which the gradient waits."""
    axes = {_axis(path, step) for step in range(len(path) - 1)}
    return all(mesh.get_local_rank(axis) == 0 for axis in axes)


def _sum(tensors: Sequence[torch.Tensor], mesh: DeviceMesh, axis: int) -> None:
    """Sum each in place over an axis; small ones of one element type share a buffer."""
    if mesh.size(axis) == 1:
        return
    group = mesh.get_group(axis)
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        buffer = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(buffer, group=group)
        pieces = buffer.split([t.numel() for t in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(t) for piece, t in zip(pieces, bucket, strict=True)])


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[list[torch.Tensor]]] = {}
    for t in tensors:
        mine = found.setdefault(t.dtype, [])
        if mine and sum(u.nbytes for u in mine[-1]) + t.nbytes <= REDUCE_BYTES:
            mine[-1].append(t)
        else:
            mine.append([t])
    return [bucket for buckets in found.values() for bucket in buckets]
