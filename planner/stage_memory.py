"""Bytes on the ranks of a pipeline: what their stages hold, and what micro-batches in flight keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.gradient_sums import GradientSums
from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.pipeline import stage_of_op
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_numel
from meshwright.planner.ir.verify import parameter_behind, value_named
from meshwright.planner.solve.memory import optimizer_bytes


@dataclass(frozen=True)
class GradientBytes:
    """What gradients of one parameter take on a device.

    Attributes:
        sums: over micro-batches, from the first backward to the end of the step.
        fresh: of one micro-batch, before it is added to the sums.
        result: where it is not the sum itself but made from it at the end of the step.
    """

    sums: int = 0
    fresh: int = 0
    result: int = 0


def gradient_bytes(plan: Plan, graph: OpGraph) -> dict[str, GradientBytes]:
    """Value name of a parameter to what its gradients take, for a plan with a pipeline; whatever its cuts are.

    Sums lie where the runtime takes them: whole where they are reduced whole once per step. They have at least 32 bits.
    """
    assert plan.pipeline is not None
    if not plan.training:
        return {}
    sizes, found = plan.mesh.sizes, dict[str, GradientBytes]()
    parameters = {name: i for i in graph.inputs_of("parameter") for name in (i.name, *i.aliases)}
    rest = {
        i.value.name: local_numel(i.value.shape, plan.inputs[i.value.name], sizes) * i.value.dtype.itemsize
        for i in parameters.values()
        if i.trainable
    }
    if plan.pipeline.micro_batches == 1:
        return {name: GradientBytes(size) for name, size in rest.items()}
    for gradient, value, placements in GradientSums(plan, graph).held():
        if gradient not in parameters:
            continue
        name, numel, width = parameters[gradient].value.name, local_numel(value.shape, placements, sizes), value.dtype.itemsize
        before, sums = found.get(name, GradientBytes()), numel * max(width, 4)
        result = max(before.result, rest[name] if sums != rest[name] else 0)
        found[name] = GradientBytes(before.sums + sums, before.fresh + numel * width, result)
    return found


def rank_memory(
    plan: Plan,
    graph: OpGraph,
    gradients: Mapping[str, GradientBytes],
    in_flight_bytes: Sequence[float],
    beside: Sequence[Mapping[str, int]],
) -> list[dict[str, int]]:
    """Bytes by category on every rank.

    Args:
        plan: with a pipeline.
        graph: its program.
        gradients: as :func:`gradient_bytes` finds.
        in_flight_bytes: per rank, the most that micro-batches in flight keep at once.
        beside: per rank, what running takes besides, by category: gathered copies of parameters, one op's own values.
    """
    assert plan.pipeline is not None
    held = _parameters(plan, graph)
    kept = _kept_bytes(plan, graph)
    state = optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    found = []
    for rank in range(plan.pipeline.degree):
        sizes = [(n, n * i.value.dtype.itemsize, i.trainable and plan.training) for i, n in held[rank].values()]
        made = [gradients.get(i.value.name, GradientBytes()) for i, _ in held[rank].values()]
        fresh = sum(g.fresh for g in made) // plan.pipeline.stages_per_rank
        found.append(
            {
                "parameters": sum(size for _, size, _ in sizes),
                "gradients": sum(g.sums for g in made) + max(fresh, sum(g.result for g in made)),
                "optimizer": sum(n * state for n, _, trained in sizes if trained),
                "activations": int(in_flight_bytes[rank]),
                **({"kept": sum(kept.get(i.value.name, 0) for i, _ in held[rank].values())} if kept else {}),
                **beside[rank],
            }
        )
    return found


def rest_by_place(plan: Plan, graph: OpGraph, gradients: Mapping[str, GradientBytes]) -> np.ndarray:
    """Bytes that are held for parameters whatever runs, at the forward op that reads each first, float64 [forward ops].

    ``gradients``: as :func:`gradient_bytes` finds.
    """
    forward = [op for op in graph.ops if op.phase == "forward"]
    kept, state = _kept_bytes(plan, graph), optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    root = {i.value.name: i for i in graph.inputs_of("parameter")}
    found, seen = np.zeros(len(forward)), set[str]()
    for index, op in enumerate(forward):
        if len(op.ins) == 1 and op.ins[0].name in root and op.outs[0] is not None and graph.consumers.get(op.outs[0].name):
            root[op.outs[0].name] = root[op.ins[0].name]
            continue
        for source in (root[v.name] for v in op.ins if v.name in root and root[v.name].name not in seen):
            seen.add(source.name)
            numel = local_numel(source.value.shape, plan.inputs[source.value.name], plan.mesh.sizes)
            made = gradients.get(source.value.name, GradientBytes())
            found[index] += numel * (source.value.dtype.itemsize + (source.trainable and plan.training) * state)
            found[index] += made.sums + max(made.fresh, made.result) + kept.get(source.value.name, 0)
    return found


def _kept_bytes(plan: Plan, graph: OpGraph) -> dict[str, int]:
    """Value name of a parameter to the bytes of its copies that live the whole step."""
    found: dict[str, int] = {}
    for name, placements in plan.kept.items():
        value, parameter = value_named(graph, name), parameter_behind(graph, name)
        size = local_numel(value.shape, placements, plan.mesh.sizes) * value.dtype.itemsize
        found[parameter] = found.get(parameter, 0) + size
    return found


def _parameters(plan: Plan, graph: OpGraph) -> list[dict[str, tuple[GraphInput, int]]]:
    """Per rank, the parameters that its forward ops read, with their local elements."""
    pipeline = plan.pipeline
    assert pipeline is not None
    forward = {op.name: i for i, op in enumerate(op for op in graph.ops if op.phase == "forward")}
    cuts = [forward[name] for name in pipeline.cuts]
    source: dict[str, GraphInput] = {i.value.name: i for i in graph.inputs_of("parameter")}
    held: list[dict[str, tuple[GraphInput, int]]] = [{} for _ in range(pipeline.degree)]
    for name, index in forward.items():
        op, rank = graph.by_name[name], pipeline.rank_of(stage_of_op(index, cuts))
        if len(op.ins) == 1 and op.ins[0].name in source:  # a view of it: who reads the view holds the parameter
            source.update((v.name, source[op.ins[0].name]) for v in op.outs if v is not None)
            if graph.consumers.get(op.outs[0].name if op.outs[0] is not None else ""):
                continue
        for i in (source[v.name] for v in op.ins if v.name in source):
            held[rank][i.name] = i, local_numel(i.value.shape, plan.inputs[i.value.name], plan.mesh.sizes)
    return held
