"""A rank that raises, dies or hangs in the middle of a schedule: the others end and say which rank, stage and action it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshwright as mw
from meshwright.runtime.journal import Report, culprit
from tests.helpers.pipelines import start, trial
from tests.helpers.ranks import RankFailed, run_ranks

CULPRIT = 1
PATIENCE_S = 4.0
"""Timeout of the process group: how soon a hang is noticed."""


def _fail(how: str) -> None:
    if how == "raise":
        raise ValueError("the disk is full")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PATIENCE_S + 6)


def _run(rank: int, given: Any, how: str, part: str, folder: str) -> None:
    """One good step, then one in which a rank fails in a part of its work (with the third micro-batch); writes what it said."""
    pm = start(given, timeout_s=PATIENCE_S if how == "hang" else None)
    batch = given.case.batch()
    pm.step(batch)
    run = next(iter(pm._programs[0].runs.values()))
    real = getattr(run, part)

    def failing(i: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == CULPRIT and (i == 2 or part == "finish"):
            time.sleep(0.7)  # the journal writes twice a second
            _fail(how)
        return real(i, *args, **kwargs)

    setattr(run, part, failing)
    try:
        pm.step(batch)
        said = "nothing"
    except mw.StepError as e:
        said = f"{e} | rank {e.rank}"
    Path(folder, str(rank)).write_text(said)
    assert not dist.is_initialized()


def said_by(tmp_path: Path, ranks: int, how: str, part: str = "forward", schedule: str = "1f1b") -> dict[int, str]:
    try:
        run_ranks(ranks, _run, trial("mlp", schedule, 8, ranks), how, part, str(tmp_path), timeout=60)
    except RankFailed as e:
        assert how == "kill" and f"died without a word (exit code {-signal.SIGKILL})" in str(e)
    return {int(p.name): p.read_text() for p in tmp_path.iterdir()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_raises_is_named_with_its_error_by_all(tmp_path, ranks):
    said = said_by(tmp_path, ranks, "raise")
    assert len(said) == ranks
    assert f"rank {CULPRIT} (pipeline rank {CULPRIT}) failed while computing F2 of stage 1: ValueError" in said[CULPRIT]
    for rank in set(said) - {CULPRIT}:
        assert f"rank {CULPRIT} raised ValueError: the disk is full" in said[rank]
        assert said[rank].endswith(f"| rank {CULPRIT}")
        assert "waiting for" in said[rank] or "communicating after" in said[rank]


def test_a_rank_that_is_killed_is_named_by_all(tmp_path):
    said = said_by(tmp_path, 4, "kill")
    assert set(said) == {0, 2, 3}
    for text in said.values():
        assert text.startswith(f"rank {CULPRIT} was ")
        assert text.endswith(f"| rank {CULPRIT}")


@pytest.mark.parametrize(("ranks", "part", "doing"), [(2, "forward", "computing F2"), (4, "backward", "computing B2")])
def test_a_rank_that_hangs_is_named_by_all_within_the_timeout(tmp_path, ranks, part, doing):
    said = said_by(tmp_path, ranks, "hang", part)
    assert len(said) == ranks
    for rank in set(said) - {CULPRIT}:
        assert f"rank {CULPRIT} was {doing} of stage {CULPRIT}" in said[rank]
        assert said[rank].endswith(f"| rank {CULPRIT}")
    assert said[CULPRIT] != "nothing"


@pytest.mark.parametrize(
    ("how", "part", "doing"),
    [
        ("raise", "backward", "computing I2 of stage 1"),
        ("kill", "backward", "computing I2 of stage 1"),
        ("raise", "weights", "computing W2 of stage 1"),
        ("kill", "weights", "computing W2 of stage 1"),
    ],
)
def test_a_rank_that_fails_on_the_way_back_is_named_by_all(tmp_path, how, part, doing):
    said = said_by(tmp_path, 2, how, part, "zero_bubble")
    assert said[0].endswith(f"| rank {CULPRIT}")
    if how == "raise":
        assert f"rank {CULPRIT} (pipeline rank {CULPRIT}) failed while {doing}: ValueError" in said[CULPRIT]
        assert f"rank {CULPRIT} raised ValueError: the disk is full while {doing}" in said[0]
    else:
        assert f"rank {CULPRIT} was " in said[0]


def test_a_rank_that_fails_after_the_last_micro_batch_is_named_by_all(tmp_path):
    said = said_by(tmp_path, 2, "raise", "finish")
    assert f"rank {CULPRIT} (pipeline rank {CULPRIT}) failed while finishing the step: ValueError" in said[CULPRIT]
    assert f"rank {CULPRIT} raised ValueError: the disk is full" in said[0] and said[0].endswith(f"| rank {CULPRIT}")


def test_blame_goes_to_a_rank_that_raised_then_to_a_silent_one_that_computes():
    cut = Report(0, "cut off", "waiting for activations", "RuntimeError", 1.0)
    waits = Report(2, "running", "waiting for activations", "", 9.0)
    works = Report(3, "running", "computing F1 of stage 3", "", 9.0)
    raised = Report(1, "raised", "computing B0 of stage 1", "ValueError: x", 0.1)
    assert culprit([cut, waits, works, raised]) is raised
    assert culprit([cut, waits, works]) is works
    assert culprit([cut, waits]) is waits
    assert culprit([cut]) is None
