"""The seed of random ops: equal on all ranks, another one for each forward, part of the saved state."""

from __future__ import annotations

from typing import Any

import torch

_MASK = (1 << 64) - 1


class SeedSequence:
    """A stream of seeds for the ``seed`` input of programs with random ops.

    Attributes:
        base: what the stream starts from; all ranks must use the same.
        count: how many seeds were drawn.
    """

    def __init__(self, base: int, count: int = 0):
        self.base = base
        self.count = count

    def draw(self) -> int:
        """The next seed, in [0, 2**63).

        Source: the output function of SplitMix64 (Steele, Lea, Flood 2014), so that neighbouring counts are unrelated.
        """
        self.count += 1
        z = (self.base + self.count * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) >> 1

    def state(self) -> dict[str, int]:
        """What :meth:`load_state` takes."""
        return {"base": self.base, "count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue the stream of which ``state`` was taken."""
        self.base, self.count = int(state["base"]), int(state["count"])


def initial_seed() -> int:
    """This process's ``torch.initial_seed()``, from which rank 0 starts the stream of all ranks."""
    return torch.initial_seed() & _MASK
