"""Joint graphs: their module, and nodes written into them.

A module's Python code is written when it is first run or printed: a capture makes several on the way to the one that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def joint_module(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs ``graph``, without parameters of its own."""
    return _LazyGraphModule(nn.Module(), graph, class_name="JointGraph")


def written(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A call at the graph's insertion point, whose arguments are static: nodes, numbers and the like, no symbolic sizes.

    ``Graph.create_node`` looks through all arguments for those, and whatever of a node is assigned makes the graph list it anew:
    together two thirds of the time.
    """
    node = graph.create_node("call_function", target, name=name)
    node._update_args_kwargs(args, dict(kwargs))
    if meta is not None:
        node.meta.update(meta)
    return node
