"""Counts the functional collectives that really run; unlike torch's CommDebugMode also where ranks are threads.

The generated code looks an op up as ``torch.ops._c10d_functional.all_reduce.default`` at every call, so the counter
stands in for those attributes. A TorchDispatchMode would do as well, but on a loaded machine ranks crashed in collectives
that it called again (torch 2.13; seen twice, and once in a session that had used it before; the cause is not known).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # defines the ops

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

_counting: dict[int, Counter[str]] = {}
"""By thread, what is being counted there."""


class _Counted:
    """An op that counts its calls while its thread asks for it."""

    def __init__(self, op: Callable[..., Any], kind: str):
        self._op, self._kind = op, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        counts = _counting.get(threading.get_ident())
        if counts is not None:
            counts[self._kind] += 1
        return self._op(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


_LOCK = threading.Lock()


def _stand_in() -> None:
    with _LOCK:
        for name, kind in _KINDS.items():
            packet = getattr(torch.ops._c10d_functional, name)
            if not isinstance(packet.default, _Counted):
                packet.default = _Counted(packet.default, kind)


def _restore() -> None:
    with _LOCK:
        if _counting:
            return
        for name in _KINDS:
            packet = getattr(torch.ops._c10d_functional, name)
            if isinstance(packet.default, _Counted):
                packet.default = packet.default._op


class CountCollectives:
    """Inside ``with``, counts the ``_c10d_functional`` collectives that this thread's generated code calls, by kind.

    Attributes:
        counts: by ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> CountCollectives:
        _counting[threading.get_ident()] = self.counts
        _stand_in()
        return self

    def __exit__(self, *_: object) -> None:
        del _counting[threading.get_ident()]
        _restore()
