"""Ops on fake tensors, run once for each kind of arguments: the blocks of a model are alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache

from meshwright.planner.faking import Form, fake_of, form_of, view_of

_CPU = torch.device("cpu")

_KEPT_OUT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@dataclass(frozen=True, slots=True)
class Known:
    """What an op gives.

    Attributes:
        kind: type of several results; None for one.
        forms: of the results; None for what is no tensor.
        offset: of a view in the memory of the first argument: the element that it begins at; None for new memory.
    """

    kind: type | None
    forms: tuple[Form | None, ...]
    offset: int | None = None


Results = dict[Hashable, Known]
"""What decides what an op gives, and that; good for any fake mode."""


class NoKind(TypeError):
    """More than shapes, strides and types of its arguments decides what an op gives."""


@cache
def _gives_views(target: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in target._schema.returns)


@cache
def _gives_one(target: torch._ops.OpOverload) -> bool:
    return [str(r.type) for r in target._schema.returns] == ["Tensor"]


@cache
def _may_be_known(target: Any) -> bool:
    """Whether an op's arguments decide what kind of new tensors it gives."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    return not any(tag in target.tags for tag in _KEPT_OUT)


def kind_of_argument(x: Any) -> Hashable:
    """Shapes, strides and types of an argument of an op, or what it is.

    Raises:
        NoKind: these alone do not say enough.
    """
    if isinstance(x, FakeTensor):
        if x.constant is not None or x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise NoKind("its value or its layout matters")
        return (x.shape, x.stride(), x.dtype)
    if isinstance(x, torch.Tensor):
        raise NoKind("a tensor from outside")
    return tuple(map(kind_of_argument, x)) if isinstance(x, list | tuple) else (type(x), x)


class Remembering:
    """Runs ops on fake tensors; one that was run before, on the same kinds of tensors, gives the same kind of result at once.

    The cache of a fake mode does so, too; this one knows less (new memory or a view of the first argument, CPU, no gradients) and takes a
    fifth of its time.

    Args:
        mode: of the fake tensors.
        views: whether views may get memory of their own; else they share that of what they are views of.
        results: what is known already, of any mode; what is learnt is added.
    """

    def __init__(self, mode: FakeTensorMode, *, views: bool = True, results: Results | None = None):
        self._mode, self._views = mode, views
        self._results: Results = {} if results is None else results

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        known = self._results.get(key)
        if known is not None:
            return self._made(known, args)
        with disable_fake_tensor_cache(self._mode):
            result = func(*args, **kwargs)
        if (known := _known(result, args, is_view=not self._views and _gives_views(func))) is not None:
            self._results[key] = known
        return result

    def _made(self, known: Known, args: Any) -> Any:
        if known.offset is not None:
            assert known.forms[0] is not None
            return view_of(args[0], known.forms[0], known.offset, self._mode)
        made = [None if form is None else fake_of(form, self._mode) for form in known.forms]
        return made[0] if known.kind is None else known.kind(made)

    def _key(self, func: Any, args: Any, kwargs: Any) -> Hashable | None:
        """What decides the kind of the result; None where more does."""
        shares = not self._views and _gives_views(func)
        if not _may_be_known(func) or (shares and not (_gives_one(func) and args and isinstance(args[0], torch.Tensor))):
            return None
        try:
            named = tuple((k, kind_of_argument(v)) for k, v in kwargs.items()) if kwargs else ()
            begins = args[0].storage_offset() if shares else None
            key = (func, torch.get_default_dtype(), begins, kind_of_argument(args), named)
            hash(key)
        except TypeError:
            return None
        return key


def _known(result: Any, args: Any, *, is_view: bool) -> Known | None:
    """A result for later; None where it is not one new fake tensor, or several, or with ``is_view`` a view of the first argument."""
    several = result if isinstance(result, list | tuple) else (result,)
    made = [x for x in several if x is not None]
    if not made or not all(is_plain(x) for x in made) or any(x is a for x in made for a in args):
        return None
    forms = tuple(None if x is None else form_of(x) for x in several)
    if not is_view:
        return Known(None if several is not result else type(result), forms)
    if several is result or not args or not is_plain(args[0]) or not _shares_memory(result, args[0]):
        return None
    return Known(None, forms, result.storage_offset())


def is_plain(x: Any) -> bool:
    """Whether something is a fake CPU tensor of which its form says all."""
    if not isinstance(x, FakeTensor) or x.constant is not None or x.fake_device != _CPU:
        return False
    return x.layout is torch.strided and not x.is_conj() and not x.is_neg()


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
