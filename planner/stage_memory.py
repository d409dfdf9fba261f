"""Bytes on the ranks of a pipeline: what their stages hold, and the activations of micro-batches in flight."""

from __future__ import annotations

from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.pipeline import Pipeline, stage_of_op
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_numel
from meshwright.planner.ir.verify import made_placements
from meshwright.planner.solve.memory import optimizer_bytes


def in_flight(pipeline: Pipeline, rank: int) -> int:
    """Upper bound of the (stage, micro-batch) pairs whose activations a rank holds at once.

    Source: the warm-up of each schedule plus one; Narayanan et al., 2021 (arXiv:2104.04473), section 2.2, for the interleaved one,
    Qi et al., 2023 (arXiv:2401.10241), for those that split the backward (a micro-batch is held until its weight gradients are made).
    """
    p, m, v = pipeline.degree, pipeline.micro_batches, pipeline.stages_per_rank
    whole = m * v
    if pipeline.schedule in ("naive", "gpipe"):
        return whole
    if pipeline.schedule == "1f1b":
        return min(m, p - rank)
    if pipeline.schedule == "zbv":
        return min(whole, 2 * p + 1)
    behind = 0 if pipeline.schedule == "zero_bubble" else rank
    return min(whole, (v - 1) * p + 2 * (p - 1 - behind) + 1)


def fullest_rank(plan: Plan, graph: OpGraph) -> dict[str, int]:
    """Bytes by category on the fullest rank."""
    pipeline = plan.pipeline
    assert pipeline is not None
    held, kept = _held(plan, graph)
    state = optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    found = []
    for rank in range(pipeline.degree):
        sizes = {i.name: (n, n * i.value.dtype.itemsize, i.trainable and plan.training) for i, n in held[rank].values()}
        each = kept[rank] / (pipeline.micro_batches * pipeline.stages_per_rank)
        found.append(
            {
                "parameters": sum(size for _, size, _ in sizes.values()),
                "gradients": sum(size for _, size, trained in sizes.values() if trained),
                "optimizer": sum(n * state for n, _, trained in sizes.values() if trained),
                "activations": int(each * in_flight(pipeline, rank)),
            }
        )
    return max(found, key=lambda m: sum(m.values()))


def _held(plan: Plan, graph: OpGraph) -> tuple[list[dict[str, tuple[GraphInput, int]]], list[float]]:
    """Per rank: the parameters that its forward ops read, with their local elements; bytes of the values saved for the backward."""
    pipeline = plan.pipeline
    assert pipeline is not None
    forward = {op.name: i for i, op in enumerate(op for op in graph.ops if op.phase == "forward")}
    cuts = [forward[name] for name in pipeline.cuts]
    made, sizes = made_placements(plan, graph), plan.mesh.sizes
    source: dict[str, GraphInput] = {i.value.name: i for i in graph.inputs_of("parameter")}
    saved = {v.name for v in graph.saved}
    held: list[dict[str, tuple[GraphInput, int]]] = [{} for _ in range(pipeline.degree)]
    kept = [0.0] * pipeline.degree
    for name, index in forward.items():
        op, rank = graph.by_name[name], pipeline.rank_of(stage_of_op(index, cuts))
        for i in (source[v.name] for v in op.ins if v.name in source):
            held[rank][i.name] = i, local_numel(i.value.shape, plan.inputs[i.value.name], sizes)
        if len(op.ins) == 1 and op.ins[0].name in source:
            source.update((v.name, source[op.ins[0].name]) for v in op.outs if v is not None)
        for v in op.outs:
            if v is not None and v.name in saved:
                kept[rank] += local_numel(v.shape, made[v.name], sizes) * v.dtype.itemsize
    return held, kept
