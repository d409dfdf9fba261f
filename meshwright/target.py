"""What a plan is for: a logical mesh and the hardware under it, from whatever the user named it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright.planner import cost
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import Cluster, MeshShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CUDA_NAMES = (("H200", "H200"), ("H100", "H100"), ("A100", "A100-80"))
"""What ``torch.cuda.get_device_name`` contains, and the device record it stands for."""


@dataclass(frozen=True, slots=True)
class Target:
    """A logical mesh and the hardware under it."""

    mesh: MeshShape
    hardware: Hardware


def target_of(mesh_or_cluster: Any, hardware: Hardware | str | None = None) -> Target:
    """Read a mesh or a cluster.

    Args:
        mesh_or_cluster: a torch ``DeviceMesh``, a :class:`MeshShape`, a :class:`Cluster`, or text as ``"8x8xH100"``.
        hardware: numbers to plan with: a record, or the name of a known device. Default: the cluster's device, or what
            the mesh's device type is on this machine.

    Raises:
        InputError: of another type, an unknown device, or a bare mesh shape without ``hardware``.
    """
    if isinstance(mesh_or_cluster, str):
        mesh_or_cluster = Cluster.parse(mesh_or_cluster)
    if isinstance(mesh_or_cluster, Cluster):
        return Target(mesh_or_cluster.mesh, _hardware(mesh_or_cluster.mesh, hardware or mesh_or_cluster.device, mesh_or_cluster))
    if isinstance(mesh_or_cluster, MeshShape):
        if hardware is None:
            raise InputError(
                f"a mesh of {mesh_or_cluster} says nothing about its devices: pass hardware='H100' (known: {', '.join(cost.DEVICES)}), "
                "or a cluster such as '8x8xH100' instead of the mesh"
            )
        return Target(mesh_or_cluster, _hardware(mesh_or_cluster, hardware, None))
    if hasattr(mesh_or_cluster, "device_type") and hasattr(mesh_or_cluster, "get_coordinate"):
        from meshwright.runtime.mesh import mesh_shape

        shape = mesh_shape(mesh_or_cluster)
        return Target(shape, _hardware(shape, hardware or local_device(mesh_or_cluster), None))
    raise InputError(
        f"mesh is {type(mesh_or_cluster).__name__}; it must be a torch DeviceMesh, a MeshShape, a Cluster, or text as '8x8xH100'"
    )


def local_device(mesh: DeviceMesh) -> str:
    """The device record's name for the devices of a running mesh.

    Raises:
        InputError: an accelerator without a record.
    """
    if mesh.device_type == "cpu":
        return "CPU"
    found = torch.cuda.get_device_name() if mesh.device_type == "cuda" else mesh.device_type
    name = next((record for part, record in _CUDA_NAMES if part in found), None)
    if name is None:
        raise InputError(
            f"no hardware record for {found!r}: pass hardware= one of {', '.join(cost.DEVICES)}, or a Hardware record with its numbers"
        )
    return name


def _hardware(mesh: MeshShape, hardware: Hardware | str, cluster: Cluster | None) -> Hardware:
    if isinstance(hardware, Hardware):
        if len(hardware.links) != mesh.num_axes:
            raise InputError(
                f"hardware has {len(hardware.links)} links and the mesh {mesh} has {mesh.num_axes} axes: one link per axis"
            )
        return hardware
    if hardware not in cost.DEVICES:
        raise InputError(f"unknown device {hardware!r}; known are {', '.join(cost.DEVICES)}, or pass a Hardware record")
    return cost.hardware_for(mesh, hardware, cluster)
