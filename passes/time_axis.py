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

from meshwright.planner.gradient_sums import GradientSums
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import GraphOutput, OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import KEPT, OpSpec, Plan, Redistribution
from meshwright.planner.ir.redistribute import legal_step, step_axis
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.ir.verify import made_placements, needs, path_of

TIME = "time"
"""Name of the axis of micro-batches."""


def with_time_axis(plan: Plan, graph: OpGraph) -> Plan:
    """``plan`` on a mesh whose first axis is its micro-batches, without stages; for more than one micro-batch.

    Raises:
        VerifyError: the plan has no pipeline.
    """
    if plan.pipeline is None:
        raise VerifyError("the plan has no pipeline, so it has no micro-batches")
    late = GradientSums(plan, graph)
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


def _paths(plan: Plan, full: Plan, graph: OpGraph, late: GradientSums) -> tuple[Redistribution, ...]:
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
        path = _path(src[0], wanted[0], inside, time_first=late.sums_first(value.name, inside))
        if all(legal_step(a, step_axis(a, b), b[step_axis(a, b)]) for a, b in itertools.pairwise(path)):
            found[value.name, phase, wanted] = Redistribution(value.name, phase, path)
    return tuple(found.values())


def _path(src: Placement, dst: Placement, inside: tuple[Placements, ...], *, time_first: bool) -> tuple[Placements, ...]:
    here = [(dst if time_first else src, *p) for p in inside]
    if src == dst:
        return tuple(here)
    return ((src, *inside[0]), *here) if time_first else (*here, (dst, *inside[-1]))
