"""Where the first values of a model come from that is given as a callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.planner.ir.errors import InputError
from meshwright.request import one_of
from meshwright.runtime.initial import INITS, SHARDED_NOTE, fill
from meshwright.runtime.module import ParallelModule
from meshwright.runtime.pipeline import PipelineModule
from meshwright.runtime.tape import Tape, record


@dataclass(frozen=True)
class FirstValues:
    """What to do once the module is there.

    Attributes:
        tape: the recorded constructor; None: nothing.
        generator: the random state when it was called.
        sharded: whether every piece is drawn by itself.
    """

    tape: Tape | None
    generator: torch.Tensor
    sharded: bool

    @classmethod
    def of(cls, model: nn.Module | Callable[[], nn.Module] | Any, init: str) -> FirstValues | None:
        """None for a module, which has its values or gets them from a checkpoint.

        Raises:
            InputError: an option that is none, or a constructor that cannot be replayed.
        """
        one_of("init", init, INITS)
        if isinstance(model, nn.Module):
            if init == "sharded":
                raise InputError("init='sharded' is for a model given as a callable: pass the callable that makes it")
            return None
        if not callable(model):
            raise InputError(f"model is {type(model).__name__}; it must be an nn.Module, or a callable that makes one")
        return cls(record(model) if init != "none" else None, torch.get_rng_state(), init == "sharded")

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan says of it."""
        return (SHARDED_NOTE,) if self.sharded else ()

    def give(self, made: ParallelModule | PipelineModule) -> None:
        """Give the module its values. Collective."""
        if self.tape is not None:
            fill(made, made.device_mesh, self.tape, self.generator, sharded=self.sharded)
