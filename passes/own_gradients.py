"""Gradients that own their memory: what shares it is copied.

```
g = sum(t); return g, g             # of two biases that are added to one value      ->   return g, clone(g)
g = expand(t); return g             # of a sum                                       ->   return clone(g)
return t                            # of what is added to the result                 ->   return clone(t)
p0, p1 = split(b); return p0, p1    # of a bucket: pieces apart                      ->   as it is
```

A caller changes gradients in place: the next backward adds to them, clipping scales them. Where two parameters had one memory, each
would be added or scaled twice; where the memory is the caller's (a tangent, an input), it would change.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from meshwright.passes.views import is_collective, views_to_root

aten = torch.ops.aten

_DENSE = frozenset(
    (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.detach.default, aten.alias.default)
)
"""Views that keep the elements one behind the other."""


def own_gradients(graph: fx.Graph, gradients: list[tuple[fx.Node, str]]) -> list[tuple[fx.Node, str]]:
    """The gradients (node and name), copied where they would share memory; copies stand right behind what they copy."""
    passed: set[fx.Node] = set()
    found = []
    for g, name in gradients:
        chain = views_to_root(g)
        if _is_foreign(chain[-1]) or _overlaps(chain, passed) or not _is_dense(chain):
            found.append((copied(graph, g), name))
        else:
            passed.update(chain)
            found.append((g, name))
    return found


def _is_foreign(root: fx.Node) -> bool:
    """Whether the backward does not make this memory itself."""
    return root.op == "placeholder" or root.meta["phase"] == "forward"


def _is_dense(chain: list[fx.Node]) -> bool:
    """Whether the elements lie one behind the other: told by the ops alone, so that all ranks copy alike, whatever their pieces."""
    *views, root = chain
    return all(_keeps_order(view, is_collective(root)) for view in views)


def _keeps_order(view: fx.Node, of_bucket: bool) -> bool:
    if view.target is operator.getitem or view.target is aten.split_with_sizes.default:
        return of_bucket
    return view.target in _DENSE or (view.target is aten.slice.Tensor and view.args[1:2] in ((), (0,)))


def _overlaps(chain: list[fx.Node], passed: set[fx.Node]) -> bool:
    """Whether a gradient may have memory of one in ``passed``: not where they are different pieces of a split."""
    at = next((i for i, node in enumerate(chain) if node in passed), None)
    if at is None:
        return False
    return at == 0 or chain[at - 1].target is not operator.getitem


def copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A contiguous copy right behind ``node``."""
    after = node if node.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(after):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    val = node.meta["val"]
    with val.fake_mode:
        copy.meta.update(node.meta, val=torch.empty(val.shape, dtype=val.dtype), phase="backward", alias=None)
    return copy
