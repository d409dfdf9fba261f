"""One op at one place of the mesh, and the table of local forms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from meshwright.passes.local.layout import dense_inputs
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import Placements, local_shape

Call = Callable[..., Any]
"""``call(overload, *args, **kwargs)``: emits (or runs) one op and gives back its result."""


@dataclass(frozen=True)
class Piece:
    """One op as one rank runs it.

    Attributes:
        op: the op, with global shapes.
        spec: placements over all mesh axes of what it reads and makes.
        sizes: mesh axis sizes.
        coordinate: the rank's place on each axis.
        inputs: local tensors, in the order of ``op.ins``.
        call: emits one op.
    """

    op: Op
    spec: OpSpec
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    inputs: tuple[Any, ...]
    call: Call

    @cached_property
    def args(self) -> list[Any]:
        """The positional arguments with local tensors in their places."""
        return self._local[0]

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, likewise."""
        return self._local[1]

    @cached_property
    def _local(self) -> tuple[list[Any], dict[str, Any]]:
        inputs = iter(self.inputs)

        def convert(arg: Any) -> Any:
            if isinstance(arg, Value):
                return next(inputs)
            if isinstance(arg, tuple):
                return [convert(a) for a in arg]
            return arg

        args = [convert(a) for a in self.op.args]
        return args, {k: convert(v) for k, v in self.op.kwargs}

    def in_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of the local input ``index``."""
        return local_shape(self.op.ins[index].shape, self.spec.ins[index], self.sizes, self.coordinate)

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of the local result ``index``."""
        value, placements = self.op.outs[index], self.spec.outs[index]
        assert value is not None and placements is not None
        return local_shape(value.shape, placements, self.sizes, self.coordinate)

    def ways(self, placements: Placements, dim: int) -> int:
        """Into how many pieces the mesh cuts ``dim``."""
        n = 1
        for p, size in zip(placements, self.sizes, strict=True):
            n *= size if p.is_shard and p.dim == dim else 1
        return n

    def span(self, placements: Placements, dim: int, length: int) -> tuple[int, int]:
        """``(start, length)`` of this rank's stretch of ``dim``, of global ``length``; nested shards cut what is left.

        Raises:
            VerifyError: the dim is cut in groups, so that the piece is no stretch.
        """
        start = 0
        for p, n, i in zip(placements, self.sizes, self.coordinate, strict=True):
            if not p.is_shard or p.dim != dim:
                continue
            if p.split > 1:
                raise VerifyError(
                    f"op {self.op.name} ({self.op.target}) needs consecutive pieces of dim {dim}, but the plan has {p}"
                )
            length //= n
            start += i * length
        return start, length

    def default(self, *, args: Sequence[Any] | None = None, **kwargs: Any) -> tuple[Any | None, ...]:
        """The same op on local tensors, with other positional arguments or some keywords replaced."""
        return self.results(
            self.call(overload(self.op.target), *(self.args if args is None else args), **{**self.kwargs, **kwargs})
        )

    def results(self, made: Any) -> tuple[Any | None, ...]:
        """One local result per ``op.outs``."""
        if not returns_several(self.op.target):
            return (made,)
        return tuple(None if v is None else self.call(operator.getitem, made, i) for i, v in enumerate(self.op.outs))


Form = Callable[[Piece], tuple[Any | None, ...]]
"""From a piece to one local result per ``op.outs``."""

_forms: dict[str, Form] = {}


def form(*targets: str) -> Callable[[Form], Form]:
    """Decorator: this function is the local form of these targets (overloads, or packets for all overloads)."""

    def add(function: Form) -> Form:
        for target in targets:
            register_form(target, function)
        return function

    return add


def register_form(target: str, function: Form) -> None:
    """Give an op a local form, or replace the one it has."""
    _forms[target] = function


def run_local(
    op: Op, spec: OpSpec, mesh: MeshShape, coordinate: tuple[int, ...], inputs: Sequence[Any], call: Call
) -> tuple[Any | None, ...]:
    """Run ``op`` on one rank's pieces.

    Args:
        op: the op, with global shapes.
        spec: placements over all axes.
        mesh: the mesh.
        coordinate: the rank's place.
        inputs: local tensors (FX nodes or real tensors), in the order of ``op.ins``.
        call: ``call(overload, *args, **kwargs)`` emits or runs one op; for ops with several results it returns what
            ``call(operator.getitem, result, i)`` indexes.

    Returns:
        One local result per ``op.outs`` (None where the op does not make it). No communication is emitted.
    """
    piece = Piece(op, spec, mesh.sizes, coordinate, dense_inputs(op, inputs, call), call)
    function = _forms.get(op.target) or _forms.get(op.target.rpartition(".")[0])
    return piece.default() if function is None else function(piece)


@lru_cache(maxsize=4096)
def overload(target: str) -> torch._ops.OpOverload:
    """The overload named ``"aten.mm.default"``."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


@lru_cache(maxsize=4096)
def returns_several(target: str) -> bool:
    """Whether the op returns a tuple or list, even of one."""
    returns = overload(target)._schema.returns
    return len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType)
