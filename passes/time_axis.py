"""Put the axis of micro-batches before the axes of a plan's mesh.

```
plan on 2 (dp), 4 micro-batches:   x S(0);  grad P -> R;        one axis more:   x S(0)S(0);  grad PP -> RP -> RR
```

The rewrite then treats micro-batches as it treats ranks. Where a value changes over both kinds of axes, the sum over
micro-batches comes first where the devices' part is a sum too: what is reduced whole is reduced once per step. What is scattered
is scattered for every micro-batch and summed in pieces, as the whole sum would be the memory that scattering saves; unless the plan
says ``whole_gradients`` (ZeRO-1). What is done to a gradient after its reduction, a cast, is then done once per step as well:

```
g PP -> cast R; cast: R -> R -> gradient       the reduction is per step, and so is the cast that reads it
```
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import GraphOutput, Op, OpGraph, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import KEPT, OpSpec, Plan, Redistribution
from meshwright.planner.ir.redistribute import legal_step, step_axis, step_kind
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.ir.verify import made_placements, needs, parameter_behind, path_of

TIME = "time"
"""Name of the axis of micro-batches."""


def with_time_axis(plan: Plan, graph: OpGraph) -> Plan:
    """``plan`` on a mesh whose first axis is its micro-batches, without stages; for more than one micro-batch.

    Raises:
        VerifyError: the plan has no pipeline.
    """
    if plan.pipeline is None:
        raise VerifyError("the plan has no pipeline, so it has no micro-batches")
    late = _Late(plan, graph)
    pipeline = late.pipeline
    full = replace(
        plan,
        mesh=MeshShape((pipeline.micro_batches, *plan.mesh.sizes), (TIME, *plan.mesh.names)),
        links=("none", *plan.links),
        inputs={name: (pipeline.inputs.get(name, R), *placements) for name, placements in plan.inputs.items()},
        ops={name: _joined(pipeline, name, spec) for name, spec in plan.ops.items()},
        outputs=(),
        redistributions=(),
        collectives=(),
        pipeline=None,
        kept={name: (R, *p) for name, p in plan.kept.items()},
    )
    made = made_placements(full, graph)
    outputs = tuple(
        None if p is None or result.value is None else _final(result, made[result.value.name], p)
        for result, p in zip(graph.outputs, plan.outputs, strict=True)
    )
    full = replace(full, outputs=outputs)
    return replace(full, redistributions=_paths(plan, full, graph, late))


def _joined(pipeline: Pipeline, name: str, spec: OpSpec) -> OpSpec:
    listed = pipeline.ops.get(name)
    if listed is None:
        return OpSpec(tuple((R, *p) for p in spec.ins), tuple(None if p is None else (R, *p) for p in spec.outs))
    ins = tuple((*t, *p) for t, p in zip(listed.ins, spec.ins, strict=True))
    outs = tuple(None if p is None or t is None else (*t, *p) for t, p in zip(listed.outs, spec.outs, strict=True))
    return OpSpec(ins, outs)


def _final(result: GraphOutput, made: Placements, planned: Placements) -> Placements:
    """Results are complete over time. What a step does not return, outputs that are no scalars, stays where it is made, as it may
    not divide where the plan would bring it."""
    if result.role == "output" and result.value is not None and result.value.shape:
        return tuple(R if p.is_partial else p for p in made)
    return (R, *planned)


def _paths(plan: Plan, full: Plan, graph: OpGraph, late: _Late) -> tuple[Redistribution, ...]:
    """The plan's paths with the change over time before or behind them."""
    made, found = made_placements(full, graph), dict[tuple[str, str, Placements], Redistribution]()
    for r in plan.redistributions if plan.kept else ():
        if r.phase == KEPT:
            found[r.value, KEPT, r.path[-1]] = replace(r, path=tuple((R, *p) for p in r.path))
    for value, phase, wanted, _ in needs(full, graph):
        src = made[value.name]
        if src[1:] == wanted[1:]:
            continue
        inside = path_of(plan, value, phase, src[1:], wanted[1:])
        path = _path(src[0], wanted[0], inside, time_first=not _scatters(inside) or late.sums_whole(value.name))
        if all(legal_step(a, step_axis(a, b), b[step_axis(a, b)]) for a, b in itertools.pairwise(path)):
            found[value.name, phase, wanted] = Redistribution(value.name, phase, path)
    return tuple(found.values())


def _path(src: Placement, dst: Placement, inside: tuple[Placements, ...], *, time_first: bool) -> tuple[Placements, ...]:
    here = [(dst if time_first else src, *p) for p in inside]
    if src == dst:
        return tuple(here)
    return ((src, *inside[0]), *here) if time_first else (*here, (dst, *inside[-1]))


def _scatters(path: tuple[Placements, ...]) -> bool:
    return "reduce_scatter" in _kinds(path)


def _kinds(path: tuple[Placements, ...]) -> set[str | None]:
    return {step_kind(a[step_axis(a, b)], b[step_axis(a, b)]) for a, b in itertools.pairwise(path)}


class _Late:
    """The part of a program that leads to gradients alone, and what of it runs once per step.

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
        once = self._ops_once_per_step()
        self.pipeline = replace(plan.pipeline, ops={n: s for n, s in plan.pipeline.ops.items() if n not in once})

    def sums_whole(self, value: str) -> bool:
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
        made = made_placements(self._plan, self._graph)
        complete: set[str] = set()
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
        leads_whole = all(self.sums_whole(v.name) for v in op.outs if v is not None)
        return ("reduce_scatter" in kinds and leads_whole) or ("all_reduce" in kinds and "reduce_scatter" not in kinds)
