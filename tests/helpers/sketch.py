"""Write small op graphs by hand: shapes come from running each op on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.planner.ir.graph import GraphInput, GraphOutput, Op, OpGraph, Value


class Sketch:
    """An op graph in the making.

    >>> s = Sketch()
    >>> x, w = s.input("x", (8, 4)), s.parameter("w", (4, 6))
    >>> y = s.op("aten.mm.default", x, w)
    >>> print(s.done(y).ops[0])
    mm: float32[8, 6] = aten.mm.default(x, w)
    """

    def __init__(self) -> None:
        self.inputs: list[GraphInput] = []
        self.ops: list[Op] = []
        self.gradients: list[GraphOutput] = []
        self.phase = "forward"
        self._names: dict[str, int] = {}

    def _fresh(self, stem: str) -> str:
        n = self._names[stem] = self._names.get(stem, -1) + 1
        return stem if n == 0 else f"{stem}_{n}"

    def placeholder(self, name: str, shape: tuple[int, ...], role: str, dtype: torch.dtype = torch.float32) -> Value:
        value = Value(self._fresh(name), shape, dtype)
        self.inputs.append(GraphInput(value, role, name, trainable=role == "parameter"))
        return value

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Value:
        return self.placeholder(name, shape, "input", dtype)

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Value:
        return self.placeholder(name, shape, "parameter", dtype)

    def op(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Add one op; returns its value, or a tuple of them."""
        ins: list[Value] = []

        def meta(arg: Any) -> Any:
            if isinstance(arg, Value):
                ins.append(arg)
                return torch.empty(arg.shape, dtype=arg.dtype, device="meta")
            return [meta(a) for a in arg] if isinstance(arg, list | tuple) else arg

        def frozen(arg: Any) -> Any:
            return tuple(map(frozen, arg)) if isinstance(arg, list | tuple) else arg

        overload: Any = torch.ops
        for part in target.split("."):
            overload = getattr(overload, part)
        metas = [meta(a) for a in args]
        result = overload(*metas, **({"device": "meta"} if not ins else {}), **{k: meta(v) for k, v in kwargs.items()})
        name = self._fresh(target.split(".")[1])
        many = isinstance(result, list | tuple)
        outs = tuple(
            None if r is None else Value(f"{name}#{i}" if many else name, tuple(r.shape), r.dtype)
            for i, r in enumerate(result if many else [result])
        )
        self.ops.append(
            Op(
                name,
                target,
                tuple(map(frozen, args)),
                tuple((k, frozen(v)) for k, v in kwargs.items()),
                tuple(ins),
                outs,
                self.phase,
            )
        )
        return outs if many else outs[0]

    def backward(self) -> None:
        """From here on ops are of the backward."""
        self.phase = "backward"

    def gradient(self, value: Value, name: str) -> None:
        """``value`` is the gradient of parameter ``name``."""
        self.gradients.append(GraphOutput(value, "gradient", name))

    def done(self, *outputs: Value) -> OpGraph:
        results = tuple(GraphOutput(v, "output", f"out{i}") for i, v in enumerate(outputs))
        return OpGraph(tuple(self.inputs), tuple(self.ops), (*results, *self.gradients))
