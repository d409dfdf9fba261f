"""What the schema of an op says: what it writes to, whether it gives a view, and what it does where a call says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten


class Unusual(Exception):
    """The model does something that one pass does not follow."""


# --- what writes in place -----------------------------------------------------------------------------------------

_FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
"""Ops whose form that returns its result has another name than theirs without the underscore."""


def _written(target: torch._ops.OpOverload) -> list[int]:
    """Positions of the arguments that an op writes to."""
    return [i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The op that returns what ``target`` writes to its first argument.

    Raises:
        Unusual: there is none.
    """
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    if torch.Tag.inplace_view in target.tags:
        raise Unusual(f"{target} changes a tensor's shape in place")
    packet = target.overloadpacket
    name = packet._qualified_op_name.split("::")[-1]
    form = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    found = getattr(form, target._overloadname, None)
    if not name.endswith("_") or found is None or found._schema.is_mutable or _written(target) != [0]:
        raise Unusual(f"{target} writes to memory")
    return found


@cache
def gives_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op's one result is a view of its first argument."""
    returns, arguments = target._schema.returns, target._schema.arguments
    of = arguments[0].alias_info if arguments else None
    return len(returns) == 1 and returns[0].alias_info is not None and of is not None and not target._schema.is_mutable


# --- arguments ----------------------------------------------------------------------------------------------------


@cache
def _defaults(target: torch._ops.OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """Defaults of positional arguments (``_NONE`` without), and of keyword arguments."""
    arguments = target._schema.arguments
    given = [(a, a.default_value if a.has_default_value() else _NONE) for a in arguments]
    return [d for a, d in given if not a.kwarg_only], {a.name: d for a, d in given if a.kwarg_only}


_NONE = object()


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, torch.Tensor) and bool(value == default)


def without_defaults(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """A call's arguments without those at the end, and the keywords, that say what the default says."""
    positional, keyword = _defaults(target)
    count = len(args)
    while count and _is_default(args[count - 1], positional[count - 1]):
        count -= 1
    return args[:count], {k: v for k, v in kwargs.items() if not _is_default(v, keyword.get(k, _NONE))}
