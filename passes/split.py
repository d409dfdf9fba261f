"""Cut the joint graph of one rank into the forward and the backward program.

```
joint(w, x, t):  h = mm(x, w); y = relu(h) | g = where(h, t); gw = mm(x', g)      -> y, gw
forward(w, x):   h = mm(x, w); y = relu(h)                                        -> y, h
backward(h, x, t): g = where(h, t); gw = mm(x', g)                                -> gw
```

What was to be recomputed was copied into the backward before planning, so the cut is by phase. A value that crosses is
saved once per storage: views are made again in the backward, and a view that would keep a larger storage alive is copied.
Inputs that the backward reads are not saved but passed again, except buffers that the forward replaces.

Gathered copies that live for the whole step are results of the forward too, and a second forward takes them instead of gathering:

```
forward(w, x):  k = gather(w); h = mm(x, k)     -> h, k, (k saved)
again(w, x, k): h = mm(x, k)                    -> h, (k saved)
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from meshwright.passes.own_gradients import copied, own_gradients
from meshwright.passes.views import is_collective, views_to_root
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import OpGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class Halves:
    """The two programs and how they are connected; see ``program.LocalProgram`` for the fields."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[str, ...]
    mutations: tuple[str, ...]
    outputs: tuple[int | None, ...]
    saved: tuple[str, ...]
    saved_inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    gradients: tuple[str, ...]
    again: fx.GraphModule | None = None
    kept: tuple[str, ...] = ()


def split(gm: fx.GraphModule, graph: OpGraph, *, training: bool) -> Halves:
    """Cut a joint local graph; ``gm`` is left as it was but for copies of saved views.

    Raises:
        VerifyError: a forward result is made in the backward.
    """
    nodes = list(gm.graph.nodes)
    results: tuple[fx.Node | None, ...] = nodes[-1].args[0]
    early = [r for r, o in zip(results, graph.outputs, strict=True) if o.role != "gradient" and r is not None]
    late = [(r, o.name) for r, o in zip(results, graph.outputs, strict=True) if o.role == "gradient" and r is not None]
    for r in early:
        if r.meta["phase"] != "forward":
            raise VerifyError(f"node {r.name} is a result of the forward, but the backward makes it")
    late = own_gradients(gm.graph, _small(gm.graph, late))
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    forward_inputs = [n for n in placeholders if n.meta["phase"] == "forward"]
    tangents = [n for n in placeholders if n.meta["phase"] == "backward"]
    body = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == "backward"]
    kept = _kept_roots(gm.graph)
    body, roots = _crossing(gm.graph, body, [g for g, _ in late], {o.name for o in graph.outputs_of("mutation")}, kept)
    saved = [r for r in roots if r.op != "placeholder"]
    again = [r for r in forward_inputs if r in set(roots)]
    computed = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    forward = _build(gm, forward_inputs, computed, [*early, *kept, *saved])
    results_again, rest = [*early, *saved], _without(computed, kept, [*early, *saved])
    second = _build(gm, [*forward_inputs, *kept], rest, results_again) if kept else None
    backward = _build(gm, [*saved, *again, *tangents], body, [g for g, _ in late]) if training else None
    mutations = graph.outputs_of("mutation")
    return Halves(
        forward=forward,
        backward=backward,
        inputs=_values(forward_inputs),
        mutations=tuple(o.name for o in mutations),
        outputs=_places(graph, len(mutations)),
        saved=tuple(_saved_name(n) for n in saved) if training else (),
        saved_inputs=_values(again),
        tangents=_values(tangents),
        gradients=tuple(name for _, name in late),
        again=second,
        kept=tuple(_saved_name(n) for n in kept),
    )


def _kept_roots(graph: fx.Graph) -> list[fx.Node]:
    """What makes the storages of the copies that are kept, in order."""
    return list(dict.fromkeys(views_to_root(n)[-1] for n in graph.nodes if "kept" in n.meta))


