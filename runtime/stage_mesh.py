"""A device mesh seen as ranks along the pipeline axis, with a mesh inside each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.pipeline import Pipeline

PIPELINE_AXIS = "pp"
"""Name of the mesh axis along which stages lie."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class StageMesh:
    """This rank's place.

    Attributes:
        whole: the mesh with its ``pp`` axis.
        inside: the axes inside a stage: this rank's stage. One axis of one device where there are none.
        along: this rank's group along the pipeline axis.
        rank: this rank's coordinate along it; ``degree`` its size.
        pipeline: which stages are on which rank, once that is known.
    """

    whole: DeviceMesh
    inside: DeviceMesh
    along: dist.ProcessGroup
    rank: int
    degree: int
    pipeline: Pipeline | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> StageMesh:
        """Split ``mesh`` at its ``pp`` axis. Collective where that is the only axis.

        Raises:
            InputError: it has no axis of that name.
        """
        names = mesh.mesh_dim_names or ()
        if PIPELINE_AXIS not in names:
            raise InputError(
                f"a plan with stages needs a mesh with an axis named 'pp', found axes {names or 'without names'}: for example "
                "init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp'))"
            )
        others = tuple(n for n in names if n != PIPELINE_AXIS)
        if not others:
            mesh = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(PIPELINE_AXIS, "stage"))
            others = ("stage",)
        axis = (mesh.mesh_dim_names or ()).index(PIPELINE_AXIS)
        return cls(mesh, mesh[others], mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis))

    def with_pipeline(self, pipeline: Pipeline) -> StageMesh:
        return replace(self, pipeline=pipeline)

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Coordinates along the pipeline axis of the ranks that run ``stages``, ascending."""
        assert self.pipeline is not None
        return tuple(sorted({self.pipeline.rank_of(s) for s in stages}))

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite ``tensor`` on all ranks along the pipeline axis with that of the rank at coordinate ``rank``."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.along, rank), group=self.along)

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """This rank's group of the given coordinates along the pipeline axis; None if it is not among them.

        Collective over the whole mesh: every rank makes every group, in the same order.
        """
        if len(ranks) == self.degree:
            return self.along
        axis = (self.whole.mesh_dim_names or ()).index(PIPELINE_AXIS)
        lines = self.whole.mesh.movedim(axis, -1).reshape(-1, self.degree)
        mine = None
        for line in lines.tolist():
            members = [line[r] for r in ranks]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        return mine

    def new_name(self) -> str:
        """A name for what belongs to one module; equal on all ranks, since all make modules in the same order."""
        return f"pipeline{next(_numbers)}"
