"""Live bytes of a run: storages that are alive after every op, by who made them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class LiveBytes(TorchDispatchMode):
    """Follows the storages of all results of ops while it is entered; one per rank (and thread).

    Attributes:
        peak: most bytes alive after any op; storages that were there before are counted by :meth:`start_with`.
        at: the op after which the peak was.
        trace: (op, bytes) after every op, where asked for.
    """

    peak: int = 0
    at: str = ""
    trace: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.now = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def start_with(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these."""
        for t in tensors:
            self._count(t)

    def _count(self, t: torch.Tensor) -> None:
        local = getattr(t, "_local_tensor", None)
        if local is not None:
            t = local
        if t.device.type != "cpu" or type(t) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = t.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            return
        size = storage.nbytes()
        self.now += size
        self._known[key] = (weakref.ref(storage, lambda _, key=key, size=size: self._gone(key, size)), size)

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self._known.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._count(t)
        if self.now > self.peak:
            self.peak, self.at = self.now, str(func)
        self.trace.append((str(func), self.now))
        return out
