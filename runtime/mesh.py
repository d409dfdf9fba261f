"""Between our meshes and placements and torch's, and small exchanges of objects over a mesh.

Everything that talks over a mesh here works where the mesh covers only some of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard

from meshwright.planner.ir.errors import InputError, RuntimeMismatchError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R, S, format_placements, plain_factor
from meshwright.runtime.ending import let_threads_finish_at_exit


def mesh_shape(mesh: DeviceMesh) -> MeshShape:
    """The mesh as a plain value; axes without names are called ``axis0``, ``axis1``, ..."""
    return MeshShape.of(*mesh.shape, names=mesh.mesh_dim_names)


def make_mesh(device_type: str, sizes: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
    """A device mesh over the ranks of the default process group.

    Args:
        device_type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        sizes: devices along each axis.
        names: axis names; ``axis0``, ``axis1``, ... by default.

    Raises:
        InputError: there is no process group, or it has fewer ranks than the mesh.
    """
    shape = MeshShape.of(*sizes, names=tuple(names) if names else None)
    _check_size(shape.num_devices, str(shape))
    return init_device_mesh(device_type, shape.sizes, mesh_dim_names=shape.names)


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse a mesh that this process cannot run on.

    Raises:
        InputError: no process group, more devices than ranks, this rank is not in the mesh, or ranks are not ascending
            along an axis (torch sorts the ranks of a group).
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, found {type(mesh).__name__}: "
            "make one with torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2))"
        )
    _check_size(mesh.size(), "x".join(map(str, mesh.shape)))
    if mesh.get_coordinate() is None:
        raise InputError(f"rank {dist.get_rank()} is not in mesh {mesh.mesh.tolist()}: call this on the ranks of the mesh only")
    for axis in range(mesh.ndim):
        along = mesh.mesh.transpose(axis, -1)
        if bool((along[..., 1:] <= along[..., :-1]).any()):
            raise InputError(
                f"mesh {mesh.mesh.tolist()} does not list its ranks in ascending order along axis {axis}: process groups order "
                "their ranks by number, so pieces would be put together in another order than the mesh says"
            )


def logical_mesh(mesh: DeviceMesh, shape: MeshShape, *, named: bool = False) -> DeviceMesh:
    """The ranks of ``mesh``, in their order, arranged in the axes of ``shape``; ``mesh`` itself where that is its shape (and,
    if ``named``, those are its names).

    ``[[0, 1], [2, 3]]`` arranged as ``(4,)`` is ``[0, 1, 2, 3]``. Makes the process groups that are missing: collective over the
    ranks of ``mesh`` (no other rank takes part).

    Raises:
        RuntimeMismatchError: another number of devices, or ranks would not ascend along an axis.
    """
    ranks = arranged_ranks(mesh, shape)
    if tuple(mesh.shape) == shape.sizes and (not named or mesh.mesh_dim_names == shape.names):
        return mesh
    if mesh.size() == dist.get_world_size():
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=shape.names)
    groups = [_group_along(ranks, axis) for axis in range(ranks.ndim)]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=shape.names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=shape.names)


def arranged_ranks(mesh: DeviceMesh, shape: MeshShape) -> torch.Tensor:
    """The ranks of a mesh in the axes of ``shape``.

    Raises:
        RuntimeMismatchError: as :func:`logical_mesh`.
    """
    found = "x".join(map(str, mesh.shape))
    if mesh.size() != shape.num_devices:
        raise RuntimeMismatchError(
            f"the plan is for a mesh of {shape} = {shape.num_devices} devices, found one of {found} = {mesh.size()}: plan again for "
            f"this mesh, or run on {shape.num_devices} ranks"
        )
    ranks = mesh.mesh.reshape(shape.sizes)
    if tuple(mesh.shape) != shape.sizes and not _is_ascending(ranks):
        raise RuntimeMismatchError(
            f"the plan is for a mesh of {shape}, but mesh {mesh.mesh.tolist()} arranged so is {ranks.tolist()}, whose ranks do not "
            "ascend along every axis, as process groups demand: make the mesh with ascending ranks, or plan with logical_mesh='given'"
        )
    return ranks


def _group_along(ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
    """This rank's process group along an axis, made by its members alone."""
    lines = ranks.transpose(axis, -1).reshape(-1, ranks.shape[axis])
    mine = next(line for line in lines.tolist() if dist.get_rank() in line)
    return dist.new_group(mine, use_local_synchronization=True)


def _is_ascending(ranks: torch.Tensor) -> bool:
    return all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim))


