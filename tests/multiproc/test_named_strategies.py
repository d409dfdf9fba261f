"""Strategies by name on real ranks, with and without degrees: the numbers of one process, laid out as the name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import R
from tests.helpers.models import ALL
from tests.helpers.prepared import toy_hardware
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import strategy_trial, try_all


def assert_equal_to_one_process(ranks: int, trials: list[Any]) -> None:
    for rank, found in enumerate(run_ranks(ranks, try_all, trials, timeout=400)):
        wrong = {label: differences for label, differences in found.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


def shape(plan: Plan) -> tuple[int, tuple[int, ...]]:
    return (1 if plan.pipeline is None else plan.pipeline.degree), plan.mesh.sizes


def test_data_parallelism_and_stages_equal_one_process():
    trials = [
        strategy_trial("mlp", "ddp+pipeline", 4),
        strategy_trial("llama_tied", "ddp+pipeline", 4, {"pp": 2, "dp": 2}, micro_batches=4),
        strategy_trial("mlp", "zero3", 4, {"pp": 2}, micro_batches=2),
        strategy_trial("mlp", "3d", 4),
    ]
    assert [shape(t.plan) for t in trials] == [(2, (2,))] * 4
    assert [t.plan.strategy for t in trials] == ["ddp+pipeline", "ddp+pipeline", "zero3", "3d"]
    assert_equal_to_one_process(4, trials)


def test_three_dimensions_equal_one_process():
    trials = [strategy_trial("gpt2", "3d", 8, micro_batches=4)]
    (plan,) = [t.plan for t in trials]
    assert shape(plan) == (2, (2, 2)) and set(plan.mesh.names) == {"dp", "tp"}
    assert plan.kept and plan.pipeline is not None and plan.pipeline.whole_gradients
    at = plan.mesh.names.index("tp")
    assert sum(p[at].is_shard for name, p in plan.inputs.items() if name.startswith("parameter")) >= 8
    assert_equal_to_one_process(8, trials)


@pytest.mark.parametrize(
    "strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero1", pytest.param("zero2", marks=pytest.mark.slow), "zero3"]
)
def test_degrees_compose_with_any_strategy(strategy):
    trials = [strategy_trial("mlp", strategy, 8, {"pp": 2, "dp": 2, "tp": 2}, micro_batches=2)]
    assert shape(trials[0].plan) == (2, (2, 2))
    assert_equal_to_one_process(8, trials)


def on_sequence(plan: Plan) -> int:
    """Norms and residual sums that work on a piece of the sequence."""
    info = {n: i for n, i in plan.op_info.items() if i.phase == "forward" and len(i.shape) == 3 and i.shape[1] == 16}
    plain = [n for n, i in info.items() if i.target in ("aten.add.Tensor", "aten.mul.Tensor", "aten.native_layer_norm.default")]
    return sum(plan.ops[n].outs[0][-1].is_shard and plan.ops[n].outs[0][-1].dim == 1 for n in plain)


def test_tensor_parallelism_with_and_without_the_sequence_equals_one_process():
    with_, without = (strategy_trial("gpt2", name, 2) for name in ("tp+sp", "tp-sp"))
    assert on_sequence(with_.plan) >= 5 and on_sequence(without.plan) == 0
    for plan in (with_.plan, without.plan):
        weights = [p for n, p in plan.inputs.items() if n.startswith("parameter") and n.endswith("weight")]
        assert sum(p != (R,) for p in weights) >= 8
    assert_equal_to_one_process(2, [with_, without])


# --- one controller -----------------------------------------------------------------------------------------------


def _controlled(rank: int) -> tuple[float, bool, float, dict[str, torch.Tensor]]:
    """Only the first rank has the batch and the values that count."""
    case, batch = ALL["gpt2"], ALL["gpt2"].batch()
    own = batch if rank == 0 else {name: torch.zeros_like(t) for name, t in batch.items()}
    pm = mw.autoparallelize(case.model(), (2,), batch, strategy="data_parallel", alternatives=False)
    opt = torch.optim.SGD(pm.parameters(), lr=1e-2 if rank == 0 else 100.0, foreach=True)
    for _ in range(2):
        opt.zero_grad()
        output = pm(**own)
        output.loss.backward()
        opt.step()
    logits = output.logits
    loss = float(pm.eval_step(own))
    return float(output.loss.detach()), logits is None, loss, pm.full_state_dict()


def test_one_controller_hands_out_batch_and_parameters():
    case, batch = ALL["gpt2"], ALL["gpt2"].batch()
    model = case.model()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        opt.zero_grad()
        output = model(**batch)
        output.loss.backward()
        opt.step()
    with torch.no_grad():
        last = float(model(**batch).loss)
    for rank, (loss, has_none, after, state) in enumerate(run_ranks(2, _controlled, timeout=300)):
        assert loss == pytest.approx(float(output.loss.detach()), rel=1e-5)
        assert after == pytest.approx(last, rel=1e-5)
        assert has_none == (rank != 0)
        assert all(torch.allclose(state[n], t, rtol=1e-4, atol=1e-6) for n, t in model.state_dict().items())


def _pieces(rank: int) -> str:
    case = ALL["mlp"]
    try:
        mw.autoparallelize(case.model(), (2,), case.batch(), strategy="data_parallel", batch="local", alternatives=False)
    except mw.InputError as e:
        return str(e)
    return "nothing was refused"


def test_one_controller_takes_the_whole_batch_only():
    assert all("takes batch='global'" in said for said in run_ranks(2, _pieces))


def test_one_controller_is_slower_than_ddp_and_says_why():
    case, mesh = ALL["gpt2"], MeshShape.of(4)
    plans = {
        name: mw.plan(case.model(), mesh, case.batch(), strategy=name, hardware=toy_hardware(mesh), alternatives=False)
        for name in ("ddp", "data_parallel")
    }
    more_s = plans["data_parallel"].predicted.step_time_s - plans["ddp"].predicted.step_time_s
    assert more_s > sum(p.numel() * 4 for p in case.model().parameters()) / toy_hardware(mesh).links[0].bytes_per_s
    extra = {c.kind for c in plans["data_parallel"].collectives} - {c.kind for c in plans["ddp"].collectives}
    assert {"broadcast", "scatter", "gather"} <= extra
    assert Plan.from_json(plans["data_parallel"].to_json()) == plans["data_parallel"]
    assert plans["data_parallel"].hash != plans["ddp"].hash
    assert "broadcast" in plans["data_parallel"].report()


@pytest.mark.parametrize("options", [{"degrees": {"pp": 2}}, {"micro_batches": 2}])
def test_one_controller_refuses_stages_and_micro_batches(options):
    case, mesh = ALL["mlp"], MeshShape.of(4)
    with pytest.raises(mw.InputError, match="neither stages nor micro-batches"):
        mw.plan(case.model(), mesh, case.batch(), strategy="data_parallel", hardware=toy_hardware(mesh), **options)
