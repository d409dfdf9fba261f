"""Gathered copies of parameters that live until the parameters change.

A copy is stale as soon as a parameter has other values. What changes parameters, and how it is seen:

* an optimizer's step: hooks of ``torch.optim`` before it (the copies are freed: they will not be read again) and behind it. Version
  counters do not show it: foreach and fused optimizers leave them as they are on DTensors;
* ``load_state_dict`` of the module or of a checkpoint, ``copy_`` and every other op in place on a parameter or on its local piece:
  version counters;
* another local tensor in a parameter: its identity.

Not seen: ``torch._foreach_*`` ops that user code calls on parameters itself, outside ``torch.optim``. Such code must call
``forget_kept`` of the module.

Every rank runs the same calls, so all ranks gather again at the same calls. Source: measured with torch 2.13, RUNTIME_FACTS §4.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.runtime.dtensor import local_of

_ALL: WeakSet[KeptCopies] = WeakSet()
_LOCK = threading.Lock()
_hooked = False


class KeptCopies:
    """The copies of one program on one rank.

    Ranks may be threads of one process: a step of an optimizer invalidates the copies of its own thread, whatever it changes, and
    those made from its parameters in every thread.
    """

    def __init__(self, names: Iterable[str]):
        """``names``: of the parameters that copies are made from."""
        self._names = tuple(names)
        self._ids: frozenset[int] = frozenset()
        self._thread = 0
        self._copies: tuple[torch.Tensor, ...] | None = None
        self._seen: tuple[_Seen, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptCopies:
        return KeptCopies(self._names)

    def fresh(self, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """The copies; None where there are none that have the parameters' present values."""
        if any(not seen.still(parameters[name]) for name, seen in zip(self._names, self._seen, strict=False)):
            self.forget()
        return self._copies

    def keep(self, copies: Sequence[torch.Tensor], parameters: Mapping[str, Any]) -> None:
        """Keep copies that were just made."""
        mine = [parameters[name] for name in self._names]
        self._copies, self._seen = tuple(copies), tuple(map(_Seen.of, mine))
        self._ids, self._thread = frozenset(map(id, mine)), threading.get_ident()
        _watch(self)

    def forget(self) -> None:
        """Free the copies; the next forward gathers again."""
        self._copies, self._seen = None, ()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer takes a step, or has taken it."""
        if self._copies is None:
            return
        mine = threading.get_ident() == self._thread
        if mine or any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            self.forget()


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A parameter as it was when its copy was made: the local tensor itself, and what moves whenever torch shows a write."""

    local: torch.Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, parameter: Any) -> _Seen:
        local = local_of(parameter)
        return cls(local, (parameter._version, local._version))

    def still(self, parameter: Any) -> bool:
        local = local_of(parameter)
        return local is self.local and (parameter._version, local._version) == self.versions


def _watch(copies: KeptCopies) -> None:
    """Let the optimizers' hooks reach ``copies``."""
    global _hooked
    with _LOCK:
        _ALL.add(copies)
        if not _hooked:
            register_optimizer_step_pre_hook(_step)
            register_optimizer_step_post_hook(_step)
            _hooked = True


def _step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _LOCK:
        known = list(_ALL)
    for copies in known:
        copies.stepped(optimizer)
