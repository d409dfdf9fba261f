"""One object that prices everything the solver asks about: clusters, collectives and steps of a redistribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.planner.cost import comm
from meshwright.planner.cost.compute import Priced, cluster_seconds, clusters_seconds
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.cuts import are_scattered, padded, piece_numels
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.redistribute import KINDS, step_kind
from meshwright.planner.ir.spec import Placement, Placements, local_numel, max_local_shape, plain_factor

Candidate = tuple[ClusterRow, ...]
"""One row per mesh axis."""

SLICE_S = 1e-8
"""Price of taking a piece of what a rank has already: small, so that no plan slices and gathers without need."""


class CostModel:
    """Seconds on one hardware and mesh.

    Args:
        hardware: device, and one link per axis.
        mesh: axis sizes.
        shared: which values travel in shared buffers; None: every collective is one of its own.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, shared: SharedBuffers | None = None):
        self.hardware, self.mesh, self._shared = hardware, mesh, shared

        self._step = lru_cache(maxsize=1 << 18)(self._step_uncached)

    @property
    def once(self) -> CostModel:
        """Prices of what is done once per step: as all else is, without micro-batches."""
        return self

    @property
    def overlaps(self) -> bool:
        """Whether communication can run beside kernels."""
        return not self.hardware.device.moves_data

    def sort_of(self, value: Value) -> bool:
        """What tells apart values whose steps cost otherwise although they look alike: whether they share buffers."""
        return self._shared is not None and value.name in self._shared.values

    def cluster_s(self, cluster: Cluster, candidate: Candidate) -> float:
        """Seconds of a cluster under one candidate."""
        return float(self.cluster_costs(cluster, [candidate])[0])

    def cluster_costs(self, cluster: Cluster, candidates: Sequence[Candidate]) -> np.ndarray:
        """Seconds of a cluster under each candidate, float64 [candidates]."""
        position: dict[int, int] = {}
        rows: list[ClusterRow] = []
        index = np.empty((len(candidates), self.mesh.num_axes), dtype=np.int64)
        for i, candidate in enumerate(candidates):
            for axis, row in enumerate(candidate):
                at = position.get(id(row))
                if at is None:
                    at = position[id(row)] = len(rows)
                    rows.append(row)
                index[i, axis] = at
        if not rows:
            return np.zeros(0)
        return cluster_seconds(cluster, rows, index, self.mesh.sizes, self.hardware.device)

    def clusters_costs(self, parts: Sequence[tuple[Cluster, Priced]]) -> list[np.ndarray]:
        """Likewise for several clusters at once."""
        return clusters_seconds(parts, self.mesh.sizes, self.hardware.device)

    def collective_s(self, kind: str, axis: int, size_bytes: int) -> float:
        """Seconds of one collective over a mesh axis.

        Args:
            kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
            axis: mesh axis index.
            size_bytes: the larger of a rank's input and output.
        """
        return comm.collective_s(self.hardware.links[axis], kind, self.mesh.sizes[axis], size_bytes)

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]:
        """Kind, bytes and seconds of changing one axis of a value's placement.

        Args:
            value: what is redistributed.
            src: placements before.
            axis: the axis that changes.
            dst: its new placement.

        Returns:
            ``("all_gather", 4096, 1e-5)``: bytes are the larger of the local input and output.

        Raises:
            ValueError: no such step exists.
        """
        return self._step(value.shape, value.dtype.itemsize, src, axis, dst, self.sort_of(value))

    def _step_uncached(
        self, shape: tuple[int, ...], itemsize: int, src: Placements, axis: int, dst: Placement, shares: bool
    ) -> tuple[str, int, float]:
        kind = step_kind(src[axis], dst)
        if kind is None:
            raise ValueError(f"no step changes {src} to {dst} over axis {axis}")
        after = (*src[:axis], dst, *src[axis + 1 :])
        size = max(local_numel(shape, p, self.mesh.sizes) for p in (src, after)) * itemsize
        if self.mesh.sizes[axis] == 1:
            return kind, size, 0.0
        if kind == "slice":
            return kind, size, SLICE_S
        copies = sum(_is_scattered(shape, p, self.mesh.sizes, axis) for p in (src, after))
        buffer = self._buffer_bytes(kind) if shares else 0
        if size < buffer:
            return kind, size, self.collective_s(kind, axis, buffer) * size / buffer + max(copies, 1) * self._copy_s(size)
        return kind, size, self.collective_s(kind, axis, size) + copies * self._copy_s(size)

    def _buffer_bytes(self, kind: str) -> int:
        """Size of the buffer that values which share one travel in; 0 where this kind of collective shares none."""
        return 0 if self._shared is None else self._shared.size_bytes.get(kind, 0)

    def steps_s(self, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and seconds of many steps, int64 and float64 [steps]: each what :meth:`step_s` says of it."""
        sizes = self.mesh.sizes
        shape = padded([v.shape for v in steps.values])[steps.of]
        node_bytes = piece_numels(shape, steps.cuts, sizes) * np.array([v.dtype.itemsize for v in steps.values])[steps.of]
        scattered = are_scattered(shape, steps.cuts, sizes)
        size = np.maximum(node_bytes[steps.tails], node_bytes[steps.heads])
        copies = scattered[steps.tails, steps.axes].astype(np.int64) + scattered[steps.heads, steps.axes]
        seconds, shares = np.zeros(len(size)), np.array([self.sort_of(v) for v in steps.values])[steps.of][steps.tails]
        for axis, n in enumerate(sizes):
            for k, kind in enumerate(KINDS if n > 1 else ()):
                at = np.flatnonzero((steps.axes == axis) & (steps.kinds == k))
                if kind == "slice":
                    seconds[at] = SLICE_S
                elif len(at):
                    buffer = self._buffer_bytes(kind)
                    part = shares[at] & (size[at] < buffer)
                    alone = comm.collectives_s(self.hardware.links[axis], kind, n, size[at])
                    collective = np.where(part, self.collective_s(kind, axis, buffer) * size[at] / max(buffer, 1), alone)
                    copied = np.maximum(copies[at], part)
                    seconds[at] = collective + copied * (2 * size[at] / self.hardware.device.memory_bytes_per_s)
        return size, seconds

    def _copy_s(self, size_bytes: int) -> float:
        """Seconds to copy a buffer within the device: one read, one write."""
        return 2 * size_bytes / self.hardware.device.memory_bytes_per_s


def _is_scattered(shape: tuple[int, ...], placements: Placements, sizes: Sequence[int], axis: int) -> bool:
    """Whether what the axis cuts off is several stretches of memory, so that it is copied together around the collective.

    One stretch it is where the dims and groups before the cut have one element each on a rank: ``S(1)`` of ``[1, S, H]``.
    """
    p = placements[axis]
    if not p.is_shard:
        return False
    groups = 1 if p.split == 1 else p.split // plain_factor(placements, sizes, p.dim)
    return groups * math.prod(max_local_shape(shape, placements, sizes)[: p.dim]) > 1
