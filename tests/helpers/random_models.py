"""Small models put together at random from what people write: layers, losses, penalties, shared and unused parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, LENGTH, WIDTH, WORDS = 8, 6, 8, 16

Layer = Callable[["RandomModel", torch.Tensor, nn.Parameter, nn.Parameter, torch.Tensor, torch.Tensor], torch.Tensor]


class RandomModel(nn.Module):
    """Layers, a loss and a penalty drawn by a seed.

    Shapes: x [samples, length, width], w [width, width], b [width], mask [samples, length].
    """

    def __init__(self, seed: int):
        super().__init__()
        dice = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = [dice.choice(LAYERS) for _ in range(dice.randint(2, 5))]
        self.loss, self.penalty, self.tied = dice.choice(LOSSES), dice.choice(PENALTIES), dice.random() < 0.3
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.ws = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in self.layers)
        self.bs = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) / 3) for _ in self.layers)
        self.positions, self.head = nn.Parameter(torch.randn(LENGTH, WIDTH) / 3), nn.Parameter(torch.randn(WORDS, WIDTH) / 3)
        self.scale = nn.Parameter(torch.ones(()))

    def __str__(self) -> str:
        names = [f.__name__ for f in (*self.layers, self.loss, self.penalty)]
        return f"{' '.join(names)}{' tied' if self.tied else ''}"

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(ids) + self.positions
        for layer, w, b in zip(self.layers, self.ws, self.bs, strict=True):
            x = layer(self, x, w, b, first, mask)
        logits = x @ (self.embedding.weight if self.tied else self.head).t()
        return self.loss(logits, labels, mask, x) + self.penalty(self, x)


def batch_of(i: int) -> dict[str, torch.Tensor]:
    """Batch number ``i``."""
    g = torch.Generator().manual_seed(i)
    ids, labels = (torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=g) for _ in range(2))
    return {"ids": ids, "labels": labels, "mask": (torch.rand(SAMPLES, LENGTH, generator=g) > 0.3).float()}


# --- layers -------------------------------------------------------------------------------------------------------


def linear(m, x, w, b, first, mask):
    return F.gelu(x @ w + b)


def residual(m, x, w, b, first, mask):
    return x + torch.tanh(x @ w) * m.scale + b


def normalised(m, x, w, b, first, mask):
    return F.layer_norm(x @ w, (WIDTH,), b, b)


def attention(m, x, w, b, first, mask):
    q = (x @ w).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2) + b


def plain_attention(m, x, w, b, first, mask):
    scores = (x @ w) @ x.transpose(1, 2) / 3 + torch.zeros(LENGTH, LENGTH).masked_fill(
        torch.ones(LENGTH, LENGTH).tril() == 0, -1e4
    )
    return torch.softmax(scores, -1) @ x + b


def gated_by_the_first(m, x, w, b, first, mask):
    return x * torch.sigmoid(first @ w) + b


def chosen_by_the_mask(m, x, w, b, first, mask):
    return torch.where(mask.unsqueeze(-1) > 0, x @ w, b)


def sums_along_the_sequence(m, x, w, b, first, mask):
    return torch.cumsum(x, 1) / LENGTH @ w + b


def maximum_of_the_sequence(m, x, w, b, first, mask):
    return x + (x @ w).amax(1, keepdim=True) + b


def halves(m, x, w, b, first, mask):
    p, q = (x @ w + b).chunk(2, -1)
    return torch.cat([p * q, q], -1) + m.ws[0].sum() * 1e-2


def detached(m, x, w, b, first, mask):
    return x.detach() @ w + x * b


def with_the_first_weights(m, x, w, b, first, mask):
    return x @ m.ws[0] + b + m.bs[0]


def backwards(m, x, w, b, first, mask):
    return x[:, torch.arange(LENGTH - 1, -1, -1)] @ w + b


def shifted(m, x, w, b, first, mask):
    return torch.cat([x[:, 1:], x[:, :1]], 1) @ w + b


def unit_weights(m, x, w, b, first, mask):
    return x @ (w / w.norm()) + b / (b.norm() + 1)


def squared_weights(m, x, w, b, first, mask):
    return x + torch.einsum("bth,hk->btk", x, w @ w.t()) / 3 + b


LAYERS: list[Layer] = [
    linear,
    residual,
    normalised,
    attention,
    plain_attention,
    gated_by_the_first,
    chosen_by_the_mask,
    sums_along_the_sequence,
    maximum_of_the_sequence,
    halves,
    detached,
    with_the_first_weights,
    backwards,
    shifted,
    unit_weights,
    squared_weights,
]


# --- losses -------------------------------------------------------------------------------------------------------


def cross_entropy(logits, labels, mask, x):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cross_entropy_of_some(logits, labels, mask, x):
    return F.cross_entropy(logits.flatten(0, 1), torch.where(mask > 0, labels, -100).flatten())


def weighted_cross_entropy(logits, labels, mask, x):
    return (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum() / mask.sum()


def summed_cross_entropy(logits, labels, mask, x):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


def with_small_logits(logits, labels, mask, x):
    return cross_entropy(logits, labels, mask, x) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def squares(logits, labels, mask, x):
    return (x - 0.5).square().mean()


def of_each_sample(logits, labels, mask, x):
    return (x.square().mean((1, 2)) + 1).log().mean()


def share_of_the_batch(logits, labels, mask, x):
    return x.square().sum() / (x.abs().sum().detach() + 1)


LOSSES = [
    cross_entropy,
    cross_entropy_of_some,
    weighted_cross_entropy,
    summed_cross_entropy,
    with_small_logits,
    squares,
    of_each_sample,
    share_of_the_batch,
]


# --- penalties ----------------------------------------------------------------------------------------------------


def no_penalty(m: RandomModel, x: torch.Tensor) -> Any:
    return 0


def small_weights(m, x):
    return 1e-2 * torch.stack([w.square().sum() for w in m.ws]).sum()


def small_norm_of_all(m, x):
    return 1e-2 * torch.sqrt(torch.stack([p.square().sum() for p in m.parameters()]).sum() + 1)


def small_positions(m, x):
    return 1e-1 * m.positions.abs().mean()


def product_of_two(m, x):
    return 1e-1 * m.scale * m.bs[0].sum()


def weights_times_activations(m, x):
    return 1e-2 * m.ws[0].square().mean() * x.square().mean()


def orthogonal_weights(m, x):
    return 1e-2 * (m.ws[0] @ m.ws[-1].t() - torch.eye(WIDTH)).square().sum()


PENALTIES = [
    no_penalty,
    no_penalty,
    small_weights,
    small_norm_of_all,
    small_positions,
    product_of_two,
    weights_times_activations,
    orthogonal_weights,
]
