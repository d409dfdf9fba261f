"""What sort of kernel an op is, which decides what it may be fused with.

============= ====================================================================================================
``view``      moves no data: the same elements under another shape
``cast``      one input, the same elements in another type
``pointwise`` one output element from the matching input elements (or from their neighbours: ``cat``, ``pad``)
``reduction`` folds dims of one input away
``creation``  has no tensor input
``kernel``    everything else: matmul, attention, convolution, normalisation, sort, ...
============= ====================================================================================================
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from meshwright.planner.ir.graph import Op

_VIEWS = frozenset(
    f"aten.{name}"
    for name in [
        "alias",
        "detach",
        "expand",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "_unsafe_view",
        "chunk",
        "view_as",
        "narrow",
        "diagonal",
        "flatten",
        "unflatten",
        "movedim",
        "as_strided",
    ]
)
_CASTS = frozenset({"aten._to_copy", "aten.to", "prims.convert_element_type"})
_POINTWISE = frozenset(
    [
        f"aten.{name}"
        for name in [
            "cat",
            "stack",
            "slice_backward",
            "select_backward",
            "constant_pad_nd",
            "clone",
            "copy",
            "fill",
            "lift_fresh_copy",
        ]
    ]
    + ["meshwright.uniform"]
)
_REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "any",
        "all",
        "argmax",
        "argmin",
        "logsumexp",
        "var",
        "var_mean",
        "std",
        "norm",
    ]
)


RANDOM = "meshwright.uniform.default"
"""The op whose second argument numbers the call."""


def packet(target: str) -> str:
    """``"aten.mm"`` of ``"aten.mm.default"``."""
    return target.rpartition(".")[0] or target


@lru_cache(maxsize=4096)
def overload(target: str) -> Any:
    """The ``OpOverload`` called ``target``, or None where torch has none of that name."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


@lru_cache(maxsize=4096)
def kind_of_target(target: str) -> str:
    """``"view"``, ``"cast"``, ``"pointwise"``, ``"reduction"`` or ``"kernel"``, by the overload's name alone."""
    name = packet(target)
    for kind, names in (("view", _VIEWS), ("cast", _CASTS), ("pointwise", _POINTWISE), ("reduction", _REDUCTIONS)):
        if name in names:
            return kind
    op = overload(target)
    if op is not None and torch.Tag.pointwise in op.tags:
        return "pointwise"
    return "kernel"


def kind_of(op: Op) -> str:
    """The sort of kernel that ``op`` is; see the module docstring.

    ``max(a, b)`` is pointwise: what has two tensor inputs of full shape does not fold anything.
    """
    if not op.ins:
        return "creation"
    kind = kind_of_target(op.target)
    return "pointwise" if kind == "reduction" and len(op.ins) > 1 else kind


def is_free(op: Op) -> bool:
    """Whether an op costs nothing by itself: a view, or a cast to a wider type, which each reader does as it reads."""
    kind = kind_of(op)
    if kind == "cast":
        out = op.outs[0]
        return out is not None and out.dtype.itemsize > op.ins[0].dtype.itemsize
    return kind == "view"


@lru_cache(maxsize=4096)
def _parameters_of(target: str) -> tuple[tuple[str, bool, Any], ...]:
    op = overload(target)
    if op is None:
        return ()
    return tuple((a.name, a.kwarg_only, a.default_value if a.has_default_value() else None) for a in op._schema.arguments)


def argument(op: Op, name: str, default: Any = None) -> Any:
    """Argument ``name`` of the call, however it was passed; the schema's default, then ``default``, where it was not."""
    for position, (known, keyword_only, value) in enumerate(_parameters_of(op.target)):
        if known == name:
            if not keyword_only and position < len(op.args):
                return op.args[position]
            return op.kwarg(name, default if value is None else value)
    return op.kwarg(name, default)


def signature_of(op: Op) -> tuple[Any, ...]:
    """What two ops must share to have the same rows and the same cost: all but names, and which random call it is."""
    args = op.args if op.target != RANDOM else (op.args[0], *op.args[2:])
    return (op.target, op.phase, _shape_only(args), _shape_only(op.kwargs), tuple(v and (v.shape, v.dtype) for v in op.outs))


def _shape_only(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(_shape_only(a) for a in arg)
    shape = getattr(arg, "shape", None)
    if shape is not None:
        return ("tensor", tuple(shape), arg.dtype)
    if isinstance(arg, bool | float):
        return (type(arg).__name__, arg)
    return arg if arg is None or isinstance(arg, int | str) else repr(arg)
