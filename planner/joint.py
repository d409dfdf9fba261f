"""The module of a joint graph. Its Python code is written when it is first run or printed: a capture makes several on the way to
the one that is."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def joint_module(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs ``graph``, without parameters of its own."""
    return _LazyGraphModule(nn.Module(), graph, class_name="JointGraph")
