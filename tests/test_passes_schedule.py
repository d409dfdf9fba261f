"""Collectives are placed by the clock: what a plan calls hidden is under way while kernels run."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.passes import lower
from meshwright.passes.overlap import is_wait
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.heavy import HEAVY
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.remat import save_few
from meshwright.planner.search import make_plan
from meshwright.planner.trace import capture
from meshwright.timeline import timeline
from tests.helpers.models import ALL


def hardware(bytes_per_s: float, axes: int) -> Hardware:
    """A device on which the small models' matmuls take about a millisecond, and links without latency."""
    device = Device("slow", 1 << 30, 1e9, {"float32": 1e9}, {"float32": 1.0}, 1e-6, "made up for a test")
    return Hardware(device, tuple(Link("made up", bytes_per_s, 1e-9, "made up for a test") for _ in range(axes)))


def planned(name: str, strategy: str, bytes_per_s: float, *sizes: int):
    case = ALL[name]
    program = save_few(capture(case.model(), kwargs=case.batch()))
    mesh = MeshShape.of(*sizes)
    plan = make_plan(program, mesh, hardware(bytes_per_s, len(sizes)), strategy=strategy, alternatives=False)
    return program, plan, lower(program, plan, (0,) * len(sizes), tuple(f"g{i}" for i in range(len(sizes))), bucket_bytes=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_what_the_plan_calls_hidden_runs_beside_kernels(strategy: str, sizes: tuple[int, ...]) -> None:
    _, plan, program = planned("llama", strategy, 1e5, *sizes)
    assert plan.predicted.hidden_s > plan.predicted.exposed_s
    found = timeline(program, plan)
    assert plan.predicted.hidden_s > 0.2 * plan.predicted.compute_s, "else nothing is shown"
    # Two layers have much of their communication near the ends of a phase; the longer a model, the less that is.
    assert found.seconds_of("wait") - plan.predicted.exposed_s <= 0.3 * plan.predicted.hidden_s
    assert found.step_time_s <= 1.1 * plan.predicted.step_time_s


def test_seconds_of_the_timeline_are_those_of_the_plan() -> None:
    _, plan, program = planned("gpt2", "zero3", 1e8, 4)
    found = timeline(program, plan)
    assert found.seconds_of("compute") == pytest.approx(plan.predicted.compute_s, rel=1e-2)
    moved = sum(c.count * c.time_s for c in plan.collectives)
    assert found.seconds_of("collective") == pytest.approx(moved, rel=2e-2)


def test_a_gradient_is_reduced_while_the_backward_goes_on() -> None:
    """Also under mixed precision, where autograd casts the gradients at the very end."""
    case = ALL["llama"]
    program = save_few(capture(case.model(), kwargs=case.batch(), precision="bf16-mixed"))
    plan = make_plan(program, MeshShape.of(4), hardware(1e9, 1), strategy="ddp", alternatives=False)
    nodes = [n for n in lower(program, plan, (0,), ("g",), bucket_bytes=0).backward.graph.nodes if n.op == "call_function"]
    last_big = max(i for i, n in enumerate(nodes) if str(n.target) in HEAVY)
    issued = [i for i, n in enumerate(nodes) if "all_reduce" in str(n.target)]
    assert sum(i < last_big for i in issued) > 0.8 * len(issued)


def test_kernels_keep_their_order() -> None:
    program, _, lowered = planned("gpt2", "zero3", 1e9, 2, 2)
    known = {op.name: i for i, op in enumerate(program.graph.ops)}
    for module in (lowered.forward, lowered.backward):
        big = [known[n.meta["op"]] for n in module.graph.nodes if str(n.target) in HEAVY]
        assert big == sorted(big)


def test_without_predicted_seconds_collectives_are_still_issued_ahead() -> None:
    program, plan, _ = planned("gpt2", "zero3", 1e9, 4)
    lowered = lower(program, dataclasses.replace(plan, kernel_s={}), (0,), ("g",), bucket_bytes=0)
    nodes = [n for n in lowered.forward.graph.nodes if n.op == "call_function"]
    at = {n: i for i, n in enumerate(nodes)}
    big = [i for i, n in enumerate(nodes) if str(n.target) in HEAVY]
    later = [n for n in nodes if is_wait(n) and n.meta["step"].kind == "all_gather" and at[n] > big[1]]
    ahead = [any(at[n.all_input_nodes[0]] < i < at[n] for i in big) for n in later]
    assert len(ahead) > 5 and sum(ahead) > 0.8 * len(ahead)


def test_the_plan_carries_the_seconds_of_its_kernels() -> None:
    program, plan, _ = planned("gpt2", "ddp", 1e9, 4)
    assert set(plan.kernel_s) <= set(program.graph.by_name)
    assert sum(plan.kernel_s.values()) == pytest.approx(plan.predicted.compute_s, rel=1e-2)
    assert type(plan).from_json(plan.to_json()).kernel_s == plan.kernel_s
