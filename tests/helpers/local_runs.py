"""Run a lowered program on simulated ranks and put its results together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from meshwright.passes import LocalProgram, lower
from meshwright.planner.ir.graph import Capture, Value
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, join_shards, local_slice
from tests.helpers.pieces import coordinates
from tests.helpers.threads import run_threads


@dataclass(frozen=True)
class Whole:
    """Inputs and results of the whole program on one device, by position in the joint graph."""

    inputs: dict[str, torch.Tensor]
    results: tuple[torch.Tensor | None, ...]


def run_whole(capture: Capture, model: torch.nn.Module, batch: dict, seed: int = 0) -> Whole:
    """Run the captured joint graph as it is.

    Args:
        capture: what was captured from ``model`` with ``batch``.
        model: gives parameters and buffers.
        batch: keyword arguments of the call.
        seed: for tangents and the graph's seed.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    leaves = iter([x for x in pytree.tree_leaves(((), batch)) if isinstance(x, torch.Tensor)])
    inputs: dict[str, torch.Tensor] = {}
    for placeholder in capture.graph.inputs:
        inputs[placeholder.value.name] = _input(
            placeholder.role, placeholder.name, placeholder.value, state, leaves, capture, generator
        )
    with torch.no_grad():
        results = capture.gm(*inputs.values())
    return Whole(inputs, tuple(results))


def _input(role, name, value: Value, state, leaves, capture: Capture, generator) -> torch.Tensor:
    if role in ("parameter", "buffer"):
        found = state[name].detach()
    elif role == "input":
        found = next(leaves)
    elif role == "constant":
        found = capture.constants[name]
    elif role == "seed":
        found = torch.tensor(1234, dtype=value.dtype)
    elif not value.shape:
        found = torch.ones((), dtype=value.dtype)
    else:
        found = torch.randn(value.shape, dtype=value.dtype, generator=generator)
    assert tuple(found.shape) == value.shape and found.dtype == value.dtype, (role, name, value, found.shape, found.dtype)
    return found


def lower_all(capture: Capture, plan: Plan) -> list[LocalProgram]:
    """Every rank's program, with group names that :func:`group_name` makes."""
    return [lower(capture, plan, c, [group_name(c, a) for a in range(len(c))]) for c in coordinates(plan.mesh.sizes)]


def group_name(coordinate: tuple[int, ...], axis: int) -> str:
    """A stable name of the group of ``coordinate`` along ``axis``."""
    return f"mesh{axis}:{'-'.join('x' if a == axis else str(i) for a, i in enumerate(coordinate))}"


def run_local_programs(
    capture: Capture, plan: Plan, programs: list[LocalProgram], whole: Whole
) -> tuple[torch.Tensor | None, ...]:
    """All results of the joint graph, joined from what the ranks made.

    Raises:
        AssertionError: replicas differ.
    """
    sizes = plan.mesh.sizes
    by_rank = run_threads(plan.mesh.num_devices, _run_rank, capture, plan, programs, whole)
    joined: list[torch.Tensor | None] = []
    for k, (result, final) in enumerate(zip(capture.graph.outputs, plan.outputs, strict=True)):
        if result.value is None or final is None:
            joined.append(None)
            continue
        pieces = {c: by_rank[r][k] for r, c in enumerate(coordinates(sizes))}
        _replicas_agree(pieces, final, result.name)
        joined.append(join_shards(pieces, final, sizes))
    return tuple(joined)


def _replicas_agree(pieces: dict[tuple[int, ...], torch.Tensor], final: Placements, name: str) -> None:
    for c, piece in pieces.items():
        first = tuple(0 if p.is_replicate else i for p, i in zip(final, c, strict=True))
        torch.testing.assert_close(piece, pieces[first], rtol=1e-9, atol=1e-12, msg=f"{name} differs at {c}")


def _run_rank(rank: int, capture: Capture, plan: Plan, programs: list[LocalProgram], whole: Whole) -> list[torch.Tensor | None]:
    sizes, program = plan.mesh.sizes, programs[rank]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=plan.mesh.names)
    coordinate = coordinates(sizes)[rank]
    for axis in range(len(sizes)):
        torch._C._distributed_c10d._register_process_group(group_name(coordinate, axis), mesh.get_group(axis))
    local = {k: local_slice(t, plan.inputs[k], sizes, coordinate).contiguous() for k, t in whole.inputs.items()}
    with torch.no_grad():
        made = program.forward(*[local[name] for name in program.inputs])
        gradients = iter(())
        if program.backward is not None:
            saved = made[len(made) - len(program.saved) :] if program.saved else ()
            again = [local[name] for name in program.saved_inputs]
            gradients = iter(program.backward(*saved, *again, *[local[name] for name in program.tangents]))
    early = iter(made)
    outputs = zip(capture.graph.outputs, plan.outputs, strict=True)
    return [None if p is None else next(gradients if o.role == "gradient" else early) for o, p in outputs]
