"""Data parallelism run by one controller: what the first rank of a mesh hands out and collects around every call.

All ranks make the same calls; of the others' batches only the shapes count. The gradients are summed on all ranks as the plan says, so
that any optimizer may run on all of them: what the first rank's optimizer made of the parameters is broadcast at the next call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.planner.ir.spec import Placements, local_slice
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.mesh import broadcast_tensor, coordinate_of, device_of, mesh_shape


class OneController:
    """The first rank of a mesh, in charge of the others.

    Args:
        mesh: of the plan.
    """

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self.is_first = not any(coordinate_of(mesh))

    @torch.no_grad()
    def hand_out_parameters(self, parameters: Iterable[Any]) -> None:
        """The first rank's values on every rank; collective."""
        for parameter in {id(p): p for p in parameters}.values():
            broadcast_tensor(local_of(parameter), self._mesh)

    def hand_out(self, whole: torch.Tensor, placements: Placements) -> torch.Tensor:
        """This rank's piece of the first rank's ``whole``; collective.

        The pieces travel axis by axis, each rank keeping its own: along an axis the first rank of each group scatters what it has.
        """
        device, sizes = device_of(self._mesh), mesh_shape(self._mesh).sizes
        piece = whole.detach().to(device).contiguous()
        for axis, (p, size) in enumerate(zip(placements, sizes, strict=True)):
            group, coordinate = self._mesh.get_group(axis), coordinate_of(self._mesh)
            first = dist.get_global_rank(group, 0)
            cuts = [local_slice(piece, (p,), (size,), (k,)).contiguous() for k in range(size)]
            piece = torch.empty_like(cuts[coordinate[axis]])
            dist.scatter(piece, cuts if coordinate[axis] == 0 else None, src=first, group=group)
        return piece

    def collect(self, output: Any) -> Any:
        """The output with its tensors whole on the first rank and None on the others where they were spread; collective."""

        def whole(leaf: DTensor) -> torch.Tensor | None:
            found = gather_whole(leaf)
            return found if self.is_first else None

        return pytree.tree_map_only(DTensor, whole, output)
