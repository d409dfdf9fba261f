"""Let few collectives of a graph be under way at once.

```
i0 = cat([g0, g1]); r0 = all_reduce(i0)            i0 = cat([g0, g1]); r0 = all_reduce(i0)
i1 = cat([g2, g3]); r1 = all_reduce(i1)      ->    i1 = cat([g2, g3]); r1 = all_reduce(i1)
i2 = cat([g4, g5]); r2 = all_reduce(i2)            q0 = wait(r0)
q0 = wait(r0); q1 = wait(r1); q2 = wait(r2)        i2 = cat([g4, g5]); r2 = all_reduce(i2); q1 = wait(r1); q2 = wait(r2)
```

A collective's operand and the pieces that it is made of live until it has arrived: with all of them under way, a graph that reduces all
gradients would hold them twice. Collectives of one kind run one after the other anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.passes.overlap import is_wait
from meshwright.passes.views import is_collective


@dataclass(frozen=True)
class LandEarly:
    """The pass, for graphs that issue all they can first.

    Attributes:
        flying: how many may be under way at once.
    """

    flying: int = 2

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        issued = [n for n in gm.graph.nodes if is_collective(n) and not is_wait(n)]
        for earlier, later in zip(issued, issued[self.flying :], strict=False):
            wait = next(iter(earlier.users))
            start = _prepared_from(later)
            if start < wait:
                start.prepend(wait)
        return gm


def _prepared_from(collective: fx.Node) -> fx.Node:
    """The first of the nodes that stand together before a collective, behind any other, and make its operand."""
    needed, first = set(collective.all_input_nodes), collective
    while first.prev in needed and first.prev.op == "call_function" and not is_collective(first.prev):
        first = first.prev
        needed.update(first.all_input_nodes)
    return first
