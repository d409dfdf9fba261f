"""What is saved of a module: its parameters and persistent buffers, an optimizer, random state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.runtime.checkpoint.catalogue import MODEL
from meshwright.runtime.checkpoint.optimizer_state import Names, tensors_of
from meshwright.runtime.checkpoint.pieces import Piece

RANDOM = "random."
"""Prefix of the states of torch's own generators: ``random.cpu.3`` is that of rank 3."""


@dataclass(frozen=True)
class Held:
    """A module's tensors on this rank.

    Attributes:
        tensors: parameters (DTensors) and persistent buffers, each once, by their first names.
        aliases: the other names of tied ones, to the first.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    @classmethod
    def by(cls, module: nn.Module) -> Held:
        """What ``module`` holds now."""
        first: dict[int, str] = {}
        tensors, aliases = {}, {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) == name:
                tensors[name] = tensor
            else:
                aliases[name] = first[id(tensor)]
        return cls(tensors, aliases)

    @property
    def names(self) -> Names:
        """Names by ``id``."""
        return {id(t): name for name, t in self.tensors.items()}


def generator_states() -> dict[str, torch.Tensor]:
    """States of this process's generators, by device type."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def saved_pieces(held: Held, optimizer: torch.optim.Optimizer | None, rank: int) -> dict[str, Piece]:
    """All tensors that this rank can save, by full name."""
    tensors: dict[str, torch.Tensor] = {MODEL + name: t for name, t in held.tensors.items()}
    if optimizer is not None:
        tensors.update(tensors_of(optimizer, held.names))
    tensors.update((f"{RANDOM}{kind}.{rank}", state) for kind, state in generator_states().items())
    return {name: Piece.of(t) for name, t in tensors.items()}


def set_generators(saved: Mapping[str, torch.Tensor]) -> None:
    """Continue the generators where their states were taken."""
    if "cpu" in saved:
        torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
