"""From a solution to the plan: every op, path and number spelled out, and the price found again by walking the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner import blocks
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.plan import Alternative, Fallback, MeshTried, Plan, Prediction
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.on_mesh import Found
from meshwright.planner.program import Program
from meshwright.planner.solve.evaluate import Evaluation, evaluate, kernel_seconds, require_equal
from meshwright.planner.solve.extract import collectives, extract
from meshwright.planner.solve.memory import RESERVE
from meshwright.planner.solve.restrict import batch_length


def checked_plan(
    program: Program, name: str, found: Found, bound_s: float, alternatives: Sequence[Alternative], tried: Sequence[MeshTried]
) -> Plan:
    """The plan of a solution.

    Args:
        program: what was planned.
        name: of the strategy.
        found: its solution on the best mesh.
        bound_s: lower bound of the objective over all meshes that were searched.
        alternatives: other strategies.
        tried: the meshes that were looked at.

    Raises:
        VerifyError: the plan's two prices disagree (a bug).
    """
    plan = _spelled_out(program, name, found, bound_s, tuple(alternatives), tuple(tried))
    verify_plan(plan, program.capture.graph)
    walked = evaluate(plan, program.capture.graph, program.clusters, found.on.costs, found.on.trained)
    require_equal(found.outcome, walked.outcome, plan.collectives, walked.collectives)
    kernel_s = kernel_seconds(program.capture.graph, program.clusters, walked.cluster_s)
    memory = dict(sorted(walked.outcome.memory_bytes.items()))
    predicted = replace(plan.predicted, memory_bytes=memory, peak_at=walked.peak_at)
    return replace(plan, predicted=predicted, fallbacks=_fallbacks(program.clusters, walked), kernel_s=kernel_s)


def told(
    plan: Plan,
    program: Program,
    found: Found,
    bound_s: float,
    alternatives: Sequence[Alternative],
    tried: Sequence[MeshTried],
) -> Plan:
    """A checked plan with what is known of others by now; the arguments are those of :func:`checked_plan`."""
    gap = _gap(found.objective_s, bound_s)
    return replace(
        plan,
        objective_s=found.objective_s,
        bound_s=bound_s,
        gap=gap,
        alternatives=tuple(alternatives),
        meshes=tuple(tried),
        notes=_notes(program, found, gap),
    )


def _spelled_out(
    program: Program,
    name: str,
    found: Found,
    bound_s: float,
    alternatives: tuple[Alternative, ...],
    tried: tuple[MeshTried, ...],
) -> Plan:
    graph, outcome, where, options = program.capture.graph, found.outcome, found.on.where, program.options
    layout = extract(found.tables, found.solution.chosen, outcome)
    gap = _gap(found.objective_s, bound_s)
    return Plan(
        graph_hash=graph.hash,
        model=options.model,
        mesh=where.mesh,
        device=where.hardware.device.name,
        links=tuple(link.name for link in where.hardware.links),
        memory_limit_bytes=program.limit_bytes,
        strategy=name,
        precision=program.capture.precision,
        optimizer=str(options.optimizer),
        accumulate=options.accumulate,
        training=program.capture.training,
        inputs=layout.inputs,
        ops=layout.ops,
        outputs=layout.outputs,
        redistributions=layout.redistributions,
        collectives=collectives(found.tables, found.solution.chosen, outcome),
        predicted=Prediction(
            sum(outcome.compute_s),
            sum(outcome.exposed_s),
            sum(outcome.hidden_s),
            outcome.step_time_s,
            dict(sorted(outcome.memory_bytes.items())),
        ),
        objective_s=found.objective_s,
        bound_s=bound_s,
        gap=gap,
        alternatives=alternatives,
        meshes=tried,
        folded=blocks.summary(program.clusters),
        notes=_notes(program, found, gap),
        recompute=program.recompute,
        kept=layout.kept,
    )


def _gap(objective_s: float, bound_s: float) -> float:
    return max(0.0, (objective_s - bound_s) / objective_s) if objective_s else 0.0


def _notes(program: Program, found: Found, gap: float) -> tuple[str, ...]:
    notes, options = list(found.notes), program.options
    if options.memory_limit_bytes is None:
        notes.append(f"memory limit: the device's memory less a reserve of {RESERVE:.0%}")
    if found.solution.method.endswith("limit"):
        notes.append(
            f"the solver stopped after {options.effort.nodes} nodes, before a gap of {options.effort.gap:.1%}: {gap:.2%}"
        )
    if found.on.rows:
        notes.append(
            f"three axes ({found.on.mesh}) were tried with the rows of other plans alone, which beats all meshes of fewer axes; only "
            "compute bounds what all rows could give, so the gap is wide"
        )
    batch, devices = batch_length(program.capture.graph), found.on.mesh.num_devices
    if batch is not None and batch[1] % devices:
        notes.append(f"the batch of {batch[1]} does not divide over all {devices} devices")
    return tuple(notes)


def _fallbacks(clusters: ClusterGraph, walked: Evaluation) -> tuple[Fallback, ...]:
    """Ops without a rule, by target, with what they cost replicated."""
    found: dict[str, Fallback] = {}
    for cluster, seconds, times in zip(clusters.clusters, walked.cluster_s, clusters.weights, strict=True):
        for target in dict.fromkeys(cluster.fallback):
            size = sum(v.size_bytes for op in cluster.ops if op.target == target for v in op.outs if v is not None)
            before = found.get(target, Fallback(target, 0, 0.0, 0))
            count = sum(op.target == target for op in cluster.ops)
            found[target] = Fallback(
                target, before.count + times * count, before.time_s + times * seconds, before.bytes + times * size
            )
    return tuple(found.values())
