"""Which rule an op has, and its rows, cached by what they depend on: target, shapes, element types, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import R, Row
from meshwright.planner.rules.factors import einsum

Rows = Iterable[Row]
Rule = Callable[[Op], Rows | None]

POINTWISE = "pointwise"
"""Name of the rule of every overload that torch tags as element-wise."""

_rules: dict[str, Rule] = {}
_cache: dict[tuple[Any, ...], tuple[Row, ...] | None] = {}
_MAX_CACHED = 100_000


_R = TypeVar("_R", bound=Rule)


def rule(*targets: str) -> Callable[[_R], _R]:
    """Decorator: this function is the rule of these targets (``"aten.mm.default"``, or ``"aten.mm"``: all overloads).

    The function returns the op's rows over one axis, without the replicated one, or None where it has none.
    """

    def add(function: _R) -> _R:
        _rules.update(dict.fromkeys(targets, function))
        return function

    return add


def register(target: str, rule: str | Rule, *, linear: Iterable[Sequence[int]] = ()) -> None:
    """Give an op a rule, or replace the one it has.

    Args:
        target: overload (``"mylib.op.default"``) or packet (``"mylib.op"``).
        rule: factor text (``"bm,mk->bk"``, see :mod:`~meshwright.planner.rules.factors`), or a function from an
            :class:`Op` to its rows without the replicated one.
        linear: for factor text, groups of inputs in which the op is linear: ``[(0,), (1,)]`` for a product.

    Raises:
        InputError: the target is no ``namespace.op`` or ``namespace.op.overload``.
    """
    if target.count(".") not in (1, 2) or not all(target.split(".")):
        raise InputError(f"rule for {target!r}: the target must read 'namespace.op.overload', such as 'mylib.op.default'")
    groups = [tuple(group) for group in linear]
    _rules[target] = (lambda op: einsum(op, rule, linear=groups)) if isinstance(rule, str) else rule
    _cache.clear()


def unregister(target: str) -> None:
    """Forget the rule of a target."""
    _rules.pop(target, None)
    _cache.clear()


def has_rule(target: str) -> bool:
    """Whether some rule is responsible for ``target``."""
    return rule_of(target) is not None


def rule_of(target: str) -> Rule | None:
    """The rule of an overload: its own, its packet's, or the element-wise one where torch tags it as such."""
    found = _rules.get(target) or _rules.get(target.rpartition(".")[0])
    return _rules[POINTWISE] if found is None and _is_pointwise(target) else found


@lru_cache(maxsize=4096)
def _is_pointwise(target: str) -> bool:
    try:
        overload = resolve(target)
    except AttributeError:
        return False
    tags = overload.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not overload._schema.is_mutable


def resolve(target: str) -> torch._ops.OpOverload:
    """The overload named ``"aten.mm.default"``.

    Raises:
        AttributeError: it is not loaded.
    """
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def rows_for(op: Op) -> tuple[Row, ...] | None:
    """Every known legal way to run ``op`` over one mesh axis of any size, the replicated way first.

    Whether an axis divides the sharded dims is for the caller to check (``spec.divides``).

    Returns:
        The rows, or None if the op has no rule.
    """
    key = signature(op)
    if key not in _cache:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        rule = rule_of(op.target)
        found = None if rule is None else rule(op)
        _cache[key] = None if found is None else tuple(dict.fromkeys((replicated(op), *found)))
    return _cache[key]


def replicated(op: Op) -> Row:
    """The row that every op has."""
    return Row((R,) * len(op.ins), tuple(None if v is None else R for v in op.outs))


def signature(op: Op) -> tuple[Any, ...]:
    """What an op's rows depend on, hashable: target, shapes, element types and other arguments, not names."""
    return (op.target, _key(op.args), _key(op.kwargs), tuple(v is None for v in op.outs))


def _key(arg: Any) -> Any:
    if isinstance(arg, Value):
        return (arg.shape, arg.dtype)
    if isinstance(arg, tuple):
        return tuple(map(_key, arg))
    return (arg, type(arg)) if isinstance(arg, int | float) else arg
