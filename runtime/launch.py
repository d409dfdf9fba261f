"""Local ranks through torchrun's own machinery: one machine as the embedded default."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.planner.ir.errors import InputError


def run_script(script: str, args: Sequence[str], nproc: int) -> int:
    """Run ``script`` in ``nproc`` local ranks, as ``torchrun --standalone --nproc-per-node`` does.

    Ranks find each other by the environment (``torch.distributed.init_process_group()``). When one fails the others are
    ended. Unless OMP_NUM_THREADS is set, every rank computes with its share of the cores.

    Args:
        script: path of a Python file.
        args: its arguments.
        nproc: number of ranks.

    Returns:
        0, or the exit code of the first rank that failed (128 + signal for a rank that a signal ended).

    Raises:
        InputError: the script does not exist, or ``nproc`` is less than 1.
    """
    if nproc < 1:
        raise InputError(f"the number of ranks must be at least 1, found {nproc}")
    if not Path(script).is_file():
        raise InputError(f"script {script} does not exist")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *args)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0
