"""One forward and backward of a bound program, as an ``autograd.Function``.

Parameters go in as DTensors and their gradients come out as DTensors that lie alike, so that ``p.grad`` accumulates,
clips and steps like any other. Saved tensors go through ``save_for_backward``: a second ``backward()`` without
``retain_graph`` raises torch's usual error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from meshwright.runtime.dtensor import local_of, wrap_like
from meshwright.runtime.mesh import mesh_shape, torch_placements
from meshwright.runtime.programs import BoundProgram


@dataclass(frozen=True, slots=True)
class Return:
    """How a leaf gets its gradient.

    Attributes:
        name: what the program calls the gradient.
        give_back: from the program's local gradient to what autograd is given.
    """

    name: str
    give_back: Callable[[torch.Tensor], torch.Tensor]


def return_to_parameter(name: str, parameter: DTensor) -> Return:
    """A DTensor that lies as the parameter does."""
    return Return(name, partial(wrap_like, model=parameter))


def return_to_input(program: BoundProgram, name: str, value: str, *, whole: bool) -> Return:
    """The gradient of a batch input, gathered to the whole batch or brought to the input's piece.

    Args:
        program: whose gradient.
        name: path of the input in the call, as the capture names it.
        value: name of its placeholder.
        whole: whether the caller passed the global batch.
    """
    sizes = mesh_shape(program.mesh).sizes
    made = torch_placements(program.interface.gradients[name], sizes, f"gradient of {name}")
    wanted = [Replicate()] * len(sizes) if whole else torch_placements(program.placements[value], sizes, f"input {name}")

    def give_back(grad: torch.Tensor) -> torch.Tensor:
        spread = DTensor.from_local(grad, program.mesh, made, run_check=False)
        return spread.redistribute(placements=wanted).to_local()

    return Return(name, give_back)


Made = dict[str, torch.Tensor]
"""Local gradients by name."""


class Step(torch.autograd.Function):
    """``apply(program, flat, run, finish, returns, *leaves) -> forward's results without the saved ones``.

    ``flat`` holds the forward's local arguments, from which ``run`` makes its results; ``leaves`` are the tensors that autograd
    may want gradients of (parameters as DTensors, batch inputs as the caller passed them), and ``returns`` how each gets its
    gradient, of those that ``finish`` leaves.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        program: BoundProgram,
        flat: list[torch.Tensor],
        run: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        finish: Callable[[Made], Made] | None,
        returns: Sequence[Return],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        local = program.local
        results = run(flat)
        index = {name: i for i, name in enumerate(local.inputs)}
        num_results = len(results) - len(local.saved)
        kept = [*results[num_results:], *(flat[index[name]] for name in local.saved_inputs)]
        returned = _distinct(results[:num_results], [*flat, *kept])
        ctx.save_for_backward(*kept)
        ctx.program, ctx.finish, ctx.returns = program, finish, returns
        ctx.tangents = [o.index for o in program.outputs if o.differentiable]
        ctx.shapes = [(returned[i].shape, returned[i].dtype, returned[i].device) for i in ctx.tangents]
        ctx.mark_non_differentiable(*(r for i, r in enumerate(returned) if i not in ctx.tangents))
        ctx.set_materialize_grads(False)
        return tuple(returned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        program: BoundProgram = ctx.program
        assert program.backward is not None
        tangents = [
            torch.zeros(shape, dtype=dtype, device=device) if grads[i] is None else _plain(grads[i])
            for i, (shape, dtype, device) in zip(ctx.tangents, ctx.shapes, strict=True)
        ]
        given = [*ctx.saved_tensors, *tangents]
        ctx.maybe_clear_saved_tensors()  # but where the graph is retained; then ``given`` alone holds them
        del grads, tangents
        made = dict(zip(program.local.gradients, program.backward(given), strict=True))
        if ctx.finish is not None:
            made = ctx.finish(made)
        return (
            None,
            None,
            None,
            None,
            None,
            *(None if made.get(r.name) is None else r.give_back(made[r.name]) for r in ctx.returns),
        )


def _plain(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return (local_of(grad) if isinstance(grad, DTensor) else grad).contiguous()


def _distinct(results: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results of which none is the same object as another, an argument or a saved tensor (autograd forbids it)."""
    seen = {id(t) for t in taken}
    fresh = []
    for result in results:
        if id(result) in seen:
            result = result.detach()
        seen.add(id(result))
        fresh.append(result)
    return fresh
