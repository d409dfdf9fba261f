"""Local ranks through torchrun's machinery: exit codes, arguments, refusals."""

from __future__ import annotations

import pytest

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.launch import run_script

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2 and sys.argv[1] == "an argument"
if dist.get_rank() == 1 and len(sys.argv) > 2:
    os._exit(int(sys.argv[2]))
open(f"rank{dist.get_rank()}", "w").close()
dist.destroy_process_group()
"""


def test_a_script_runs_in_ranks_and_its_failure_is_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run_script(str(script), ["an argument"], 2) == 0
    assert {p.name for p in tmp_path.glob("rank*")} == {"rank0", "rank1"}
    assert run_script(str(script), ["an argument", "7"], 2) == 7


def test_a_script_that_is_not_there_and_no_ranks_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"script .*/none.py does not exist"):
        run_script(str(tmp_path / "none.py"), [], 2)
    with pytest.raises(InputError, match="the number of ranks must be at least 1, found 0"):
        run_script(__file__, [], 0)
