"""What a call of the model looks like: its tensors by path, whichever way the caller passes them.

``pm(ids, labels=y)``, ``pm(input_ids=ids, labels=y)`` and ``pm(labels=y, input_ids=ids)`` are one call: arguments are
bound to the signature of the model's ``forward``, defaults filled in, and flattened to ``{"['input_ids']": tensor, ...}``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture, GraphInput


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of a call.

    Attributes:
        shape: its shape.
        dtype: its element type.
        requires_grad: whether a gradient for it is wanted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class PlainLeaf:
    """A leaf of a call that is no tensor; it was baked into the program.

    Attributes:
        text: its ``repr``.
    """

    text: str

    def __str__(self) -> str:
        return self.text


Call = dict[str, TensorLeaf | PlainLeaf]
"""A call's leaves by path."""


def call_of_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that a batch stands for: a dict of keywords, a tuple or list of positions, or one input."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


class CallBinder:
    """Flattens calls of one model to leaves by path.

    Attributes:
        signature: of the model's ``forward``.
    """

    def __init__(self, forward: Callable[..., Any]):
        self.signature = inspect.signature(forward)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves of a call by path, defaults included.

        Raises:
            InputError: ``forward`` does not take these arguments.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"the model's forward{self.signature} cannot be called so: {error}") from None
        bound.apply_defaults()
        flat, _ = pytree.tree_flatten_with_path(bound.arguments if type(bound.arguments) is dict else dict(bound.arguments))
        return {pytree.keystr(path): leaf for path, leaf in flat}

    def captured(self, capture: Capture) -> tuple[dict[str, GraphInput], dict[str, Any]]:
        """The captured call: placeholders of its tensors by path, and its other leaves by path."""
        count = capture.in_spec.num_leaves
        tensors = iter(capture.graph.inputs_of("input"))
        leaves: list[Any] = [
            _Baked(capture.baked_inputs[i]) if i in capture.baked_inputs else _Held(next(tensors)) for i in range(count)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, capture.in_spec)
        found = self.leaves(tuple(args), kwargs)
        placeholders = {path: leaf.input for path, leaf in found.items() if isinstance(leaf, _Held)}
        plain = {
            path: leaf.value if isinstance(leaf, _Baked) else leaf for path, leaf in found.items() if path not in placeholders
        }
        return placeholders, plain


class _Held:
    """Stands for a tensor while a captured call is bound."""

    def __init__(self, given: GraphInput):
        self.input = given


class _Baked:
    """Stands for a leaf that is no tensor."""

    def __init__(self, value: Any):
        self.value = value


def describe_call(leaves: Mapping[str, Any], *, grad: bool) -> Call:
    """Leaves as what programs are looked up by.

    Args:
        leaves: from :meth:`CallBinder.leaves`.
        grad: whether autograd records.
    """
    return {
        path: TensorLeaf(tuple(leaf.shape), leaf.dtype, grad and leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else PlainLeaf(repr(leaf))
        for path, leaf in leaves.items()
    }


def without_gradients(call: Call) -> Call:
    """The same call, none of whose tensors wants a gradient."""
    return {path: replace(leaf, requires_grad=False) if isinstance(leaf, TensorLeaf) else leaf for path, leaf in call.items()}


def key_of(call: Call) -> tuple[Any, ...]:
    """A hashable key that is equal for equal calls, in whatever order their arguments came."""
    return tuple(sorted(call.items(), key=lambda item: item[0]))


def difference(planned: Call, found: Call) -> str:
    """What is different in ``found``, one clause per leaf; "" where nothing is."""
    clauses = [
        *(f"{path} is missing (needed: {planned[path]})" for path in planned if path not in found),
        *(f"{path} is unexpected (found: {found[path]})" for path in found if path not in planned),
        *(
            _leaf_difference(path, planned[path], found[path])
            for path in planned
            if path in found and not _serves(planned[path], found[path])
        ),
    ]
    return "; ".join(clauses)


def _serves(planned: TensorLeaf | PlainLeaf, found: TensorLeaf | PlainLeaf) -> bool:
    """Equal, or the program makes a gradient that this call does not want."""
    if isinstance(planned, TensorLeaf) and planned.requires_grad:
        planned = replace(planned, requires_grad=False)
        found = replace(found, requires_grad=False) if isinstance(found, TensorLeaf) else found
    return planned == found


def _leaf_difference(path: str, planned: TensorLeaf | PlainLeaf, found: TensorLeaf | PlainLeaf) -> str:
    if not isinstance(planned, TensorLeaf) or not isinstance(found, TensorLeaf):
        return f"{path} is {found}, needed {planned}"
    if planned.dtype != found.dtype:
        return f"{path} has dtype {str(found.dtype).removeprefix('torch.')}, needed {str(planned.dtype).removeprefix('torch.')}"
    if planned.shape != found.shape:
        return f"{path} has shape {list(found.shape)}, needed {list(planned.shape)}"
    return f"{path} requires a gradient, which the example did not"


def dtype_differences(planned: Call, found: Call) -> str:
    """Tensors of ``found`` whose dtype is another one than planned: never a reason to plan again."""
    both = [(path, planned[path], found[path]) for path in planned if path in found]
    wrong = [
        (path, a, b) for path, a, b in both if isinstance(a, TensorLeaf) and isinstance(b, TensorLeaf) and a.dtype != b.dtype
    ]
    return "; ".join(_leaf_difference(path, a, b) for path, a, b in wrong)
