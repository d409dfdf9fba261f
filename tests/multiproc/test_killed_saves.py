"""Ranks that are killed at any moment while they save leave whole checkpoints only, and never lose one that was reported."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.planner import remat, trace
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import S
from meshwright.runtime.checkpoint.catalogue import read_catalogue
from meshwright.runtime.checkpoint.folder import checkpoints_in, newest
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.storage import read_pieces
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from tests.helpers.legal_plans import greedy_plan

RANKS, SIDE = 2, 400


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))


def _fill(tensors: list[torch.Tensor], value: int) -> None:
    with torch.no_grad():
        for t in tensors:
            t.fill_(float(value))


def _save_for_ever(rank: int, work: Path, made: tuple[Any, Any], asynchronous: bool, reports: Any) -> None:
    """Save step after step, all tensors of step n being n; report each one that is said to be there."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=RANKS, timeout=limit)
    pm = build(_model(), *made, make_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.0, momentum=0.9, foreach=True)
    for p in pm.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = [optimizer.state[p]["momentum_buffer"] for p in pm.parameters()]
    tensors = [local_of(t).detach() for t in (*pm.parameters(), *state)]
    dist.barrier()
    saving = None
    for step in range(10_000):
        _fill(tensors, step)
        before, saving = saving, pm.save_checkpoint(work / "run", optimizer, step=step, asynchronous=asynchronous, keep_last=2)
        done = before if asynchronous else saving
        if rank == 0:
            reports.send_bytes(str(-1 if done is None else done.step).encode())


def _kill_once(work: Path, made: tuple[Any, Any], asynchronous: bool, chance: random.Random) -> int:
    """Start ranks, kill one or all of them after a while; the highest step that was reported, -1 for none."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_save_for_ever, args=(r, work, made, asynchronous, theirs), daemon=True) for r in range(RANKS)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        assert ours.poll(60), "no checkpoint was saved"
        time.sleep(chance.uniform(0.0, 0.15))
        first = chance.choice([0, 1, None])
        if first is not None:
            os.kill(ranks[first].pid or 0, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.1))
    finally:
        for process in ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    reported = -1
    try:
        while True:
            reported = max(reported, int(ours.recv_bytes()))
    except EOFError:
        return reported


def _check(folder: Path, reported: int) -> None:
    """Every checkpoint is whole and of one step; the newest is no older than what was reported."""
    latest = newest(folder)
    assert latest is not None or reported < 0
    for name, (step, _) in checkpoints_in(folder).items():
        catalogue = read_catalogue(folder / name)
        catalogue.verify()
        assert catalogue.state["step"] == step
        for tensor, saved in catalogue.tensors.items():
            if not tensor.startswith("random."):
                found = torch.full(saved.shape, -1.0)
                read_pieces({tensor: Piece.of(found)}, catalogue)
                assert bool((found == step).all()), f"{name}: {tensor} holds {found.unique().tolist()}"
        assert len(catalogue.tensors) == 8 + RANKS
    assert latest is None or checkpoints_in(folder)[latest.name][0] >= reported


def _kill_many(tmp_path: Path, asynchronous: bool, times: int, seed: int) -> int:
    """How many of the kills fell into a save, which left a directory half-written."""
    capture = remat.save_few(trace.capture(_model(), (torch.randn(4, SIDE),), {}))
    made = capture, greedy_plan(capture, MeshShape.of(RANKS), batch_axes=(0,), parameters={"*": (S(0),)})
    chance = random.Random(seed)
    for i in range(times):
        (tmp_path / str(i)).mkdir()
        _check(tmp_path / str(i) / "run", _kill_once(tmp_path / str(i), made, asynchronous, chance))
    return sum(bool(list((tmp_path / str(i) / "run").glob("*.tmp-*"))) for i in range(times))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["foreground", "background"])
def test_a_kill_during_a_save_leaves_whole_checkpoints_only(asynchronous: bool, tmp_path: Path):
    _kill_many(tmp_path, asynchronous, times=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["foreground", "background"])
def test_thirty_kills_during_saves_leave_whole_checkpoints_only(asynchronous: bool, tmp_path: Path):
    assert _kill_many(tmp_path, asynchronous, times=30, seed=2) > 5
