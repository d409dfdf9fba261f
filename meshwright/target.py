"""What a plan is for: a logical mesh and the hardware under it, from whatever the user named it by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright.planner import cost
from meshwright.planner.cost import Topology
from meshwright.planner.cost.links import network_link
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware, Link
from meshwright.planner.ir.mesh import Cluster, MeshShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CUDA_NAMES = (("H200", "H200"), ("H100", "H100"), ("A100", "A100-80"))
"""What ``torch.cuda.get_device_name`` contains, and the device record it stands for."""


@dataclass(frozen=True)
class Target:
    """Devices to plan for.

    Attributes:
        topology: the devices and how they are wired.
        searched: whether their arrangement in logical axes is searched unless the user says otherwise: that of a cluster and of a
            torch mesh is, sizes that were written down are meant.
    """

    topology: Topology
    searched: bool

    @property
    def mesh(self) -> MeshShape:
        """The mesh as it was given."""
        return self.topology.shape

    @property
    def hardware(self) -> Hardware:
        """The hardware under :attr:`mesh`."""
        return self.topology.hardware(self.mesh)

    @property
    def pipeline_axis(self) -> int | None:
        """Index of the axis that is named for pipeline stages."""
        return self.mesh.names.index("pp") if "pp" in self.mesh.names else None

    def stage(self, degree: int) -> tuple[Target, Link]:
        """The devices of one of ``degree`` stages, and the link between neighbouring ones.

        Stages lie along the axis named ``pp``, or else along the outermost: each has consecutive devices.

        Raises:
            InputError: ``degree`` does not divide the devices, or is not the size of the axis.
        """
        shape, axis = self.mesh, self.pipeline_axis
        if shape.num_devices % degree:
            raise InputError(f"pp={degree} does not divide the {shape.num_devices} devices of {shape}: choose a divisor")
        if axis is not None and shape.sizes[axis] != degree:
            raise InputError(f"pp={degree}, but axis 'pp' of mesh {shape} has {shape.sizes[axis]} devices: give the same number")
        if axis is not None:
            left = [(n, name) for n, name in zip(shape.sizes, shape.names, strict=True) if name != "pp"]
            order = (axis, *(a for a in range(shape.num_axes) if a != axis))
            outer = self.topology.reordered(order)
        else:
            first = shape.sizes[0]
            left = [(first // degree, shape.names[0]), *zip(shape.sizes[1:], shape.names[1:], strict=True)]
            left = left if first % degree == 0 else [(shape.num_devices // degree, "device")]
            outer = self.topology
        left = left or [(1, "device")]
        inside = MeshShape(tuple(n for n, _ in left), tuple(name for _, name in left))
        link = outer.link((degree, shape.num_devices // degree), 0)
        return Target(outer.first(inside), self.searched), link


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
        cluster = mesh_or_cluster
        rate, each = cluster.node_bytes_per_s, cluster.devices_per_node
        between = None if rate is None else network_link(rate, each)
        return Target(_topology(cluster.mesh, hardware or cluster.device, each, between=between), searched=True)
    if isinstance(mesh_or_cluster, MeshShape):
        if hardware is None:
            raise InputError(
                f"a mesh of {mesh_or_cluster} says nothing about its devices: pass hardware='H100' (known: {', '.join(cost.DEVICES)}), "
                "or a cluster such as '8x8xH100' instead of the mesh"
            )
        return Target(_topology(mesh_or_cluster, hardware), searched=False)
    if hasattr(mesh_or_cluster, "device_type") and hasattr(mesh_or_cluster, "get_coordinate"):
        from meshwright.runtime.mesh import mesh_shape

        numbers = tuple(mesh_or_cluster.mesh.flatten().tolist())
        per_node = _ranks_per_node() if mesh_or_cluster.device_type != "cpu" else None
        shape = mesh_shape(mesh_or_cluster)
        return Target(_topology(shape, hardware or local_device(mesh_or_cluster), per_node, numbers), searched=True)
    raise InputError(
        f"mesh is {type(mesh_or_cluster).__name__}; it must be a torch DeviceMesh, a MeshShape, a Cluster, or text as '8x8xH100'"
    )


def _ranks_per_node() -> int | None:
    """Ranks of each node, as the launcher says; None where it says nothing."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else None


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


def _topology(
    mesh: MeshShape,
    hardware: Hardware | str,
    per_node: int | None = None,
    numbers: tuple[int, ...] = (),
    between: Link | None = None,
) -> Topology:
    if isinstance(hardware, Hardware):
        return Topology.of_record(mesh, hardware, numbers)
    if hardware not in cost.DEVICES:
        raise InputError(f"unknown device {hardware!r}; known are {', '.join(cost.DEVICES)}, or pass a Hardware record")
    return Topology.of_machines(mesh, hardware, per_node, numbers, between)
