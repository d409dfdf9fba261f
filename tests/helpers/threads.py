"""Simulated ranks: threads of one process over torch's threaded process group (no point-to-point).

The one test helper that imports torch's private testing module.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.helpers.ranks import RankFailed


class _ReduceScatter:
    """The threaded group's own sums only; gloo and NCCL also take maximum and minimum."""

    reduce: ClassVar = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}

    def __init__(self, op: Any):
        self.op = op.op if hasattr(op, "op") else op

    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        for i, (outputs, _) in enumerate(data):
            total = data[0][1][0][i]
            for _, inputs in data[1:]:
                total = self.reduce[self.op](total, inputs[0][i])
            outputs[0].detach().copy_(total)


multi_threaded_pg.ReduceScatter = _ReduceScatter


def run_threads(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``n`` simulated ranks; real ``_c10d_functional`` ops, one process.

    Capture and plan before calling: tracing patches torch globally and must not run beside other threads.

    Returns:
        Each rank's result.

    Raises:
        RankFailed: a rank raised, or did not finish within ``timeout`` seconds.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=n, store=store)
            results[rank] = fn(rank, *args)
        except SystemExit:
            pass  # another rank failed and ended this one
        except BaseException as error:
            failures[rank] = traceback.format_exc()
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if not failures and any(thread.is_alive() for thread in threads):
            failures = {rank: f"did not finish within {timeout:.0f} s" for rank, t in enumerate(threads) if t.is_alive()}
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise RankFailed("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(n)]
