"""Many one-axis steps between placements of many values, as arrays: what a mesh's networks are priced by at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.cuts import Cuts
from meshwright.planner.ir.graph import Value


@dataclass(frozen=True, slots=True)
class Steps:
    """Placements of values (*nodes*), and steps between them.

    Attributes:
        values: the values.
        of: index of each node's value, int64 [nodes].
        cuts: how each node is cut, [nodes, axes].
        tails: node before each step, int64 [steps].
        heads: node after it, int64 [steps].
        axes: mesh axis that changes, int64 [steps].
        kinds: index in :data:`~meshwright.planner.ir.redistribute.KINDS`, int64 [steps].
    """

    values: tuple[Value, ...]
    of: np.ndarray
    cuts: Cuts
    tails: np.ndarray
    heads: np.ndarray
    axes: np.ndarray
    kinds: np.ndarray
