"""Recomputation on several ranks and in stages: at every level, and mixed, the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.pipelined import PipelineRequest
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import mixed_trial, strategy_trial, try_all

LEVELS = ("selective", "full")
MIXTURES = (Recompute("full", 1, "none"), Recompute("full", 1, "selective"), Recompute("selective", 1, "none"))


def assert_equal_to_one_process(ranks: int, trials: list[Any]) -> None:
    found = run_ranks(ranks, try_all, trials, timeout=900)
    wrong = [f"rank {rank}: {label}: {d[:3]}" for rank, by_label in enumerate(found) for label, d in by_label.items() if d]
    assert not wrong, "\n".join(wrong)


def recomputed(trial: Any) -> int:
    return sum(op.recompute_of is not None for op in trial.capture.graph.ops)


def test_recomputation_on_two_ranks_and_in_stages_equals_one_process():
    plain = strategy_trial("gpt2", "zero3", 2, recompute="none")
    trials = [
        strategy_trial("gpt2", "zero3", 2, recompute="full"),
        strategy_trial("gpt2", "pipeline", 2, recompute="full", schedule="1f1b", micro_batches=2),
        mixed_trial("gpt2", "zero1", 2, MIXTURES[0]),
    ]
    assert all(recomputed(t) > recomputed(plain) for t in trials)
    assert_equal_to_one_process(2, trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "t5", "unet_deep"])
def test_every_level_and_mixture_equals_one_process(name):
    trials = [strategy_trial(name, s, 2, recompute=level) for s in ("ddp", "zero1", "zero3", "tp") for level in LEVELS]
    if name != "unet_deep":  # a mixture is of repeated blocks
        trials += [mixed_trial(name, s, 2, mix) for s, mix in zip(("zero1", "zero3", "tp"), MIXTURES, strict=True)]
    assert_equal_to_one_process(2, trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "t5", "unet_deep"])
def test_every_level_and_mixture_in_stages_equals_one_process(name):
    schedules = (("gpipe", 2), ("1f1b", 4), ("interleaved_1f1b", 4), ("zero_bubble", 2), ("zbv", 2))
    trials = [
        strategy_trial(name, "pipeline", 2, recompute=level, schedule=schedule, micro_batches=m)
        for level in LEVELS
        for schedule, m in schedules
    ]
    if name != "unet_deep":
        trials += [mixed_trial(name, "auto", 2, mix, PipelineRequest(2, "1f1b", 4)) for mix in MIXTURES]
    assert_equal_to_one_process(2, trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_recomputation_in_stages_of_several_devices_equals_one_process(name):
    trials = [
        strategy_trial(name, s, 4, {"pp": 2}, recompute=level, schedule="1f1b", micro_batches=2)
        for s in ("zero1", "zero3", "tp")
        for level in LEVELS
    ]
    assert_equal_to_one_process(4, trials)
