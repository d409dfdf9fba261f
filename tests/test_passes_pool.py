"""Reductions over two axes share buffers: their first legs with each other, and then their second."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import fx

from meshwright.passes import lower
from meshwright.passes.overlap import OverlapCollectives, is_wait
from meshwright.passes.pool_results import PoolResults
from meshwright.passes.program import LocalProgram, count_collectives
from meshwright.passes.rewrite import RewriteForRank
from meshwright.passes.split import is_collective
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.search import Options, make_plan
from tests.helpers.prepared import captured, toy_hardware


def hardware(mesh: MeshShape, *, moves_data: bool) -> Hardware:
    """With ``moves_data`` nothing hides behind kernels."""
    toy = toy_hardware(mesh)
    return dataclasses.replace(toy, device=dataclasses.replace(toy.device, moves_data=moves_data))


def lowered(name: str, strategy: str, bucket_bytes: int, *, moves_data: bool = True) -> LocalProgram:
    capture, mesh = captured(name), MeshShape.of(2, 2)
    plan = make_plan(capture, mesh, hardware(mesh, moves_data=moves_data), Options(strategy=strategy, alternatives=False))
    return lower(capture, plan, (0, 0), ("dp", "tp"), bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("strategy", ["tp", "zero1+tp"])
def test_gradients_reduced_over_two_axes_do_not_end_the_buffers_of_others(strategy):
    program = lowered("gpt2", strategy, 25 << 20)
    reduced = [c for c in program.collectives if c.phase == "backward" and c.axis == 0 and c.kind != "all_gather"]
    assert max(len(c.values) for c in reduced) > 10, "else nothing is shared"
    assert len([c for c in reduced if c.shape]) <= 3  # all but what kernels read goes in one buffer of each kind


@pytest.mark.parametrize("strategy", ["tp", "zero1+tp"])
def test_the_plans_collectives_are_the_same_whatever_shares_a_buffer(strategy):
    assert count_collectives(lowered("gpt2", strategy, 25 << 20)) == count_collectives(lowered("gpt2", strategy, 0))


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 14])
def test_no_buffer_is_larger_than_one_may_be(bucket_bytes):
    program = lowered("gpt2", "tp", bucket_bytes)
    shared = [c for c in program.collectives if c.kind == "all_reduce" and len(c.values) > 1]
    assert shared and all(4 * torch.Size(c.shape).numel() <= bucket_bytes for c in shared)
    counts = Counter((c.axis, c.kind) for c in program.collectives)
    assert (
        counts[0, "all_reduce"] > Counter((c.axis, c.kind) for c in lowered("gpt2", "tp", 25 << 20).collectives)[0, "all_reduce"]
    )


def body(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "call_function"]


def test_kernels_keep_their_order_and_what_they_read_is_not_put_off():
    capture, mesh = captured("gpt2"), MeshShape.of(2, 2)
    plan = make_plan(capture, mesh, hardware(mesh, moves_data=True), Options(strategy="tp", alternatives=False))
    joint = OverlapCollectives()(RewriteForRank(capture, plan, (0, 0), ("dp", "tp"), None)(capture.gm))
    before = body(joint)
    after = body(PoolResults()(joint))
    still = [n for n in before if not is_collective(n) and not is_wait(n) and "step" not in n.meta]
    assert sorted(before) == sorted(after) and [n for n in after if n in set(still)] == still
    at = {n: i for i, n in enumerate(after)}
    assert all(at[a] < at[n] for n in after for a in n.all_input_nodes if a in at)


def test_where_communication_hides_second_legs_are_not_put_off():
    capture, mesh = captured("gpt2"), MeshShape.of(2, 2)
    plans = [
        make_plan(capture, mesh, hardware(mesh, moves_data=moves), Options(strategy="ddp", alternatives=False))
        for moves in (False, True)
    ]
    assert [PoolResults.of(plan, 1 << 20).bucket_bytes for plan in plans] == [0, 1 << 20]
