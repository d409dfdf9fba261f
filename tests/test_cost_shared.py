"""Prices of collectives that share buffers, against the buffers that the passes make; what a device that moves data itself changes."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from meshwright.passes import lower
from meshwright.planner import rules, search
from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.fuse import fuse
from meshwright.planner.ir.buffers import GATHER_BYTES, REDUCE_BYTES
from meshwright.planner.ir.hardware import Hardware, Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import P, R, S
from meshwright.planner.ir.verify import planned_steps
from tests.helpers.legal_plans import greedy_plan
from tests.helpers.prepared import captured, toy_hardware


def latency_only(mesh: MeshShape) -> Hardware:
    """Collectives cost a second each, whatever their size, and copies nothing."""
    hardware = toy_hardware(mesh)
    device = dataclasses.replace(hardware.device, memory_bytes_per_s=math.inf)
    return Hardware(device, (Link("one second", math.inf, 1.0, "made up for tests"),) * mesh.num_axes, "made up for tests")


def priced(plan: Plan, name: str, shared: SharedBuffers | None) -> dict[tuple[str, str], float]:
    """Latencies that steps of parameters and gradients pay, by phase and kind, in those of one collective."""
    of_them = SharedBuffers.of(captured(name).graph).values
    costs, found = CostModel(latency_only(plan.mesh), plan.mesh, shared), dict[tuple[str, str], float]()
    for step in planned_steps(plan, captured(name).graph):
        kind, _, seconds = costs.step_s(step.value, step.src, step.axis, step.dst[step.axis])
        if kind != "slice" and step.value.name in of_them:
            alone = costs.collective_s(kind, step.axis, 0)
            found[step.phase, kind] = found.get((step.phase, kind), 0.0) + seconds / alone
    return found


def buffers(plan: Plan, name: str, phase: str, kind: str, bucket_bytes: int = REDUCE_BYTES) -> int:
    """How many collectives of parameters and gradients a rank runs."""
    capture = captured(name)
    of_them, ran = (
        SharedBuffers.of(capture.graph).values,
        lower(capture, plan, (0,), ("g",), bucket_bytes=bucket_bytes).collectives,
    )
    return sum(c.phase == phase and c.kind == kind and bool(of_them.intersection(c.values)) for c in ran)


@pytest.mark.parametrize("buffer_bytes", [REDUCE_BYTES, 1 << 15, 1 << 13])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("rests", [{}, {"*": (S(0),)}])
def test_reductions_of_gradients_pay_about_as_many_latencies_as_buffers_are_made(name, rests, buffer_bytes):
    capture, mesh = captured(name), MeshShape.of(2)
    plan, kind = greedy_plan(capture, mesh, batch_axes=(0,), parameters=rests), "reduce_scatter" if rests else "all_reduce"
    shared = SharedBuffers.of(capture.graph)
    total = shared.size_bytes["all_reduce"]
    shared = dataclasses.replace(shared, size_bytes={k: min(n, buffer_bytes) for k, n in shared.size_bytes.items()})
    made = buffers(plan, name, "backward", kind, buffer_bytes)
    alone, found = priced(plan, name, None)["backward", kind], priced(plan, name, shared)["backward", kind]
    assert found <= made + 1e-9 <= alone
    assert made <= 2 * found + 1  # two buffers behind each other hold more than one may
    assert found >= min(1.0, total / buffer_bytes) * 0.9


def test_gathers_of_small_parameters_pay_for_one_buffer():
    capture, mesh = captured("gpt2"), MeshShape.of(2)
    plan = greedy_plan(capture, mesh, batch_axes=(0,), parameters={"*": (S(0),)})
    found = priced(plan, "gpt2", SharedBuffers.of(capture.graph))["forward", "all_gather"]
    assert buffers(plan, "gpt2", "forward", "all_gather") == 1 and 0.0 < found <= 1.0  # some are read as they lie


def test_what_the_next_kernel_waits_for_shares_nothing():
    graph = captured("gpt2").graph
    shared = SharedBuffers.of(graph)
    gradients = {o.value.name for o in graph.outputs_of("gradient") if o.value is not None}
    assert {i.value.name for i in graph.inputs_of("parameter")} <= shared.values
    for op in graph.ops:
        for v in (v for v in op.outs if v is not None and v.name in shared.values):
            readers = graph.consumers.get(v.name, ())
            of_one = len(op.ins) == 1 and op.ins[0].name in shared.values
            assert of_one or all(w.name in shared.values for r in readers for w in r.outs if w is not None)
            assert of_one or readers or v.name in gradients


@functools.cache
def sharing(buffer_bytes: int) -> CostModel:
    mesh, graph = MeshShape.of(8), captured("gpt2").graph
    kinds = dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), buffer_bytes)
    return CostModel(hardware_for(mesh, "H100"), mesh, dataclasses.replace(SharedBuffers.of(graph), size_bytes=kinds))


@pytest.mark.parametrize(("kind", "src", "dst"), [("all_gather", S(0), R), ("all_reduce", P, R), ("reduce_scatter", P, S(0))])
def test_a_full_buffer_costs_what_one_collective_does_and_half_of_it_half_as_much(kind, src, dst):
    value = max((i.value for i in captured("gpt2").graph.inputs_of("parameter")), key=lambda v: v.size_bytes)
    size = value.size_bytes
    full, half, alone = (sharing(n).step_s(value, (src,), 0, dst) for n in (size, 2 * size, 0))
    copy = 2 * size / 3350e9
    assert full == alone and full[0] == kind
    assert half[2] - copy == pytest.approx(sharing(0).collective_s(kind, 0, 2 * size) / 2)


def test_sizes_of_buffers_are_those_of_the_whole_program_where_it_is_small():
    graph = captured("mlp").graph
    total = sum(i.value.size_bytes for i in graph.inputs_of("parameter"))
    assert SharedBuffers.of(graph).size_bytes == {"all_gather": total, "all_reduce": total, "reduce_scatter": total}
    many = SharedBuffers.of(graph, lambda _: 1 << 20).size_bytes
    assert many == {"all_gather": GATHER_BYTES, "all_reduce": REDUCE_BYTES, "reduce_scatter": REDUCE_BYTES}


# --- a device that moves data itself, and one that fuses nothing ------------------------------------------------------


@pytest.mark.parametrize("moves_data", [False, True])
def test_nothing_hides_where_the_device_moves_the_data(moves_data):
    mesh = MeshShape.of(2)
    hardware = toy_hardware(mesh)
    hardware = dataclasses.replace(hardware, device=dataclasses.replace(hardware.device, moves_data=moves_data))
    plan = search.make_plan(captured("gpt2"), mesh, hardware, search.Options(strategy="ddp", alternatives=False, model="gpt2"))
    told = plan.predicted
    assert (told.hidden_s == 0.0) is moves_data and any(c.hidden for c in plan.collectives) is not moves_data
    if moves_data:
        assert told.step_time_s == pytest.approx(told.compute_s + told.exposed_s)


def test_where_nothing_is_fused_ops_are_kernels_of_their_own():
    mesh, graph = MeshShape.of(1), captured("gpt2").graph
    hardware = toy_hardware(mesh)
    device = dataclasses.replace(hardware.device, kernel_overhead_s=1.0, memory_bytes_per_s=math.inf, fuses=False)
    costs = CostModel(dataclasses.replace(hardware, device=device), mesh)
    several = [c for c in fuse(graph, rules.rows_for).clusters if c.source is None and len(c.ops) > 2]
    assert several
    for cluster in several:
        row = next(r for r in cluster.rows if all(p == R for p in (*r.ins, *r.outs)))
        seconds = costs.cluster_s(cluster, (row,))
        assert math.isclose(seconds, len(cluster.ops), abs_tol=0.5) or seconds == 0.0  # views alone


def test_ops_that_are_not_fused_read_and_write_what_is_between_them():
    mesh, graph = MeshShape.of(1), captured("gpt2").graph
    device = dataclasses.replace(toy_hardware(mesh).device, kernel_overhead_s=0.0)
    fused, apart = (
        CostModel(Hardware(dataclasses.replace(device, fuses=f), toy_hardware(mesh).links), mesh) for f in (True, False)
    )
    longer = 0
    for cluster in (c for c in fuse(graph, rules.rows_for).clusters if c.source is None):
        row = next(r for r in cluster.rows if all(p == R for p in (*r.ins, *r.outs)))
        together, alone = fused.cluster_s(cluster, (row,)), apart.cluster_s(cluster, (row,))
        assert alone >= together * (1 - 1e-9)
        longer += alone > together * 1.01
    assert longer > 3
