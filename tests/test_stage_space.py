"""What a search over pipelines can try, and bounds of it: no problem computes less than its kernels were said to take."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.inputs import call_of, model_of
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.meshes import MeshRequest, meshes_in_roles
from meshwright.planner.options import Clock, Options
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.stage_space import Devices, Space
from meshwright.planner.staging import StageSearch
from meshwright.planning import capture_call
from meshwright.request import Request
from meshwright.target import target_of


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@functools.cache
def space() -> Space:
    ids = torch.empty(64, 256, dtype=torch.int64, device="meta")
    call = call_of({"input_ids": ids, "labels": ids})
    source, _ = capture_call(model_of(llama), call, Request(precision="bf16-mixed"), True)
    target = target_of("1x8xH100")

    def inside(degree: int):
        stage, link = target.stage(degree)
        return meshes_in_roles(stage.topology, MeshRequest()), link

    return Space(source, Devices(8, inside), Options(), PipelineRequest(2), (2, 4), Clock(None))


def test_every_mesh_and_number_of_micro_batches_that_can_share_the_batch_is_there():
    found = {(i.degree, i.micro_batches, i.where.mesh.sizes, i.where.mesh.names) for i in space().combinations()}
    assert {(2, 16, (4,), (name,)) for name in ("dp", "cp", "tp")} <= found
    assert {n for degree, n, *_ in found if degree == 4} == {4, 8, 16, 32}
    assert (2, 16, (2, 2), ("dp", "tp")) in found


def test_no_problem_computes_less_than_its_kernels_were_said_to_take():
    looked_at = 0
    for item in space().combinations():
        if item.micro_batches > 8:
            continue
        problem = space().build(item).tables_for("auto").problem
        compute_s = sum(float(c.count * c.compute_s.min()) for c in problem.choices) * space().share(item)
        assert item.kernels_s <= compute_s * (1 + 1e-9)
        assert item.kernels_s >= 0.5 * compute_s  # what is done once per step and casts of parameters are not in it
        looked_at += 1
    assert looked_at >= 8


def test_one_micro_batch_is_on_one_rank_at_a_time():
    item = space().combinations()[0]
    item.degree, item.micro_batches = 4, 1
    assert space().share(item) == pytest.approx(1.0)
    item.degree, item.micro_batches = 2, 16  # two layers on each: they can be two stages
    assert space().share(item) == pytest.approx((1 + 1 / 32) / 2)


def test_no_plan_in_stages_takes_less_than_the_bound_that_one_is_said_to_have():
    ids = torch.empty(32, 256, dtype=torch.int64, device="meta")
    options = {"precision": "bf16-mixed", "alternatives": False}

    def planned(**asked: object):
        return mw.plan(llama, "1x4xH100", {"input_ids": ids, "labels": ids}, **options, **asked)

    best = planned(degrees={"pp": 2})
    assert 0 < best.bound_s <= best.objective_s == best.predicted.step_time_s
    assert best.gap == pytest.approx((best.objective_s - best.bound_s) / best.objective_s)
    asked = [("1f1b", 4), ("interleaved_1f1b", 4), ("zero_bubble", 4), ("zbv", 8), ("gpipe", 16), ("naive", 1)]
    others = [planned(degrees={"pp": 2}, schedule=name, micro_batches=count) for name, count in asked]
    assert all(best.bound_s <= other.objective_s for other in others)
    assert best.objective_s <= min(o.objective_s for o in others if o.pipeline.micro_batches > 1) * 1.02  # one is not searched


def test_smaller_micro_batches_are_no_less_work():
    """More micro-batches are not looked at where fewer of the same mesh are too much work already, memory aside."""
    search = StageSearch(space().source, space().devices, _same, Options(), PipelineRequest(2), (2, 4))
    works: dict[tuple[int, MeshShape], dict[int, float]] = {}
    for item in search.space.combinations():
        if item.micro_batches <= 16:
            search._look_at(item, math.inf)
            assert item.task is not None
            works.setdefault((item.degree, item.where.mesh), {})[item.micro_batches] = item.task.ahead.free_bound_s
    compared = 0
    for by_count in works.values():
        found = [by_count[n] for n in sorted(by_count)]
        compared += len(found) - 1
        assert all(more >= fewer * (1 - 1e-2) for fewer, more in pairwise(found))
    assert compared > 10


def _same(plan: Plan) -> tuple[Plan, OpGraph, None]:
    return plan, space().graph, None
