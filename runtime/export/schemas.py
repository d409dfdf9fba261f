"""Whether arguments are of the types that an operator declares.

Torch converts what it is given: a plain integer passes for an element type, and one that names none crashes the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

_KINDS: Mapping[str, tuple[type, ...]] = {
    "Tensor": (fx.Node, bool, int, float),  # numbers pass for tensors without dims
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "number": (bool, int, float),
    "bool": (bool,),
    "str": (str,),
    "Any": (str,),  # names of process groups
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Device": (torch.device,),
}


@cache
def _arguments(target: Any) -> tuple[tuple[str, str, bool], ...]:
    """Name, type and whether a single number stands for a list, of each argument."""
    return tuple((a.name, str(a.real_type), a.N is not None) for a in target._schema.arguments)


def wrong_argument(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What is wrong about the arguments of an operator; "" where nothing is. A function without schema takes one node."""
    if not hasattr(target, "_schema"):
        return ""
    declared = _arguments(target)
    if len(args) > len(declared):
        return f"{len(args)} arguments"
    kinds = {name: (kind, broadcasts) for name, kind, broadcasts in declared}
    given = [*((name, value) for (name, _, _), value in zip(declared, args, strict=False)), *kwargs.items()]
    for name, value in given:
        if name not in kinds:
            return f"an argument called {name[:40]!r}"
        kind, broadcasts = kinds[name]
        if not _fits(value, kind) and not (broadcasts and _fits([value], kind)):
            return f"{name}={str(value)[:60]}, which is no {kind}"
    return f"{name} twice" if len({name for name, _ in given}) < len(given) else ""


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        return isinstance(value, list) and all(_fits(v, kind[len("List[") : -1]) for v in value)
    return type(value) in _KINDS.get(kind, ())
