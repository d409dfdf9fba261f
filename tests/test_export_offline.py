"""An export made without ranks is the one that ranks would have made, and trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.exporting import _all_programs, export_plan
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.recompute import Recompute
from meshwright.planning import capture_call
from meshwright.request import Request
from meshwright.runtime.export.manifest import PROGRAMS
from tests.helpers import pipelines
from tests.helpers.equality import RTOL, Trial, compare, gathered
from tests.helpers.exports import made
from tests.helpers.prepared import trial
from tests.helpers.ranks import run_ranks
from tests.helpers.stages import forward_ops, staged_plan


def _same(rank: int, given: Any, folder: Path) -> list[str]:
    """What differs between the two exports, and between training the offline one and one process."""
    made(given).export(folder / "online")
    files = [
        "plan.json",
        "model.json",
        *(str(p.relative_to(folder / "online")) for p in (folder / "online" / PROGRAMS).rglob("*.json")),
    ]
    wrong = [name for name in files if (folder / "online" / name).read_bytes() != (folder / "offline" / name).read_bytes()]
    pm: Any = mw.load(folder / "offline")
    loss = pm.step(given.case.batch())
    wrong += compare({"loss": loss}, {"loss": given.reference.loss}, RTOL, 0.0)
    found = {n: gathered(p.grad) for n, p in pm.named_parameters() if p.grad is not None}
    return wrong + compare(found, {n: given.reference.gradients[n] for n in found}, RTOL, 1e-6)


def staged() -> Trial:
    """Two stages of a program as the planner captures it."""
    given = pipelines.trial("mlp", "1f1b", 2)
    capture = capture_call(given.model, ((), given.case.batch()), Request())[0].at(Recompute()).whole
    ops = forward_ops(capture)
    plan = staged_plan(capture, (ops[len(ops) // 2],), 2, "1f1b")
    return replace(given, capture=capture, plan=plan)


@pytest.mark.parametrize("make", [lambda: trial("tied", (2,), "tp"), staged], ids=["tp", "stages"])
def test_it_is_the_same_as_that_of_ranks(make, tmp_path):
    given = make()
    export_plan(given.model, ((), given.case.batch()), given.plan, tmp_path / "offline")
    assert run_ranks(2, _same, given, tmp_path) == [[], []]


def test_a_plan_for_another_batch_is_refused(tmp_path):
    given = trial("tied", (2,), "tp")
    few = {name: t[:4] for name, t in given.case.batch().items()}
    with pytest.raises(InputError, match="the plan is for another program"):
        export_plan(given.model, ((), few), given.plan, tmp_path / "offline")
    assert not list(tmp_path.iterdir())


MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)
def factory():
    return Net(), {"x": torch.empty(8, 16, device="meta"), "y": torch.empty(8, 16, device="meta")}
"""


def _loss(rank: int, folder: Path) -> float:
    pm: Any = mw.load(folder / "out")
    return float(pm.step({"x": torch.ones(8, 16), "y": torch.zeros(8, 16)}))


def test_the_command_line_writes_one(tmp_path, monkeypatch):
    (tmp_path / "exported_net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    args = ["exported_net:factory", "--batch", "8"]
    planned = run(app, ["plan", *args, "--cluster", "2xCPU", "--strategy", "ddp", "--no-alternatives", "--out", "plan.json"])
    assert planned.exit_code == 0, planned.output
    result = run(app, ["export", "plan.json", *args, "--out", "out", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "for 2 ranks" in result.output
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(3)
    import exported_net  # type: ignore[import-not-found]

    wanted = exported_net.factory()[0](torch.ones(8, 16), torch.zeros(8, 16))
    first, second = run_ranks(2, _loss, tmp_path)
    assert first == second and abs(first - float(wanted.detach())) < 1e-6
    again = run(app, ["export", "plan.json", *args, "--out", "out"])
    assert again.exit_code != 0 and "there already" in str(again.exception)


def test_programs_for_other_tools_compute_the_same(tmp_path):
    given = trial("tied", (1,), "ddp")
    export_plan(given.model, ((), given.case.batch()), given.plan, tmp_path / "out", format="pt2")
    files = sorted(p.name for p in (tmp_path / "out" / "pt2" / "0").iterdir())
    assert files == ["backward-rank-0.pt2", "forward-rank-0.pt2"]
    (program,) = next(_all_programs(given.capture, given.plan, ("mw.0",)))
    values = [n.meta["val"] for n in program.forward.graph.nodes if n.op == "placeholder"]
    inputs = [torch.rand(v.shape) if v.is_floating_point() else torch.ones(v.shape, dtype=v.dtype) for v in values]
    read = torch.export.load(tmp_path / "out" / "pt2" / "0" / "forward-rank-0.pt2")
    assert (tmp_path / "out" / "pt2" / "0" / "forward-rank-0.pt2").stat().st_size < 100_000
    for a, b in zip(read.graph_module(*inputs), program.forward(*inputs), strict=True):
        assert torch.equal(a, b)


def test_a_package_that_would_deadlock_is_refused_with_the_reason(tmp_path):
    given = trial("tied", (2,), "tp")
    with pytest.raises(InputError, match="it deadlocks .*Compile at load instead"):
        export_plan(given.model, ((), given.case.batch()), given.plan, tmp_path / "out", format="aoti")
    with pytest.raises(InputError, match="format is 'onnx'"):
        export_plan(given.model, ((), given.case.batch()), given.plan, tmp_path / "out", format="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_program_without_collectives_becomes_a_package(tmp_path):
    given = trial("tied", (1,), "ddp")
    export_plan(given.model, ((), given.case.batch()), given.plan, tmp_path / "out", format="aoti")
    assert len(list((tmp_path / "out" / "pt2" / "0").glob("*.aoti.pt2"))) == 2
