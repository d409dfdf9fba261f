"""Cut a whole tensor into every rank's piece, partial ones included: the inverse of ``spec.join_shards``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from meshwright.planner.ir.spec import Placement, Placements, local_slice

Pieces = dict[tuple[int, ...], torch.Tensor]


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every coordinate of a mesh, in rank order."""
    return list(itertools.product(*map(range, sizes)))


def _addends(whole: torch.Tensor, p: Placement, n: int, seed: int) -> list[torch.Tensor]:
    """``n`` tensors whose reduction is ``whole``; sums are exact for whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randint(-8, 8, whole.shape, generator=generator).to(whole.dtype) for _ in range(n)]
    if p.op == "sum":
        return [*noise[1:], whole - sum(noise[1:], torch.zeros_like(whole))]
    winner = torch.randint(0, n, whole.shape, generator=generator)
    worse = (lambda t: t - 1) if p.op == "max" else (lambda t: t + 1)
    return [torch.where(winner == i, whole, worse(whole)) for i in range(n)]


def cut(whole: torch.Tensor, placements: Placements, sizes: Sequence[int]) -> Pieces:
    """Coordinate to local tensor: shards are slices, addends of partial axes are made up."""
    pieces: Pieces = {(): whole}
    for axis, (p, n) in enumerate(zip(placements, sizes, strict=True)):
        grown: Pieces = {}
        for head, piece in pieces.items():
            parts = _addends(piece, p, n, 7 * axis + len(grown)) if p.is_partial else [piece] * n
            grown.update({(*head, i): part for i, part in enumerate(parts)})
        pieces = grown
    return {c: local_slice(t, placements, sizes, c) for c, t in pieces.items()}
