"""Fusing and folding lose nothing: the best plan over clusters costs what the best plan over single ops costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.planner.blocks import fold
from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.fuse import fuse, trivial_clusters
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.rules import rows_for
from meshwright.planner.solve.backend import Solver
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.program import NetworkCache, assemble
from meshwright.planner.solve.tables import build_tables
from tests.helpers.sketch import Sketch
from tests.test_blocks import stack
from tests.test_fuse import block, random_graph


def best_s(graph: OpGraph, clusters: ClusterGraph, *sizes: int, arithmetic_only: bool = True) -> float:
    """Least seconds of arithmetic and communication, nothing hidden: the relaxation, whose optimum is integral here.

    Memory traffic is left out where ``arithmetic_only``: single ops pay for every intermediate value, clusters do not.
    """
    mesh = MeshShape.of(*sizes)
    hardware = hardware_for(mesh, "H100")
    if arithmetic_only:
        free = replace(hardware.device, memory_bytes_per_s=1e20, kernel_overhead_s=0.0)
        hardware = replace(hardware, device=free)
    costs = CostModel(hardware, mesh)
    tables = build_tables(graph, clusters, clusters.class_of, mesh, costs, trained=Trained(8), memory_limit_bytes=None)
    program = assemble(replace(tables.problem, memory_limit_bytes=None), Restriction(), NetworkCache())
    cost = program.arrays.cost + program.compute.sum(0) + program.hidden.sum(0)
    answer = Solver(program.arrays, integer=True).solve(cost, gap=1e-7)
    assert answer.x is not None
    return answer.objective / program.scale


def blocks_of(layers: int) -> OpGraph:
    s = Sketch()
    h = s.input("x", (8, 1024, 2048))
    for i in range(layers):
        h = block(s, h, i, wide=8192)
    return s.done(s.op("aten.sum.dim_IntList", h, [0, 1, 2]))


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("batch", [64, 4096])
def test_clusters_lose_nothing_against_single_ops(batch: int, sizes: tuple[int, ...]):
    for graph in (blocks_of(2), stack(3, hidden=4096, batch=batch)):
        fused, single = (best_s(graph, clusters(graph, rows_for), *sizes) for clusters in (fuse, trivial_clusters))
        assert fused == pytest.approx(single, rel=1e-3)


@pytest.mark.parametrize("seed", range(16))
def test_clusters_of_random_programs_lose_little(seed: int):
    graph = random_graph(random.Random(seed), 14, size=2048)
    fused, single = (best_s(graph, clusters(graph, rows_for), 4) for clusters in (fuse, trivial_clusters))
    assert single <= fused * (1 + 1e-5) and fused <= 1.1 * single


def test_fused_plans_cost_less_than_plans_over_single_ops():
    graph = blocks_of(2)
    fused, single = (
        best_s(graph, clusters(graph, rows_for), 2, 4, arithmetic_only=False) for clusters in (fuse, trivial_clusters)
    )
    assert fused < single


@pytest.mark.parametrize("layers", [3, 6])
def test_tying_repeated_blocks_loses_nothing(layers: int):
    graph = stack(layers, hidden=4096, batch=4096)
    free = fuse(graph, rows_for)
    assert best_s(graph, fold(free), 2, 4) == pytest.approx(best_s(graph, free, 2, 4), rel=1e-3)
