"""Repeated blocks in a module tree: lists whose children are alike, and the model with most of them left out.

    layers: ModuleList of 32 decoder layers      ->   Stack("model.layers", first=1, total=32)

Children are alike if their classes, submodules, parameters, buffers, mode and plain attributes are equal, up to integer
attributes that are the child's own index (``layer_idx``). What forward *does* with them is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MIN_TOTAL = 5
"""Fewest children of a list that pay: three (or more) of them are captured."""

LISTS = (nn.ModuleList, nn.Sequential)
_INTERNAL = frozenset(nn.Module().__dict__)
_HOOKS = tuple(k for k in nn.Module().__dict__ if k.endswith("_hooks"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of modules of which few are captured.

    Attributes:
        path: dotted path of the list.
        first: index of the first captured child that stands for others. The one before it is alike, too, so that it meets its
            predecessor as all others meet theirs.
        total: number of children; all from ``first - 1`` on are alike.
        tail: how many of the last children are captured. Two, where the very last one meets what follows in another way.
    """

    path: str
    first: int
    total: int
    tail: int = 1

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the children that are captured: those before ``first``, it, and the last ones."""
        return (*range(self.first + 1), *range(self.total - self.tail, self.total))

    @property
    def copies(self) -> int:
        """How many children are left out."""
        return self.total - len(self.kept)


# --- likeness -----------------------------------------------------------------------------------------------------


def _same(a: Any, b: Any, i: int, j: int, seen: set[tuple[int, int]]) -> bool:
    """Whether plain values are equal, or are the indices ``i`` and ``j`` of their own children."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return a == b or (type(a) is int and a == i and b == j)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, i, j, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], i, j, seen) for k in a)
    if isinstance(a, set | frozenset):
        return a == b
    if isinstance(a, torch.Tensor | nn.Module) or not hasattr(a, "__dict__"):
        return isinstance(a, nn.Module) and (id(a), id(b)) in seen
    if (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    return _same(dict(vars(a)), dict(vars(b)), i, j, seen)


def _same_tensors(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if list(a) != list(b):
        return False
    return all(
        x is y is None
        or (x is not None and y is not None and (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad))
        for x, y in ((a[k], b[k]) for k in a)
    )


def alike(a: nn.Module, b: nn.Module, i: int, j: int) -> bool:
    """Whether children ``i`` and ``j`` of a list are the same module but for the numbers in their tensors."""
    pairs = list(zip(a.named_modules(remove_duplicate=False), b.named_modules(remove_duplicate=False), strict=False))
    if len(pairs) != sum(1 for _ in a.named_modules(remove_duplicate=False)) or len(pairs) != sum(
        1 for _ in b.named_modules(remove_duplicate=False)
    ):
        return False
    seen = {(id(x), id(y)) for (_, x), (_, y) in pairs}
    return all(p == q and _alike_alone(x, y, i, j, seen) for (p, x), (q, y) in pairs)


def _alike_alone(x: nn.Module, y: nn.Module, i: int, j: int, seen: set[tuple[int, int]]) -> bool:
    """Likeness of two modules without their children."""
    if type(x) is not type(y) or x.training != y.training:
        return False
    if any(getattr(m, hooks, None) for m in (x, y) for hooks in _HOOKS):
        return False
    mine, other = ({k: v for k, v in vars(m).items() if k not in _INTERNAL} for m in (x, y))
    return (
        _same_tensors(x._parameters, y._parameters)
        and _same_tensors(x._buffers, y._buffers)
        and list(mine) == list(other)
        and all(_same(mine[k], other[k], i, j, seen) for k in mine)
    )


# --- finding ------------------------------------------------------------------------------------------------------


def _tensors(module: nn.Module) -> set[int]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {id(t) for _, t in named}


def _is_apart(children: Sequence[nn.Module]) -> bool:
    """Whether no two children share a tensor or a module."""
    tensors = [_tensors(c) for c in children]
    modules = [{id(m) for m in c.modules()} for c in children]
    return all(len(set().union(*sets)) == sum(map(len, sets)) for sets in (tensors, modules))


def _per_layer_lists(model: nn.Module, total: int) -> Iterator[Sequence[Any]]:
    """Lists of length ``total`` in attributes of modules and of their configurations: what differs by layer."""
    seen: set[int] = set()
    for module in model.modules():
        for value in [v for k, v in vars(module).items() if k not in _INTERNAL]:
            if id(value) in seen:
                continue
            seen.add(id(value))
            inside = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor) else ()
            yield from (v for v in (value, *inside) if isinstance(v, list | tuple) and len(v) == total)


def _stack(model: nn.Module, path: str, module: nn.Module) -> Stack | None:
    children = list(module.children())
    total = len(children)
    if total < MIN_TOTAL or len(module._modules) != total:
        return None
    first = total - 1
    while first > 0 and alike(children[-1], children[first - 1], total - 1, first - 1):
        first -= 1
    stack = Stack(path, first + 1, total)
    if stack.copies < 1 or not _is_apart(children):
        return None
    lists = list(_per_layer_lists(model, total))
    if any(not _same(values[stack.first], v, 0, 0, set()) for values in lists for v in values[stack.first :]):
        return None
    return stack


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of alike children, in the model's order."""
    found: list[Stack] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(s.path + ".") for s in found)
        if isinstance(module, LISTS) and not inside and (stack := _stack(model, path, module)) is not None:
            found.append(stack)
    return tuple(found)


@contextmanager
def shortened(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """While entered, every stack holds only the children in ``Stack.kept``, numbered from 0."""
    lists = [model.get_submodule(s.path) for s in stacks]
    saved = [dict(m._modules) for m in lists]
    try:
        for module, stack, before in zip(lists, stacks, saved, strict=True):
            children = list(before.values())
            module._modules.clear()
            module._modules.update({str(k): children[i] for k, i in enumerate(stack.kept)})
        yield
    finally:
        for module, before in zip(lists, saved, strict=True):
            module._modules.clear()
            module._modules.update(before)
