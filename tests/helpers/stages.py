"""Run the stages of a plan one after the other in this process, as a pipeline would, without process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.passes.lower_stages import PipelineProgram, StageProgram, lower_stages
from meshwright.passes.stage_graphs import ONCE, SUM
from meshwright.passes.weights_apart import split_backward
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline, schedule_named
from meshwright.planner.ir.plan import Plan
from meshwright.planner.micro import time_specs
from tests.helpers.legal_plans import replicated_plan

Tensors = dict[str, torch.Tensor]


def staged_plan(capture: Capture, cuts: tuple[str, ...], micro_batches: int, schedule: str = "gpipe") -> Plan:
    """Stages on one device each, everything else replicated."""
    times = time_specs(capture.graph, micro_batches)
    degree = (len(cuts) + 1) // (2 if schedule == "zbv" else 1)
    pipeline = Pipeline(degree, schedule, cuts, micro_batches, times.inputs, times.ops)
    return replace(replicated_plan(capture, MeshShape.of(1)), pipeline=pipeline)


def forward_ops(capture: Capture) -> list[str]:
    """Names of the forward ops, in order, without the last: where cuts may be."""
    return [op.name for op in capture.graph.ops if op.phase == "forward"][:-1]


def run_stages(capture: Capture, plan: Plan, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Tensors]:
    """Loss and gradients of one step, all micro-batches forth, then back."""
    program = lower_stages(capture, plan, (0,), ("none",))
    return _Run(capture, plan, program, model, batch).run()


class _Run:
    def __init__(self, capture: Capture, plan: Plan, program: PipelineProgram, model: torch.nn.Module, batch: Mapping[str, Any]):
        assert plan.pipeline is not None
        self.program, self.count, self.stages = program, plan.pipeline.micro_batches, plan.pipeline.num_stages
        self.splits = schedule_named(plan.pipeline.schedule).splits_backward
        leaves = iter([x for x in pytree.tree_leaves(((), dict(batch))) if isinstance(x, torch.Tensor)])
        state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
        self.shared: Tensors = {}
        self.pieces: list[Tensors] = [{} for _ in range(self.count)]
        for i in capture.graph.inputs:
            if i.role == "input":
                whole = next(leaves)
                cut = i.value.name in plan.pipeline.inputs
                for j in range(self.count):
                    self.pieces[j][i.value.name] = whole.chunk(self.count)[j].contiguous() if cut else whole
            elif i.role == "tangent":
                one = i.name == program.loss
                self.shared[i.value.name] = torch.full(i.value.shape, float(one), dtype=i.value.dtype)
            elif i.role == "seed":
                self.shared[i.value.name] = torch.tensor(1234)
            else:
                held = capture.constants[i.name] if i.role == "constant" else state[i.name]
                self.shared[i.value.name] = held.detach()
        self.sums: dict[int, Tensors] = {k: {} for k in range(self.stages)}
        self.known: Tensors = {}

    def run(self) -> tuple[torch.Tensor, Tensors]:
        if self.program.before is not None:
            self.known = self.program.before([{**self.shared, **piece} for piece in self.pieces])
        for i in range(self.count):
            sent: Tensors = {}
            kept: list[tuple[torch.Tensor, ...]] = []
            given: list[Tensors] = []
            for k in range(self.stages):
                stage = self.program.stage(k, i)
                given.append({**self.shared, **self.pieces[i], **self.known, **sent})
                sent, saved = self.forward(stage, given[k])
                kept.append(saved)
            back: Tensors = {}
            for k in reversed(range(self.stages)):
                back = self.backward(self.program.stage(k, i), given[k], kept[k], back)
        return self.finish()

    def forward(self, stage: StageProgram, given: Tensors) -> tuple[Tensors, tuple[torch.Tensor, ...]]:
        local = stage.local
        with torch.no_grad():
            made = list(local.forward(*[given[name] for name in local.inputs]))
        at = len(local.mutations)
        for name in stage.outputs:
            self.add(stage.index, name, made[at])
            at += 1
        sends = {slot.name: made[at + j] for j, slot in enumerate(stage.sends)}
        for slot in stage.sends:
            assert tuple(sends[slot.name].shape) == slot.shape and sends[slot.name].dtype == slot.dtype
        return sends, tuple(made[len(made) - len(local.saved) :] if local.saved else ())

    def backward(self, stage: StageProgram, given: Tensors, saved: tuple[torch.Tensor, ...], back: Tensors) -> Tensors:
        local = stage.local
        assert local.backward is not None
        again = [given[name] for name in local.saved_inputs]
        tangents = [{**self.shared, **back}[name] for name in local.tangents]
        with torch.no_grad():
            if not self.splits:
                made = list(local.backward(*saved, *again, *tangents))
            else:
                count = len(local.gradients)
                halves = split_backward(local.backward, range(count - len(stage.upstream), count))
                early = list(halves.first(*saved, *again, *tangents))
                ahead, kept = early[: len(stage.upstream)], early[len(stage.upstream) :]
                made = [*halves.later(*kept), *ahead]
        names = local.gradients[: len(made) - len(stage.upstream)]
        for name, grad in zip(names, made, strict=False):
            self.add(stage.index, name, grad)
        return {slot.name: grad for slot, grad in zip(stage.upstream, made[len(names) :], strict=True)}

    def add(self, stage: int, name: str, value: torch.Tensor) -> None:
        sums = self.sums[stage]
        if name not in sums or not name.startswith(ONCE):
            sums[name] = sums[name] + value if name in sums else value.clone()

    def finish(self) -> tuple[torch.Tensor, Tensors]:
        found: Tensors = {}
        for k in range(self.stages):
            stage, sums = self.program.stage(k, 0), self.sums[k]
            made = {n.removeprefix(ONCE): t for n, t in sums.items() if not n.startswith(SUM)}
            for finish in stage.finishes:
                given = {"sum": sums, "known": self.known, "input": self.shared}
                with torch.no_grad():
                    results = finish.program(*[given[role][name] for role, name in finish.inputs])
                made.update(zip(finish.results, results, strict=True))
            for name, term in made.items():
                found[name] = found[name] + term if name in found else term
        return found.pop(self.program.loss), found
