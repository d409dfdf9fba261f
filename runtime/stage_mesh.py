"""A device mesh seen as ranks along the pipeline axis, with a mesh inside each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.runtime.mesh import logical_mesh

PIPELINE_AXIS = "pp"
"""Name of the mesh axis along which stages lie."""

_numbers = itertools.count()


def stage_axes(pipeline: Pipeline, inside: MeshShape) -> MeshShape:
    """The mesh of all ranks: the pipeline axis, then those inside a stage."""
    inner = tuple(f"in_{n}" if n == PIPELINE_AXIS else n for n in inside.names)
    return MeshShape((pipeline.degree, *inside.sizes), (PIPELINE_AXIS, *inner))


@dataclass(frozen=True, eq=False)
class StageMesh:
    """This rank's place.

    Attributes:
        whole: the mesh with its pipeline axis first.
        inside: the axes inside this rank's stage.
        along: this rank's group along the pipeline axis.
        rank: this rank's coordinate along it.
        pipeline: which stages are on which rank.
    """

    whole: DeviceMesh
    inside: DeviceMesh
    along: dist.ProcessGroup
    rank: int
    pipeline: Pipeline

    @classmethod
    def of(cls, mesh: DeviceMesh, pipeline: Pipeline, shape: MeshShape, timeout_s: float | None = None) -> StageMesh:
        """Arrange the ranks of ``mesh`` in a pipeline axis, its ``pp`` axis or else the outermost, and the axes of ``shape``.

        Makes the process groups that are missing: collective over the ranks of ``mesh``.

        Args:
            mesh: torch's mesh.
            pipeline: the plan's stages.
            shape: the plan's mesh, inside a stage.
            timeout_s: how long a rank waits for others along the pipeline axis; None: as the process group was made with.

        Raises:
            InputError: it has a ``pp`` axis of another size.
            RuntimeMismatchError: it has another number of devices than stages and ``shape`` need.
        """
        names = mesh.mesh_dim_names or ()
        if PIPELINE_AXIS in names and mesh.size(names.index(PIPELINE_AXIS)) != pipeline.degree:
            raise InputError(
                f"the plan has {pipeline.degree} ranks along the pipeline axis, axis 'pp' of the mesh has "
                f"{mesh.size(names.index(PIPELINE_AXIS))}: plan again for this mesh"
            )
        if PIPELINE_AXIS in names[1:]:
            axis = names.index(PIPELINE_AXIS)
            order = (PIPELINE_AXIS, *(n for n in names if n != PIPELINE_AXIS))
            mesh = DeviceMesh(mesh.device_type, mesh.mesh.movedim(axis, 0).contiguous(), mesh_dim_names=order)
        axes = stage_axes(pipeline, shape)
        whole = logical_mesh(mesh, axes, named=True)
        found = cls(whole, whole[axes.names[1:]], whole.get_group(0), whole.get_local_rank(0), pipeline)
        if timeout_s is None:
            return found
        along = found._new_group(tuple(range(pipeline.degree)), timedelta(seconds=timeout_s))
        assert along is not None
        return replace(found, along=along)

    @property
    def degree(self) -> int:
        """Number of ranks along the pipeline axis."""
        return self.pipeline.degree

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Coordinates along the pipeline axis of the ranks that run ``stages``, ascending."""
        return tuple(sorted({self.pipeline.rank_of(s) for s in stages}))

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite ``tensor`` on all ranks along the pipeline axis with that of the rank at coordinate ``rank``."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.along, rank), group=self.along)

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """This rank's group of the given coordinates along the pipeline axis; None if it is not among them.

        Collective over the whole mesh: every rank makes every group, in the same order.
        """
        return self.along if len(ranks) == self.degree else self._new_group(ranks, None)

    def _new_group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup | None:
        lines = self.whole.mesh.movedim(0, -1).reshape(-1, self.degree)
        mine = None
        for line in lines.tolist():
            members = [line[r] for r in ranks]
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                mine = group
        return mine

    def forget_groups(self) -> None:
        """Let go of the process groups that the meshes remember: connections close with the last reference to a group."""
        for mesh in (self.whole, self.inside):
            getattr(mesh, "_pg_registry", {}).clear()  # torch 2.13; a release without it has nothing to let go of

    def new_name(self) -> str:
        """A name for what belongs to one module; equal on all ranks, since all make modules in the same order."""
        return f"pipeline{next(_numbers)}"
