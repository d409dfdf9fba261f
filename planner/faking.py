"""Fake tensors in the place of a model's weights and inputs, for the time of one capture.

A fake tensor has shape, dtype and device but no memory. Real, meta and already fake tensors, DTensors (by their global
shape) all become contiguous fake *CPU* tensors of one mode: on raw meta tensors autograd drops the backward of some ops
without an error, and fake CUDA tensors need a CUDA build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from meshwright.planner.ir.errors import TraceError

_CPU = torch.device("cpu")

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype


@cache
def _attributes() -> dict[str, Any]:
    """What every fake CPU tensor says of itself, but for its mode."""
    fake = FakeTensor(FakeTensorMode(), torch.empty((), device="meta"), _CPU)
    return {k: v for k, v in vars(fake).items() if k != "fake_mode"}


def _fake(empty: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """The fake of a meta tensor, as ``FakeTensor`` makes it, which looks at its arguments for three times as long."""
    fake = torch.Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_CPU)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(_attributes(), fake_mode=mode)
    return fake


def fake_of(form: Form, mode: FakeTensorMode) -> FakeTensor:
    """A fake CPU tensor in memory of its own, that knows nothing of gradients."""
    shape, strides, dtype = form
    with no_dispatch():
        return _fake(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), mode)


def view_of(tensor: torch.Tensor, form: Form, offset: int, mode: FakeTensorMode) -> FakeTensor:
    """A fake CPU tensor in the memory of another one, beginning at one of its elements."""
    shape, strides, dtype = form
    with no_dispatch():
        empty = torch.empty((), dtype=dtype, device="meta")
        empty.set_(tensor.untyped_storage(), offset, shape, strides)
        return _fake(empty, mode)


def fake_as(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """A fake CPU tensor of the same shape, strides and dtype, in memory of its own, that knows nothing of gradients."""
    return fake_of(form_of(tensor), mode)


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, requires_grad: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A contiguous fake CPU tensor of the same shape, and of the same dtype unless another one is given."""
    with no_dispatch():
        fake = _fake(torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta"), mode)
    return fake.requires_grad_() if requires_grad else fake


@dataclass(frozen=True)
class StateNames:
    """Which names stand for one tensor, for parameters or for buffers.

    Attributes:
        groups: first name of each distinct tensor to all its names, in the model's order.
        tensors: the tensor of each first name, as the model holds it.
    """

    groups: dict[str, tuple[str, ...]]
    tensors: dict[str, torch.Tensor]

    def first_of(self) -> dict[str, str]:
        """Every name to the first name of its tensor."""
        return {name: first for first, names in self.groups.items() for name in names}


def _names(named: list[tuple[str, torch.Tensor]]) -> StateNames:
    by_id: dict[int, list[str]] = {}
    for name, tensor in named:
        by_id.setdefault(id(tensor), []).append(name)
    groups = {names[0]: tuple(names) for names in by_id.values()}
    return StateNames(groups, {n: t for n, t in named if n in groups})


def parameter_names(model: nn.Module) -> StateNames:
    """Names of the model's parameters, tied ones together."""
    return _names(list(model.named_parameters(remove_duplicate=False)))


def buffer_names(model: nn.Module) -> StateNames:
    """Names of the model's buffers, persistent or not."""
    return _names(list(model.named_buffers(remove_duplicate=False)))


def _check_initialised(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise TraceError(
                f"parameter {name!r} has no shape yet (a lazy module): run the model once on a real batch before it is captured"
            )


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, trainable: bool, low: torch.dtype | None = None) -> Iterator[None]:
    """While entered, every parameter and buffer of ``model`` is fake; the very objects come back afterwards.

    Attributes that forward assigns (a counter, a cached tensor) come back to what they were, too. Ties stay ties: one
    tensor, one fake. With ``trainable`` False no fake requires a gradient. With ``low`` floating parameters are what
    :func:`cast_parameters` makes of them.

    Raises:
        TraceError: a parameter is not initialised.
    """
    _check_initialised(model)
    fakes: dict[int, torch.Tensor] = {}

    def swap(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            is_parameter = isinstance(tensor, nn.Parameter)
            is_cast = is_parameter and low is not None and tensor.is_floating_point()
            fake = fake_like(tensor, mode, dtype=low if is_cast else None)
            fakes[id(tensor)] = nn.Parameter(fake, trainable and tensor.requires_grad) if is_parameter and not is_cast else fake
        return fakes[id(tensor)]

    saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for module, _, parameters, buffers in saved:
            module._parameters.update({k: swap(p) for k, p in parameters.items()})  # type: ignore[misc]
            module._buffers.update({k: swap(b) for k, b in buffers.items()})
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            stores: tuple[tuple[Any, Any], ...] = (
                (module.__dict__, attributes),
                (module._parameters, parameters),
                (module._buffers, buffers),
            )
            for store, before in stores:
                store.clear()
                store.update(before)


def low_precision(precision: str | None) -> torch.dtype | None:
    """What floating parameters and inputs are cast to at the start of the forward; None for nothing."""
    return torch.bfloat16 if precision == "bf16-mixed" else None


@contextmanager
def cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """While entered, floating parameters read as casts to ``dtype``, each made once."""
    if dtype is None:
        yield
        return
    saved = [(m, dict(m._parameters)) for m in model.modules()]
    casts: dict[int, torch.Tensor] = {}
    try:
        for module, parameters in saved:
            for name, p in parameters.items():
                if p is not None and p.is_floating_point():
                    if id(p) not in casts:
                        casts[id(p)] = p.to(dtype)
                    module._parameters[name] = casts[id(p)]  # type: ignore[assignment]
        yield
    finally:
        for module, parameters in saved:
            module._parameters.clear()
            module._parameters.update(parameters)
