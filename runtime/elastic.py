"""Local ranks that go on without those that were lost, on torchrun's own elastic agent.

The agent watches the ranks, ends all when one fails, and starts the script again. Here it starts it with fewer ranks where some were
killed by SIGKILL: by the kernel for memory, by an operator, with their device. The script does the rest: it makes its mesh of the
world that it finds, plans for it, loads the newest checkpoint and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from meshwright.planner.ir.errors import InputError, RuntimeMismatchError

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch 2.13 keeps one store for all starts of the ranks, in which those of a later start find the addresses of the dead and connect to
them: they fail, or hang. With this variable the first rank makes a new store at every start."""


def next_size(ranks: int, lost: int, allowed: Sequence[int] | None) -> int:
    """With how many ranks to go on.

    Args:
        ranks: how many there were.
        lost: how many of them were killed.
        allowed: numbers that the script can run on; None: all.

    Raises:
        RuntimeMismatchError: no number is left.
    """
    left = ranks - lost
    fitting = [n for n in (allowed if allowed is not None else range(left + 1)) if 0 < n <= left]
    if not fitting:
        raise RuntimeMismatchError(
            f"{lost} of {ranks} ranks were lost, and the script cannot go on with {left}: allowed are "
            f"{', '.join(map(str, sorted(allowed))) if allowed else 'one or more'}; restart it from its last checkpoint elsewhere"
        )
    return max(fitting)


class ShrinkingAgent(LocalElasticAgent):
    """torch's agent; ranks that SIGKILL ended are not started again."""

    def __init__(self, spec: WorkerSpec, allowed: Sequence[int] | None):
        super().__init__(spec, DefaultLogsSpecs())
        self._allowed = allowed
        self._failures: dict[int, ProcessFailure] = {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._failures = dict(result.failures)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        lost = sorted(rank for rank, f in self._failures.items() if f.exitcode == -signal.SIGKILL)
        size = next_size(spec.local_world_size, len(lost), self._allowed) if lost else spec.local_world_size
        what = f"rank {', '.join(map(str, lost))} was killed" if lost else f"rank {min(self._failures, default=0)} failed"
        print(f"meshwright: {what}; starting again with {size} of {spec.local_world_size} ranks", file=sys.stderr, flush=True)
        spec.local_world_size = size
        self._failures = {}
        super()._restart_workers(worker_group)


def run_elastic(
    script: str, args: Sequence[str], nproc: int, *, allowed: Sequence[int] | None = None, max_restarts: int = 10
) -> int:
    """Run ``script`` in up to ``nproc`` local ranks, again and with fewer where ranks are lost.

    Args:
        script: path of a Python file that continues from its newest checkpoint.
        args: its arguments.
        nproc: number of ranks to begin with.
        allowed: numbers of ranks that it can run on; None: any.
        max_restarts: how often it is started again before its failure is final.

    Returns:
        0, or the exit code of the first rank that failed for good (128 + signal for one that a signal ended).

    Raises:
        InputError: ``nproc`` is not allowed.
        RuntimeMismatchError: too few ranks are left.
    """
    if allowed is not None and nproc not in allowed:
        raise InputError(f"-n {nproc} is not among the allowed numbers of ranks {', '.join(map(str, allowed))}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ[FRESH_STORE] = "1"
    meeting = RendezvousParameters(backend="c10d", endpoint="localhost:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1)
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-u", script, *args),
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    try:
        result = ShrinkingAgent(spec, allowed).run()
    finally:
        spec.rdzv_handler.shutdown()
    if not result.is_failed():
        return 0
    first = min(result.failures.values(), key=lambda f: f.timestamp)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
