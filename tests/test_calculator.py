"""The memory calculator: its numbers are those of counting by hand, of plans, and of the model as it is frozen."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.adapters import LowRank, with_low_rank
from meshwright.calculator import WEIGHT_BITS, cache_bytes, largest_layer
from meshwright.cli import app
from tests.helpers.models import ALL

FEW = {"devices": ("H100",), "strategies": ("ddp",)}


class Net(nn.Module):
    """Two linear layers with a hidden size of 64 and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


X = {"x": torch.empty(16, 32, device="meta")}


def use(found: mw.memory, mode: str, level: str = "none") -> dict[str, int]:
    return next(u.memory_bytes for u in found.uses if (u.mode, u.recompute) == (mode, level))


def test_numbers_are_those_of_counting_by_hand() -> None:
    found = mw.memory(Net, X, **FEW)
    numel = 32 * 64 + 64 + 64 * 8 + 8
    assert (found.model, found.parameters, found.trainable) == ("Net", numel, numel)
    assert found.weight_bytes == {name: numel * bits // 8 for name, bits in WEIGHT_BITS.items()}
    trained = use(found, "training")
    assert (trained["parameters"], trained["gradients"], trained["optimizer"]) == (4 * numel, 4 * numel, 8 * numel)
    inferred = use(found, "inference")
    assert inferred["parameters"] == 4 * numel and not inferred.get("gradients") and not inferred.get("optimizer")
    assert (found.largest.name, found.largest.numel) == ("blocks.0", 32 * 64 + 64)


def test_optimizer_and_recomputation_count() -> None:
    case = ALL["gpt2"]
    found = mw.memory(case.model(), case.batch(), optimizer="sgd", **FEW)
    levels = [sum(use(found, "training", level).values()) for level in ("none", "selective", "full")]
    assert levels[0] >= levels[1] >= levels[2]
    assert not use(found, "training").get("optimizer")
    one = mw.memory(case.model(), case.batch(), recompute="full", **FEW)
    assert [u.recompute for u in one.uses if u.mode == "training"] == ["full"]


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    found = mw.memory(net, X, **FEW)
    assert found.trainable == 64 * 8 + 8
    assert use(found, "training")["optimizer"] == 8 * found.trainable


def test_low_rank_adapters_are_all_that_is_trained() -> None:
    case = ALL["llama"]
    model = case.model()
    adapted = with_low_rank(model, 2)
    wrapped = [m for m in adapted.modules() if isinstance(m, LowRank)]
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert len(wrapped) > 4 and trained == sum(2 * (w.down.in_features + w.up.out_features) for w in wrapped)
    assert all(p.requires_grad for p in model.parameters()), "the model given is left as it is"
    batch = case.batch()
    assert torch.equal(adapted.eval()(**batch).loss, model.eval()(**batch).loss), "adapters begin as nothing"
    found = mw.memory(model, batch, low_rank=2, **FEW)
    assert found.trainable == trained and use(found, "training")["optimizer"] == 8 * trained


def test_the_fewest_devices_fit_and_half_of_them_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(28))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.sum()

    x = torch.empty(64, 1 << 14, device="meta")  # 28 GiB of weights, 112 GiB with gradients and AdamW
    found = {f.strategy: f for f in mw.memory(Wide, x, strategies=("ddp", "zero3", "auto")).fits}
    assert found["ddp"].devices is None and "over the limit" in found["ddp"].reason
    assert found["zero3"].devices == found["auto"].devices == 2
    assert found["zero3"].memory_bytes < 80e9
    with pytest.raises(mw.InfeasibleError):
        mw.plan(Wide, "1x1xH100", x, strategy="zero3")


def test_the_model_keeps_its_modes_and_weights() -> None:
    net = Net().train()
    net.blocks[1].eval()
    before = [m.training for m in net.modules()]
    mw.memory(net, X, **FEW)
    assert [m.training for m in net.modules()] == before


def test_keys_and_values_of_a_decoder() -> None:
    case = ALL["llama"]
    model, batch = case.model(), case.batch()
    c = model.config
    expected = 2 * c.num_hidden_layers * batch["input_ids"].numel() * c.num_key_value_heads * c.head_dim * 4
    assert cache_bytes(model, ((), batch), None) == expected == 2 * cache_bytes(model, ((), batch), "bf16-mixed")
    assert cache_bytes(Net(), ((), X), None) is None


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(mw.InputError, match="recompute='half' is not known"):
        mw.memory(Net, X, recompute="half")
    with pytest.raises(mw.InputError, match="low_rank=0"):
        mw.memory(Net, X, low_rank=0)
    with pytest.raises(mw.InputError, match="no linear layers inside"):
        with_low_rank(nn.ReLU(), 2)
    with pytest.raises(mw.InputError, match="has no parameters"):
        largest_layer(nn.ReLU())
    with pytest.raises(mw.InputError, match="device 'TPU' is not known"):
        mw.memory(Net, X, devices=("TPU",))


def test_on_the_command_line(tmp_path) -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 101,
        "n_positions": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["memory", str(tmp_path), "--batch", "2", "--seq", "16", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "GPT2LMHeadModel" and {f["strategy"]: f["devices"] for f in found["fits"]}["ddp"] == 1
    text = CliRunner().invoke(app, ["memory", str(tmp_path), "--batch", "2", "--seq", "16", "--inference"]).stdout
    assert "All on one device" in text and "training" not in text
