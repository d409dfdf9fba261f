"""A plan of a large model carried over to a small one of the same structure, and run on all ranks of a small mesh.

The small model has the same modules and as many layers; so its program has the same ops under the same names, and each takes the same
rows of its rule as the plan's op does.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from meshwright.inputs import Call, call_of
from meshwright.lockstep import run_all, run_graph
from meshwright.passes.base import run_passes
from meshwright.passes.rewrite import RewriteForRank
from meshwright.passes.verify import VerifyProgram
from meshwright.planner.ir.errors import InputError, VerifyError
from meshwright.planner.ir.graph import Capture, Op, OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec, Plan, Redistribution
from meshwright.planner.ir.spec import Placement, Placements, Row, join_shards, local_slice
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.repeat import Unlike
from meshwright.planner.rules import rows_for
from meshwright.planning import capture_call
from meshwright.prove import joined
from meshwright.request import Request

_TOLERANCE = 1e-6
"""Relative to the largest element: both sides run in double precision."""
_BATCH, _TOKENS = 8, 16
_FIXED = ("head_dim", "d_kv", "max_position_embeddings", "n_positions")
_HEADS = {"num_attention_heads": 16, "n_head": 8, "num_heads": 8}
_SIZES = {
    "hidden_size": 128,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 192,
    "n_inner": 192,
    "d_ff": 192,
    "d_kv": 8,
    "head_dim": 8,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_key_value_heads": 8,
}


def small_config(config: Any, times: int = 1) -> Any:
    """The configuration with small sizes, ``times`` as large for meshes of odd axes: heads keep whether they are grouped, layers stay; None where no size is known."""
    small, found = copy.deepcopy(config), False
    for name, n in {**_SIZES, **_HEADS}.items():
        if isinstance(getattr(config, name, None), int):
            setattr(small, name, n if name in _FIXED else n * times)
            found = True
    heads, key_heads = (getattr(config, k, None) for k in ("num_attention_heads", "num_key_value_heads"))
    if heads is not None and heads == key_heads:
        small.num_key_value_heads = small.num_attention_heads
    return small if found else None


def small_model(model: nn.Module, call: Call, devices: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model with the structure of ``model``, and a batch for it, for a mesh of ``devices`` ranks.

    Raises:
        InputError: nothing is known of the model's configuration, or its batch is not of token ids by keyword.
    """
    config = getattr(model, "config", None)
    args, kwargs = call
    odd = devices // (devices & -devices)
    small = small_config(config, odd) if hasattr(config, "to_dict") else None
    if small is None:
        raise InputError("no small sizes are known for this model: pass small=(model, inputs)")
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    if args or len(tensors) != len(kwargs) or any(v.dim() != 2 or v.dtype.is_floating_point for v in tensors.values()):
        raise InputError("its batch is more than token ids by keyword: pass small=(model, inputs)")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        try:
            made = type(model)(small)
        except (ValueError, TypeError, RuntimeError, AttributeError) as e:
            raise InputError(f"{type(model).__name__} cannot be made of small sizes: {' '.join(str(e).split())[:200]}") from None
    return made, {k: torch.ones(_BATCH * odd, _TOKENS, dtype=v.dtype) for k, v in tensors.items()}


def run_small(plan: Plan, large: OpGraph, mesh: MeshShape, model: nn.Module, inputs: Any) -> int:
    """Carry ``plan`` over to a small model and compare all ranks with one process; how many results were compared.

    Raises:
        InputError: the plan cannot be carried over.
        VerifyError: a result differs; names it.
    """
    request = Request(precision=plan.precision)
    folded, _ = capture_call(model, call_of(inputs), request, plan.training)
    try:
        capture = folded.at(plan.recompute).whole
    except Unlike as e:
        raise InputError(f"the small model cannot be captured as the large one: {e}") from None
    carried = carried_over(plan, large, capture.graph, mesh)
    try:
        verify_plan(carried, capture.graph)
    except VerifyError as e:
        raise InputError(f"the plan does not suit the small sizes: {e}") from None
    return compare(capture, carried, model)


def carried_over(plan: Plan, large: OpGraph, small: OpGraph, mesh: MeshShape) -> Plan:
    """The plan said of the small program.

    Raises:
        InputError: the programs have different ops, or placements that no rule has.
    """
    same = [(a.name, a.target) for a in large.ops] == [(b.name, b.target) for b in small.ops]
    if not same or [i.value.name for i in large.inputs] != [i.value.name for i in small.inputs]:
        raise InputError("the small model's program has other ops")
    known: dict[tuple[str, Placements], Placements] = {(name, ps): ps for name, ps in plan.inputs.items()}
    ops: dict[str, OpSpec] = {}
    batches = zip(large.inputs_of("input"), small.inputs_of("input"), strict=True)
    groups = {a.value.shape[0]: {b.value.shape[0]} for a, b in batches if a.value.shape and b.value.shape}
    for big, little in zip(large.ops, small.ops, strict=True):
        spec, made = plan.ops[big.name], _carried(big, little, plan.ops[big.name], groups)
        ops[big.name] = made
        pairs = [*zip(big.ins, spec.ins, made.ins, strict=True), *zip(big.outs, spec.outs, made.outs, strict=True)]
        for _, p, q in pairs:
            for a, b in zip(p or (), q or (), strict=True):
                groups.setdefault(a.split, set()).add(b.split)
        known.update({(v.name, p): q for v, p, q in pairs if v is not None and p is not None and q is not None})

    def place(value: str, ps: Placements) -> Placements:
        found = known.get((value, ps), ps)
        if found is ps and any(p.split > 8 for p in ps):
            raise InputError(f"the groups of {value} have no small counterpart")
        return found

    outputs = tuple(
        None if p is None or o.value is None else place(o.value.name, p) for o, p in zip(large.outputs, plan.outputs, strict=True)
    )
    kept = {name: place(name, ps) for name, ps in plan.kept.items()}
    return replace(
        plan, graph_hash=small.hash, mesh=mesh, ops=ops, outputs=outputs, kept=kept, collectives=(), pipeline=None,
        redistributions=tuple(_paths(plan, place)),
    )  # fmt: skip


