"""Bytes per device: what rests, what is kept for the backward, and the largest of what comes and goes.

============== =====================================================================================================
parameters     the piece at rest
gradients      as large as the parameter's piece, for parameters that get one
optimizer      state of the optimizer for those (``OPTIMIZER_BYTES`` per element of the piece)
activations    values that the backward reads, where their producer made them
buffers        buffers and constants, whole
inputs         this rank's piece of the batch
gathered       twice the largest gathered copy of a parameter: one in use, one fetched ahead
working        the largest cluster's operands and results, beyond what is counted above
============== =====================================================================================================

All are linear in the candidates; the last two are maxima of linear terms. Allocator slack is in the reserve that the limit
leaves, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import GraphInput, OpGraph, Value
from meshwright.planner.ir.spec import R
from meshwright.planner.solve.candidates import Candidate, piece_bytes, piece_numel

# Bytes of optimizer state per parameter element: two float32 moments, none, or one float32 momentum.
OPTIMIZER_BYTES: Mapping[str, int] = {"adamw": 8, "adam": 8, "sgd": 0, "sgd-momentum": 4}
GATHERED_COPIES = 2
# Fraction of the device's memory left to the allocator, the communication library and the context. A stated guess.
RESERVE = 0.06
_AT_REST = {"buffer": "buffers", "constant": "buffers", "seed": "buffers", "input": "inputs", "tangent": "inputs"}


def optimizer_bytes(optimizer: str | int) -> int:
    """Bytes of state per parameter element.

    Raises:
        InputError: an unknown name or a negative number.
    """
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    if optimizer in OPTIMIZER_BYTES:
        return OPTIMIZER_BYTES[str(optimizer)]
    raise InputError(
        f"optimizer {optimizer!r} is unknown: use one of {', '.join(OPTIMIZER_BYTES)}, or the bytes of state per parameter element"
    )


def parameters_with_gradient(graph: OpGraph) -> frozenset[str]:
    """Value names of the parameters that get a gradient."""
    named = {name for o in graph.outputs_of("gradient") if o.value is not None for name in (o.name,)}
    return frozenset(p.value.name for p in graph.inputs_of("parameter") if named.intersection((p.name, *p.aliases)))


def rest_bytes(source: GraphInput, numel: int, state_bytes: int, has_gradient: bool) -> dict[str, int]:
    """Bytes by category of ``numel`` elements of a placeholder."""
    size = numel * source.value.dtype.itemsize
    if source.role != "parameter":
        return {_AT_REST[source.role]: size}
    if not has_gradient:
        return {"parameters": size}
    return {"parameters": size, "gradients": size, "optimizer": numel * state_bytes}


class MemoryModel:
    """Memory of classes of clusters as vectors over their candidates.

    Args:
        graph: the program.
        sizes: of the mesh axes.
        state_bytes: optimizer state per parameter element.
        weights: name of a value to how many it stands for, where not one.
    """

    def __init__(self, graph: OpGraph, sizes: tuple[int, ...], state_bytes: int, weights: Mapping[str, int] | None = None):
        self._sizes = sizes
        self._weights = weights or {}
        self._state_bytes = state_bytes
        self._saved = frozenset(v.name for v in graph.saved)
        self._placeholders = frozenset(i.value.name for i in graph.inputs)
        self._with_gradient = parameters_with_gradient(graph)

    def static(self, members: Sequence[Cluster], candidates: Sequence[Candidate]) -> dict[str, np.ndarray]:
        """Category to bytes by candidate, of all ``members`` of a class together."""
        total: dict[str, np.ndarray] = {}
        for member in members:
            if member.source is not None:
                self._add_rest(total, member.source, candidates)
        for m, op in enumerate(members[0].ops):
            for k in range(len(op.outs)):
                self._add_saved(total, [member.ops[m].outs[k] for member in members], m, k, candidates)
        return total

    def _add_rest(self, total: dict[str, np.ndarray], source: GraphInput, candidates: Sequence[Candidate]) -> None:
        has_gradient = source.value.name in self._with_gradient
        for c, candidate in enumerate(candidates):
            assert candidate.rest is not None
            numel = piece_numel(source.value.shape, candidate.rest, self._sizes)
            for category, size in rest_bytes(source, numel, self._state_bytes, has_gradient).items():
                total.setdefault(category, np.zeros(len(candidates)))[c] += size * self._weights.get(source.value.name, 1)

    def _add_saved(
        self, total: dict[str, np.ndarray], results: Sequence[Value | None], m: int, k: int, candidates: Sequence[Candidate]
    ) -> None:
        kept = [v for v in results if v is not None and v.name in self._saved]
        times = sum(self._weights.get(v.name, 1) for v in kept)
        for c, candidate in enumerate(candidates if kept else ()):
            placements = tuple(row.members[m].outs[k] or R for row in candidate.rows)
            size = times * piece_bytes(kept[0], placements, self._sizes)
            total.setdefault("activations", np.zeros(len(candidates)))[c] += size

    def working(self, members: Sequence[Cluster], candidates: Sequence[Candidate]) -> np.ndarray:
        """Bytes of operands and results of one cluster by candidate, less what is counted elsewhere."""
        first = members[0]
        ins = [k for k, v in enumerate(first.ins) if v.name not in self._placeholders]
        outs = [k for k in range(len(first.outs)) if any(m.outs[k].name not in self._saved for m in members)]
        return np.array(
            [
                float(
                    sum(piece_bytes(first.ins[k], c.ins[k], self._sizes) for k in ins)
                    + sum(piece_bytes(first.outs[k], c.outs[k], self._sizes) for k in outs)
                )
                for c in candidates
            ]
        )
