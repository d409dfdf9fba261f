"""Writing a captured graph: emit ops, each distinct computation once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshwright.planner.ir import random_ops  # noqa: F401  (registers meshwright::uniform)
from meshwright.planner.joint import written

aten = torch.ops.aten

KEPT_META = ("seq_nr", "nn_module_stack", "fwd_nn_module_stack", "stack_trace")
"""What of a node's provenance is carried over."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node's value."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _frozen(arg: Any) -> Any:
    """A hashable stand-in for an argument that keeps 1, 1.0 and True apart."""
    if isinstance(arg, list | tuple):
        return tuple(_frozen(a) for a in arg)
    return arg if isinstance(arg, fx.Node) else (type(arg), arg)


class Builder:
    """The new graph while it is written.

    Attributes:
        graph: the new graph.
        made: old node to new node (or to a tuple of new nodes, for a multi-result op that was taken apart).
        seed: placeholder that feeds random ops; made when the first of them is met.
        like: the old node being rewritten: gives provenance to what is emitted.
    """

    def __init__(self, fake_mode: Any):
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}
        self.seed: fx.Node | None = None
        self.like: fx.Node | None = None
        self._fake_mode = fake_mode
        self._seen: dict[Any, fx.Node] = {}
        self._salt = 0

    def placeholder(self, name: str, val: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def emit(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """The op's node: an earlier one with equal arguments, or a new one; ``val`` is computed where not given."""
        key = (target, _frozen(args), tuple((k, _frozen(v)) for k, v in sorted(kwargs.items())))
        if key in self._seen:
            return self._seen[key]
        node = written(self.graph, target, args, kwargs)
        node.meta["val"] = self._val(target, args, kwargs) if val is None else val
        if self.like is not None:
            node.meta.update({k: self.like.meta[k] for k in KEPT_META if k in self.like.meta})
        self._seen[key] = node
        return node

    def _val(self, target: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake_mode, torch.no_grad():
            return target(*real_args, **real_kwargs)

    def uniform(self, shape: tuple[int, ...]) -> fx.Node:
        """Fresh uniform numbers in [0, 1), float32."""
        if self.seed is None:
            with self._fake_mode:
                val = torch.zeros((), dtype=torch.int64)
            before = self.graph._insert
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.seed = self.placeholder("seed", val)
            self.graph._insert = before
        self._salt += 1
        return self.emit(torch.ops.meshwright.uniform.default, self.seed, self._salt, list(shape), "", [], [], True)

    def reshape(self, x: fx.Node, shape: tuple[int, ...], val: Any = None) -> fx.Node:
        """``x`` in another shape; reshapes of reshapes are one, and a sum that kept its dims is one that did not."""
        while x.target is aten.reshape.default:
            x = x.args[0]  # type: ignore[assignment]
        if x.target is aten.sum.dim_IntList and x.args[2]:
            source, dims, _ = x.args
            if shape == tuple(n for d, n in enumerate(shape_of(source)) if d not in dims):  # type: ignore[operator,arg-type]
                return self.emit(aten.sum.dim_IntList, source, dims, False, val=val)
        return x if shape_of(x) == shape else self.emit(aten.reshape.default, x, list(shape), val=val)

    def permute(self, x: fx.Node, dims: list[int], val: Any = None) -> fx.Node:
        """``x`` with its dims in another order; permutes of permutes are one."""
        if x.target is aten.permute.default:
            source, inner = x.args
            return self.permute(source, [inner[d] for d in dims], val)  # type: ignore
        return x if dims == list(range(len(dims))) else self.emit(aten.permute.default, x, dims, val=val)

    def cast(self, x: fx.Node, dtype: torch.dtype, val: Any = None) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self.emit(aten._to_copy.default, x, val=val, dtype=dtype)

    def expand(self, x: fx.Node, shape: tuple[int, ...], val: Any = None) -> fx.Node:
        if x.target is aten.expand.default and len(shape_of(x.args[0])) == len(shape):  # type: ignore[arg-type]
            x = x.args[0]  # type: ignore[assignment]
        return x if shape_of(x) == shape else self.emit(aten.expand.default, x, list(shape), val=val)

    def full(self, node: fx.Node, value: Any) -> fx.Node:
        """A constant of the old node's shape, dtype and device."""
        val = node.meta["val"]
        return self.emit(aten.full.default, list(val.shape), value, val=val, dtype=val.dtype, device=val.device)
