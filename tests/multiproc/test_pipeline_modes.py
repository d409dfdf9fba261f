"""A model in stages in another mode or with another batch than planned: a further program, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from tests.helpers.equality import RTOL, compare, gathered
from tests.helpers.models import ALL, loss_of
from tests.helpers.pipelines import start, trial
from tests.helpers.ranks import run_ranks

STEPS = 2


def _modes(rank: int, name: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Loss in evaluation mode before and after steps of training, then the state."""
    case = ALL[name]
    pm = mw.autoparallelize(case.model(), options.pop("mesh", (2,)), case.batch(), alternatives=False, **options)
    opt = torch.optim.SGD(pm.parameters(), lr=1e-2, foreach=True)
    losses = [float(pm.eval().eval_step(case.batch()))]
    pm.train()
    for _ in range(STEPS):
        opt.zero_grad()
        pm.step(case.batch())
        opt.step()
    pm.eval()
    losses += [float(pm.eval_step(case.batch())) for _ in range(2)]
    return losses, pm.full_state_dict(), len(pm._programs)


def _one_process(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = ALL[name]
    model = case.model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.no_grad():
        losses = [float(loss_of(model.eval()(**case.batch())))]
    model.train()
    for _ in range(STEPS):
        opt.zero_grad()
        loss_of(model(**case.batch())).backward()
        opt.step()
    with torch.no_grad():
        losses += [float(loss_of(model.eval()(**case.batch())))] * 2
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("cnn", 2, {"degrees": {"pp": 2}, "schedule": "naive"}),
        (
            "llama_tied",
            4,
            {"mesh": (4,), "degrees": {"pp": 2}, "strategy": "zero1", "micro_batches": 4, "schedule": "zero_bubble"},
        ),
    ],
)
def test_evaluation_of_a_model_in_stages_equals_one_process(name, ranks, options):
    losses, state = _one_process(name)
    for found, after, programs in run_ranks(ranks, _modes, name, options, timeout=300):
        assert found == pytest.approx(losses, rel=2e-5)
        assert programs == 2
        assert not compare(after, state, RTOL, 1e-6)


def _without_dropout(rank: int) -> tuple[list[float], list[float]]:
    case = ALL["gpt2_dropout"]
    pm = mw.autoparallelize(case.model(), (2,), case.batch(), degrees={"pp": 2}, micro_batches=4, alternatives=False)
    trained = [float(pm.step(case.batch())) for _ in range(2)]
    pm.eval()
    return trained, [float(pm.eval_step(case.batch())) for _ in range(2)]


def test_evaluation_draws_no_dropout():
    with torch.no_grad():
        wanted = float(ALL["gpt2_dropout"].model().eval()(**ALL["gpt2_dropout"].batch()).loss)
    for trained, evaluated in run_ranks(2, _without_dropout, timeout=300):
        assert evaluated == pytest.approx([wanted, wanted], rel=1e-5)
        assert trained[0] != trained[1]


def _another_batch(rank: int) -> tuple[float, list[str]]:
    case = ALL["gpt2"]
    pm = mw.autoparallelize(case.model(), (2,), case.batch(), degrees={"pp": 2}, micro_batches=2, alternatives=False)
    shorter = {k: v[:4, :12].contiguous() for k, v in case.batch().items()}
    loss = float(pm.step(shorter))
    model = case.model()
    model(**shorter).loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    found = {n: gathered(p.grad) for n, p in pm.named_parameters()}
    return loss, compare(found, {n: wanted[n] for n in found}, RTOL, 1e-6)


def test_a_batch_of_another_shape_trains_as_in_one_process():
    batch = {k: v[:4, :12].contiguous() for k, v in ALL["gpt2"].batch().items()}
    with torch.no_grad():
        wanted = float(ALL["gpt2"].model()(**batch).loss)
    for loss, wrong in run_ranks(2, _another_batch, timeout=300):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert not wrong


def _in_evaluation_mode(rank: int, given: Any) -> str:
    pm = start(given)
    pm.eval()
    try:
        pm.eval_step(given.case.batch())
    except mw.InputError as e:
        return str(e)
    return "nothing was refused"


def test_a_module_that_cannot_plan_says_that_its_mode_is_another():
    for said in run_ranks(2, _in_evaluation_mode, trial("mlp", "gpipe", 2)):
        assert "planned in training mode, the model is in evaluation mode now" in said
