"""Counts the functional collectives that really run; unlike torch's CommDebugMode also where ranks are threads."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class CountCollectives(TorchDispatchMode):
    """Inside ``with``, counts ``_c10d_functional`` collectives by kind.

    Attributes:
        counts: by ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace == "_c10d_functional" and func._opname in _KINDS:
            self.counts[_KINDS[func._opname]] += 1
        return func(*args, **(kwargs or {}))
