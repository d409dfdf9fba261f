"""A stage may leave a rank without parameters: the same script trains there, saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.equality import Trial
from tests.helpers.models import ALL
from tests.helpers.pipelines import differences, start
from tests.helpers.prepared import captured, reference
from tests.helpers.ranks import run_ranks
from tests.helpers.stages import staged_plan


def _trial() -> Trial:
    """Three stages of which the middle one is an activation alone."""
    capture = captured("mlp")
    (relu,) = (op for op in capture.graph.ops if op.phase == "forward" and op.target == "aten.relu.default")
    before = capture.graph.producer[relu.ins[0].name]
    plan = staged_plan(capture, (before.name, relu.name), 4, "1f1b")
    return Trial("", ALL["mlp"], ALL["mlp"].model(), capture, plan, reference("mlp"))


def _run(rank: int, given: Trial, folder: str) -> tuple[int, list[str], list[float]]:
    pm = start(given)
    wrong = differences(pm, given.case.batch(), given.reference)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    losses: list[Any] = []
    for step in range(3):
        opt.zero_grad()
        losses.append(pm.step(given.case.batch()))
        pm.clip_grad_norm_(1.0)
        opt.step()
        if step == 0:
            pm.save_checkpoint(folder, opt)
    pm.load_checkpoint(folder, opt)
    opt.zero_grad()
    again = pm.step(given.case.batch())
    return len(list(pm.named_parameters())), wrong, [float(losses[1]), float(again)]


def test_a_rank_without_parameters_trains_saves_and_loads(tmp_path: Path):
    found = run_ranks(3, _run, _trial(), str(tmp_path / "saved"))
    assert [count for count, _, _ in found] == [4, 0, 2]
    for _, wrong, (loss, again) in found:
        assert not wrong
        assert loss == again
