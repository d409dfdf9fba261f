"""A step of a pipeline, simulated action by action: how long it takes, where ranks idle, what they hold.

Every rank runs its actions in order. An action begins when the rank is free and what it needs has arrived: a forward needs that
of the stage before, a backward that of the stage behind, both sent as soon as they are made. Between ranks a send takes a while; where a rank moves the data itself, it also takes a part of
the sending rank's time, behind the action, and as much of the receiving rank's, before the action that needs it.
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
    moving_s: Callable[[int], float] = lambda boundary: 0.0,
    held: Callable[[int], StageBytes] = lambda stage: StageBytes(0.0),
) -> Simulated:
    """Run one step.

    Args:
        pipeline: stages and their ranks.
        order: the actions of every rank.
        seconds: duration of each action.
        send_s: seconds until what one stage sends over a boundary (number of the stage before it) is there; between stages of one
            rank nothing is sent.
        moving_s: seconds that sending it takes of the sender's own time, and receiving it of the receiver's.
        held: bytes by stage.

    Raises:
        VerifyError: the orders wait for each other for ever.
    """
    run = _Run(pipeline, order, send_s, moving_s)
    clock, busy, at = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    began: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            now, worked, k = clock[rank], busy[rank], at[rank]
            while k < len(actions):
                action = actions[k]
                ready = run.ready(action)
                if ready < 0.0:
                    break
                took = seconds(action)
                received, sent = run.moving(action) if run.moves else (0.0, 0.0)
                began[action] = now = max(now, ready) + received
                now += took + sent
                worked += took
                run.end(action, now)
                k += 1
                moved = True
            clock[rank], busy[rank], at[rank] = now, worked, k
    stuck = [str(actions[i]) for actions, i in zip(order, at, strict=True) if i < len(actions)]
    if stuck:
        raise VerifyError(f"the ranks of schedule {pipeline.schedule!r} wait for each other for ever: at {', '.join(stuck)}")
    sizes = [held(stage) for stage in range(pipeline.num_stages)]
    return Simulated(max(clock, default=0.0), tuple(busy), began, tuple(_peak(actions, sizes) for actions in order))


class _Run:
    """When what actions wait for was done: forwards, and gradients of inputs, by stage and micro-batch; negative: not yet.

    Attributes:
        moves: whether sending and receiving takes a rank's own time.
    """

    def __init__(
        self, pipeline: Pipeline, order: Sequence[Order], send_s: Callable[[int], float], moving_s: Callable[[int], float]
    ):
        self._last = pipeline.num_stages - 1
        self._count = 1 + max((a.micro_batch for actions in order for a in actions), default=0)
        ranks = [pipeline.rank_of(s) for s in range(pipeline.num_stages)]
        self._sent = [send_s(s) if ranks[s] != ranks[s + 1] else 0.0 for s in range(self._last)]
        self._moving = [moving_s(s) if ranks[s] != ranks[s + 1] else 0.0 for s in range(self._last)]
        self.moves = any(self._moving)
        self._forward = [-1.0] * (pipeline.num_stages * self._count)
        self._gradient = list(self._forward)

    def ready(self, action: Action) -> float:
        """When what ``action`` needs of other actions is there."""
        kind, stage, i = action
        at = stage * self._count + i
        if kind == "F":
            return 0.0 if stage == 0 else self._arrived(self._forward[at - self._count], stage - 1)
        if kind == "W":
            return self._gradient[at]
        own = self._forward[at]
        if own < 0.0 or stage == self._last:
            return own
        sent = self._arrived(self._gradient[at + self._count], stage)
        return sent if sent < 0.0 else max(own, sent)

    def _arrived(self, made_s: float, boundary: int) -> float:
        return made_s if made_s < 0.0 else made_s + self._sent[boundary]

    def moving(self, action: Action) -> tuple[float, float]:
        """Seconds of the rank's own time that receiving for an action takes, and sending what it makes."""
        kind, stage, _ = action
        before = self._moving[stage - 1] if stage else 0.0
        behind = self._moving[stage] if stage < self._last else 0.0
        if kind == "F":
            return before, behind
        return (0.0, 0.0) if kind == "W" else (behind, before)

    def end(self, action: Action, now: float) -> None:
        """An action is done."""
        kind, stage, i = action
        if kind == "F":
            self._forward[stage * self._count + i] = now
        elif kind != "W":
            self._gradient[stage * self._count + i] = now


def _peak(actions: Order, held: Sequence[StageBytes]) -> float:
    """Most bytes that a rank holds; what an action makes and what it frees are there at once."""
    now = most = 0.0
    for kind, stage, _ in actions:
        size = held[stage]
        if kind == "F":
            now += size.saved
        elif kind == "I":
            now += size.stashed
        if now > most:
            most = now
        if kind == "B":
            now -= size.saved
        elif kind == "W":
            now -= size.saved + size.stashed
    return most
