"""Gradients are finished as soon as they can be: their reductions then run while the backward goes on.

```
gw2 = mm(..); gw1 = mm(..); c2 = cast(gw2); c1 = cast(gw1)   ->   gw2 = mm(..); c2 = cast(gw2); gw1 = mm(..); c1 = cast(gw1)
```

Autograd hands out gradients when the whole backward is done, so that a capture has their casts and sums at its very end.
"""

from __future__ import annotations

from torch import fx

from meshwright.planner.kinds import kind_of_target

CHEAP = ("view", "cast", "pointwise")


def finish_gradients_early(graph: fx.Graph) -> None:
    """Move cheap backward ops that only results of the graph are made from right behind the last of their operands."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    ends: list[fx.Node] = []
    leads_out = {node for node in graph.nodes if node.op == "output"}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.meta["phase"] != "backward":
            continue
        if node.users and leads_out.issuperset(node.users) and kind_of_target(str(node.target)) in CHEAP:
            leads_out.add(node)
            ends.append(node)
    for node in reversed(ends):
        last = max(node.all_input_nodes, default=None)
        if last is not None and last.op == "call_function" and position[last] < position[node]:
            last.append(node)
