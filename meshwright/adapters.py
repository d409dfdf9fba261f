"""Low-rank adapters beside the linear layers of a frozen model, to count or plan fine-tuning without weights.

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: ``y = W x + B A x * (alpha / rank)``.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from meshwright.planner.ir.errors import InputError


class LowRank(nn.Module):
    """A frozen layer ``[in] -> [out]`` and a trainable ``[in] -> [rank] -> [out]`` beside it.

    Args:
        layer: the layer; its parameters are frozen.
        features: its input and output features.
        rank: of the adapter.
        alpha: scale of the adapter's result times ``rank``.
    """

    def __init__(self, layer: nn.Module, features: tuple[int, int], rank: int, alpha: float = 16.0):
        super().__init__()
        like = next(layer.parameters())
        self.layer, self.scale = layer, alpha / rank
        self.down = nn.Linear(features[0], rank, bias=False, device=like.device, dtype=like.dtype)
        self.up = nn.Linear(rank, features[1], bias=False, device=like.device, dtype=like.dtype)
        if like.device.type != "meta":
            nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x)) * self.scale


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer; None for any other."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's linear layer, weight [in, out]
        rows, columns = module.get_parameter("weight").shape
        return rows, columns
    return None


def with_low_rank(model: nn.Module, rank: int) -> nn.Module:
    """A copy of ``model`` in which only adapters beside its linear layers are trained; output heads stay as they are.

    Args:
        model: any module; left as it is.
        rank: of the adapters, at least 1.

    Raises:
        InputError: a rank below 1, or a model without linear layers.
    """
    if not isinstance(rank, int) or rank < 1:
        raise InputError(f"low_rank={rank!r}: the rank of an adapter is a whole number of at least 1")
    adapted = copy.deepcopy(model)
    adapted.requires_grad_(False)
    embeddings = {id(p) for m in adapted.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    found = [(n, m, f) for n, m in adapted.named_modules() if (f := _features(m)) is not None and "." in n]
    found = [(n, m, f) for n, m, f in found if not embeddings & {id(p) for p in m.parameters()}]
    if not found:
        raise InputError(f"{type(model).__name__} has no linear layers inside that could get adapters")
    for name, module, features in found:
        parent, _, child = name.rpartition(".")
        setattr(adapted.get_submodule(parent), child, LowRank(module, features, rank))
    return adapted
