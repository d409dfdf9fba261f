"""Gradients of a model in stages: summed over the ranks that share a parameter, given to ``.grad``, clipped by one norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from meshwright.runtime.dtensor import local_of, wrap_like
from meshwright.runtime.mesh import device_of
from meshwright.runtime.stage_mesh import StageMesh


class GradientBook:
    """Which gradients there are, who holds the parameters, and the groups over which shared ones are summed.

    Args:
        trained: names of the gradients that the program makes.
        holders: for every parameter, the coordinates along the pipeline axis that hold it.
        mesh: this rank's place.
    """

    def __init__(self, trained: Iterable[str], holders: Mapping[str, tuple[int, ...]], mesh: StageMesh):
        self._mesh = mesh
        self._trained = [name for name in trained if name in holders]
        self._holders = holders
        shared = sorted({holders[n] for n in self._trained if len(holders[n]) > 1})
        self._groups = {ranks: mesh.group_of(ranks) for ranks in shared}

    def give(self, made: Mapping[str, Sequence[torch.Tensor]], parameters: Mapping[str, Any]) -> None:
        """Add this step's gradients to ``.grad``.

        Args:
            made: the terms that this rank's stages made, by parameter.
            parameters: those that this rank holds, by name.
        """
        taken: set[tuple[int, int]] = set()
        for name in self._trained:
            if self._mesh.rank not in self._holders[name]:
                continue
            parameter = parameters[name]
            local = self._summed(name, made.get(name, ()), local_of(parameter))
            if parameter.requires_grad:
                _accumulate(parameter, _own(local, taken))

    def _summed(self, name: str, terms: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        ranks = self._holders[name]
        total = terms[0] if terms else torch.zeros_like(like)
        for term in terms[1:]:
            total = total + term
        if len(ranks) == 1:
            return total
        total = total.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._groups[ranks])
        return total

    def clip(self, parameters: Mapping[str, torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients to a norm of at most ``max_norm``; the norm before. Collective over the whole mesh."""
        device = device_of(self._mesh.whole)
        total = torch.zeros((), dtype=torch.float64, device=device)
        graded = {id(p): (name, p) for name, p in parameters.items() if p.grad is not None}
        for name, p in graded.values():
            assert isinstance(p.grad, DTensor)
            copies = len(self._holders[name]) * _replicas(p.grad)
            total += local_of(p.grad).double().square().sum() / copies
        for axis in range(self._mesh.whole.ndim):
            dist.all_reduce(total, group=self._mesh.whole.get_group(axis))
        norm = total.sqrt()
        scale = float(max_norm / (norm + 1e-6))  # torch's clip_grad_norm_ adds the same
        if scale < 1.0:
            for _, p in graded.values():
                assert isinstance(p.grad, DTensor)
                local_of(p.grad).mul_(scale)
        return norm.float()


def _replicas(tensor: DTensor) -> int:
    """How many ranks of its mesh hold each element."""
    return math.prod(n for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if isinstance(p, Replicate))


def _own(local: torch.Tensor, taken: set[tuple[int, int]]) -> torch.Tensor:
    """``local``, copied where another gradient is the same memory or where it is not dense."""
    at = (local.untyped_storage().data_ptr(), int(local.storage_offset()))
    if at in taken or not local.is_contiguous():
        return local.clone(memory_format=torch.contiguous_format)
    taken.add(at)
    return local


def _accumulate(parameter: Any, local: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = wrap_like(local, parameter)
    else:
        local_of(parameter.grad).add_(local)
