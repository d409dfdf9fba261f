"""What kernels cost on a device that fuses nothing, against sums worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.cost.eager import query_block
from meshwright.planner.fuse import fuse
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import R
from meshwright.planner.rules import rows_for
from tests.helpers.sketch import Sketch

FLOPS_PER_S, FUNCTIONS_PER_S, EDGE = 1e9, 1e6, 16


def seconds_of(graph: OpGraph, **other: float) -> float:
    """Of all kernels, whole, on a core whose only cost is arithmetic unless ``other`` says more."""
    mesh = MeshShape.of(1)
    hardware = hardware_for(mesh, "CPU")
    device = dataclasses.replace(
        hardware.device,
        peak_flops_per_s={"float32": FLOPS_PER_S},
        matmul_efficiency={"float32": 1.0},
        **{"memory_bytes_per_s": math.inf, "kernel_overhead_s": 0.0, "functions_per_s": FUNCTIONS_PER_S, **other},
    )
    costs = CostModel(dataclasses.replace(hardware, device=device), mesh)
    clusters = [c for c in fuse(graph, rows_for).clusters if c.source is None]
    return sum(costs.cluster_s(c, (next(r for r in c.rows if all(p == R for p in r.ins)),)) for c in clusters)


def attention(shape: tuple[int, ...], causal: bool) -> OpGraph:
    s = Sketch()
    q, k, v = (s.placeholder(n, shape, "input") for n in "qkv")
    return s.done(s.op("aten._scaled_dot_product_flash_attention_for_cpu.default", q, k, v, 0.0, causal)[0])


def one(target: str, *shapes: tuple[int, ...], rest: tuple = ()) -> OpGraph:
    s = Sketch()
    out = s.op(target, *(s.placeholder(f"x{i}", shape, "input") for i, shape in enumerate(shapes)), *rest)
    return s.done(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize(("causal", "keys"), [(False, 64), (True, 48)])
def test_attention_is_two_matmuls_for_each_block_of_queries_of_each_head(causal, keys):
    """Two blocks of 32 queries; under a causal mask the first sees 32 keys and the second 64."""
    blocks = 4 * 6 * 2
    matmuls_s = 2 * blocks * 2 * (32 + EDGE) * (32 + EDGE) * (keys + EDGE) / FLOPS_PER_S
    exponentials_s = blocks * 32 * keys / FUNCTIONS_PER_S
    assert seconds_of(attention((4, 6, 64, 32), causal)) == pytest.approx(matmuls_s + exponentials_s)


def test_a_device_without_functions_of_their_own_pays_attention_its_matmuls_alone():
    whole, alone = (seconds_of(attention((1, 1, 16, 8), False), functions_per_s=f) for f in (FUNCTIONS_PER_S, 0.0))
    assert alone == pytest.approx(2 * 2 * (16 + EDGE) * (8 + EDGE) * (16 + EDGE) / FLOPS_PER_S)
    assert whole - alone == pytest.approx(16 * 16 / FUNCTIONS_PER_S)


def test_long_queries_go_in_longer_blocks():
    assert query_block(np.array([1, 32, 191, 192, 767, 768, 4096])).tolist() == [1, 32, 32, 64, 64, 256, 256]


@pytest.mark.parametrize(("target", "functions"), [("aten.gelu.default", 1), ("aten.exp.default", 1), ("aten.relu.default", 0)])
def test_functions_are_worked_out_of_every_element(target, functions):
    graph, elements = one(target, (64, 32)), 64 * 32
    assert seconds_of(graph) == pytest.approx(functions * elements / FUNCTIONS_PER_S)
    besides = {"memory_bytes_per_s": 1e6, "kernel_overhead_s": 0.5}
    assert seconds_of(graph, **besides) == pytest.approx(functions * elements / FUNCTIONS_PER_S + 2 * 4 * elements / 1e6 + 0.5)
    assert seconds_of(graph, functions_per_s=0.0, **besides) == pytest.approx(2 * 4 * elements / 1e6 + 0.5)


def test_a_reduction_of_functions_counts_what_it_reads():
    assert seconds_of(one("aten.logsumexp.default", (64, 32), rest=([1],))) == pytest.approx(64 * 32 / FUNCTIONS_PER_S)


def test_functions_behind_a_matmul_come_on_top_of_it():
    s = Sketch()
    x, w = s.input("x", (64, 128)), s.placeholder("w", (128, 256), "input")
    graph = s.done(s.op("aten.gelu.default", s.op("aten.mm.default", x, w)))
    matmul_s = 2 * (64 + EDGE) * (128 + EDGE) * (256 + EDGE) / FLOPS_PER_S
    assert seconds_of(graph) == pytest.approx(matmul_s + 64 * 256 / FUNCTIONS_PER_S)
