"""``plan``: what it gives, what it tells on the way, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.helpers.models import ZOO

MLP = ZOO["mlp"]


def _plan(mesh: str = "2x2xH100", **options) -> mw.Plan:
    return mw.plan(MLP.model(), mesh, MLP.batch(), **options)


def test_a_plan_says_what_it_is_for():
    plan = _plan(strategy="zero3", memory_limit="10GiB", optimizer="sgd")
    assert (plan.model, plan.device, plan.strategy, plan.optimizer) == ("Mlp", "H100", "zero3", "sgd")
    assert plan.memory_limit_bytes == 10 * 1024**3 and plan.training and plan.predicted.step_time_s > 0
    assert {i.name for i in plan.input_info.values() if i.role == "input"} == {"x", "target"}
    assert {"trace_s", "recompute_s"} <= plan.solver.keys()
    assert {a.strategy for a in plan.alternatives} == {"ddp", "zero1", "tp"}
    assert mw.Plan.from_json(plan.to_json()) == plan


def test_a_factory_a_meta_model_and_a_real_one_give_one_plan():
    build = MLP.build
    hashes = {mw.plan(m, "4xH100", MLP.batch()).hash for m in (build, MLP.model(device="meta"), MLP.model(seed=3))}
    assert len(hashes) == 1


def test_two_meshes_and_two_models_in_one_process_do_not_disturb_each_other():
    alone = _plan("4xH100").hash
    mw.plan(nn.Linear(8, 8), "2x4xA100-80", (torch.zeros(8, 8),))
    assert _plan("2x2xH100", logical_mesh="given").mesh.sizes == (2, 2) and _plan("4xH100").hash == alone


def test_inference_is_planned_without_a_backward():
    plan = _plan(training=False)
    assert not plan.training and plan.predicted.memory_bytes.get("gradients", 0) == 0
    assert {i.phase for i in plan.op_info.values()} == {"forward"}


def test_phases_are_told_as_they_begin():
    phases: list[str] = []
    _plan(progress=phases.append)
    assert phases[:2] == ["capture", "recompute"] and len(phases) > 3


def test_a_pin_is_kept():
    plan = _plan(pins={"up.weight": "RS(0)"})
    (value,) = (v for v, i in plan.input_info.items() if i.name == "up.weight")
    assert str(plan.inputs[value][0]) + str(plan.inputs[value][1]) == "RS(0)"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"strategy": "magic"},
            mw.InputError,
            "strategy='magic' is not known; known are 'auto', 'ddp', ",
        ),
        ({"precision": "fp8"}, mw.InputError, "precision='fp8' is not known; known are None, 'bf16-mixed'"),
        ({"on_missing_rule": "ignore"}, mw.InputError, "on_missing_rule='ignore' is not known"),
        ({"optimizer": "magic"}, mw.InputError, "optimizer 'magic' is unknown"),
        ({"pins": {"nothing.*": "RR"}}, mw.InputError, "pin 'nothing.*' matches no parameter"),
        ({"memory_limit": 1000}, mw.InfeasibleError, "fits 1000 bytes per device"),
        ({"mesh": "3xH100", "strategy": "ddp"}, mw.InputError, "which 3 does not divide"),
    ],
)
def test_what_cannot_be_planned_is_a_typed_error(options, kind, message):
    with pytest.raises(kind) as caught:
        _plan(**options)
    assert message in str(caught.value)


def test_an_infeasible_limit_names_what_would_fit():
    with pytest.raises(mw.InfeasibleError) as caught:
        _plan(memory_limit=1000)
    assert caught.value.binding == "memory" and caught.value.needed_bytes is not None
    room = caught.value.needed_bytes * 5 // 4  # at the very least the search is long
    assert _plan(memory_limit=room).predicted.peak_memory_bytes <= room


def test_an_op_without_a_rule_is_a_fallback_or_an_error():
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(self.layer(x)).real.sum()

    batch = (torch.zeros(8, 8),)
    plan = mw.plan(Rolled(), "2xH100", batch)
    assert any("fft" in f.target for f in plan.fallbacks) and "run replicated" in plan.report()
    with pytest.raises(mw.NoRuleError, match="fft"):
        mw.plan(Rolled(), "2xH100", batch, on_missing_rule="error")


def test_the_debug_ladder_says_more_with_each_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    said = {}
    for level in "0123":
        monkeypatch.setenv("MESHWRIGHT_DEBUG", level)
        _plan(strategy="ddp")
        said[level] = capsys.readouterr().err
    assert said["0"] == "" and "capture" in said["1"] and "gap" not in said["1"]
    assert "gap" in said["2"] and "Parameters at rest" not in said["2"] and "Parameters at rest" in said["3"]
