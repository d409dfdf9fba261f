"""Gradients are finished as soon as they can be: their reductions then run while the backward goes on.

```
gw2 = mm(..); gw1 = mm(..); c2 = cast(gw2); c1 = cast(gw1)   ->   gw2 = mm(..); c2 = cast(gw2); gw1 = mm(..); c1 = cast(gw1)
```

Autograd hands out gradients when the whole backward is done, so that a capture has their casts and sums at its very end.

Views and widening casts, on the other hand, are made right before they are first read: until then their operand is smaller.
"""

from __future__ import annotations

import torch
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


SMALL = 1 / 1000
"""What is at most this part of the largest value may be held in any type."""


def widen_late(graph: fx.Graph) -> None:
    """Move backward views and widening casts, and all casts of small values, right before the first op that reads them.

    Blocks of a model, which are traced once and copied, then have their ops in one place and in one order.
    """
    small = SMALL * max((_bytes(node) for node in graph.nodes), default=0)
    for node in list(reversed(graph.nodes)):
        if node.op != "call_function" or node.meta["phase"] != "backward" or not _may_wait(node, small):
            continue
        readers = [u for u in node.users if u.op == "call_function"]
        if len(readers) < len(node.users) or not readers:
            continue
        first = min(readers)
        if node.next is not first:
            first.prepend(node)


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0


def _may_wait(node: fx.Node, small: float) -> bool:
    kind = kind_of_target(str(node.target))
    if kind != "cast":
        return kind == "view"
    (operand,) = node.all_input_nodes
    return _bytes(node) > _bytes(operand) or _bytes(operand) <= small
