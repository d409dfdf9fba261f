"""From the global graph and a plan to one rank's graph, node by node.

```
x: [8, 4] S(0);  w: [4, 6] R                  x: [4, 4];  w: [4, 6]
y = mm(x, w): [8, 6]                     ->   y = mm(x, w): [4, 6]
l = sum(y): [] S(0) -> P, returned as R       l_local = sum(y): [] ; l = wait(all_reduce(l_local))
```

Every op's inputs are brought to the placements that the plan gives it; then ``passes.local`` emits what the rank computes.
Each new node has its fake value, so its local shape is known, and carries the name, phase and source line of the op
that it came from. A step of a redistribution is emitted once per (value, phase, placements). It stands before its first
consumer, or right behind its producer where the result of the graph needs it, and belongs to the phase of its consumers.
A copy that the plan keeps for the whole step is made right behind its producer; readers of both phases get that one, and an op
that would compute its value again is left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.passes.emit import Emitter, share_values
from meshwright.passes.local import run_local
from meshwright.passes.redistribute import Step, emit_step, unpermuted
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Capture, GraphInput, Op, Value
from meshwright.planner.ir.plan import KEPT, Plan
from meshwright.planner.ir.spec import Placements, format_placements, local_shape
from meshwright.planner.ir.verify import kept_values, path_of, result_phase

aten = torch.ops.aten

PROVENANCE = ("forward_op", "module_path", "source", "recompute_of", "stack_trace")


@dataclass(frozen=True)
class RewriteForRank:
    """The pass: replaces the global joint graph by that of one rank.

    Attributes:
        capture: the program.
        plan: a verified plan for it.
        coordinate: this rank's coordinate on the mesh.
        group_names: name of this rank's process group per mesh axis.
        device: where the program will run, or None for the device of the capture.
    """

    capture: Capture
    plan: Plan
    coordinate: tuple[int, ...]
    group_names: tuple[str, ...]
    device: torch.device | None = None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return _Rewriter(self, gm).run()


def _order_to_lead(step: Step, node: fx.Node) -> tuple[int, ...]:
    """The order of a permutation under which a gather would run along dim 0, where memory order is rank order; else ().

    ``all_gather(permute(w))`` is ``permute(all_gather(w))``: for a weight that is read transposed this saves two copies.
    """
    if node.target is not aten.permute.default or step.parts == 1 or step.kind != "all_gather":
        return ()
    order = tuple(node.args[1])  # type: ignore[arg-type]
    return order if unpermuted(step, order).cut(unpermuted(step, order).src).leads else ()


class _Rewriter:
    """State of one rewrite: the new graph, and the local node of every (value, phase, placements)."""

    def __init__(self, options: RewriteForRank, gm: fx.GraphModule):
        self.capture, self.plan, self.old = options.capture, options.plan, gm
        self.coordinate, self.group_names = options.coordinate, options.group_names
        self.sizes = options.plan.mesh.sizes
        self.graph = fx.Graph()
        self.emit = Emitter(self.graph, gm, options.device)
        self.made: dict[str, tuple[fx.Node, Placements]] = {}
        self.brought: dict[tuple[str, str, Placements], fx.Node] = {}
        self.kept = kept_values(options.plan, options.capture.graph)
        self.results: dict[tuple[str, str], list[Placements]] = defaultdict(list)
        for result, final in zip(self.capture.graph.outputs, self.plan.outputs, strict=True):
            if result.value is not None and final is not None:
                self.results[result.value.name, result_phase(result)].append(final)

    def run(self) -> fx.GraphModule:
        graph = self.capture.graph
        metas = {node.name: node.meta for node in self.old.graph.nodes}
        with self.capture.fake_mode, torch.no_grad():
            for placeholder in graph.inputs:
                self.place(placeholder)
            for placeholder in graph.inputs:
                self.bring_results(placeholder.value, "backward" if placeholder.role == "tangent" else "forward")
            for op in graph.ops:
                self.rewrite(op, metas[op.name])
            self.finish()
        new = fx.GraphModule(self.old, self.graph)
        share_values(self.old, new)
        return new

    def place(self, placeholder: GraphInput) -> None:
        value, placements = placeholder.value, self.plan.inputs[placeholder.value.name]
        node = self.graph.placeholder(value.name)
        phase = "backward" if placeholder.role == "tangent" else "forward"
        node.meta.update(phase=phase, role=placeholder.role, fqn=placeholder.name, value=value.name, placements=placements)
        node.meta["val"] = torch.empty(self.local_shape(value, placements), dtype=value.dtype)
        self.made[value.name] = node, placements
        self.keep(value)

    def keep(self, value: Value) -> None:
        """Where a copy of ``value`` is kept, make it: all readers get that one."""
        if value.name in self.plan.kept:
            final = self.plan.kept[value.name]
            before, _ = self.made[value.name]
            node = self.bring(value, KEPT, final)
            if node is not before:
                node.meta["kept"] = value.name
            self.made[value.name] = node, final

    def rewrite(self, op: Op, meta: dict[str, Any]) -> None:
        spec = self.plan.ops[op.name]
        again = self.kept.get(op.outs[0].name) if len(op.outs) == 1 and op.outs[0] is not None else None
        if again is not None and again != op.name:
            self.made[op.name] = self.made[again]
            return
        inputs = [self.bring(v, op.phase, p) for v, p in zip(op.ins, spec.ins, strict=True)]
        self.emit.hint = op.name
        self.emit.meta = {"phase": op.phase, "op": op.name, **{k: meta[k] for k in PROVENANCE if k in meta}}
        try:
            results = run_local(op, spec, self.plan.mesh, self.coordinate, inputs, self.emit)
        except Exception as error:
            error.add_note(f"while lowering {op} with {spec}{f', from {op.source}' if op.source else ''}")
            raise
        for value, placements, node in zip(op.outs, spec.outs, results, strict=True):
            if value is None or placements is None or node is None:
                continue
            self.check_shape(op, value, placements, node)
            if node.meta.get("op") == op.name and "value" not in node.meta:
                node._rename(value.name.replace("#", "_"))
                node.meta.update(value=value.name, placements=placements)
            self.made[value.name] = node, placements
            self.keep(value)
            self.bring_results(value, op.phase)

    def check_shape(self, op: Op, value: Value, placements: Placements, node: fx.Node) -> None:
        found, needed = tuple(node.meta["val"].shape), self.local_shape(value, placements)
        if found != needed or node.meta["val"].dtype != value.dtype:
            raise VerifyError(
                f"op {op.name} ({op.target}) makes {node.meta['val'].dtype} {list(found)} at {self.coordinate}, "
                f"but {value} as {format_placements(placements)} is {list(needed)} there"
            )

    def bring_results(self, value: Value, phase: str) -> None:
        """Redistribute a value that the graph returns, right where it is made."""
        for final in self.results.get((value.name, phase), ()):
            self.bring(value, phase, final)

    def bring(self, value: Value, phase: str, wanted: Placements) -> fx.Node:
        """The local node of ``value`` in ``wanted`` for consumers of ``phase``; emits the steps that are not there yet."""
        node, placements = self.made[value.name]
        for there in path_of(self.plan, value, phase, placements, wanted)[1:]:
            key = (value.name, phase, there)
            if key not in self.brought:
                self.brought[key] = self.step(value, phase, node, placements, there)
            node, placements = self.brought[key], there
        return node

    def step(self, value: Value, phase: str, node: fx.Node, src: Placements, dst: Placements) -> fx.Node:
        axis = next(a for a, (p, q) in enumerate(zip(src, dst, strict=True)) if p != q)
        step = Step(value.shape, value.dtype, src, dst, self.sizes, self.coordinate, self.group_names[axis])
        order = _order_to_lead(step, node)
        if order:
            step = unpermuted(step, order)
        self.emit.hint = value.name.replace("#", "_")
        origin = {k: node.meta[k] for k in PROVENANCE if k in node.meta}
        if phase == KEPT:
            phase, origin = "forward", {**origin, "keeps": True}
        self.emit.meta = {"phase": phase, "step": step, "step_value": value.name, **origin}
        if order:
            result = self.emit(aten.permute.default, emit_step(step, node.args[0], self.emit), list(order))
        else:
            result = emit_step(step, node, self.emit)
        if result is not node:
            result.meta.update(value=value.name, placements=dst)
        return result

    def local_shape(self, value: Value, placements: Placements) -> tuple[int, ...]:
        return local_shape(value.shape, placements, self.sizes, self.coordinate)

    def finish(self) -> None:
        outputs: list[fx.Node | None] = []
        for result, final in zip(self.capture.graph.outputs, self.plan.outputs, strict=True):
            wanted = result.value is not None and final is not None
            outputs.append(self.bring(result.value, result_phase(result), final) if wanted else None)  # type: ignore[arg-type]
        node = self.graph.output(tuple(outputs))
        node.meta["results"] = tuple((result.role, result.name) for result in self.capture.graph.outputs)
