"""Plans of folded captures: equal to those of whole ones, and legal and truthfully priced on the whole program."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.planner import blocks, fuse, rules
from meshwright.planner.cost import CostModel
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.expand import expanded
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.repeat import capture_folded
from meshwright.planner.search import make_plan
from meshwright.planner.solve.evaluate import evaluate, require_equal
from meshwright.planner.solve.memory import Trained
from meshwright.target import target_of
from tests.test_repeat import BATCH, Tower, deep

CASES = [
    ("gpt2", 6, "2x4xH100", "auto", None),
    ("gpt2", 8, "1x8xH100", "tp", None),
    ("llama", 6, "2x4xH100", "zero3", "bf16-mixed"),
    ("llama", 8, "1x4xA100-80", "auto", "bf16-mixed"),
    ("gpt2_dropout", 6, "1x8xH100", "ddp", None),
]


@pytest.mark.parametrize(("name", "layers", "cluster", "strategy", "precision"), CASES)
def test_the_folded_plan_is_the_whole_one(
    name: str, layers: int, cluster: str, strategy: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = deep(name, layers, monkeypatch)
    folded = capture_folded(model, kwargs=batch, precision=precision)
    target = target_of(cluster, None)
    few, all_of_it = (
        make_plan(program, target.mesh, target.hardware, strategy=strategy, alternatives=False)
        for program in (folded.plannable, folded.whole)
    )
    assert few.objective_s == pytest.approx(all_of_it.objective_s, rel=1e-6)
    assert few.bound_s == pytest.approx(all_of_it.bound_s, rel=1e-6)
    assert few.predicted.memory_bytes == all_of_it.predicted.memory_bytes

    whole = folded.whole.graph
    plan = expanded(few, folded.plannable.graph, whole, folded.repeats)
    verify_plan(plan, whole)
    walked = evaluate(
        plan,
        whole,
        blocks.fold(fuse.fuse(whole, rules.rows_for)),
        CostModel(target.hardware, target.mesh, SharedBuffers.of(whole)),
        trained=Trained(8),
    )
    require_equal(walked.outcome, walked.outcome, plan.collectives, walked.collectives)
    assert walked.outcome.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
    assert walked.outcome.memory_bytes == plan.predicted.memory_bytes


def test_a_plan_says_what_was_captured() -> None:
    plan = mw.plan(Tower(9), "1x4xH100", BATCH)
    assert plan.folded["captured"] == [{"list": "blocks", "captured": [0, 1, 8], "of": 9}]
    assert {i.name for i in plan.input_info.values() if i.role == "parameter"} == {n for n, _ in Tower(9).named_parameters()}
    assert mw.Plan.from_json(plan.to_json()) == plan


def test_without_folding_the_plan_is_as_good() -> None:
    few = mw.plan(Tower(6), "1x4xH100", BATCH, strategy="ddp")
    all_of_it = mw.plan(Tower(6), "1x4xH100", BATCH, strategy="ddp", fold_capture=False)
    assert "captured" not in all_of_it.folded
    assert few.objective_s == pytest.approx(all_of_it.objective_s, rel=1e-6)


def test_a_pin_of_one_copied_block_plans_the_whole_model() -> None:
    plan = mw.plan(Tower(8), "1x2xH100", BATCH, pins={"blocks.4.mix.weight": "S(0)"})
    assert any("planned whole" in note for note in plan.notes)
    rests = {plan.input_info[v].name: p for v, p in plan.inputs.items()}
    assert str(rests["blocks.4.mix.weight"][0]) == "S(0)"


def test_a_pin_of_all_blocks_holds_in_all() -> None:
    plan = mw.plan(Tower(8), "1x2xH100", BATCH, pins={"blocks.*.mix.weight": "S(0)"})
    rests = {plan.input_info[v].name: p for v, p in plan.inputs.items()}
    assert all(str(rests[f"blocks.{i}.mix.weight"][0]) == "S(0)" for i in range(8))
