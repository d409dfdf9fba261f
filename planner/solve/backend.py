"""The only file that imports OR-tools."""

from __future__ import annotations

import numpy as np
from ortools.graph.python import max_flow


def min_cut(tails: np.ndarray, heads: np.ndarray, capacities: np.ndarray, source: int, sink: int) -> set[int]:
    """Nodes on the source side of a minimum cut.

    Args:
        tails: node index at which each arc starts, shape [arcs].
        heads: node index at which each arc ends, shape [arcs].
        capacities: non-negative integer capacities, shape [arcs]; their sum must stay below 2**63.
        source: source node.
        sink: sink node.

    Raises:
        ValueError: the solver gave no optimal flow.
    """
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(source, sink)
    if status != flow.OPTIMAL:
        raise ValueError(f"maximum flow ended with status {status}")
    return set(flow.get_source_side_min_cut())
