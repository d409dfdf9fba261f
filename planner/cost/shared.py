"""Small collectives of parameters and gradients share buffers when they run: each costs its part of a full one.

```
gradients of 40 norms, 8 KiB each:     40 x (latency + 8 KiB / rate)     ->     40 x (8 KiB / buffer) x (latency + buffer / rate)
```

A buffer is as large as ``passes.bucket`` lets it grow, or all there is to fill it. Where the next kernel waits for a collective (of
activations and their gradients) nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.planner.ir.buffers import GATHER_BYTES, REDUCE_BYTES
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.kinds import kind_of


@dataclass(frozen=True, eq=False)
class SharedBuffers:
    """Which values of a program travel in shared buffers, and how large those are.

    Attributes:
        values: parameters, gradients of parameters that nothing else reads, and their views and casts.
        size_bytes: of a buffer by kind of collective.
    """

    values: frozenset[str]
    size_bytes: dict[str, int]

    @classmethod
    def of(cls, graph: OpGraph, times: Callable[[str], int] = lambda _: 1) -> SharedBuffers:
        """Of a program; ``times``: for how many values of the whole one a value stands."""
        parameters = graph.inputs_of("parameter")
        total = max(1, sum(i.value.size_bytes * times(i.value.name) for i in parameters))
        gather, reduce = min(GATHER_BYTES, total), min(REDUCE_BYTES, total)
        values = _of_parameters(graph) | _of_gradients(graph)
        return cls(values, {"all_gather": gather, "all_reduce": reduce, "reduce_scatter": reduce})


def _of_parameters(graph: OpGraph) -> frozenset[str]:
    found = {i.value.name for i in graph.inputs_of("parameter")}
    for op in graph.ops:
        if _is_other_form(op) and op.ins[0].name in found:
            found.update(v.name for v in op.outs if v is not None)
    return frozenset(found)


def _of_gradients(graph: OpGraph) -> frozenset[str]:
    names = {n for i in graph.inputs_of("parameter") for n in (i.name, *i.aliases)}
    results: dict[str, bool] = {}
    for o in graph.outputs:
        if o.value is not None:
            results[o.value.name] = results.get(o.value.name, True) and o.role == "gradient" and o.name in names
    found: set[str] = set()
    for op in reversed(graph.ops):
        for v in (v for v in op.outs if v is not None):
            readers = graph.consumers.get(v.name, ())
            further = all(_is_other_form(r) and r.outs[0] is not None and r.outs[0].name in found for r in readers)
            if further and results.get(v.name, bool(readers)):
                found.add(v.name)
    return frozenset(found)


def _is_other_form(op: Op) -> bool:
    """Whether an op only shows its one input in another shape or element type."""
    return len(op.ins) == 1 and kind_of(op) in ("view", "cast")
