"""Nested inputs and outputs: flat leaves, and a name for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import TraceError


def flatten(tree: Any, what: str) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; dataclasses that pytree does not know yet are registered with it.

    Args:
        tree: nested containers.
        what: words for an error, ``"the model's output"``.

    Raises:
        TraceError: a leaf is an object of an unknown class that holds tensors.
    """
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            break
        for cls in unknown:
            pytree.register_dataclass(cls)
    for leaf in leaves:
        held = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type) else {}
        if any(isinstance(value, torch.Tensor) for value in held.values()):
            raise TraceError(
                f"{what} holds a {type(leaf).__qualname__} with tensors in it, whose structure is unknown: make it a dataclass, "
                "dict, tuple or list, or register it with torch.utils._pytree.register_pytree_node"
            )
    return leaves, spec


def leaf_names(spec: pytree.TreeSpec, root: str) -> list[str]:
    """One name per leaf: ``"loss"``, ``"parts['hidden']"``, ``"output[0]"``; a lone leaf is ``root``."""
    return [_shorten(path, root) for path in _paths(spec)]


def call_names(spec: pytree.TreeSpec) -> list[str]:
    """One name per leaf of ``(args, kwargs)``: ``"args[0]"``, ``"input_ids"``, ``"batch['x']"``."""
    args, kwargs = spec.children()
    return [*("args" + _text(path) for path in _paths(args)), *(_shorten(path, "kwargs") for path in _paths(kwargs))]


def _paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    if spec.is_leaf():
        return [()]
    keys = _keys(spec)
    return [(key, *rest) for key, child in zip(keys, spec.children(), strict=True) for rest in _paths(child)]


def _keys(spec: pytree.TreeSpec) -> Sequence[Any]:
    """Names of the children where the container has them, else positions."""
    context: Any = spec.context
    if isinstance(context, list | tuple) and len(context) and isinstance(context[0], list | tuple):
        context = context[0]
    if isinstance(spec.type, type) and hasattr(spec.type, "_fields"):
        context = spec.type._fields
    if isinstance(context, type) and hasattr(context, "_fields"):
        context = context._fields
    if isinstance(context, list | tuple) and len(context) == spec.num_children and all(isinstance(k, str) for k in context):
        return context
    return range(spec.num_children)


def _text(path: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _shorten(path: Sequence[Any], root: str) -> str:
    if path and isinstance(path[0], str):
        return path[0] + _text(path[1:])
    return root + _text(path)


@dataclasses.dataclass
class Call:
    """The call that is captured, and what the model returned.

    Attributes:
        spec: structure of ``(args, kwargs)``.
        leaves: its leaves; tensors as given.
        names: a name per leaf.
        out_spec: structure of the output, known after the model ran.
        out_leaves: the output's leaves; tensors are fake.
        differentiable: per output leaf, whether a gradient flows into it.
    """

    spec: pytree.TreeSpec
    leaves: list[Any]
    names: list[str]
    out_spec: Any = None
    out_leaves: list[Any] = dataclasses.field(default_factory=list)
    differentiable: list[bool] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = flatten((args, kwargs), "the model's input")
        return cls(spec, leaves, call_names(spec))

    @property
    def tensor_at(self) -> list[int]:
        """Leaf indices of the tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def out_tensor_at(self) -> list[int]:
        """Output leaf indices of the tensors."""
        return [i for i, leaf in enumerate(self.out_leaves) if isinstance(leaf, torch.Tensor)]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` in the places of the tensor leaves."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensor_at, tensors, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self.spec)
