"""A step of a pipeline, simulated action by action: how long it takes, where ranks idle, what they hold.

Every rank runs its actions in order. An action begins when the rank is free and what it needs has arrived: a forward needs that
of the stage before, a backward that of the stage behind, both sent as soon as they are made. Sends take no time of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.orders import Action, Order

Seconds = Callable[[Action], float]
"""Duration of an action."""


@dataclass(frozen=True)
class StageBytes:
    """What one stage holds of one micro-batch.

    Attributes:
        saved: from its forward to the end of its backward.
        stashed: how much more it is between the gradients of inputs and those of weights, where the backward is split: gradients that
            the latter read, less what only the former read.
    """

    saved: float
    stashed: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    Attributes:
        step_s: from the first action to the end of the last.
        busy_s: seconds that each rank computes.
        began_s: when each action begins, by action.
        peak_bytes: most that each rank holds at once.
    """

    step_s: float
    busy_s: tuple[float, ...]
    began_s: dict[Action, float]
    peak_bytes: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they idle."""
        whole = self.step_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(
    pipeline: Pipeline,
    order: Sequence[Order],
    seconds: Seconds,
    send_s: Callable[[int], float] = lambda boundary: 0.0,
    held: Callable[[int], StageBytes] = lambda stage: StageBytes(0.0),
) -> Simulated:
    """Run one step.

    Args:
        pipeline: stages and their ranks.
        order: the actions of every rank.
        seconds: duration of each action.
        send_s: seconds until what one stage sends over a boundary (number of the stage before it) is there; between stages of one
            rank nothing is sent.
        held: bytes by stage.

    Raises:
        VerifyError: the orders wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    began: dict[Action, float] = {}
    clock, busy, at = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                ready = _ready(action, pipeline, ends, send_s)
                if ready is None:
                    break
                began[action] = max(clock[rank], ready)
                clock[rank] = ends[action] = began[action] + seconds(action)
                busy[rank] += seconds(action)
                at[rank] += 1
                moved = True
    stuck = [str(actions[i]) for actions, i in zip(order, at, strict=True) if i < len(actions)]
    if stuck:
        raise VerifyError(f"the ranks of schedule {pipeline.schedule!r} wait for each other for ever: at {', '.join(stuck)}")
    return Simulated(max(clock, default=0.0), tuple(busy), began, tuple(_peak(actions, held) for actions in order))


def _ready(action: Action, pipeline: Pipeline, ends: dict[Action, float], send_s: Callable[[int], float]) -> float | None:
    """When what ``action`` needs of other actions is there; None while one of them has not run."""
    kind, stage, i = action
    if kind == "W":
        return ends.get(Action("I", stage, i))
    if kind == "F":
        return 0.0 if stage == 0 else _arrival((Action("F", stage - 1, i),), stage - 1, pipeline, ends, send_s)
    own = ends.get(Action("F", stage, i))
    if stage == pipeline.num_stages - 1 or own is None:
        return own
    sent = _arrival((Action("B", stage + 1, i), Action("I", stage + 1, i)), stage, pipeline, ends, send_s)
    return None if sent is None else max(own, sent)


def _arrival(
    senders: tuple[Action, ...], boundary: int, pipeline: Pipeline, ends: dict[Action, float], send_s: Callable[[int], float]
) -> float | None:
    made = next((ends[a] for a in senders if a in ends), None)
    if made is None:
        return None
    return made + (send_s(boundary) if pipeline.rank_of(boundary) != pipeline.rank_of(boundary + 1) else 0.0)


def _peak(actions: Order, held: Callable[[int], StageBytes]) -> float:
    """Most bytes that a rank holds; what an action makes and what it frees are there at once."""
    now = most = 0.0
    for kind, stage, _ in actions:
        size = held(stage)
        now += {"F": size.saved, "I": size.stashed}.get(kind, 0.0)
        most = max(most, now)
        now -= {"B": size.saved, "W": size.saved + size.stashed}.get(kind, 0.0)
    return most
