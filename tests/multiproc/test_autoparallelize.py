"""``autoparallelize`` on two gloo ranks: planning at once and at the first call, given plans, and every mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshwright as mw
from tests.helpers.models import ZOO, gpt2
from tests.helpers.ranks import run_ranks

MLP = ZOO["mlp"]
GPT2 = ZOO["gpt2"]


def _train(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _expected() -> list[float]:
    model = MLP.model()
    return _train(model, MLP.batch(), _adamw(model))


def _message(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- planning -----------------------------------------------------------------------------------------------------


def _lazy(rank: int, strategy: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    pm = mw.autoparallelize(MLP.model(), mesh, strategy=strategy)
    no_plan = _message(mw.InputError, lambda: pm.plan)
    names = [name for name, _ in pm.named_parameters()]
    pm.load_state_dict(MLP.model(seed=1).state_dict())
    pm.load_state_dict(MLP.model().state_dict())
    optimizer = _adamw(pm)
    losses = _train(pm, MLP.batch(), optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        "losses": losses,
        "no_plan": no_plan,
        "names": names == [name for name, _ in MLP.model().named_parameters()] == [name for name, _ in pm.named_parameters()],
        "kept": held == {id(p) for p in pm.parameters()} and all(isinstance(p, DTensor) for p in pm.parameters()),
        "plan": pm.plan.strategy,
        "hash": pm.plan.hash,
    }


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp"])
def test_a_lazy_module_plans_at_the_first_call_and_keeps_what_the_optimizer_holds(strategy: str):
    first, second = run_ranks(2, _lazy, strategy)
    assert first["losses"] == second["losses"] == pytest.approx(_expected(), rel=1e-5)
    assert "there is no plan yet: it is made at the first call" in first["no_plan"]
    assert first["names"] and first["kept"] and second["kept"]
    assert first["plan"] == strategy and first["hash"] == second["hash"]


def _lazy_frozen(rank: int) -> tuple[bool, bool, bool]:
    pm = mw.autoparallelize(MLP.model(), (2,), strategy="zero3").eval()
    pm.train()
    pm.up.weight.requires_grad_(False)
    pm(**MLP.batch()).backward()
    return pm.training, pm.up.weight.grad is None, pm.mid.weight.grad is not None


def test_flags_set_before_the_first_call_count():
    assert run_ranks(2, _lazy_frozen) == [(True, True, True)] * 2


def _given_plan(rank: int, plan: mw.Plan) -> list[float]:
    pm = mw.autoparallelize(MLP.model(), (2,), MLP.batch(), plan=plan)
    assert pm.plan == plan
    return _train(pm, MLP.batch(), _adamw(pm))


def test_a_plan_made_elsewhere_runs():
    plan = mw.plan(MLP.model(device="meta"), mw.MeshShape.of(2), MLP.batch(), hardware="CPU", strategy="zero3")
    again = mw.Plan.from_json(plan.to_json())
    for losses in run_ranks(2, _given_plan, again):
        assert losses == pytest.approx(_expected(), rel=1e-5)


def _other_calls(rank: int) -> list[float]:
    """Evaluation, inference and another batch size after training calls: each is planned again, parameters stay."""
    pm = mw.autoparallelize(MLP.model(), (2,), MLP.batch(), strategy="zero3")
    batch = MLP.batch()
    pm(**batch).backward()
    half = {k: v[:4] for k, v in batch.items()}
    found = [pm(**half).item()]
    pm.eval()
    with torch.no_grad():
        found += [pm(**batch).item(), pm(**half).item()]
    return found


def test_calls_of_another_form_are_planned_again():
    model, batch = MLP.model(), MLP.batch()
    half = {k: v[:4] for k, v in batch.items()}
    with torch.no_grad():
        expected = [model(**half).item(), model(**batch).item(), model(**half).item()]
    for found in run_ranks(2, _other_calls):
        assert found == pytest.approx(expected, rel=1e-5)


# --- mistakes -----------------------------------------------------------------------------------------------------


def _mistakes(rank: int, plan_of_other_mesh: mw.Plan, plan_of_other_model: mw.Plan) -> dict[str, str]:
    model, batch, mesh = MLP.model(), MLP.batch(), init_device_mesh("cpu", (2,))

    def refused(*args: Any, kind: type[Exception] = mw.InputError, **kwargs: Any) -> str:
        return _message(kind, lambda: mw.autoparallelize(*args, **kwargs))

    return {
        "model": refused(3, mesh),
        "mesh type": refused(model, 2),
        "cluster": refused(model, "8x8xH100"),
        "mesh size": refused(model, (2, 2)),
        "strategy": refused(model, mesh, batch, strategy="magic"),
        "batch": refused(model, mesh, batch, batch="mine"),
        "outputs": refused(model, mesh, batch, outputs="some"),
        "lazy local": refused(model, mesh, batch="local"),
        "other mesh": refused(model, mesh, batch, plan=plan_of_other_mesh, kind=mw.RuntimeMismatchError),
        "other model": refused(model, mesh, batch, plan=plan_of_other_model),
        "memory": refused(model, mesh, batch, memory_limit=1000, kind=mw.InfeasibleError),
    }


def test_every_mistake_is_a_typed_error_on_every_rank():
    other_mesh = mw.plan(MLP.model(), mw.MeshShape.of(4), MLP.batch(), hardware="CPU", strategy="ddp")
    other_model = mw.plan(nn.Linear(32, 8), mw.MeshShape.of(2), (torch.zeros(8, 32),), hardware="CPU", strategy="ddp")
    first, second = run_ranks(2, _mistakes, other_mesh, other_model)
    assert first == second
    expected = {
        "model": "model is int; it must be an nn.Module",
        "mesh type": "mesh is int; it must be a torch DeviceMesh",
        "cluster": "is a cluster to plan for; to run, pass a torch DeviceMesh",
        "mesh size": "mesh 2x2 needs 4 ranks, and the world has 2",
        "strategy": "strategy='magic' is not known; known are 'auto', 'ddp'",
        "batch": "batch='mine' is not known; known are 'global', 'local'",
        "outputs": "outputs='some' is not known; known are 'auto', 'full'",
        "lazy local": 'batch="local" needs example_inputs with the global shapes',
        "other mesh": "the plan is for a mesh of 4 = 4 devices, found one of 2 = 2: plan again for this mesh, or run on 4 ranks",
        "other model": "the plan is for another program: Linear",
        "memory": "no plan on mesh 2 fits 1000 bytes per device",
    }
    for mistake, text in expected.items():
        assert text in first[mistake], mistake


def test_without_a_process_group_the_remedy_is_named():
    with pytest.raises(mw.InputError, match="no process group: start the script with torchrun or `meshwright run"):
        mw.autoparallelize(MLP.model(), (2,))


# --- repeated blocks ----------------------------------------------------------------------------------------------


def _deep(rank: int) -> dict[str, Any]:
    model = gpt2(0.0, layers=6)
    pm = mw.autoparallelize(model, init_device_mesh("cpu", (2,)), GPT2.batch(), strategy="zero3")
    optimizer = _adamw(pm)
    losses = []
    for _ in range(3):
        loss = pm(**GPT2.batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "captured": pm.plan.folded["captured"]}


def test_copied_layers_train_as_on_one_device():
    torch.manual_seed(0)
    model = gpt2(0.0, layers=6)
    optimizer = _adamw(model)
    expected = []
    for _ in range(3):
        loss = model(**GPT2.batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    def one(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        return _deep(rank)

    for found in run_ranks(2, one):
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
        assert found["captured"] == [{"list": "transformer.h", "captured": [0, 1, 5], "of": 6}]
