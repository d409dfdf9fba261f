"""Ops on fake tensors, run once for each kind of arguments: the blocks of a model are alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.planner.faking import fake_as

_CPU = torch.device("cpu")

_KEPT_OUT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@cache
def _gives_views(target: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in target._schema.returns)


class Remembering:
    """Runs ops on fake tensors; one that was run before, on the same kinds of tensors, gives the same kind of result at once.

    The cache of a fake mode does so, too; this one knows less (new memory for every result, CPU, no gradients) and takes a
    quarter of its time.

    Args:
        mode: of the fake tensors.
        views: whether views may get memory of their own, too.
    """

    def __init__(self, mode: FakeTensorMode, *, views: bool = True):
        self._mode, self._views = mode, views
        self._results: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = self._key(func, args, kwargs)
        if key is not None and key in self._results:
            known = self._results[key]
            several = isinstance(known, list | tuple)
            return type(known)([fake_as(x, self._mode) for x in known]) if several else fake_as(known, self._mode)
        result = func(*args, **kwargs)
        if key is not None and self._is_new(result, args):
            self._results[key] = result
        return result

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What decides the kind of the result; None where more does."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
            return None
        if any(tag in func.tags for tag in _KEPT_OUT) or (not self._views and _gives_views(func)):
            return None
        try:
            key = (func, torch.get_default_dtype(), self._kind(args), tuple((k, self._kind(v)) for k, v in kwargs.items()))
            hash(key)
        except TypeError:
            return None
        return key

    def _kind(self, x: Any) -> Any:
        if isinstance(x, FakeTensor):
            if x.constant is not None:
                raise TypeError("its value matters")
            return (x.shape, x.stride(), x.dtype)
        if isinstance(x, torch.Tensor):
            raise TypeError("a tensor from outside")
        return tuple(map(self._kind, x)) if isinstance(x, list | tuple) else (type(x), x)

    def _is_new(self, result: Any, args: Any) -> bool:
        """Whether a result is one fake tensor or several, none of them an argument."""
        several = result if isinstance(result, list | tuple) else (result,)
        mine = [x for x in several if isinstance(x, FakeTensor) and x.constant is None and x.fake_device == _CPU]
        return len(mine) == len(several) and not any(x is a for x in mine for a in args)
