"""A checkpoint saved under one plan continues under any other with the same losses: sharded in groups, in stages, simulated on 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.helpers import pipelines
from tests.helpers.models import ALL
from tests.helpers.prepared import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.threads import run_threads
from tests.multiproc.common import start

NAME = "gpt2_dropout"
BEFORE, AFTER = 2, 3


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Two groups, so that settings differ by parameter."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "lr": lr}, {"params": vectors, "lr": lr / 2, "weight_decay": 0.0}], foreach=True
    )


def steps(pm: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    """Losses of steps ``first``, ``first + 1``, ..., each on its own batch."""
    losses = []
    for step in range(first, first + count):
        losses.append(pm.step(ALL[NAME].batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _save(rank: int, folder: Path, plan: mw.Plan) -> list[float]:
    """Save in the foreground and in the background; train on while the latter writes."""
    pm = start(NAME, plan, model=ALL[NAME].model())
    optimizer = adamw(pm)
    steps(pm, optimizer, 0, BEFORE)
    optimizer.param_groups[0]["lr"] = 2e-2  # as a schedule would
    pm.save_checkpoint(folder / "now", optimizer, step=BEFORE, extra={"schedule": {"last": (1, 2.5)}})
    saving = pm.save_checkpoint(folder / "later", optimizer, step=BEFORE, asynchronous=True)
    losses = steps(pm, optimizer, BEFORE, AFTER)
    assert saving.wait() == folder / "later" / "step-00000002" and saving.done
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of 2x2 ranks with weights sharded in groups, and the losses that follow."""
    folder, plan = tmp_path_factory.mktemp("checkpoints"), planned(NAME, (2, 2), "tp")
    assert any(p.is_shard and p.split > 1 for placements in plan.inputs.values() for p in placements)
    losses, *others = run_ranks(4, _save, folder, plan)
    assert all(other == losses for other in others)
    return folder, losses


def _go_on(pm: Any, folder: Path) -> list[list[float]]:
    """Losses after loading each of the two into other weights and another optimizer state."""
    optimizer = adamw(pm, lr=1.0)
    found = []
    for name in ("now", "later"):
        loaded = pm.load_checkpoint(folder / name, optimizer)
        assert loaded.step == BEFORE and loaded.path == folder / name / "step-00000002"
        assert not loaded.missing and not loaded.unexpected and not loaded.cast
        assert loaded.extra == ({"schedule": {"last": (1, 2.5)}} if name == "now" else {})
        assert [g["lr"] for g in optimizer.param_groups] == [2e-2, 5e-3]
        found.append(steps(pm, optimizer, BEFORE, AFTER))
    return found


def _load(rank: int, folder: Path, plan: mw.Plan, model: nn.Module) -> list[list[float]]:
    return _go_on(start(NAME, plan, model=model), folder)


def _check(found: list[list[list[float]]], wanted: list[float]) -> None:
    for losses in (losses for rank in found for losses in rank):
        assert losses == pytest.approx(wanted, rel=1e-5)


ELSEWHERE = [
    pytest.param((2,), "zero1", id="2 zero1"),
    pytest.param((1,), "ddp", id="1"),
    pytest.param((2, 2), "auto", id="2x2 auto", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sizes", "strategy"), ELSEWHERE)
def test_training_goes_on_with_the_same_losses_on_other_ranks(saved, sizes: tuple[int, ...], strategy: str):
    folder, wanted = saved
    ranks = torch.Size(sizes).numel()
    _check(run_ranks(ranks, _load, folder, planned(NAME, sizes, strategy), ALL[NAME].model(seed=5)), wanted)


def test_training_goes_on_with_the_same_losses_on_eight_simulated_ranks(saved):
    folder, wanted = saved
    _check(run_threads(8, _load, folder, planned(NAME, (8,), "zero3"), ALL[NAME].model(seed=5)), wanted)


# --- stages -------------------------------------------------------------------------------------------------------


def _load_in_stages(rank: int, folder: Path, trial: Any, back: Path) -> list[list[float]]:
    pm = pipelines.start(trial)
    losses = _go_on(pm, folder)
    optimizer = adamw(pm, lr=1.0)
    pm.load_checkpoint(folder / "now", optimizer)
    pm.save_checkpoint(back, optimizer, step=BEFORE, asynchronous=True)
    losses.append(steps(pm, optimizer, BEFORE, AFTER))
    pm.save_checkpoint(back / "more", optimizer)
    return losses


def _load_back(rank: int, folder: Path, plan: mw.Plan, model: nn.Module) -> list[float]:
    pm = start(NAME, plan, model=model)
    optimizer = adamw(pm, lr=1.0)
    assert pm.load_checkpoint(folder, optimizer).step == BEFORE
    return steps(pm, optimizer, BEFORE, AFTER)


def test_stages_load_what_no_stages_saved_and_the_other_way_round(saved, tmp_path: Path):
    folder, wanted = saved
    trial = pipelines.trial(NAME, "1f1b", 2, inside=((2,), "zero3"))
    _check(run_ranks(4, _load_in_stages, folder, trial, tmp_path), wanted)
    assert (tmp_path / "more" / "latest").read_text() == "step-00000000\n"
    found = run_ranks(2, _load_back, tmp_path, planned(NAME, (2,), "zero1"), ALL[NAME].model(seed=5))
    _check([[losses] for losses in found], wanted)
