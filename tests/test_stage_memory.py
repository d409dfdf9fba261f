"""What a pipeline rank holds, by category."""

from __future__ import annotations

from functools import partial

import torch

import meshwright as mw
from tests.helpers.models import Stack

LAYERS, WIDTH = 6, 64


def test_copies_that_are_kept_for_the_step_count_on_the_rank_of_their_stage() -> None:
    x = torch.empty(32, WIDTH, device="meta")
    keywords = {"degrees": {"pp": 2}, "micro_batches": 4, "alternatives": False}
    plans = {s: mw.plan(partial(Stack, LAYERS, WIDTH), "1x4xH100", x, strategy=s, **keywords) for s in ("zero1", "ddp")}
    whole = LAYERS * WIDTH * WIDTH * 4
    assert len(plans["zero1"].kept) == LAYERS and not plans["ddp"].kept
    memory = plans["zero1"].predicted.memory_bytes
    assert whole / 2 <= memory["kept"] < whole and memory["kept"] == 2 * memory["parameters"]
    assert "kept" not in plans["ddp"].predicted.memory_bytes


def test_sums_over_several_steps_count_on_the_rank_of_their_stage() -> None:
    x = torch.empty(32, WIDTH, device="meta")
    once, twice = (
        mw.plan(partial(Stack, LAYERS, WIDTH), "1x4xH100", x, strategy="zero1", degrees={"pp": 2}, micro_batches=4, accumulate=n)
        for n in (1, 2)
    )
    memory, before = dict(twice.predicted.memory_bytes), once.predicted.memory_bytes
    assert memory.pop("accumulated") == memory["parameters"] > 0 and memory == before
    assert mw.Plan.from_json(twice.to_json()) == twice and twice.hash == once.hash
    told = [" ".join(plan.report().split()) for plan in (twice, once)]  # however the console wraps lines
    assert "2 passes added up" in told[0] and "passes added up" not in told[1]
