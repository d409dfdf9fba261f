"""What clusters cost where the device fuses nothing: every op goes through memory by itself, and one core works out what is in it.

```
gelu [256, 768]:   read and write 2 x 768 KiB, and 196,608 error functions
attention, causal, 24 heads of [64, 32]:   for each head and each block of 32 queries, 32 x 32 x 48 and 32 x 48 x 32, and 32 x 48 exponentials
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.kinds import is_free, packet

SCATTERED = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten._unsafe_index"})
"""Ops that read of their first input only what they return."""

FUNCTIONS = frozenset(
    f"aten.{name}"
    for name in [
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "acos",
        "asin",
        "atan",
        "atan2",
        "celu",
        "cos",
        "cosh",
        "elu",
        "elu_backward",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "gelu",
        "gelu_backward",
        "log",
        "log10",
        "log1p",
        "log2",
        "logsumexp",
        "mish",
        "mish_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "sigmoid",
        "silu",
        "silu_backward",
        "sin",
        "sinh",
        "softplus",
        "softplus_backward",
        "tan",
        "tanh",
    ]
)
"""Ops that work out one function of every element: on one core (AMD EPYC 9004, torch 2.13, float32, within the cache) an element takes
0.4 to 2.6 ns, where moving it takes 0.1. Powers are not among them: nearly all are squares."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What the ops of a cluster without arithmetic of their own take, relative to the bytes that cross the cluster's border.

    Counted whole, as its values are cut alike.

    Attributes:
        bytes: what they read and write as kernels of their own.
        functions: values of functions that they work out.
    """

    bytes: float
    functions: float


def beside(cluster: Cluster, light: Sequence[Op]) -> Beside:
    """Of a cluster; ``light``: its ops that do no matmul or the like."""
    tables = {op.ins[0].name for op in cluster.ops if packet(op.target) in SCATTERED}

    def moved(ins: Sequence[Value], outs: Sequence[Value | None]) -> int:
        written = sum(v.size_bytes for v in outs if v is not None)
        return written + sum(min(v.size_bytes, written) if v.name in tables else v.size_bytes for v in ins)

    border = max(moved(cluster.ins, cluster.outs), 1)
    working = [op for op in light if not is_free(op)]
    functions = sum(_elements(op) for op in working if packet(op.target) in FUNCTIONS)
    return Beside(sum(moved(op.ins, op.outs) for op in working) / border, functions / border)


def _elements(op: Op) -> int:
    return max(v.size_bytes // v.dtype.itemsize for v in (*op.ins, *op.outs) if v is not None)


def query_block(queries: np.ndarray) -> np.ndarray:
    """Queries that a core's attention kernel takes at a time.

    Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` (torch 2.13): 256 of 768 or more, 64 of 192 or more, else 32.
    """
    return np.minimum(queries, np.select([queries >= 768, queries >= 192], [256, 64], 32))
