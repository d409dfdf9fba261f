"""Which devices there are and how they are wired: the link of any axis that they may be arranged in.

Devices are numbered so that those of one node are consecutive. A *level* is a run of consecutive devices that reach each
other over one link; levels nest: 8 devices over NVLink, all of them over InfiniBand with one NIC per device::

    8x8xH100 as (16, 4):  axis 1 = {0,1,2,3}: one node                    NVLink4
                          axis 0 = {0,4,8,...,60}: 2 ranks in each node   NVLink4 + 2x InfiniBand NDR 400
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.planner.cost.devices import device_for
from meshwright.planner.cost.links import MACHINES
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.mesh import Cluster, MeshShape

# A node so large that everything is in it.
ONE_MACHINE = 1 << 30


@dataclass(frozen=True)
class Level:
    """Runs of consecutive devices that reach each other over one link.

    Attributes:
        span: devices in a run; a multiple of the span of the level inside.
        link: between the runs of the level inside; each device has one of its own.
    """

    span: int
    link: Link


@dataclass(frozen=True)
class Topology:
    """The devices of a physical mesh.

    Attributes:
        shape: the physical mesh.
        device: the device at every position.
        levels: how they are wired, the innermost first.
        numbers: number of the device at each position of the mesh, row-major; empty: 0, 1, 2, ...
        ranks: rank of the process at each position; empty: as ``numbers``.
        source: a sentence for the report.
    """

    shape: MeshShape
    device: Device
    levels: tuple[Level, ...]
    numbers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    source: str = "datasheet"

    @classmethod
    def of_machines(
        cls,
        shape: MeshShape,
        device: str,
        per_node: int | None = None,
        numbers: tuple[int, ...] = (),
        between: Link | None = None,
    ) -> Topology:
        """A known device in nodes.

        Args:
            shape: the physical mesh.
            device: name of a known device, any case.
            per_node: devices per node; None: the usual node (8 GPUs, or one machine for CPUs).
            numbers: as the attribute.
            between: link between nodes; None: the usual one.

        Raises:
            InputError: the device is not known.
        """
        record = device_for(device)
        machine = MACHINES[record.name]
        per_node = per_node or machine.per_node
        where = f"nodes of {per_node}" if per_node < ONE_MACHINE else "one machine"
        levels = [Level(per_node, machine.inside)]
        if per_node < ONE_MACHINE:
            levels.append(Level(ONE_MACHINE, between or machine.between))
        return cls(shape, record, tuple(levels), numbers, source=f"data sheets and published measurements, {where}")

    @classmethod
    def of_record(cls, shape: MeshShape, hardware: Hardware, ranks: tuple[int, ...] = ()) -> Topology:
        """Devices and links as the user says: one link per axis of ``shape``.

        Raises:
            InputError: another number of links than axes.
        """
        if len(hardware.links) != shape.num_axes:
            raise InputError(
                f"hardware has {len(hardware.links)} links, but mesh {shape} has {shape.num_axes} axes: give one link per axis"
            )
        span, levels = 1, []
        for size, link in zip(reversed(shape.sizes), reversed(hardware.links), strict=True):
            span *= size
            levels.append(Level(span, link))
        return cls(shape, hardware.device, tuple(levels), (), ranks, hardware.source)

    def reordered(self, order: tuple[int, ...]) -> Topology:
        """The same devices with the axes of the mesh in another order."""
        shape = MeshShape(tuple(self.shape.sizes[a] for a in order), tuple(self.shape.names[a] for a in order))
        numbers = self._numbers.reshape(self.shape.sizes).transpose(order).flatten()
        ranks = np.array(self.ranks).reshape(self.shape.sizes).transpose(order).flatten() if self.ranks else np.zeros(0, int)
        return replace(self, shape=shape, numbers=tuple(map(int, numbers)), ranks=tuple(map(int, ranks)))

    def first(self, shape: MeshShape) -> Topology:
        """The first devices, as many as ``shape`` has, arranged so."""
        n = shape.num_devices
        return replace(self, shape=shape, numbers=tuple(map(int, self._numbers[:n])), ranks=self.ranks[:n])

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.array(self.numbers, dtype=np.int64) if self.numbers else np.arange(self.shape.num_devices)

    @cached_property
    def _is_consecutive(self) -> bool:
        return not self.ranks and bool((np.diff(self._numbers) == 1).all())

    @cached_property
    def _known(self) -> dict[tuple[str, int, int, int], Any]:
        """What was found out of axes, by how many groups of them are outside and inside."""
        return {}

    def _once(self, what: str, sizes: tuple[int, ...], axis: int, work_out: Callable[[np.ndarray], Any]) -> Any:
        key = what, math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
        if key not in self._known:
            self._known[key] = work_out(self.groups(sizes, axis))
        return self._known[key]

    def groups(self, sizes: tuple[int, ...], axis: int) -> np.ndarray:
        """Device numbers of every group along an axis of a mesh of these devices, shape [groups, size]."""
        return np.moveaxis(self._numbers.reshape(sizes), axis, -1).reshape(-1, sizes[axis])

    def link(self, sizes: tuple[int, ...], axis: int) -> Link:
        """The link of an axis: that of the worst of its groups.

        A group inside one run of the innermost level uses that level's link. One that has ``g`` devices (at least) in each of
        several runs uses ``g`` links of the outer level side by side, at most as fast as the inner one. Latency is the mean
        over the hops of a ring through the group.
        """
        return self._once("link", sizes, axis, self._worst_link)

    def _worst_link(self, groups: np.ndarray) -> Link:
        if len(self.levels) == 1:
            groups = groups[:1]
        else:  # groups that lie alike in the runs below the outermost level are alike
            span = self.levels[-2].span
            if self._is_consecutive:
                groups = groups[np.unique(groups[:, 0] % span, return_index=True)[1]]
            groups = np.unique(groups - groups[:, :1] // span * span, axis=0)
        return min(map(self._group_link, groups), key=lambda link: (link.bytes_per_s, -link.latency_s))

    def _group_link(self, group: np.ndarray) -> Link:
        """The link of one group of ascending device numbers."""
        if len(group) == 1:
            return self.levels[0].link
        used: list[tuple[Level, int, int]] = []  # level, devices side by side, hops of a ring
        inside, below = 1, np.arange(len(group))
        for level in self.levels:
            runs = group // level.span
            hops = len(np.unique(below)) - len(np.unique(runs))
            if hops:
                used.append((level, inside, hops))
            inside = int(np.unique(runs, return_counts=True)[1].min())
            below = runs
        (inner, _, _), (outer, abreast, _) = used[0], used[-1]
        if len(used) == 1:
            return inner.link
        rate = min(level.link.bytes_per_s * side for level, side, _ in used)
        latency = sum(level.link.latency_s * hops for level, _, hops in used) / (len(group) - 1)
        name = f"{inner.link.name} + {abreast}x {outer.link.name}"
        return Link(name, rate, latency, "; ".join(dict.fromkeys(level.link.source for level, _, _ in used)))

    def inside(self, sizes: tuple[int, ...], axis: int) -> bool:
        """Whether every group of an axis lies within a run of the innermost level."""

        def is_inside(groups: np.ndarray) -> bool:
            runs = groups // self.levels[0].span
            return bool((runs == runs[:, :1]).all())

        return self._once("inside", sizes, axis, is_inside)

    def ascending(self, sizes: tuple[int, ...]) -> bool:
        """Whether ranks are in ascending order along every axis, as process groups demand."""
        if self._is_consecutive:
            return True
        ranks = (np.array(self.ranks, dtype=np.int64) if self.ranks else self._numbers).reshape(sizes)
        return all(bool((np.diff(ranks, axis=axis) > 0).all()) for axis in range(len(sizes)))

    def hardware(self, mesh: MeshShape) -> Hardware:
        """The hardware under a logical mesh of these devices."""
        return Hardware(self.device, tuple(self.link(mesh.sizes, axis) for axis in range(mesh.num_axes)), self.source)


def hardware_for(mesh: MeshShape, device: str, cluster: Cluster | None = None) -> Hardware:
    """The hardware under a mesh.

    Args:
        mesh: logical mesh, ranks row-major.
        device: name of a known device, any case.
        cluster: the machines; None: nodes of the usual size (8 GPUs, or one machine for CPUs).

    Raises:
        InputError: the device is not known.
    """
    return Topology.of_machines(mesh, device, cluster.devices_per_node if cluster is not None else None).hardware(mesh)
