"""Whole tensors from DTensors, whichever placements they have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.spec import join_shards, local_shape, max_local_shape
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.mesh import mesh_shape, our_placements


def gather_whole(tensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank; shares nothing with ``tensor``. Collective.

    ``DTensor.full_tensor()`` gives the same and warns on every rank where two axes shard one dim.
    """
    mesh, sizes = tensor.device_mesh, mesh_shape(tensor.device_mesh).sizes
    placements, shape = our_placements(tensor.placements, sizes), tuple(tensor.shape)
    biggest = max_local_shape(shape, placements, sizes)
    stacked = pad_to(local_of(tensor).detach(), biggest)
    for axis in reversed(range(len(sizes))):
        if placements[axis].is_replicate:
            stacked = stacked.unsqueeze(0)
            continue
        parts = [torch.empty_like(stacked) for _ in range(sizes[axis])]
        dist.all_gather(parts, stacked, group=mesh.get_group(axis))
        stacked = torch.stack(parts)
    pieces = {}
    for at in itertools.product(*(range(n) for n in sizes)):
        held = stacked[tuple(0 if p.is_replicate else i for p, i in zip(placements, at, strict=True))]
        pieces[at] = held[tuple(slice(0, n) for n in local_shape(shape, placements, sizes, at))]
    return join_shards(pieces, placements, sizes).clone()


def pad_to(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``piece`` with zeros behind it up to ``shape``, contiguous; a copy only where it is smaller."""
    if tuple(piece.shape) == tuple(shape):
        return piece.contiguous()
    padded = piece.new_zeros(shape)
    padded[tuple(slice(0, n) for n in piece.shape)] = piece
    return padded
