"""What users pass as example inputs and models, made into one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.planner.ir.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call of the model."""


def call_of(example_inputs: Any) -> Call:
    """Arguments of the call that ``example_inputs`` stand for.

    Args:
        example_inputs: a tuple or list (positional), a mapping (keywords), one tensor, or a callable giving any of these.

    Raises:
        InputError: of another type, a keyword is no string, or there is nothing in it.
    """
    given = example_inputs() if callable(example_inputs) and not isinstance(example_inputs, torch.Tensor) else example_inputs
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, Mapping) and all(isinstance(k, str) for k in given):
        args, kwargs = (), dict(given)
    elif isinstance(given, tuple | list):
        args, kwargs = tuple(given), {}
    else:
        raise InputError(
            f"example_inputs is {type(given).__name__}; it must be a tuple of positional arguments, a dict of keyword arguments, "
            "one tensor, or a callable that returns one of these"
        )
    if not args and not kwargs:
        raise InputError("example_inputs is empty; pass what the model's forward takes, with global shapes")
    return args, kwargs


def model_of(model: torch.nn.Module | Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The module itself, or what a factory makes on the meta device (no memory, whatever the size).

    Raises:
        InputError: neither a module nor a callable that returns one.
    """
    if isinstance(model, torch.nn.Module):
        return model
    if not callable(model):
        raise InputError(
            f"model is {type(model).__name__}; it must be an nn.Module, or a callable without arguments that makes one"
        )
    with torch.device("meta"):
        made = model()
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"the model factory returned {type(made).__name__}; it must return an nn.Module")
    return made
