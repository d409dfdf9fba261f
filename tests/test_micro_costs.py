"""Prices of a step in micro-batches against a capture of one micro-batch."""

from __future__ import annotations

import pytest
import torch

from meshwright.planner import remat, rules, trace
from meshwright.planner.cost import CostModel
from meshwright.planner.fuse import fuse
from meshwright.planner.ir.cluster import ClusterRow
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import P, R, S
from meshwright.planner.micro import _Walk, batch_length, time_specs
from meshwright.planner.micro_costs import MicroCosts, TimeRows
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, toy_hardware

COUNT = 4


def replicated(cluster) -> tuple[ClusterRow, ...]:
    """The row in which nothing is sharded."""
    rows = [r for r in cluster.rows if all(p == R for p in (*r.ins, *r.outs)) and r.rest in (None, R)]
    return (rows[0],)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_kernels_cost_as_often_as_they_run_what_those_of_a_micro_batch_cost(name):
    whole, mesh = captured(name), MeshShape.of(1)
    batch = {k: v[: len(v) // COUNT] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in ALL[name].batch().items()}
    one = remat.save_few(trace.capture(ALL[name].model(), (), batch))
    hardware = toy_hardware(mesh)
    costs = MicroCosts(hardware, mesh, TimeRows(whole.graph, time_specs(whole.graph, COUNT), COUNT))
    small = {c.name: c for c in fuse(one.graph, rules.rows_for).clusters}
    alone, compared, once = CostModel(hardware, mesh), 0, []
    for cluster in fuse(whole.graph, rules.rows_for).clusters:
        if cluster.source is None and cluster.name in small and len(cluster.ops) == len(small[cluster.name].ops):
            priced = float(costs.cluster_costs(cluster, [replicated(cluster)])[0])
            wanted = float(alone.cluster_costs(small[cluster.name], [replicated(small[cluster.name])])[0])
            compared += 1
            if priced != pytest.approx(COUNT * wanted, rel=1e-6):
                assert priced == pytest.approx(wanted, rel=1e-6)
                once.append(cluster.name)
    assert compared > 20 and len(once) <= compared // 10


def test_a_parameter_is_gathered_for_every_micro_batch_and_its_gradient_summed_once():
    capture, mesh = captured("gpt2"), MeshShape.of(2)
    graph, hardware = capture.graph, toy_hardware(mesh)
    costs, whole = MicroCosts(hardware, mesh, TimeRows(graph, time_specs(graph, COUNT), COUNT)), CostModel(hardware, mesh)
    weight = next(i.value for i in graph.inputs_of("parameter") if len(i.value.shape) == 2)
    gradient = next(o.value for o in graph.outputs_of("gradient") if o.value is not None and o.value.shape == weight.shape)
    gather, reduce, scatter = (weight, (S(0),), 0, R), (gradient, (P,), 0, R), (gradient, (P,), 0, S(0))
    assert costs.step_s(*gather)[2] == pytest.approx(COUNT * whole.step_s(*gather)[2])
    assert costs.step_s(*reduce)[2] == pytest.approx(whole.step_s(*reduce)[2])
    assert costs.step_s(*scatter)[2] == pytest.approx(COUNT * whole.step_s(*scatter)[2])
    assert costs.once.step_s(*gather)[2] == whole.step_s(*gather)[2]


def test_an_activation_moves_in_pieces_of_a_micro_batch():
    capture, mesh = captured("gpt2"), MeshShape.of(2)
    graph, hardware = capture.graph, toy_hardware(mesh)
    costs, whole = MicroCosts(hardware, mesh, TimeRows(graph, time_specs(graph, COUNT), COUNT)), CostModel(hardware, mesh)
    value = next(v for op in graph.ops for v in op.outs if v is not None and len(v.shape) == 3 and costs.sort_of(v)[0] == S(0))
    kind, size, seconds = costs.step_s(value, (S(1),), 0, R)
    assert (kind, size) == ("all_gather", whole.step_s(value, (S(1),), 0, R)[1] // COUNT)
    latency = hardware.links[0].latency_s
    assert seconds == pytest.approx(whole.step_s(value, (S(1),), 0, R)[2] + (COUNT - 1) * latency, rel=0.5)


@pytest.mark.parametrize(("name", "shared"), [("gpt2", 0), ("llama", 0), ("t5", 1), ("transformer", 0), ("mlp", 2)])
def test_numbers_of_micro_batches_that_share_their_placements_have_those_of_their_own(name, shared):
    graph = captured(name).graph
    batch = batch_length(graph)
    counts = [n for n in range(2, batch + 1) if batch % n == 0]
    for count in (*counts, *reversed(counts)):
        assert time_specs(graph, count) == _Walk(graph, batch, count).specs()
    assert len({id(time_specs(graph, count)) for count in counts}) == len(counts) - shared
