"""Compare a model in pipeline stages on real ranks with the same model in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.passes.verify import KINDS
from meshwright.planner.micro import time_specs
from meshwright.runtime.module import build
from meshwright.runtime.pipeline import PipelineModule
from tests.helpers.counting import CountCollectives
from tests.helpers.equality import FLOOR, RTOL, SGD_LR, STEPS, Reference, Trial, compare, gathered, sgd
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, planned, reference
from tests.helpers.stages import forward_ops, staged_plan


def trial(
    name: str, schedule: str, micro_batches: int, degree: int = 2, inside: tuple[tuple[int, ...], str] | None = None
) -> Trial:
    """Stages of equally many ops.

    Args:
        name: model of the zoo.
        schedule: two stages per rank for those that can have several.
        micro_batches: how many.
        degree: ranks along the pipeline axis.
        inside: mesh sizes and strategy inside a stage; None: one device.
    """
    capture = captured(name)
    each = 2 if schedule in ("interleaved_1f1b", "zero_bubble", "zbv") else 1
    ops, count = forward_ops(capture), degree * each
    plan = staged_plan(capture, tuple(ops[len(ops) * k // count] for k in range(1, count)), micro_batches, schedule)
    assert plan.pipeline is not None
    plan = replace(plan, pipeline=replace(plan.pipeline, degree=degree))
    if inside is not None:
        times = time_specs(capture.graph, micro_batches)
        plan = replace(
            planned(name, *inside, micro_batches=micro_batches),
            pipeline=replace(plan.pipeline, inputs=times.inputs, ops=times.ops),
        )
    label = f"{name} {schedule} m={micro_batches} pp={degree} {inside or ''}"
    return Trial(label, ALL[name], ALL[name].model(), capture, plan, reference(name))


def start(given: Trial, timeout_s: float | None = None, *, compile: bool = False) -> PipelineModule:
    """The module on all ranks of this world."""
    assert given.plan.pipeline is not None
    sizes = (given.plan.pipeline.degree, *given.plan.mesh.sizes)
    names = ("pp", *(f"in{i}" for i in range(given.plan.mesh.num_axes)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    pm = build(given.model, given.capture, given.plan, mesh, timeout_s=timeout_s, compile=compile)
    assert isinstance(pm, PipelineModule)
    return pm


def try_all(rank: int, trials: Sequence[Trial]) -> dict[str, list[str]]:
    """What differs, by trial; runs on every rank."""
    return {t.label: differences(start(t), t.case.batch(), t.reference) for t in trials}


def differences(pm: PipelineModule, batch: dict[str, torch.Tensor], wanted: Reference) -> list[str]:
    """Loss, gradients, parameters after steps, and buffers of the engine that are not as they should be."""
    largest = max((float(g.abs().max()) for g in wanted.gradients.values() if g is not None), default=0.0)
    opt = sgd(list(pm.parameters()))
    before = wanted.loss if pm._programs[0].interface.mutations else pm.eval_step(batch)
    loss = pm.step(batch)
    wrong = compare({"step": loss, "eval_step": before}, dict.fromkeys(("step", "eval_step"), wanted.loss), RTOL, 0.0, "loss of ")
    found = {n: None if p.grad is None else gathered(p.grad) for n, p in pm.named_parameters()}
    wrong += compare(found, {n: wanted.gradients[n] for n in found}, RTOL, FLOOR * largest, "gradient of ")
    opt.step()
    for step in range(STEPS - 1):
        opt.zero_grad()
        if step == 0:
            wrong += traffic_differences(pm, batch)
        else:
            pm.step(batch)
        opt.step()
    wrong += compare(pm.full_state_dict(), wanted.after_sgd, RTOL, STEPS**2 * SGD_LR * FLOOR * largest, "after SGD, ")
    return wrong + leftovers(pm)


def traffic_differences(pm: PipelineModule, batch: dict[str, torch.Tensor]) -> list[str]:
    """A step whose collectives and messages are not those of the stages' programs and the plan's boundaries."""
    program, sent = pm._programs[0], Counter[str]()
    stages = program.engine._stages
    asked = [(stage, name, getattr(stage, name)) for stage in stages for name in ("get_fwd_send_ops", "get_bwd_send_ops")]

    def counted(name: str, call: Any) -> Any:
        def run(chunk: int) -> Any:
            ops = call(chunk)
            sent[name] += len(ops)
            return ops

        return run

    for stage, name, call in asked:
        setattr(stage, name, counted(name, call))
    with CountCollectives() as ran:
        pm.step(batch)
    for stage, name, call in asked:
        setattr(stage, name, call)
    pipeline, wanted, messages = program.pipeline, Counter[str](), Counter[str]()
    m = pipeline.micro_batches
    for k, run in program.runs.items():
        for i in range(m):
            local, stage = run._at(i).program.local, run._at(i).program
            forward = local.again if local.again is not None and i else local.forward
            wanted += sum((collectives_in(gm) for gm in (forward, local.backward) if gm is not None), Counter[str]())
        wanted += sum((collectives_in(f.program) for f in stage.finishes), Counter[str]())
        last = pipeline.num_stages - 1
        if k < last and pipeline.rank_of(k + 1) != pipeline.rank_of(k):
            messages["get_fwd_send_ops"] += m * max(len(stage.sends), len(stage.downstream))
        if k and pipeline.rank_of(k - 1) != pipeline.rank_of(k):
            messages["get_bwd_send_ops"] += m * len(stage.upstream)
    wrong = (
        [] if ran.counts == wanted else [f"collectives that ran {dict(ran.counts)} are not those of the stages {dict(wanted)}"]
    )
    return wrong + ([] if sent == messages else [f"messages that were sent {dict(sent)} are not the plan's {dict(messages)}"])


def collectives_in(gm: torch.fx.GraphModule) -> Counter[str]:
    names = (part for n in gm.graph.nodes for part in str(n.target).split(".")[1:2])
    return Counter(KINDS[name.removesuffix("_")] for name in names if name.removesuffix("_") in KINDS)


def leftovers(pm: PipelineModule) -> list[str]:
    """Tensors that the engine or the stages keep after a step."""
    found = []
    for stage in pm._programs[0].engine._stages:
        infos = [i for chunk in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()) for i in chunk]
        kept = {
            "receive buffers": sum(i.buffer is not None for i in infos),
            "sent values": sum(len(outputs) for outputs, _ in stage.fwd_cache.values()),
            "gradients": len(stage.bwd_cache),
            "saved values": len(stage.run._kept) + len(stage.run._later) + len(stage.run.sums),
        }
        found += [f"stage {stage.stage_index} keeps {n} {what}" for what, n in kept.items() if n]
    return found
