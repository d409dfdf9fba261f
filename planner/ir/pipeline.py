"""How a plan's program is cut into pipeline stages, and how its batch is cut into micro-batches.

The plan's own mesh is the mesh *inside* a stage; ``degree`` ranks along the pipeline axis each run one or several stages.
Micro-batches are one more axis, sharded *in time*: ``inputs`` and ``ops`` give the placements over it, as a plan gives those
over its mesh. A batch input that is ``S(0)`` is cut into consecutive micro-batches; a loss that is ``P`` adds up over them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.planner.ir.errors import InputError, PlanFormatError
from meshwright.planner.ir.spec import Placement, format_placements, parse_placements

if TYPE_CHECKING:
    from meshwright.planner.ir.plan import OpSpec


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of forward and backward passes.

    Attributes:
        name: what users write.
        title: one line for people.
        stages_per_rank: how many stages a rank may have: ``(least, most)``; most None: any number.
        folded: whether the stages go through the ranks forth and back (0 1 2 2 1 0) instead of round and round.
        splits_backward: whether gradients of inputs and of weights are two actions.
    """

    name: str
    title: str
    stages_per_rank: tuple[int, int | None] = (1, 1)
    folded: bool = False
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    s.name: s
    for s in (
        Schedule("naive", "one micro-batch, one stage works at a time"),
        Schedule("gpipe", "all forwards, then all backwards"),
        Schedule("1f1b", "one forward, one backward: few micro-batches in flight"),
        Schedule("interleaved_1f1b", "1f1b with several stages per rank", (1, None)),
        Schedule("zero_bubble", "interleaved, weight gradients fill the gaps", (1, None), splits_backward=True),
        Schedule("zbv", "two stages per rank, forth and back, weight gradients fill the gaps", (2, 2), True, True),
    )
}


AGAIN_ON_EACH_STAGE = frozenset(
    f"aten.{name}"
    for name in (
        "permute.default",
        "reshape.default",
        "expand.default",
        "unsqueeze.default",
        "_to_copy.default",
        "contiguous.default",
        "clone.default",
        "slice.Tensor",
        "constant_pad_nd.default",
        "view.dtype",
        "detach.default",
        "alias.default",
    )
)
"""What may be done to a parameter again on every stage that reads it, besides collectives."""


def schedule_named(name: str) -> Schedule:
    """Look a schedule up.

    Raises:
        InputError: no schedule has this name.
    """
    if name not in SCHEDULES:
        raise InputError(f"schedule {name!r} is unknown: use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, degree: int, stages: int, micro_batches: int) -> None:
    """Refuse a schedule that cannot run so.

    Args:
        name: of the schedule.
        degree: ranks along the pipeline axis.
        stages: number of stages.
        micro_batches: number of micro-batches.

    Raises:
        InputError: the number of stages or micro-batches does not suit it.
    """
    schedule = schedule_named(name)
    if degree < 1 or stages < 1 or stages % degree:
        raise InputError(
            f"{stages} stages cannot be dealt out evenly over {degree} ranks along the pipeline axis: use a multiple of {degree} stages"
        )
    least, most = schedule.stages_per_rank
    each = stages // degree
    if each < least or (most is not None and each > most):
        wanted = f"{least}" if least == most else f"at least {least}"
        raise InputError(f"schedule {name!r} needs {wanted} stages per rank, found {each} ({stages} stages on {degree} ranks)")
    if micro_batches < 1:
        raise InputError(f"micro_batches is {micro_batches}: it must be at least 1")
    if name == "naive" and micro_batches != 1:
        raise InputError(f"schedule 'naive' runs one micro-batch, found {micro_batches}: use 'gpipe' or '1f1b'")
    if name == "1f1b" and micro_batches < stages:
        raise InputError(
            f"schedule '1f1b' needs at least as many micro-batches as stages, found {micro_batches} for {stages}: use more "
            "micro-batches, or schedule 'gpipe'"
        )
    rounds = max(1, micro_batches // degree)
    if name in ("interleaved_1f1b", "zero_bubble") and micro_batches % rounds:
        raise InputError(
            f"schedule {name!r} runs its {micro_batches} micro-batches in {rounds} rounds, which do not divide them: use a multiple "
            f"of {degree} micro-batches, or schedule 'gpipe' or 'zbv'"
        )


@dataclass(frozen=True)
class Pipeline:
    """Stages, schedule and micro-batches of a plan.

    Attributes:
        degree: ranks along the pipeline axis.
        schedule: a name of :data:`SCHEDULES`.
        cuts: names of the forward ops behind which a stage ends, in execution order; one less than there are stages.
        micro_batches: how many micro-batches a step has.
        inputs: placement of batch inputs over the axis of micro-batches, by value name; what is not listed is replicated.
        ops: likewise of the ops, one placement per operand and result; what is not listed is replicated.
        whole_gradients: whether gradients of parameters of which a gathered copy is kept (``Plan.kept``) are summed whole over the
            micro-batches and scattered once per step (ZeRO-1), or scattered by every micro-batch and summed in pieces (ZeRO-2).
    """

    degree: int
    schedule: str
    cuts: tuple[str, ...]
    micro_batches: int = 1
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    ops: Mapping[str, OpSpec] = field(default_factory=dict)
    whole_gradients: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.degree

    def rank_of(self, stage: int) -> int:
        """Coordinate along the pipeline axis of the rank that runs ``stage``."""
        lap, at = divmod(stage, self.degree)
        return self.degree - 1 - at if schedule_named(self.schedule).folded and lap % 2 else at

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank at coordinate ``rank`` runs, in order."""
        return tuple(s for s in range(self.num_stages) if self.rank_of(s) == rank)

    def to_json_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "degree": self.degree,
            "schedule": self.schedule,
            "cuts": list(self.cuts),
            "micro_batches": self.micro_batches,
            "inputs": {name: str(p) for name, p in self.inputs.items()},
            "ops": {name: str(spec) for name, spec in self.ops.items()},
            **({"whole_gradients": True} if self.whole_gradients else {}),
        }

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> Pipeline:
        """The inverse of :meth:`to_json_dict`.

        Raises:
            PlanFormatError: a placement is not one placement.
        """
        from meshwright.planner.ir.plan import OpSpec

        return cls(
            degree=data["degree"],
            schedule=data["schedule"],
            cuts=tuple(data["cuts"]),
            micro_batches=data["micro_batches"],
            inputs={name: _one_placement(text) for name, text in data["inputs"].items()},
            ops={name: OpSpec.parse(text) for name, text in data["ops"].items()},
            whole_gradients=bool(data.get("whole_gradients", False)),
        )


def _one_placement(text: str) -> Placement:
    found = parse_placements(text)
    if len(found) != 1:
        raise PlanFormatError(f"placement over micro-batches is {format_placements(found)!r}: exactly one is needed")
    return found[0]


def stage_of_op(index: int, cuts: Sequence[int]) -> int:
    """The stage of the forward op at ``index`` of the program, given the ascending indices of the cut ops."""
    return bisect_left(cuts, index)
