"""Ranks that are killed in mid-training: the rest goes on by itself, with the losses of a run that nobody interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.runtime.elastic import next_size, run_elastic

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "06_elastic.py"
LINE = re.compile(r"step (\d+) on (\d+) ranks: loss ([\d.]+)")


def _start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwright", "run", *options, str(EXAMPLE), str(folder)]
    folder.mkdir()
    with open(folder.with_suffix(".log"), "w") as errors:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)


def _ranks_of(launcher: int) -> list[int]:
    """Process ids of its children that run the example."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(c) for c in children if "06_elastic.py" in Path(f"/proc/{c}/cmdline").read_text()]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_rank_is_left_behind_and_training_goes_on_with_the_same_losses(count: int, tmp_path: Path):
    whole = _start(tmp_path / "whole", "-n", "1")
    wanted = {int(m[1]): float(m[3]) for m in LINE.finditer(whole.communicate(timeout=300)[0])}
    assert len(wanted) == 12
    run, seen = _start(tmp_path / "cut", "--elastic", "-n", str(count)), []
    assert run.stdout is not None
    try:
        for line in run.stdout:
            seen += [(int(m[1]), int(m[2]), float(m[3])) for m in LINE.finditer(line)]
            if seen and seen[-1][:2] == (4, count):
                ranks = _ranks_of(run.pid)
                assert len(ranks) == count
                os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(timeout=300) == 0
        told = (tmp_path / "cut.log").read_text()
        assert f"rank 1 was killed; starting again with {count - 1} of {count} ranks" in told
    finally:
        run.kill()
        run.communicate()
    assert {ranks for _, ranks, _ in seen} == {count, count - 1} and [s for s, _, _ in seen][-1] == 11
    assert {step for step, _, _ in seen} == set(wanted) and len(seen) - len(wanted) <= 3  # steps since the last checkpoint
    for step, _, loss in seen:
        assert loss == pytest.approx(wanted[step], rel=1e-5)


FAILING = """
import os, signal, sys
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "a") as file:
        file.write(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == os.environ.get("KILLED", "0"):
    {how}
"""


@pytest.mark.parametrize(
    ("how", "restarts", "code", "sizes"),
    [("sys.exit(7)", 1, 7, "22"), ("os.kill(os.getpid(), signal.SIGTERM)", 0, 128 + 15, "2"), ("pass", 3, 0, "2")],
    ids=["an error", "a signal", "success"],
)
def test_a_failure_that_repeats_is_final_and_its_code_is_returned(tmp_path: Path, how: str, restarts: int, code: int, sizes: str):
    (tmp_path / "script.py").write_text(FAILING.format(how=how))
    assert run_elastic(str(tmp_path / "script.py"), [str(tmp_path / "log")], 2, max_restarts=restarts) == code
    assert (tmp_path / "log").read_text() == sizes


def test_when_too_few_ranks_are_left_the_run_ends(tmp_path: Path):
    (tmp_path / "script.py").write_text(FAILING.format(how="os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(mw.RuntimeMismatchError, match="1 of 2 ranks were lost.*allowed are 2"):
        run_elastic(str(tmp_path / "script.py"), [str(tmp_path / "log")], 2, allowed=[2])


def test_the_largest_allowed_number_of_ranks_is_taken():
    assert next_size(8, 1, None) == 7
    assert next_size(8, 1, (8, 4, 2)) == 4
    assert next_size(8, 6, (8, 4, 2)) == 2
    with pytest.raises(mw.RuntimeMismatchError, match="one or more"):
        next_size(1, 1, None)
