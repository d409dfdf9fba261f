"""What a step in stages takes besides its kernels: actions that are started, gradients that are added up; small cases by hand."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch

import meshwright as mw
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.micro import time_specs
from meshwright.planner.orders import orders
from meshwright.planner.pipelined import Lying, Uncut
from meshwright.planner.simulate import simulate
from meshwright.planner.stage_cuts import profile
from tests.helpers.models import Stack
from tests.helpers.prepared import captured
from tests.helpers.stages import staged_plan

LAYERS, WIDTH, ACTION_S = 4, 8, 0.5
FREE = Device("made up", 1 << 40, 1e18, {"float32": 1e18}, {"float32": 1.0}, 0.0, "made up for tests")


def hardware(**other: float) -> Hardware:
    """Where next to nothing takes any time but what ``other`` says."""
    return Hardware(dataclasses.replace(FREE, **other), (Link("made up", math.inf, 0.0, "made up for tests"),))


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "actions"), [("gpipe", 4, 2 * (4 + 1)), ("1f1b", 4, 2 * (4 + 1)), ("naive", 1, 4)]
)
def test_where_only_starting_actions_takes_time_a_step_takes_those_of_its_longest_chain(schedule, micro_batches, actions):
    x = torch.empty(16, WIDTH, device="meta")
    plans = [
        mw.plan(
            partial(Stack, LAYERS, WIDTH), MeshShape.of(2), x, hardware=hardware(action_overhead_s=s), strategy="pipeline", degrees={"pp": 2},
            schedule=schedule, micro_batches=micro_batches, alternatives=False,
        )
        for s in (0.0, ACTION_S)
    ]  # fmt: skip
    assert plans[1].predicted.step_time_s - plans[0].predicted.step_time_s == pytest.approx(actions * ACTION_S)
    assert plans[0].predicted.step_time_s == pytest.approx(0.0, abs=1e-6)


def test_a_backward_in_two_halves_is_started_twice():
    """Two stages, two micro-batches, all actions alike: F0 F1 I0 I1 W0 W1 on the last, whose gradients the first waits for."""
    whole, halves = (Pipeline(2, s, ("op0",), 2) for s in ("gpipe", "zero_bubble"))
    assert simulate(whole, orders(whole), lambda _: ACTION_S).busy_s == (4 * ACTION_S,) * 2
    assert simulate(halves, orders(halves), lambda _: ACTION_S).busy_s == (6 * ACTION_S,) * 2


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradients_are_read_and_added_for_every_micro_batch_but_the_first(micro_batches):
    """One device: each further gradient is read, and the sum read and written: three times its bytes."""
    capture, rate = captured("mlp"), 1e9
    plan = dataclasses.replace(staged_plan(capture, (), micro_batches), pipeline=None, strategy="ddp")
    given = hardware(memory_bytes_per_s=rate)
    lying = Lying(time_specs(capture.graph, micro_batches), frozenset())
    uncut = Uncut(plan, capture.graph, lying, micro_batches, given, given.links[0], 1 << 40)
    alone = profile(capture.graph, plan, uncut.costs, lying.hides, None)
    parameters = [i.value for i in capture.graph.inputs_of("parameter")]
    summed_s = (micro_batches - 1) * 3 * sum(v.size_bytes for v in parameters) / rate
    for more, before in ((uncut.profile.backward_s, alone.backward_s), (uncut.profile.weight_s, alone.weight_s)):
        assert (more - before).sum() == pytest.approx(summed_s)
    assert (uncut.profile.forward_s == alone.forward_s).all()