def _check_size(devices: int, text: str) -> None:
    if not dist.is_initialized():
        raise InputError(
            f"mesh {text} needs {devices} ranks but there is no process group: start the script with "
            f"`meshwright run -n {devices} script.py` or torchrun, or call torch.distributed.init_process_group"
        )
    if devices > dist.get_world_size():
        raise InputError(
            f"mesh {text} has {devices} devices but the world has {dist.get_world_size()} ranks: "
            f"start {devices} ranks (`meshwright run -n {devices} ...`) or use a smaller mesh"
        )


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's coordinate in the mesh."""
    found = mesh.get_coordinate()
    assert found is not None, "check_mesh has refused ranks outside"
    return tuple(found)


def group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Per axis, the name of the process group that this rank's collectives run over."""
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's tensors."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# --- placements ---------------------------------------------------------------------------------------------------


def torch_placements(placements: Placements, sizes: Sequence[int], name: str = "value") -> tuple[TorchPlacement, ...]:
    """Our placements as DTensor's.

    ``S(0)R -> (Shard(0), Replicate())``; ``S(1;3) -> _StridedShard(1, split_factor=3)``, where the groups that earlier
    axes have already dealt out are divided away.

    Args:
        placements: one per mesh axis.
        sizes: mesh axis sizes.
        name: whose placements, for the message.

    Raises:
        InputError: DTensor cannot put such pieces together again (measured with torch 2.13): two strided axes on one
            dim, or a plain one after a strided one.
    """
    for axis, p in enumerate(placements):
        if p.is_shard and p.split > 1 and any(q.is_shard and q.dim == p.dim for q in placements[axis + 1 :]):
            raise InputError(
                f"{name} cannot rest in {format_placements(placements)}: DTensor cannot gather dim {p.dim} when axis {axis} "
                "shards it in groups and a later axis shards it again; pin another placement"
            )
    return tuple(_torch_placement(p, placements[:axis], sizes[:axis]) for axis, p in enumerate(placements))


def _torch_placement(p: Placement, before: Placements, sizes: Sequence[int]) -> TorchPlacement:
    if p.is_replicate:
        return Replicate()
    if p.is_partial:
        return Partial(p.op)
    groups = p.split // plain_factor(before, sizes, p.dim) if p.split > 1 else 1
    return Shard(p.dim) if groups == 1 else _StridedShard(p.dim, split_factor=groups)


def our_placements(placements: Sequence[TorchPlacement], sizes: Sequence[int]) -> Placements:
    """DTensor's placements as ours: the inverse of :func:`torch_placements`."""
    found: list[Placement] = []
    for p in placements:
        if isinstance(p, _StridedShard):
            found.append(S(p.dim, int(p.split_factor) * plain_factor(found, sizes[: len(found)], p.dim)))
        elif isinstance(p, Shard):
            found.append(S(p.dim))
        else:
            found.append(Placement("P", op=p.reduce_op) if isinstance(p, Partial) else R)
    return tuple(found)


# --- exchange -----------------------------------------------------------------------------------------------------


def gather_objects(item: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's ``item``, in row-major order of the mesh, on every rank."""
    let_threads_finish_at_exit()
    if mesh.size() == dist.get_world_size():
        by_rank: list[Any] = [None] * mesh.size()
        dist.all_gather_object(by_rank, item)
        return [by_rank[rank] for rank in mesh.mesh.flatten().tolist()]
    found = [item]
    for axis in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(parts, found, group=mesh.get_group(axis))
        found = [x for part in parts for x in part]
    return found


def broadcast_object(item: Any, mesh: DeviceMesh) -> Any:
    """The first rank's ``item`` on every rank of the mesh."""
    let_threads_finish_at_exit()
    box = [item]
    for axis in range(mesh.ndim):
        dist.broadcast_object_list(box, src=_first_rank(mesh, axis), group=mesh.get_group(axis))
    return box[0]


def broadcast_text(text: str | None, mesh: DeviceMesh) -> str:
    """The first rank's text on every rank; the others may pass None."""
    return broadcast_object(text, mesh)


def broadcast_tensor(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrite ``tensor`` (contiguous) with the first rank's values."""
    for axis in range(mesh.ndim):
        dist.broadcast(tensor, src=_first_rank(mesh, axis), group=mesh.get_group(axis))


def _first_rank(mesh: DeviceMesh, axis: int) -> int:
    """Global rank at coordinate 0 of this rank's group along ``axis``."""
    at = list(coordinate_of(mesh))
    at[axis] = 0
    return int(mesh.mesh[tuple(at)])
