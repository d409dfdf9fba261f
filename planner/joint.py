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
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, meta: Mapping[str, Any]
) -> fx.Node:
    """A call, at the graph's insertion point, of what another graph calls with the same kinds of arguments.

    ``Graph.create_node`` looks through all arguments for symbolic sizes, and whatever of a node is assigned makes the graph list it
    anew: together two thirds of the time. What comes from a graph was looked through when it was made there.
    """
    node = graph.create_node("call_function", target, name=name)
    node._update_args_kwargs(args, dict(kwargs))
    node.meta.update(meta)
    return node
