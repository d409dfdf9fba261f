"""Checkpoints of a model in stages: each rank has its own part, a single-device checkpoint is made of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.mesh import device_of
from meshwright.runtime.stage_mesh import StageMesh
from meshwright.runtime.state import IncompatibleKeys, load_state, some

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def load_state_dict(module: nn.Module, given: Mapping[str, Any], names: set[str], strict: bool) -> IncompatibleKeys:
    """Copy the values of this rank's parameters and buffers.

    Args:
        module: where to.
        given: tensors by name, of the whole model or of this rank's part.
        names: of the whole model's parameters and buffers.
        strict: whether names must match.

    Raises:
        InputError: see :func:`meshwright.runtime.state.load_state`.
    """
    unexpected = [name for name in given if name not in names]
    if strict and unexpected:
        raise InputError(
            f"the checkpoint does not match the model: unexpected {some(unexpected)}; pass strict=False to load what matches"
        )
    own = module.state_dict(keep_vars=True)
    found = load_state(module, {name: t for name, t in given.items() if name in own}, strict)
    return IncompatibleKeys(found.missing_keys, unexpected)


def full_state_dict(
    module: nn.Module, shapes: Shapes, holders: Mapping[str, tuple[int, ...]], mesh: StageMesh
) -> dict[str, torch.Tensor]:
    """Whole plain tensors of the whole model on every rank; collective.

    Args:
        module: this rank's part.
        shapes: shape and dtype of every tensor of the whole model, in order.
        holders: pipeline coordinates that hold a parameter; buffers are on all.
        mesh: this rank's place.
    """
    own = module.state_dict()
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        mine = own.get(name)
        if name not in holders:
            assert mine is not None
            found[name] = mine.clone()
            continue
        empty = torch.empty(shape, dtype=dtype, device=device_of(mesh.whole)) if mine is None else None
        whole = gather_whole(mine) if isinstance(mine, DTensor) else empty
        assert whole is not None
        mesh.broadcast(whole, holders[name][0])
        found[name] = whole
    return found
