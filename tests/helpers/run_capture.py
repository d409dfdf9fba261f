"""Runs a captured graph on real tensors in one process, to compare it with the model itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.planner.ir.graph import Capture, GraphInput
from meshwright.planner.trace import capture
from tests.helpers.models import ALL


@cache
def captured(name: str) -> Capture:
    """The training capture of a model of the zoo, made once per process."""
    return capture(ALL[name].model(), kwargs=ALL[name].batch())


@dataclass
class Ran:
    """What one run of a captured graph gave.

    Attributes:
        output: the model's output, in its own structure.
        gradients: parameter FQN or input path to gradient (None where there is none).
        mutations: buffer FQN to new value.
    """

    output: Any
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    mutations: dict[str, torch.Tensor] = field(default_factory=dict)


def _feed(capture: Capture, model: nn.Module, batch: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    left = iter(batch)

    def value(entry: GraphInput) -> torch.Tensor:
        if entry.role in ("parameter", "buffer"):
            return state[entry.name].detach()
        if entry.role == "input":
            return next(left).detach()
        if entry.role == "constant":
            return capture.constants[entry.name]
        return torch.tensor(seed) if entry.role == "seed" else torch.ones(entry.value.shape, dtype=entry.value.dtype)

    return [value(entry) for entry in capture.graph.inputs]


def run(capture: Capture, model: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> Ran:
    """Runs ``capture.gm`` with the model's weights and the given call; tangents are ones."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        results = capture.gm(*_feed(capture, model, leaves, seed))
    outputs: list[Any] = []
    ran = Ran(None)
    for entry, result in zip(capture.graph.outputs, results, strict=True):
        if entry.role == "output":
            outputs.append(entry.constant if entry.value is None else result)
        elif entry.role == "gradient":
            ran.gradients[entry.name] = result
        else:
            ran.mutations[entry.name] = result
    ran.output = pytree.tree_unflatten(outputs, capture.out_spec)
    return ran
