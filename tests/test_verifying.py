"""Plans checked without a cluster: right ones pass, whatever their size; a placement flipped by hand is caught and its op named."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright import cli, lockstep
from meshwright.planner.ir.errors import InputError, VerifyError
from meshwright.planner.ir.plan import OpSpec, Plan


def gpt2() -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32, use_cache=False)
        ).train()


def llama(layers: int = 3, hidden: int = 1024, heads: int = 16) -> LlamaForCausalLM:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": heads, "num_key_value_heads": 8}
    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, use_cache=False, **sizes)
        return LlamaForCausalLM(config).train()


def tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {k: torch.zeros(batch, seq, dtype=torch.long, device="meta") for k in ("input_ids", "labels")}


def test_a_right_plan_of_gpt2_passes_and_every_sharded_op_was_run():
    plan = mw.plan(gpt2(), "2x4xH100", tokens(8, 32), strategy="tp", degrees={"tp": 2}, alternatives=False)
    found = plan.verify(gpt2())
    assert found.ops == len(plan.ops) == found.replicated + found.run and not found.by_rule
    assert found.small_mesh.sizes == (2,) * plan.mesh.num_axes and found.run > found.cases > 20
    assert found.results > 25 and not found.not_whole  # loss, logits, 28 gradients
    assert "right, simulated on" in str(found)


def test_a_plan_of_llama_in_mixed_precision_passes():
    plan = mw.plan(llama(), "4x8xH100", tokens(64, 512), strategy="zero3", alternatives=False, precision="bf16-mixed")
    found = mw.verify(plan, llama(), tokens(64, 512))
    assert found.run > 100 and not found.by_rule and found.results > 25


def test_a_model_without_a_configuration_is_run_small_where_a_small_one_is_passed():
    def model(n: int) -> torch.nn.Module:
        layers = [torch.nn.Linear(n, 4 * n), torch.nn.GELU(), torch.nn.Linear(4 * n, n), torch.nn.LayerNorm(n)]
        return torch.nn.Sequential(*layers)

    batch = torch.zeros(256, 1024, device="meta")
    plan = mw.plan(lambda: model(1024), "2x4xH100", batch, strategy="tp", degrees={"tp": 4}, alternatives=False)
    assert "pass small=" in mw.verify(plan, lambda: model(1024)).not_whole
    found = mw.verify(plan, lambda: model(1024), small=(model(16), torch.zeros(8, 16)))
    assert found.results >= 7 and not found.not_whole
    with pytest.raises(InputError, match="other ops"):
        mw.verify(plan, lambda: model(1024), small=(torch.nn.Linear(16, 16), torch.zeros(8, 16)))


def test_plans_for_inference_on_three_devices_and_in_stages_pass():
    evaluated = mw.plan(gpt2(), "3xH100", tokens(12, 32), strategy="ddp", training=False, alternatives=False)
    model = gpt2()
    found = mw.verify(evaluated, model)
    assert found.small_mesh.sizes == (3,) and found.results >= 2 and model.training
    assert mw.verify(mw.plan(gpt2().eval(), "3xH100", tokens(12, 32), strategy="ddp", alternatives=False), model).results >= 2
    options = {"strategy": "pipeline", "degrees": {"pp": 2}, "micro_batches": 2, "alternatives": False}
    assert mw.verify(mw.plan(gpt2(), "4xH100", tokens(8, 32), **options), model).results > 25


def test_a_difference_of_the_whole_small_model_is_found(monkeypatch):
    """A collective that gives the wrong numbers, which no op by itself can show."""
    plan = mw.plan(gpt2(), "2x4xH100", tokens(8, 32), strategy="tp", degrees={"tp": 2}, alternatives=False)
    monkeypatch.setitem(lockstep._REDUCE, "sum", lambda x: x.mean(0))
    with pytest.raises(VerifyError, match="differs from one process by"):
        mw.verify(plan, gpt2())


@pytest.mark.slow
def test_a_plan_for_16384_devices_is_verified():
    def model() -> LlamaForCausalLM:
        return llama(80, 8192, 64)

    options = {"strategy": "zero1+tp", "degrees": {"tp": 8}, "alternatives": False, "precision": "bf16-mixed"}
    plan = mw.plan(model, "2048x8xH100", tokens(2048, 4096), **options)
    found = mw.verify(Plan.from_json(plan.to_json()), model)
    assert found.mesh.num_devices == 16384 and found.ops > 10_000 and not found.by_rule and found.results > 700


# --- wrong plans --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> Plan:
    degrees = {"dp": 2, "tp": 4}
    return mw.plan(gpt2(), "8xH100", tokens(8, 32), strategy="zero1+tp", degrees=degrees, alternatives=False)


FLIPS = {
    "a product's sum is forgotten": ("aten.mm.default", r"->PS\(0\)$", "->RS(0)"),
    "a product is called sharded along rows": ("aten.mm.default", r"->S\(1\)S\(0\)$", "->S(0)S(0)"),
    "heads become queries": ("aten._safe_softmax.default", r"->S\(1\)", "->S(2)"),
    "a bias gradient is not summed": ("aten.sum.dim_IntList", r"->S\(0\)P$", "->S(0)R"),
    "a weight gradient is not summed": ("aten.mm.default", r"->S\(0\)P$", "->S(0)R"),
    "a normalised dim is sharded": ("aten.native_layer_norm.default", r"^RS\(0\),(.*)->RS\(0\),", r"S(2)S(0),\1->S(2)S(0),"),
    "a vocabulary shard is called whole": ("aten.embedding.default", r"->PS\(0\)$", "->RS(0)"),
    "queries, keys and values are mixed": ("aten.reshape.default", r"->S\(2;3\)", "->S(2)"),
    "a bias is cut in other groups": ("aten.add.Tensor", r",S\(0;3\)", ",S(0)"),
    "pieces are cut in other groups": ("aten.split_with_sizes.default", r"^S\(2;3\)", "S(2)"),
    "the loss of some rows is called that of all": ("aten.nll_loss_forward.default", r"->RP,", "->RR,"),
    "addends are squared": ("aten.pow.Tensor_Scalar", r"^S\(2\)(.*)->S\(2\)", r"P\1->P"),
    "a maximum is called a sum": ("aten.amax.default", r"^R(.*)->R", r"S(1)\1->P"),
    "one factor has all heads": ("aten.bmm.default", r",S\(0;8\)", ",R"),
    "a piece is called whole": ("aten.tanh.default", r"->S\(2\)", "->R"),
    "a dim that is not there": ("aten.tanh.default", r"->S\(2\)", "->S(5)"),
}


@pytest.mark.parametrize("what", FLIPS)
def test_a_flipped_placement_is_caught_and_its_op_named(good: Plan, what: str):
    target, pattern, instead = FLIPS[what]
    name, before = next(
        (n, str(s)) for n, s in good.ops.items() if good.op_info[n].target == target and re.search(pattern, str(s))
    )
    after = re.sub(pattern, instead, before)
    wrong = replace(good, ops={**good.ops, name: OpSpec.parse(after)})
    with pytest.raises(VerifyError) as found:
        mw.verify(wrong, gpt2())
    assert f"op {name} ({target})" in str(found.value), found.value


def test_a_wrong_op_that_all_its_readers_agree_with_is_caught(good: Plan):
    """Nothing but the numbers can tell: every path is legal, every reader finds what it needs."""
    name, spec = next((n, s) for n, s in good.ops.items() if str(s).endswith("->PS(0)") and ".mm." in good.op_info[n].target)
    made = spec.outs[0]
    claimed = OpSpec.parse("->RS(0)").outs[0]
    paths = tuple(r for r in good.redistributions if r.value != name)
    ops = {**good.ops, name: replace(spec, outs=(claimed,))}
    assert made != claimed and len(paths) < len(good.redistributions)
    with pytest.raises(VerifyError, match=rf"op {name} \(aten.mm.default\) of transformer.*needed is .* -> P") as found:
        mw.verify(replace(good, ops=ops, redistributions=paths), gpt2())
    assert not hasattr(found.value, "__notes__")  # the plan is legal


def test_a_plan_for_another_model_or_without_its_batch_is_refused(good: Plan):
    with pytest.raises(InputError, match="the plan is for another program"):
        mw.verify(good, gpt2(), tokens(16, 32))
    with pytest.raises(InputError, match="pass example_inputs"):
        mw.verify(replace(good, input_info={}), gpt2())


def test_the_command_line_says_right_or_wrong(good: Plan, tmp_path, monkeypatch, capsys):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(plan: Plan) -> int:
        plan.save(tmp_path / "plan.json")
        monkeypatch.setattr(sys, "argv", ["meshwright", "verify", str(tmp_path / "plan.json"), str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert run(good) == 0 and "right, simulated on 2x2" in capsys.readouterr().out
    name = next(n for n, s in good.ops.items() if str(s) == "S(2)S(0)->S(2)S(0)")
    assert run(replace(good, ops={**good.ops, name: OpSpec.parse("S(2)S(0)->S(1)S(0)")})) == 1
    assert capsys.readouterr().err.startswith(f"meshwright: op {name} (")
    assert run(replace(good, graph_hash="0" * 64)) == 2
