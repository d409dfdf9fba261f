"""What every rank is doing in a pipeline step, so that a failure can name who failed and where.

Process groups say "connection closed by peer" or "timed out", never who or in which op. Each rank therefore keeps its present
action, and a thread writes it to the job's store now and then: a rank that hangs or was killed leaves its last action there.
When a step fails, each rank writes what failed, looks at what the others wrote, and says whose fault it is: a rank that reports
an error of its own, or one that reports none although all others do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_EVERY_S = 0.5
"""How often the present action is written, in seconds: rare against actions, so that thousands of ranks can share a store."""

_GRACE_S = 2.0
"""How long a failed rank waits for the others' reports, in seconds."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank wrote.

    Attributes:
        rank: global rank.
        state: ``"running"``, ``"raised"`` (an error of its own) or ``"cut off"`` (communication failed).
        action: what it was doing.
        error: what it raised, or ``""``.
        since_s: seconds that it had been doing it.
    """

    rank: int
    state: str
    action: str
    error: str
    since_s: float

    def __str__(self) -> str:
        what = {"raised": f"raised {self.error} while {self.action}", "cut off": f"was cut off while {self.action}"}
        return f"rank {self.rank} {what.get(self.state, f'was {self.action} (for {self.since_s:.1f} s when last heard)')}"


class Journal:
    """The present action of this rank, and everybody's last words.

    Args:
        name: equal on all ranks that run one module, and no other module's.
        ranks: global ranks that take part.
    """

    def __init__(self, name: str, ranks: list[int]):
        self.rank, self.ranks = dist.get_rank(), ranks
        self._name = name
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._action, self._since = "idle", time.monotonic()
        self._written: tuple[str, str] | None = None
        self._over = threading.Event()
        self._pid = 0

    def doing(self, action: str) -> None:
        """Note what this rank does now; costs a microsecond."""
        self._action, self._since = action, time.monotonic()

    @property
    def action(self) -> str:
        return self._action

    def watch(self) -> None:
        """Start the thread that writes the present action; once per process."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            thread = threading.Thread(target=self._beat, daemon=True, name="meshwright-journal")
            thread.start()
            atexit.register(self._end, thread)

    def close(self) -> None:
        """Stop writing."""
        self._over.set()

    def _end(self, thread: threading.Thread) -> None:
        """Before the interpreter ends: a thread that it ends while it writes to the store would end the process with an error."""
        self.close()
        thread.join(_GRACE_S)

    def _beat(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                self._write("running", "")
            except Exception:  # the store is gone: the job ends, or this rank says so itself
                return

    def _write(self, state: str, error: str) -> None:
        now = (state, self._action)
        if state == "running" and now == self._written and self._action == "idle":
            return
        self._written = now
        seconds = time.monotonic() - self._since
        self._store.set(self._key(self.rank), json.dumps([state, self._action, error, seconds]))

    def _key(self, rank: int) -> str:
        return f"meshwright/{self._name}/{rank}"

    def fail(self, error: BaseException, *, own: bool) -> None:
        """Write that this rank failed.

        Args:
            error: what it caught.
            own: whether the error is this rank's own, not one of communication.
        """
        self.close()
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        with contextlib.suppress(Exception):  # the rank that keeps the store may be gone
            self._write("raised" if own else "cut off", text)

    def collect(self, *, wait: bool) -> list[Report]:
        """What every rank wrote last; [] where the store is gone.

        Args:
            wait: whether to give ranks time to write what they noticed, unless one has raised.
        """
        deadline = time.monotonic() + (_GRACE_S if wait else 0.0)
        try:
            while True:
                reports = self._reports()
                told = any(r.state == "raised" for r in reports) or all(r.state != "running" for r in reports)
                if told or time.monotonic() >= deadline:
                    return reports
                time.sleep(0.05)
        except Exception:
            return []

    def _reports(self) -> list[Report]:
        found = []
        for rank in self.ranks:
            key = self._key(rank)
            if self._store.check([key]):
                found.append(Report(rank, *json.loads(self._store.get(key).decode())))
            else:
                found.append(Report(rank, "running", "in its first action", "", 0.0))
        return found


def culprit(reports: list[Report]) -> Report | None:
    """Whose fault a failure is: a rank that raised; else the one silent rank, the one that computes if several are silent."""
    raised = [r for r in reports if r.state == "raised"]
    if raised:
        return raised[0]
    silent = [r for r in reports if r.state == "running"]
    computing = [r for r in silent if r.action.startswith("computing")]
    return next(iter(computing or silent), None)
