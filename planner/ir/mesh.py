"""Meshes and clusters as plain values: planning needs shapes and links, never a process group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.planner.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """An abstract device mesh: how many devices along each axis, and the axes' names.

    Attributes:
        sizes: devices along each axis; ranks are numbered row-major, the last axis fastest.
        names: one distinct name per axis.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.names) or len(set(self.names)) != len(self.names):
            raise InputError(f"mesh sizes {self.sizes} need as many distinct axis names, found {self.names}")
        if any(n < 1 for n in self.sizes):
            raise InputError(f"mesh sizes must be at least 1, found {self.sizes}")

    @classmethod
    def of(cls, *sizes: int, names: tuple[str, ...] | None = None) -> MeshShape:
        """``MeshShape.of(8, 8)``; axes are named ``axis0``, ``axis1``, ... unless ``names`` are given."""
        return cls(tuple(sizes), names or tuple(f"axis{i}" for i in range(len(sizes))))

    @property
    def num_axes(self) -> int:
        return len(self.sizes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Row-major coordinate of ``rank``."""
        out = []
        for n in reversed(self.sizes):
            rank, i = divmod(rank, n)
            out.append(i)
        return tuple(reversed(out))

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines to plan for: ``nodes`` x ``devices_per_node`` of one device kind.

    Attributes:
        nodes: number of machines.
        devices_per_node: devices in each.
        device: name of a known device (``"H100"``, ``"H200"``, ``"A100-80"``, ``"CPU"``), see ``hardware``.
        node_bytes_per_s: what the network carries in one direction per node; None: the usual network of such nodes.
    """

    nodes: int
    devices_per_node: int
    device: str
    node_bytes_per_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``"8x8xH100"`` (nodes x devices per node x device) or ``"8xH100"`` (one node).

        ``"4x8xA100-80@25Gbit"`` says what the network carries per node, in 10^9 bits per second.

        Raises:
            InputError: the text has another form, or a count is zero.
        """
        found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w.-]*)(?:@(\d+(?:\.\d+)?)Gbit)?", text.strip())
        if found is None or int(found[1] or 1) < 1 or int(found[2]) < 1 or (found[4] and float(found[4]) == 0):
            raise InputError(
                f"cluster {text!r} is not NODESxGPUSxDEVICE with counts of at least 1, for example '8x8xH100', '4xA100-80' or '4x8xA100-80@25Gbit'"
            )
        return cls(int(found[1] or 1), int(found[2]), found[3], float(found[4]) * 1e9 / 8 if found[4] else None)

    def __str__(self) -> str:
        network = "" if self.node_bytes_per_s is None else f"@{self.node_bytes_per_s * 8 / 1e9:g}Gbit"
        return f"{self.nodes}x{self.devices_per_node}x{self.device}{network}"

    @property
    def mesh(self) -> MeshShape:
        """The physical mesh: (node, device), or one axis where one of the two is 1."""
        if self.nodes == 1:
            return MeshShape((self.devices_per_node,), ("device",))
        if self.devices_per_node == 1:
            return MeshShape((self.nodes,), ("node",))
        return MeshShape((self.nodes, self.devices_per_node), ("node", "device"))