def _paths(plan: Plan, place: Any) -> Iterator[Redistribution]:
    for r in plan.redistributions:
        try:
            yield replace(r, path=tuple(place(r.value, ps) for ps in r.path))
        except InputError:
            continue  # placements on the way that no op has: the default path leads there too


def _carried(big: Op, little: Op, spec: OpSpec, groups: Mapping[int, set[int]]) -> OpSpec:
    """The rows of the small op's rule that stand where the large op's rows stand; other rows with as many groups as ops before have."""
    rows, small = rows_for(big), rows_for(little)
    if rows is None or small is None:
        return spec
    places = {Row(r.ins, r.outs): i for i, r in enumerate(rows)}
    chosen = []
    for axis in range(len(next(iter([*spec.ins, *(o for o in spec.outs if o is not None)]), ()))):
        row = Row(tuple(ps[axis] for ps in spec.ins), tuple(None if ps is None else ps[axis] for ps in spec.outs))
        if row not in places or len(rows) != len(small):
            small_row = Row(tuple(_grouped(p, groups) for p in row.ins), tuple(p and _grouped(p, groups) for p in row.outs))
            if _has_groups(small_row):
                raise InputError(f"op {big.name} ({big.target}): {row} has no small counterpart")
            chosen.append(small_row)
            continue
        chosen.append(small[places[row]])
    return joined(little, chosen)


def _grouped(p: Placement, groups: Mapping[int, set[int]]) -> Placement:
    """With the number of groups that stands for its own, where only one does."""
    found = groups.get(p.split, set())
    return replace(p, split=next(iter(found))) if p.split > 8 and len(found) == 1 else p


def _has_groups(row: Row) -> bool:
    placements: list[Placement] = [*row.ins, *(p for p in row.outs if p is not None)]
    return any(p.split > 8 for p in placements)


# --- running ------------------------------------------------------------------------------------------------------


def compare(capture: Capture, plan: Plan, model: nn.Module) -> int:
    """Run the program whole and on all ranks; how many results were compared.

    Raises:
        VerifyError: one differs; names it.
    """
    graph, sizes = capture.graph, plan.mesh.sizes
    inputs = list(_inputs(capture, model))
    whole = _alone(capture.gm.graph, inputs)
    groups = tuple(f"axis {i}" for i in range(len(sizes)))
    runs = {}
    for at in itertools.product(*map(range, sizes)):
        passes = (RewriteForRank(capture, plan, at, groups, None), VerifyProgram(plan, graph))
        local = run_passes(passes, capture.gm, "verify", None).graph
        pieces = [local_slice(t, plan.inputs[i.value.name], sizes, at) for i, t in zip(graph.inputs, inputs, strict=True)]
        runs[at] = run_graph(local, pieces)
    made = run_all(runs, plan.mesh, groups)
    compared = 0
    for index, (result, final) in enumerate(zip(graph.outputs, plan.outputs, strict=True)):
        if result.value is None or final is None:
            continue
        together = join_shards({at: outs[index] for at, outs in made.items()}, final, sizes)
        want = whole[index]
        if together.shape != want.shape or not _close(together, want):
            raise VerifyError(
                f"{result.role} {result.name!r} differs from one process by {_distance(together, want)} when run on {plan.mesh}"
            )
        compared += 1
    return compared


def _alone(graph: fx.Graph, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    return run_all({(0,): run_graph(graph, inputs)}, MeshShape.of(1), ("axis 0",))[0,]


def _inputs(capture: Capture, model: nn.Module) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for i in capture.graph.inputs:
        shape, dtype = i.value.shape, i.value.dtype
        if i.role in ("parameter", "buffer"):
            found = state[i.name].detach()
        elif i.role == "constant":
            found = capture.constants[i.name]
        elif dtype.is_floating_point:
            found = torch.rand(shape, generator=generator) + 0.5
        else:
            found = torch.randint(0, 64, shape, generator=generator).to(dtype)
        yield found.to(torch.float64) if found.dtype.is_floating_point else found


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = max(float(b.double().abs().max()), 1e-3) if b.numel() else 1.0
    return bool(torch.allclose(a.double(), b.double(), rtol=0, atol=_TOLERANCE * scale))


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    return "its shape" if a.shape != b.shape else f"{float((a.double() - b.double()).abs().max()):.3g}"
