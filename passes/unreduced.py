"""The plan of a pass whose gradients are not reduced yet: later passes add to them first.

```
g PR -> RR, all_reduce:                         left PR: whole on every device, as large as its parameter
g PP -> PS -> RS, reduce_scatter, all_reduce:   left PS: a piece of the size of the parameter's
g P  -> S,  reduce_scatter:                     as it is: whole gradients would take the memory that pieces save
```

Only sums that come last in a gradient's path wait, so that what waits takes no more memory than the gradient itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.plan import Plan, Redistribution
from meshwright.planner.ir.redistribute import step_axis, step_kind
from meshwright.planner.ir.spec import Placements
from meshwright.planner.ir.verify import made_placements, path_of, result_phase


def waiting(plan: Plan, graph: OpGraph) -> Mapping[str, tuple[Placements, ...]]:
    """Gradients of parameters that can wait to be reduced: by name, the path from where they wait to where they end."""
    made, found = made_placements(plan, graph), dict[str, tuple[Placements, ...]]()
    parameters = {i.name for i in graph.inputs_of("parameter")}
    for result, final in zip(graph.outputs, plan.outputs, strict=True):
        if result.role != "gradient" or result.value is None or final is None or result.name not in parameters:
            continue
        path = path_of(plan, result.value, result_phase(result), made[result.value.name], final)
        sums = [_is_sum(a, b) for a, b in itertools.pairwise(path)]
        start = len(sums) - len(list(itertools.takewhile(bool, reversed(sums))))
        if start < len(sums):
            found[result.name] = path[start:]
    return found


def unreduced(plan: Plan, graph: OpGraph) -> Plan:
    """``plan`` with gradients that wait left where they wait; it is not complete, so it is lowered and never verified."""
    starts = {name: path[0] for name, path in waiting(plan, graph).items()}
    made, listed = made_placements(plan, graph), list(plan.redistributions)
    outputs = []
    for result, final in zip(graph.outputs, plan.outputs, strict=True):
        if result.role != "gradient" or result.name not in starts or result.value is None or final is None:
            outputs.append(final)
            continue
        outputs.append(starts[result.name])
        path = path_of(plan, result.value, result_phase(result), made[result.value.name], final)
        before = path[: path.index(starts[result.name]) + 1]
        if len(before) > 1:
            listed.append(Redistribution(result.value.name, result_phase(result), before))
    return replace(plan, outputs=tuple(outputs), redistributions=tuple(listed), collectives=())


def _is_sum(src: Placements, dst: Placements) -> bool:
    """Whether a step adds up over devices and leaves the sum whole on each."""
    axis = step_axis(src, dst)
    return step_kind(src[axis], dst[axis]) == "all_reduce" and src[axis].op == "sum"
