"""Bytes on the ranks of a pipeline: what their stages hold, and what micro-batches in flight keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.pipeline import stage_of_op
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_numel
from meshwright.planner.ir.verify import parameter_behind, value_named
from meshwright.planner.solve.memory import optimizer_bytes


def rank_memory(
    plan: Plan, graph: OpGraph, in_flight_bytes: Sequence[float], beside: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Bytes by category on every rank.

    Args:
        plan: with a pipeline.
        graph: its program.
        in_flight_bytes: per rank, the most that micro-batches in flight keep at once.
        beside: per rank, what running takes besides, by category: gathered copies of parameters, one op's own values.
    """
    assert plan.pipeline is not None
    held = _parameters(plan, graph)
    kept = _kept_bytes(plan, graph)
    whole = kept if plan.pipeline.whole_gradients else {}  # summed beside those of earlier steps' pieces
    state = optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    found = []
    for rank in range(plan.pipeline.degree):
        sizes = [(n, n * i.value.dtype.itemsize, i.trainable and plan.training) for i, n in held[rank].values()]
        found.append(
            {
                "parameters": sum(size for _, size, _ in sizes),
                "gradients": sum(size for _, size, trained in sizes if trained)
                + _one_micro_batch(plan, [n for n, _, trained in sizes if trained])
                + sum(whole.get(i.value.name, 0) for i, _ in held[rank].values() if i.trainable and plan.training),
                "optimizer": sum(n * state for n, _, trained in sizes if trained),
                "activations": int(in_flight_bytes[rank]),
                **({"kept": sum(kept.get(i.value.name, 0) for i, _ in held[rank].values())} if kept else {}),
                **beside[rank],
            }
        )
    return found


def rest_by_place(plan: Plan, graph: OpGraph) -> np.ndarray:
    """Bytes that are held for parameters whatever runs, at the forward op that reads each first, float64 [forward ops]."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    kept, state = _kept_bytes(plan, graph), optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    root = {i.value.name: i for i in graph.inputs_of("parameter")}
    found, seen = np.zeros(len(forward)), set[str]()
    width = 2 if plan.precision == "bf16-mixed" else 4
    for index, op in enumerate(forward):
        if len(op.ins) == 1 and op.ins[0].name in root and op.outs[0] is not None and graph.consumers.get(op.outs[0].name):
            root[op.outs[0].name] = root[op.ins[0].name]
            continue
        for source in (root[v.name] for v in op.ins if v.name in root and root[v.name].name not in seen):
            seen.add(source.name)
            numel = local_numel(source.value.shape, plan.inputs[source.value.name], plan.mesh.sizes)
            trained = source.trainable and plan.training
            each = source.value.dtype.itemsize * (1 + trained) + trained * (state + width)
            found[index] += numel * each + kept.get(source.value.name, 0)
    return found


def _one_micro_batch(plan: Plan, numels: Sequence[int]) -> int:
    """Bytes of the gradients that one micro-batch has made, of one stage of the rank, before they are added to the sums."""
    assert plan.pipeline is not None
    if plan.pipeline.micro_batches == 1:
        return 0
    return sum(numels) * (2 if plan.precision == "bf16-mixed" else 4) // plan.pipeline.stages_per_rank


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
