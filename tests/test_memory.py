"""Predicted peak against live bytes of real steps, with and without recomputation; levels change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.repeat import capture_folded
from tests.helpers.memory_runs import measure
from tests.helpers.models import ALL
from tests.helpers.run_capture import run

IDS = torch.randint(0, 500, (8, 128), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=500, n_positions=128, n_embd=128, n_layer=3, n_head=4, use_cache=False, loss_type="ForCausalLM"
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("strategy", "level", "passes"),
    [("ddp", "full", 1), ("zero3", "none", 1), ("tp", "selective", 1), ("ddp", "none", 3), ("zero3", "full", 2)],
)
def test_the_predicted_peak_is_what_is_alive(strategy: str, level: str, passes: int) -> None:
    found = measure(gpt2, BATCH, (2,), strategy=strategy, recompute=level, accumulate=passes)
    assert 0.95 <= found.ratio <= 1.1, f"predicted {found.plan.predicted.peak_memory_bytes}, measured {max(found.peaks)}"
    assert found.plan.predicted.peak_at
    memory = found.plan.predicted.memory_bytes
    assert memory.get("accumulated", 0) == (memory["parameters"] if passes > 1 else 0)


def test_gradients_that_wait_take_what_sums_of_passes_take() -> None:
    found = measure(gpt2, BATCH, (2,), waits=True, strategy="ddp", recompute="full", accumulate=3)
    assert 0.95 <= found.ratio <= 1.1, f"predicted {found.plan.predicted.peak_memory_bytes}, measured {max(found.peaks)}"


@pytest.mark.parametrize("name", ["gpt2_dropout", "llama", "t5", "cnn"])
def test_recomputation_changes_no_number_and_keeps_fewer_bytes(name: str) -> None:
    case = ALL[name]
    model, batch = case.model(), case.batch()
    folded = capture_folded(model, kwargs=batch)
    wanted, kept = run(folded.whole, model, seed=3, **batch), _saved(folded.whole)
    for choice in (Recompute("selective"), Recompute("full"), Recompute("full", 1, "selective")):
        capture = folded.at(choice).whole
        found = run(capture, model, seed=3, **batch)
        assert _saved(capture) <= kept, choice
        for parameter, gradient in wanted.gradients.items():
            other: Any = found.gradients[parameter]
            assert gradient is other is None or torch.equal(gradient, other), (choice, parameter)


def _saved(capture: Any) -> int:
    return sum(v.size_bytes for v in capture.graph.saved)
