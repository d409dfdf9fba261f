"""What a user may ask of a plan, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright import debug
from meshwright.planner import search
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.pipeline import SCHEDULES
from meshwright.planner.ir.recompute import LEVELS
from meshwright.planner.ir.spec import parse_placements
from meshwright.planner.meshes import MeshRequest
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.solve.strategies import IN_STAGES, strategy_named
from meshwright.report.units import parse_bytes
from meshwright.target import Target

PRECISIONS = (None, "bf16-mixed")
ON_MISSING_RULE = ("replicate", "error")


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a user may ask of a plan; the keywords of ``plan`` and ``autoparallelize``.

    Attributes:
        strategy: ``"auto"``, or a name of ``search.STRATEGIES``.
        memory_limit: bytes per device, or text as ``"60GiB"``; None: the device's memory less a reserve.
        optimizer: whose state is counted.
        precision: None, or ``"bf16-mixed"``.
        pins: name pattern to placements: what the user fixes.
        on_missing_rule: ``"replicate"`` or ``"error"``.
        respect_axis_names: whether to keep the given axes and use those named ``dp``, ``fsdp``, ``cp``, ``tp`` for that.
        fold_capture: whether few of the repeated blocks are traced and the others copied.
        degrees: size of the axis for each of ``dp``, ``cp``, ``tp``; those left out are searched.
        logical_mesh: ``"search"``, ``"given"`` (the axes as they are), sizes of one mesh (by name, if a mapping),
            or None: searched for a cluster and a torch mesh, given for sizes that were written down and where there are pins.
        alternatives: whether to solve the named strategies too, for comparison.
        micro_batches: into how many the batch is cut; None: chosen, one where there are no stages.
        schedule: a name of ``pipeline.SCHEDULES``; None: chosen.
        stages_per_rank: stages that each rank along the pipeline axis has; None: as few as the schedule allows.
        recompute: level of recomputation, or None: the fastest that fits.
        accumulate: how many passes are added up before a step of the optimizer.
    """

    strategy: str = "auto"
    memory_limit: int | str | None = None
    optimizer: str = "adamw"
    precision: str | None = None
    pins: Mapping[str, Any] | None = None
    on_missing_rule: str = "replicate"
    respect_axis_names: bool = False
    fold_capture: bool = True
    degrees: Mapping[str, int] | None = None
    logical_mesh: str | tuple[int, ...] | Mapping[str, int] | None = None
    alternatives: bool = True
    micro_batches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    recompute: str | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        self.mesh_request()
        one_of("strategy", self.strategy, ("auto", *(s for s in search.STRATEGIES if s != "auto"), *IN_STAGES))
        one_of("schedule", self.schedule, (None, *SCHEDULES))
        for name in ("micro_batches", "stages_per_rank", "accumulate"):
            count = getattr(self, name)
            if (count is not None or name == "accumulate") and (
                not isinstance(count, int) or isinstance(count, bool) or count < 1
            ):
                raise InputError(f"{name} is {count!r}: it must be a whole number of at least 1")
        one_of("precision", self.precision, PRECISIONS)
        one_of("on_missing_rule", self.on_missing_rule, ON_MISSING_RULE)
        one_of("recompute", self.recompute, (None, *LEVELS))

    def options(self, model: str, progress: debug.Progress | None) -> search.Options:
        return search.Options(
            strategy=IN_STAGES.get(self.strategy, self.strategy),
            memory_limit_bytes=None if self.memory_limit is None else parse_bytes(self.memory_limit),
            optimizer=self.optimizer,
            pins=dict(self.pins or {}),
            on_missing_rule=self.on_missing_rule,
            alternatives=self.alternatives,
            recompute=self.recompute,
            model=model,
            progress=progress,
            micro_batches=self.micro_batches or 1,
            accumulate=self.accumulate,
        )

    def mesh_request(self) -> MeshRequest:
        """What is said about the logical mesh."""
        axes = {_num_axes(pin) for pin in (self.pins or {}).values()} - {0}
        if len(axes) > 1:
            raise InputError(
                f"pins speak of meshes with {' and '.join(map(str, sorted(axes)))} axes: give one placement per axis"
            )
        sizes = tuple(self.logical_mesh) if isinstance(self.logical_mesh, list) else self.logical_mesh
        degrees = {name: n for name, n in (self.degrees or {}).items() if name != "pp"}
        return MeshRequest(sizes, degrees or None, self.respect_axis_names, axes.pop() if axes else None)

    def in_stages(self, target: Target) -> PipelineRequest | None:
        """What is asked of pipeline stages; None where there are none.

        Raises:
            InputError: options that say different things.
        """
        axis, strategy = target.pipeline_axis, self.strategy
        by_axis = target.mesh.sizes[axis] if axis is not None else None
        degree = (self.degrees or {}).get("pp", by_axis or (self._usual_stages(target) if strategy in IN_STAGES else 1))
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise InputError(f"degree pp={degree!r} must be a whole number of devices, at least 1")
        if strategy_named(IN_STAGES.get(strategy, strategy)).one_controller and (
            degree > 1 or self.micro_batches not in (None, 1)
        ):
            raise InputError(f"strategy {strategy!r} has neither stages nor micro-batches: use 'ddp' or 'ddp+pipeline'")
        if degree == 1 and self.micro_batches in (None, 1) and by_axis is None:
            if self.schedule is not None or self.stages_per_rank not in (None, 1):
                raise InputError("schedule and stages_per_rank are for pipeline stages: say how many with degrees={'pp': ...}")
            return None
        if strategy == "model_parallel":
            if self.schedule not in (None, "naive") or self.micro_batches not in (None, 1):
                raise InputError("strategy 'model_parallel' runs one micro-batch by schedule 'naive': use strategy 'pipeline'")
            return PipelineRequest(degree, "naive", 1, 1)
        return PipelineRequest(degree, self.schedule, self.micro_batches, self.stages_per_rank)

    def _usual_stages(self, target: Target) -> int:
        """How many stages a strategy has where nobody says: what the other degrees leave, else all devices if it has stages alone, else
        two, so that the others are left to shard the batch."""
        devices = target.mesh.num_devices
        others = math.prod(n for n in (self.degrees or {}).values() if isinstance(n, int) and n > 0)
        if self.strategy in ("pipeline", "model_parallel"):
            return max(1, devices // others)
        return next((n for n in range(2, devices + 1) if devices % n == 0), 1)


@dataclass(frozen=True, slots=True)
class RequestAgain(Request):
    """What is asked of a further program of a model that lies in stages already.

    Attributes:
        stages: degree, schedule and micro-batches as they are, and where parameters are.
    """

    stages: PipelineRequest | None = None

    def in_stages(self, target: Target) -> PipelineRequest | None:
        """The stages as they are."""
        return self.stages


def _num_axes(pin: Any) -> int:
    """Axes that a pin speaks of; 0 where it is malformed, which the search says with the pin's name."""
    try:
        return len(parse_placements(pin) if isinstance(pin, str) else pin)
    except (InputError, TypeError):
        return 0


def one_of(what: str, found: Any, known: tuple[Any, ...]) -> None:
    """Raise InputError unless ``found`` is one of ``known``."""
    if found not in known:
        raise InputError(f"{what}={found!r} is not known; known are {', '.join(map(repr, known))}")
