"""Issue all collectives of a graph that computes little, before the first is waited for.

```
r0 = all_reduce(g0); q0 = wait(r0); t0 = permute(q0)           r0 = all_reduce(g0); r1 = all_reduce(g1)
r1 = all_reduce(g1); q1 = wait(r1)                       ->    q0 = wait(r0); t0 = permute(q0); q1 = wait(r1)
```

For what is done once per step, after all micro-batches: no kernels are left to hide behind, and together they share buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.passes.overlap import is_wait


@dataclass(frozen=True)
class IssueFirst:
    """The pass: nodes in the order of how many collectives, one after the other, they need; else as they stood."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rounds: dict[fx.Node, int] = {}
        body = [n for n in gm.graph.nodes if n.op == "call_function"]
        for node in body:
            rounds[node] = max((rounds.get(a, 0) for a in node.all_input_nodes), default=0) + is_wait(node)
        output = next(reversed(gm.graph.nodes))
        for node in sorted(body, key=rounds.__getitem__):
            output.prepend(node)
        return gm
