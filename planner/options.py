"""What to search for, and how long each phase of it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.recompute import LEVELS
from meshwright.planner.ir.spec import Placements
from meshwright.planner.solve.memory import Trained, optimizer_bytes, usable_bytes
from meshwright.planner.solve.optimise import Effort
from meshwright.planner.solve.strategies import strategy_named

_ON_MISSING_RULE = ("replicate", "error")


@dataclass(frozen=True)
class Options:
    """What to search for.

    Attributes:
        strategy: ``"auto"`` or the name of a strategy.
        memory_limit_bytes: bytes per device; None: the device's memory less a reserve (``memory.RESERVE``).
        optimizer: name of the optimizer whose state is counted, or its bytes per parameter element.
        pins: name pattern to placements; see :mod:`meshwright.planner.solve.pins`.
        on_missing_rule: ``"replicate"`` ops that have no rule, or ``"error"``.
        respect_axis_names: whether axes named ``dp``, ``fsdp``, ``data``, ``cp``, ``tp``, ``model`` are used only for that (read by
            ``make_plan``, which is given one mesh; else the meshes themselves say it).
        alternatives: whether to solve the named strategies too, for comparison. With them ``"auto"`` is never slower than a named
            one that fits; without them only within the gap.
        recompute: level of recomputation; None: the fastest that fits. Only for a program that can be had with several.
        model: the model's class name, for people.
        progress: called with the name of each phase as it begins.
        effort: gap and limits of the solver.
        micro_batches: into how many pieces the batch will be cut: devices must be able to share each of them.
        accumulate: how many passes the caller adds up before a step of the optimizer.
        whole_gradients: whether gradients will be summed whole over micro-batches, and scattered once per step.
    """

    strategy: str = "auto"
    memory_limit_bytes: int | None = None
    optimizer: str | int = "adamw"
    pins: Mapping[str, str | Placements] = field(default_factory=dict)
    on_missing_rule: str = "replicate"
    respect_axis_names: bool = False
    alternatives: bool = True
    recompute: str | None = None
    model: str = ""
    progress: Callable[[str], None] | None = None
    effort: Effort = field(default_factory=Effort)
    micro_batches: int = 1
    whole_gradients: bool = False
    accumulate: int = 1

    def memory_limit(self, hardware: Hardware) -> int:
        """Bytes per device."""
        return self.memory_limit_bytes or usable_bytes(hardware.device)

    @property
    def trained(self) -> Trained:
        """What training holds per parameter element."""
        return Trained(optimizer_bytes(self.optimizer), self.accumulate > 1)

    def __post_init__(self) -> None:
        strategy_named(self.strategy)
        optimizer_bytes(self.optimizer)
        if self.on_missing_rule not in _ON_MISSING_RULE:
            raise InputError(f"on_missing_rule is {self.on_missing_rule!r}: use one of {', '.join(_ON_MISSING_RULE)}")
        if self.recompute not in (None, *LEVELS):
            raise InputError(f"recompute is {self.recompute!r}: use None or one of {', '.join(LEVELS)}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise InputError(f"the memory limit is {self.memory_limit_bytes} bytes: it must be positive")


class Clock:
    """Seconds per phase."""

    def __init__(self, progress: Callable[[str], None] | None):
        self.seconds: dict[str, float] = {}
        self._tell = progress or (lambda phase: None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._tell(name)
        start = time.perf_counter()
        yield
        key = f"{name.replace(' ', '_')}_s"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
