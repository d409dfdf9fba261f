"""Add nodes to a graph with their fake values, computing each distinct one once.

Ranks, layers and redistributions repeat the same ops on the same shapes thousands of times, and running an op on fake
tensors costs more than everything else in lowering. Nodes therefore share fake values: a value says shape, strides and
element type, nothing else. Which of its ``all_input_nodes`` a result is a view of is kept beside it, in ``meta["alias"]``.
"""

from __future__ import annotations

import operator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

_seen: WeakKeyDictionary[fx.GraphModule, dict[Any, tuple[Any, int | None]]] = WeakKeyDictionary()


def share_values(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """Let what is emitted into ``new`` use the values remembered for ``old``."""
    _seen[new] = _seen.setdefault(old, {})


class Emitter:
    """Adds nodes to a graph.

    Attributes:
        meta: what every new node's ``meta`` starts from.
        hint: what new nodes' names start with.
    """

    def __init__(self, graph: fx.Graph, owner: fx.GraphModule, device: torch.device | None = None):
        """Emit into ``graph``.

        Args:
            graph: where new nodes go.
            owner: the captured graph, for which fake values are remembered.
            device: where the program will run; None: as captured.
        """
        self.graph = graph
        self.device = device
        self.seen = _seen.setdefault(owner, {})
        self.meta: dict[str, Any] = {}
        self.hint = ""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit ``target(*args, **kwargs)``; must be called under the fake mode of the operands."""
        val, alias = self.value(target, args, kwargs)
        if self.device is not None and kwargs.get("device") is not None:
            kwargs["device"] = self.device
        short = "get" if target is operator.getitem else str(target).split(".")[1]
        node = self.graph.create_node("call_function", target, args, kwargs, name=f"{self.hint}_{short}")
        node.meta.update(self.meta, val=val, alias=alias)
        return node

    def value(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
        """The fake result, and the index of the operand that it is a view of."""
        if target is operator.getitem:
            return args[0].meta["val"][args[1]], None if args[0].meta.get("alias") is None else 0
        key = (target, _described(args), _described(tuple(kwargs.items())))
        if key not in self.seen:
            self.seen[key] = _run(target, args, kwargs)
        return self.seen[key]


def _described(arg: Any) -> Any:
    """What the fake result of an op can depend on, as something hashable."""
    if isinstance(arg, fx.Node):
        val = arg.meta["val"]
        return "tensor", tuple(val.shape), val.stride(), val.storage_offset() == 0, val.dtype
    if isinstance(arg, list | tuple):
        return tuple(map(_described, arg))
    return type(arg), arg


def _run(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    operands: dict[fx.Node, Any] = {}

    def fresh(node: fx.Node) -> Any:
        """A value of its own storage for each operand, so that views can be told."""
        if node not in operands:
            val = node.meta["val"]
            operands[node] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
        return operands[node]

    val = target(*fx.node.map_arg(args, fresh), **fx.node.map_arg(kwargs, fresh))
    results = [v for v in (val if isinstance(val, list | tuple) else (val,)) if isinstance(v, torch.Tensor)]
    made = {_storage(v) for v in results}
    return val, next((i for i, v in enumerate(operands.values()) if _storage(v) in made), None)


def _storage(val: torch.Tensor) -> int:
    return val.untyped_storage()._cdata
