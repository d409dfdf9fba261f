"""Search over pipelines: balance, memory, what is told, and when `auto` takes stages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.inputs import call_of, model_of
from meshwright.planner import rules
from meshwright.planner.fuse import fuse
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.pipeline import check_schedule
from meshwright.planner.ir.plan import Plan
from meshwright.planner.micro import time_specs
from meshwright.planner.micro_costs import MicroCosts, TimeRows
from meshwright.planner.orders import orders
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.simulate import simulate
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.stage_choices import micro_batch_counts, schedules
from meshwright.planner.stage_cuts import profile
from meshwright.planning import capture_call
from meshwright.request import Request
from meshwright.target import target_of
from tests.helpers.prepared import captured


def llama(layers: int, hidden: int = 1024) -> nn.Module:
    """A decoder in which blocks are most of the work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


WIDTH = 8192


class Wide(nn.Module):
    """Few samples and many parameters: nothing is cheaper to move than what lies between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


@functools.cache
def deep() -> Plan:
    """32 layers on 4 stages of 2 devices."""
    options: dict[str, Any] = {"degrees": {"pp": 4}, "alternatives": False, "precision": "bf16-mixed"}
    return mw.plan(functools.partial(llama, 32), "1x8xH100", tokens(64, 2048), schedule="1f1b", micro_batches=16, **options)


def seconds_of_stages(plan: Plan) -> list[float]:
    """Seconds of a micro-batch on every stage, forth and back."""
    asked = Request(precision="bf16-mixed")
    found, _ = capture_call(model_of(functools.partial(llama, 32)), call_of(tokens(64, 2048)), asked, True)
    graph, count = found.at(plan.recompute).whole_view, plan.pipeline.micro_batches
    hardware = target_of("1x8xH100").stage(4)[0].topology.hardware(plan.mesh)
    costs = MicroCosts(hardware, plan.mesh, TimeRows(graph, time_specs(graph, count), count))
    hides = hidden_values(graph, fuse(graph, rules.rows_for, frozenset()))
    along = profile(graph, dataclasses.replace(plan, pipeline=None), costs, hides)
    edges = [along.names.index(c) + 1 for c in plan.pipeline.cuts]
    return [float(part.sum()) / count for part in np.split(along.work_s, edges)]


def test_stages_of_a_deep_model_take_equally_long():
    found = seconds_of_stages(deep())
    assert len(found) == 4 and min(found) > 0
    assert max(found) <= 1.05 * min(found)


def test_the_predicted_step_is_that_of_the_simulator_and_the_bubble_that_of_the_textbook():
    plan = deep()
    p, per_stage = plan.pipeline, sum(seconds_of_stages(plan)) / 4
    ideal = simulate(p, orders(p), lambda a: per_stage * {"F": 1 / 3, "B": 2 / 3}[a.kind]).step_s
    assert ideal * 0.98 <= plan.predicted.step_time_s <= ideal * 1.15


def test_what_does_not_fit_says_which_stage_and_what_is_over_by_how_much():
    keywords: dict[str, Any] = {"degrees": {"pp": 2}, "alternatives": False, "micro_batches": 4, "recompute": "none"}
    with pytest.raises(
        InfeasibleError, match=r"stage \d of 2 on pipeline rank \d of 2 needs .* per device, over the limit of 8.00 MiB by "
    ) as caught:
        mw.plan(functools.partial(llama, 4, 256), "1x4xH100", tokens(16, 256), memory_limit="8MiB", schedule="1f1b", **keywords)
    assert caught.value.binding == "memory" and caught.value.needed_bytes > 8 << 20
    assert "activations" in str(caught.value) and "what helps" in str(caught.value)


def test_where_memory_is_short_more_is_computed_again():
    keywords: dict[str, Any] = {"degrees": {"pp": 2}, "alternatives": False, "micro_batches": 4, "schedule": "1f1b"}
    model, inputs = functools.partial(llama, 6, 256), tokens(64, 1024)
    free = mw.plan(model, "1x2xH100", inputs, **keywords)
    limit = free.predicted.peak_memory_bytes * 3 // 4
    tight = mw.plan(model, "1x2xH100", inputs, memory_limit=limit, **keywords)
    assert str(free.recompute) == "none" != str(tight.recompute)
    assert tight.predicted.peak_memory_bytes <= limit and tight.predicted.step_time_s >= free.predicted.step_time_s


def test_more_stages_than_blocks_are_refused():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    with pytest.raises(InputError, match="places where it can be cut, which makes at most"):
        mw.plan(Two, "8x8xH100", torch.empty(64, 8, device="meta"), degrees={"pp": 64}, alternatives=False)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_every_schedule_that_is_tried_can_run(degree, micro_batches):
    found = list(schedules(degree, micro_batches, PipelineRequest(degree)))
    assert found
    for name, each in found:
        check_schedule(name, degree, degree * each, micro_batches)


def test_numbers_of_micro_batches_divide_the_batch_and_suit_the_schedule():
    graph = captured("gpt2").graph
    counts = micro_batch_counts(graph, 2, PipelineRequest(2), 1)
    assert counts == (8, 4, 2)
    for count in counts:
        time_specs(graph, count)
    assert micro_batch_counts(graph, 2, PipelineRequest(2, "naive"), 1) == (1,)
    assert micro_batch_counts(captured("cnn").graph, 2, PipelineRequest(2), 1) == (1,)
    with pytest.raises(InputError, match="do not divide"):
        micro_batch_counts(graph, 2, PipelineRequest(2, None, 3), 1)


def test_auto_stays_without_stages_where_they_cannot_be_faster():
    plan = mw.plan(functools.partial(llama, 4), "1x4xH100", tokens(32, 1024), alternatives=False)
    assert plan.pipeline is None


def test_auto_takes_stages_where_links_are_slow():
    plan = mw.plan(Wide, "4x1xA100-80@10Gbit", torch.empty(256, WIDTH, device="meta"), alternatives=False)
    assert plan.pipeline is not None
    (note,) = (n for n in plan.notes if n.startswith("without pipeline stages: "))
    assert plan.predicted.step_time_s < 0.98 * float(note.split()[3])
