"""The harness itself: results come back, failures and hangs end everything in time, nothing is left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.threads import run_threads


def _sum(rank: int, scale: int) -> tuple[int, float]:
    x = torch.full((4,), float(rank * scale))
    dist.all_reduce(x)
    return dist.get_rank(), float(x[0])


def test_ranks_reduce_over_gloo_and_return_in_order():
    assert run_ranks(3, _sum, 2) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_simulated_ranks_reduce_and_return_in_order():
    assert run_threads(8, _sum, 1) == [(rank, 28.0) for rank in range(8)]


def _raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang(rank: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("fn", "message"),
    [(_raise_on_one, "rank one is unhappy"), (_die_on_one, "exit code 7"), (_hang, "did not finish within 2 s")],
)
def test_a_rank_that_fails_dies_or_hangs_ends_all_in_time(fn, message):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, fn, timeout=2.0 if fn is _hang else 30.0)
    assert time.monotonic() - start < 15


def test_a_simulated_rank_that_raises_ends_the_others():
    with pytest.raises(RankFailed, match="rank one is unhappy"):
        run_threads(4, _raise_on_one, timeout=30.0)
