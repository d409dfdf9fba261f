"""Cut a backward program in two: gradients of what was received first, gradients of parameters later.

```
backward(h, w, g):  gx = mm(g, w'); gw = mm(h', g)            -> gw, gx
first(h, w, g):     gx = mm(g, w')                            -> gx, kept: (h, g)
later(h, g):        gw = mm(h', g)                            -> gw
```

One op that makes both kinds of gradients (a convolution's) is emitted twice, each time with the other results masked out: it
costs the same and lets each half run when it is due.

Source: zero-bubble pipeline parallelism (Qi et al., 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_MASK_AT = {aten.convolution_backward.default: 10}
"""Ops with a mask of results among their arguments, and its position."""


@dataclass(frozen=True)
class BackwardHalves:
    """The two programs.

    Attributes:
        first: called as the whole backward; returns the first results, then ``kept`` values.
        later: called with the kept values; returns the later results.
        kept: how many values go from the one to the other.
    """

    first: fx.GraphModule
    later: fx.GraphModule
    kept: int


def split_backward(gm: fx.GraphModule, first: Sequence[int]) -> BackwardHalves:
    """Cut ``gm``; it is left as it is.

    Args:
        gm: a backward program.
        first: indices of the results that are needed first; the others come later, in their order.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copied)
    graph.output(output)
    whole = fx.GraphModule(gm, graph)
    results: tuple[fx.Node, ...] = next(reversed(whole.graph.nodes)).args[0]  # type: ignore[assignment]
    chosen = set(first)
    _mask_apart(whole.graph, [r for i, r in enumerate(results) if i in chosen])
    wanted = [r for i, r in enumerate(results) if i in chosen]
    rest = [r for i, r in enumerate(results) if i not in chosen]
    early = _needed(whole.graph, wanted)
    early |= {n for n in whole.graph.nodes if n.target is operator.getitem and n.args[0] in early}  # what is kept is no tuple
    late = [n for n in whole.graph.nodes if n.op == "call_function" and n not in early and (n in _needed(whole.graph, rest))]
    inside = set(late)
    kept = list(dict.fromkeys(a for n in late for a in n.all_input_nodes if a not in inside))
    kept += [r for r in dict.fromkeys(rest) if r not in inside and r not in kept]
    placeholders = [n for n in whole.graph.nodes if n.op == "placeholder"]
    ahead = [n for n in whole.graph.nodes if n.op == "call_function" and n in early]
    return BackwardHalves(_built(whole, placeholders, ahead, [*wanted, *kept]), _built(whole, kept, late, rest), len(kept))


def _needed(graph: fx.Graph, results: Sequence[fx.Node]) -> set[fx.Node]:
    """What ``results`` derive from."""
    needed = set(results)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _mask_apart(graph: fx.Graph, wanted: Sequence[fx.Node]) -> None:
    """Emit ops that make both kinds of results once for each kind."""
    early = _needed(graph, wanted)
    for node in list(graph.nodes):
        at = _MASK_AT.get(node.target) if node in early else None
        later = [u for u in node.users if u not in early]
        if at is None or not later or not all(u.target is operator.getitem for u in node.users):
            continue
        slots = {u: u.args[1] for u in later}
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        twin.args = _masked(node.args, at, set(slots.values()))
        node.args = _masked(node.args, at, {u.args[1] for u in node.users if u in early})
        for user in later:
            user.replace_input_with(node, twin)


def _masked(args: tuple[Any, ...], at: int, slots: set[Any]) -> tuple[Any, ...]:
    mask = [bool(wanted) and i in slots for i, wanted in enumerate(args[at])]
    return (*args[:at], mask, *args[at + 1 :])


def _built(gm: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta.update(node.meta)
    for node in body:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[r] for r in results))
    return fx.GraphModule(gm, graph)
