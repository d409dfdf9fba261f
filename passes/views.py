"""Which nodes of a rank's graph communicate, and whose memory a node has."""

from __future__ import annotations

from torch import fx


def is_collective(node: fx.Node) -> bool:
    """Whether a node communicates or waits for it."""
    return node.op == "call_function" and str(node.target).startswith("_c10d_functional.")


def views_to_root(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a view of, up to the node that made the storage."""
    chain = [node]
    while chain[-1].meta.get("alias") is not None and not is_collective(chain[-1]):
        chain.append(chain[-1].all_input_nodes[chain[-1].meta["alias"]])
    return chain
