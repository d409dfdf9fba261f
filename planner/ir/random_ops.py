"""Random numbers that a plan may shard: ``meshwright::uniform``.

Capture replaces every random op of the model by arithmetic on ``uniform(seed, salt, shape, ...)``; ``seed`` is one int64
scalar input of the whole graph, ``salt`` numbers the call site. The lowering fills in placements and coordinate, so
that replicas draw equal numbers and shards different ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.planner.ir.spec import local_shape, local_slice, parse_placements

_SCHEMA = "(Tensor seed, int salt, int[] shape, str placements, int[] sizes, int[] coordinate, bool exact) -> Tensor"
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One well-scattered non-negative 63-bit number from several.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _draw(shape: Sequence[int], device: torch.device, *numbers: int) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(mix(*numbers))
    return torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float32)


def uniform(
    seed: torch.Tensor,
    salt: int,
    shape: Sequence[int],
    placements: str,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    exact: bool,
) -> torch.Tensor:
    """This rank's piece of a float32 tensor of uniform numbers in [0, 1).

    Args:
        seed: int64 scalar; the result is on its device.
        salt: number of the call site.
        shape: global shape.
        placements: where the pieces lie, ``"S(0)R"``; ``""`` for the whole.
        sizes: mesh axis sizes.
        coordinate: this rank's place on each mesh axis.
        exact: draw the whole and slice, so that numbers do not depend on the sharding; else draw the piece alone,
            seeded by its index along the sharding axes.
    """
    at = parse_placements(placements)
    if exact:
        return local_slice(_draw(shape, seed.device, int(seed), salt), at, sizes, coordinate).clone()
    piece = local_shape(shape, at, sizes, coordinate)
    index = [i if p.is_shard else -1 for p, i in zip(at, coordinate, strict=True)]
    return _draw(piece, seed.device, int(seed), salt, *index)


def _uniform_fake(
    seed: torch.Tensor,
    salt: int,
    shape: Sequence[int],
    placements: str,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    exact: bool,
) -> torch.Tensor:
    piece = local_shape(shape, parse_placements(placements), sizes, coordinate)
    return torch.empty(piece, dtype=torch.float32, device=seed.device)


# Not torch.library.custom_op: it adds an autograd kernel in Python that every call passes through (a forked rank once
# crashed in it), and there is nothing to differentiate.
_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define(f"uniform{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("uniform", uniform, "CompositeExplicitAutograd")
torch.library.register_fake("meshwright::uniform", _uniform_fake, lib=_LIBRARY)
