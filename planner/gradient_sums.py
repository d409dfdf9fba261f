"""What of a program that runs in micro-batches is done once per step for its gradients, and what is held for it until then.

```
grad P -> R,   all_reduce:       summed whole over micro-batches, reduced once         held: all of it
grad P -> S,   reduce_scatter:   scattered for every micro-batch, summed in pieces     held: a piece (with ``whole_gradients``: all)
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.ir.graph import Op, OpGraph, Value
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.redistribute import step_axis, step_kind
from meshwright.planner.ir.spec import Placements, R
from meshwright.planner.ir.verify import made_placements, parameter_behind, path_of, result_phase


class GradientSums:
    """The part of a program that leads to gradients alone, and what of it runs once per step.

    Args:
        plan: with a pipeline of more than one micro-batch.
        graph: its program.

    Attributes:
        pipeline: the plan's, with the ops that run once per step taken off the axis of micro-batches.
    """

    def __init__(self, plan: Plan, graph: OpGraph):
        assert plan.pipeline is not None
        self._plan, self._graph, self.pipeline = plan, graph, plan.pipeline
        behind = {parameter_behind(graph, value) for value in plan.kept}
        kept = (i for i in graph.inputs_of("parameter") if i.value.name in behind)
        self._kept = {name for i in kept for name in (i.name, *i.aliases)} if plan.pipeline.whole_gradients else set[str]()
        self._leads: dict[str, frozenset[str]] = {}
        self._summing: set[str] = set()
        self._look_back()
        self._made = made_placements(plan, graph)
        self._once = self._ops_once_per_step()
        self.pipeline = replace(plan.pipeline, ops={n: s for n, s in plan.pipeline.ops.items() if n not in self._once})

    def sums_first(self, value: str, path: tuple[Placements, ...]) -> bool:
        """Whether a value is summed over micro-batches before it takes a path between devices, rather than behind it."""
        return "reduce_scatter" not in _kinds(path) or self._sums_whole(value)

    def held(self) -> Iterator[tuple[str, Value, Placements]]:
        """What is summed over micro-batches for gradients: name of the gradient, the value that is summed, and where it lies then."""
        for result, final in zip(self._graph.outputs, self._plan.outputs, strict=True):
            if result.role == "gradient" and result.value is not None and final is not None:
                for value, placements in self._summed(result.value, result_phase(result), final):
                    yield result.name, value, placements

    def _summed(self, value: Value, phase: str, wanted: Placements) -> Iterator[tuple[Value, Placements]]:
        maker = self._graph.producer[value.name]
        if isinstance(maker, Op) and maker.name in self._once:
            for v, placements in zip(maker.ins, self._plan.ops[maker.name].ins, strict=True):
                if self._leads.get(v.name):
                    yield from self._summed(v, maker.phase, placements)
            return
        path = path_of(self._plan, value, phase, self._made[value.name], wanted)
        yield value, path[0] if self.sums_first(value.name, path) else path[-1]

    def _sums_whole(self, value: str) -> bool:
        """Whether a value is part of gradients that are summed whole before they are scattered."""
        led = self._leads.get(value, frozenset())
        return bool(led) and led <= self._kept

    def _look_back(self) -> None:
        """Find the values that lead to gradients alone, and the ops that only take sums of them further."""
        ends: dict[str, set[str]] = {}
        other: set[str] = set()
        for result in self._graph.outputs:
            if result.value is not None and result.role == "gradient":
                ends.setdefault(result.value.name, set()).add(result.name)
            elif result.value is not None:
                other.add(result.value.name)
        for op in reversed(self._graph.ops):
            for v in (v for v in op.outs if v is not None and v.name not in other and op.phase == "backward"):
                readers = self._graph.consumers.get(v.name, ())
                if all(r.name in self._summing for r in readers):
                    behind = (self._leads[w.name] for r in readers for w in r.outs if w is not None)
                    self._leads[v.name] = frozenset(ends.get(v.name, ())).union(*behind)
            spec = self.pipeline.ops.get(op.name)
            leads = all(self._leads.get(v.name) for v in op.outs if v is not None)
            if leads and (spec is None or all(p == (R,) or p[0].is_partial for p in spec.ins)):
                self._summing.add(op.name)

    def _ops_once_per_step(self) -> set[str]:
        """The ops that read what is reduced over devices, or what such ops make."""
        made, complete = self._made, set[str]()
        found: set[str] = set()
        for op in self._graph.ops:
            if op.name not in self._summing:
                continue
            spec, over_time = self._plan.ops[op.name], self.pipeline.ops.get(op.name)
            for v, wanted, p in zip(op.ins, spec.ins, over_time.ins if over_time else (), strict=False):
                reduced = p[0].is_partial and made[v.name] != wanted and self._reduced(v, op, made[v.name], wanted)
                if v.name in complete or reduced:
                    found.add(op.name)
                    complete.update(out.name for out in op.outs if out is not None)
        return found

    def _reduced(self, value: Value, op: Op, src: Placements, dst: Placements) -> bool:
        """Whether a sum over devices is completed on the way to ``op`` that can be completed once per step."""
        kinds = _kinds(path_of(self._plan, value, op.phase, src, dst))
        leads_whole = all(self._sums_whole(v.name) for v in op.outs if v is not None)
        return ("reduce_scatter" in kinds and leads_whole) or ("all_reduce" in kinds and "reduce_scatter" not in kinds)


def _kinds(path: tuple[Placements, ...]) -> set[str | None]:
    return {step_kind(a[step_axis(a, b)], b[step_axis(a, b)]) for a, b in itertools.pairwise(path)}