def _without(computed: list[fx.Node], kept: list[fx.Node], results: list[fx.Node]) -> list[fx.Node]:
    """What of a forward remains to be computed where the copies that it keeps are given."""
    making = _made_from(kept)
    needed = _made_from([r for r in results if r not in kept], stop=frozenset(kept))
    for node in computed:
        if is_collective(node) and node not in making:
            needed |= _made_from([node], stop=frozenset(kept))
    return [n for n in computed if n not in kept and (n not in making or n in needed)]


def _made_from(nodes: Iterable[fx.Node], stop: frozenset[fx.Node] = frozenset()) -> set[fx.Node]:
    """``nodes`` and everything they are made from, as far as ``stop``."""
    found, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and node not in stop:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _values(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(n.meta["value"] for n in nodes)


def _saved_name(node: fx.Node) -> str:
    return node.meta.get("value", node.name)


def _places(graph: OpGraph, first: int) -> tuple[int | None, ...]:
    """Index of each user output among the forward's results."""
    places: list[int | None] = []
    for output in graph.outputs_of("output"):
        places.append(None if output.value is None else first)
        first += output.value is not None
    return tuple(places)


def _crossing(
    graph: fx.Graph, body: list[fx.Node], results: list[fx.Node], mutated: set[str], kept: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the backward must get from the forward.

    Returns:
        The backward's nodes, views of saved values that it makes again first; and the nodes to save or to pass again.
    """
    inside = set(body)
    read = {a: None for n in body for a in n.all_input_nodes if a not in inside and a.meta["phase"] == "forward"}
    read.update({r: None for r in results if r not in inside and r.meta["phase"] == "forward"})
    remade: dict[fx.Node, None] = {}
    roots: dict[fx.Node, None] = {}
    for node in read:
        chain = views_to_root(node)
        root = chain.pop()
        if root.op == "placeholder" and root.meta.get("fqn") in mutated and root.meta["role"] == "buffer":
            root = _copied(graph, root, [*remade, *chain, *body])
        elif chain and root.op != "placeholder" and root not in read and root not in kept and _bytes(node) < _bytes(root):
            root, chain = _copied(graph, node, body), []
        remade.update(dict.fromkeys(reversed(chain)))
        roots[root] = None
    return [*remade, *body], list(roots)


def _small(graph: fx.Graph, gradients: list[tuple[fx.Node, str]]) -> list[tuple[fx.Node, str]]:
    """The gradients, copied where together they are at most half of the reduced buffer that they would keep alive.

    Their sizes are those of the largest pieces, so that all ranks decide alike.
    """
    root, size = dict[fx.Node, fx.Node](), dict[fx.Node, int]()
    for g, _ in gradients:
        chain = views_to_root(g)
        reduced = next((n for n in chain if "step" in n.meta), None)
        if reduced is not None:
            root[g], size[g] = chain[-1], reduced.meta["step"].result_bytes
    used: Counter[fx.Node] = Counter()
    for g in root:
        used[root[g]] += size[g]
    copies: dict[fx.Node, fx.Node] = {}
    for g, whole in root.items():
        if g is not whole and is_collective(whole) and 2 * used[whole] <= _bytes(whole):
            copies[g] = copied(graph, g)
    return [(copies.get(g, g), name) for g, name in gradients]


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return val.numel() * val.element_size()


def _copied(graph: fx.Graph, node: fx.Node, users: Iterable[fx.Node]) -> fx.Node:
    """A clone of ``node`` at the end of the forward, read by ``users`` in its stead."""
    last = [n for n in graph.nodes if n.op == "placeholder" or n.meta.get("phase") == "forward"][-1]
    with graph.inserting_after(last):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    val = node.meta["val"]
    with val.fake_mode:
        copy.meta.update(node.meta, val=torch.empty(val.shape, dtype=val.dtype), phase="forward", alias=None)
    for user in users:
        user.replace_input_with(node, copy)
    return copy


def _build(gm: fx.GraphModule, inputs: list[fx.Node], body: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    """A graph of ``body`` alone, without what no result needs; collectives stay, whether needed or not."""
    needed = set(results)
    kept: list[fx.Node] = []
    for node in reversed(body):
        if node in needed or is_collective(node):
            needed.update(node.all_input_nodes)
            kept.append(node)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta.update(node.meta)
    for node in reversed(kept):
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[r] for r in results))
    return fx.GraphModule(gm, graph)
