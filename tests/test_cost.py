"""Costs: against published measurements, against hand counts, and that they grow where they must."""

from __future__ import annotations

import csv
import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshwright.planner.cost import DEVICES, CostModel, device_for, hardware_for
from meshwright.planner.cost.comm import collective_s
from meshwright.planner.cost.formulas import FORMULAS, expression, symbols, text
from meshwright.planner.cost.links import GLOO, HDR, NDR, NVLINK3, NVLINK4
from meshwright.planner.fuse import fuse
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.mesh import Cluster, MeshShape
from meshwright.planner.ir.spec import P, R, S
from meshwright.planner.rules import rows_for
from tests.helpers.sketch import Sketch

DATA = Path(__file__).parents[2] / "shared" / "data" / "collectives.csv"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


# --- links ------------------------------------------------------------------------------------------------------------


def published() -> list[tuple[str, Link, str, int, int, float]]:
    """(series, link, kind, group, bytes, measured seconds) of the rows that one of our links describes."""
    links = {"H100-SXM": NVLINK4, "H200-SXM": NVLINK4, "A100": NVLINK3}
    rows = []
    for r in csv.DictReader(DATA.open()):
        plain = r["kind"] in ("measured", "measured_fit") and r["scope"] == "intra" and r["gpu"] in links
        if (
            not plain
            or r["collective"] not in KINDS
            or not r["size_bytes"]
            or "XLA" in r["size_convention"]
            or "NVLS_ENABLE=0" in r["algo"]
        ):
            continue
        n, size = int(r["num_gpus"]), int(r["size_bytes"])
        if r["time_us"]:
            seconds = float(r["time_us"]) * 1e-6
        else:
            volume = FORMULAS[f"{r['collective']}_volume"](size, n)
            seconds = volume / (float(r["busbw_GBps"]) * 1e9)
        rows.append((f"{r['gpu']} x{n} {r['collective']}", links[r["gpu"]], r["collective"], n, size, seconds))
    return rows


@pytest.mark.skipif(not DATA.exists(), reason="published collective times are not beside the repository")
def test_collectives_agree_with_published_times(capsys: pytest.CaptureFixture[str]):
    errors: dict[str, list[float]] = {}
    for series, link, kind, n, size, seconds in published():
        errors.setdefault(series, []).append(abs(collective_s(link, kind, n, size) / seconds - 1))
    everything = [e for es in errors.values() for e in es]
    with capsys.disabled():
        print("\ncollective times against published ones: median and largest relative error")
        for series, es in errors.items():
            print(f"  {series:32} {len(es):3} rows {statistics.median(es):7.1%} {max(es):7.1%}")
        print(f"  {'all':32} {len(everything):3} rows {statistics.median(everything):7.1%} {max(everything):7.1%}")
    assert len(everything) > 100
    assert statistics.median(everything) < 0.12
    assert max(statistics.median(es) for es in errors.values()) < 0.3


@pytest.mark.skipif(not DATA.exists(), reason="published collective times are not beside the repository")
def test_collectives_between_nodes_agree_with_the_librarys_own_table():
    """NCCL prints latency and bandwidth of every algorithm at one rank per node; ours are those numbers."""
    ratios = []
    for r in csv.DictReader(DATA.open()):
        if r["kind"] != "nccl_internal_tuning_table" or r["gpus_per_node"] != "1" or "LL128" not in r["algo"]:
            continue
        n, small, large = int(r["num_nodes"]), float(r["time_us"]) * 1e-6, 1 << 32
        kind = "all_reduce" if r["collective"] == "all_reduce" else "all_gather"
        if kind == "all_gather":
            ratios.append(collective_s(NDR, kind, n, 1) / small)
            ratios.append(collective_s(NDR, kind, n, large) / (large / (float(r["algbw_GBps"]) * 1e9)))
    assert len(ratios) == 10
    assert all(0.7 < x < 1.15 for x in ratios), ratios


@given(
    st.sampled_from([NVLINK4, NVLINK3, NDR, HDR, GLOO, Link("of a user", 1e9, 1e-5, "measured")]),
    st.sampled_from(KINDS),
    st.integers(2, 64),
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 34),
)
@settings(deadline=None, max_examples=200)
def test_a_larger_collective_never_takes_less_time(link: Link, kind: str, n: int, a: int, b: int):
    small, large = sorted((a, b))
    assert 0 < collective_s(link, kind, n, small) <= collective_s(link, kind, n, large)


def test_large_reductions_cost_less_where_the_result_stays_scattered():
    for link, n in itertools.product((NVLINK4, NVLINK3, NDR, HDR), (2, 8, 64)):
        for kind in ("reduce_scatter", "all_gather"):
            assert collective_s(link, kind, n, 1 << 30) < collective_s(link, "all_reduce", n, 1 << 30)


def test_each_axis_gets_the_link_under_it():
    def links(*sizes: int, device: str = "H100", cluster: str | None = None) -> list[str]:
        parsed = None if cluster is None else Cluster.parse(cluster)
        return [link.name for link in hardware_for(MeshShape.of(*sizes), device, parsed).links]

    assert links(8, 8) == ["InfiniBand NDR 400", "NVLink4"]
    assert links(4, 2, 8) == ["InfiniBand NDR 400", "InfiniBand NDR 400", "NVLink4"]
    assert links(8, 2, 4) == ["InfiniBand NDR 400", "NVLink4", "NVLink4"]
    assert links(64) == ["NVLink4 + 8x InfiniBand NDR 400"]
    assert links(16, 4) == ["NVLink4 + 2x InfiniBand NDR 400", "NVLink4"]
    assert links(2, 4, device="A100", cluster="2x4xA100") == ["InfiniBand HDR 200", "NVLink3"]
    assert links(2, 2, device="cpu") == ["gloo", "gloo"]


def test_an_axis_over_several_nodes_runs_at_its_nics_together():
    (link,) = hardware_for(MeshShape.of(64), "H100").links
    assert link.bytes_per_s == min(NVLINK4.bytes_per_s, 8 * NDR.bytes_per_s)
    (outer, _) = hardware_for(MeshShape.of(16, 4), "H100").links
    assert outer.bytes_per_s == 2 * NDR.bytes_per_s
    assert NVLINK4.latency_s < outer.latency_s < NDR.latency_s


def test_devices_are_found_by_alias_in_any_case():
    assert device_for("a100").name == device_for("A100-80GB").name == "A100-80"
    assert device_for("h100-SXM") is DEVICES["H100"]
    assert all(d.source and d.name == name for name, d in DEVICES.items())


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(InputError, match=r"device 'TPU-v4' is not known; known are H100, H200, A100-80, CPU"):
        hardware_for(MeshShape.of(4), "TPU-v4")


# --- redistributions --------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> CostModel:
    mesh = MeshShape.of(4, 8)
    return CostModel(hardware_for(mesh, "H100"), mesh)


def test_a_step_counts_the_larger_of_its_input_and_output(model: CostModel):
    v = Value("v", (64, 32), torch.float32)
    whole = 64 * 32 * 4
    assert model.step_s(v, (S(0), R), 0, R)[:2] == ("all_gather", whole)
    assert model.step_s(v, (S(0), S(1)), 0, R)[:2] == ("all_gather", whole // 8)
    assert model.step_s(v, (P, S(1)), 0, S(0))[:2] == ("reduce_scatter", whole // 8)
    assert model.step_s(v, (R, P), 1, R)[:2] == ("all_reduce", whole)
    assert model.step_s(v, (R, S(0)), 1, S(1))[:2] == ("all_to_all", whole // 8)
    kind, _, seconds = model.step_s(v, (R, R), 1, S(1))
    assert kind == "slice" and 0 < seconds < 1e-6
    with pytest.raises(ValueError, match="no step changes"):
        model.step_s(v, (R, R), 1, P)


def test_an_uneven_gather_costs_its_padded_size(model: CostModel):
    v = Value("v", (30, 32), torch.float32)
    assert model.step_s(v, (R, S(0)), 1, R)[1] == 30 * 32 * 4
    assert model.step_s(v, (S(0), S(0)), 1, R)[1] == 8 * 32 * 4


def test_gathering_another_dim_than_the_first_costs_a_copy_more(model: CostModel):
    v = Value("v", (4096, 4096), torch.float32)
    copy = 2 * v.size_bytes / 3350e9
    first, second = (model.step_s(v, (R, S(d)), 1, R)[2] for d in (0, 1))
    assert second - first == pytest.approx(copy)


def test_no_copy_is_counted_where_the_cut_is_one_stretch_of_memory(model: CostModel):
    """``S(1)`` of ``[1, S, H]``, and of a batch of which each rank has one element, as plain dims and as groups."""
    one, eight = Value("v", (1, 4096, 4096), torch.float32), Value("v", (8, 512, 4096), torch.float32)
    rows = Value("v", (4096, 4096), torch.float32)
    plain = model.step_s(rows, (R, S(0)), 1, R)[2]
    assert model.step_s(one, (R, S(1)), 1, R)[2] == pytest.approx(plain)
    assert model.step_s(eight, (R, S(1)), 1, R)[2] > plain == pytest.approx(model.step_s(rows, (R, S(0, 1)), 1, R)[2])
    assert model.step_s(eight, (S(0), S(1)), 1, R)[2] == pytest.approx(model.step_s(rows, (S(0), S(0, 8)), 1, R)[2])
    assert model.step_s(rows, (R, S(0, 8)), 1, R)[2] > plain


def test_an_axis_of_one_device_costs_nothing():
    mesh = MeshShape.of(1, 4)
    model = CostModel(hardware_for(mesh, "H100"), mesh)
    assert model.step_s(Value("v", (8,), torch.float32), (P, R), 0, R)[2] == 0.0


# --- kernels ----------------------------------------------------------------------------------------------------------


def one_op(target: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, rest: tuple = ()) -> OpGraph:
    s = Sketch()
    out = s.op(target, *(s.placeholder(f"x{i}", shape, "input", dtype) for i, shape in enumerate(shapes)), *rest)
    return s.done(out[0] if isinstance(out, tuple) else out)


def costs_of(graph: OpGraph, mesh: MeshShape, device: str = "H100") -> dict[str, float]:
    """Seconds of the last cluster by candidate: ``"S(0),R R,S(1)"`` is a row per axis."""
    model = CostModel(hardware_for(mesh, device), mesh)
    *_, last = sorted(fuse(graph, rows_for).clusters, key=lambda c: c.source is None)
    candidates = list(itertools.product(last.rows, repeat=mesh.num_axes))
    names = [" ".join(",".join(map(str, row.ins or (row.rest,))) for row in c) for c in candidates]
    return dict(zip(names, model.cluster_costs(last, candidates), strict=True))


def test_a_large_matmul_runs_near_the_measured_ceiling():
    seconds = costs_of(one_op("aten.mm.default", (8192, 8192), (8192, 8192)), MeshShape.of(2))["R,R"]
    achieved = 2 * 8192**3 / seconds / 1e12
    assert 0.93 * 794.5 < achieved < 794.5


def test_sharding_any_factor_of_a_matmul_divides_its_time():
    costs = costs_of(one_op("aten.mm.default", (8192, 8192), (8192, 8192)), MeshShape.of(2, 2))
    for split in ("S(0),R R,R", "R,S(1) R,R", "S(1),S(0) R,R"):
        assert costs[split] == pytest.approx(costs["R,R R,R"] / 2, rel=0.05)
    assert costs["S(0),R R,S(1)"] == pytest.approx(costs["R,R R,R"] / 4, rel=0.1)


def test_a_small_matmul_is_less_efficient_than_a_large_one():
    small = costs_of(one_op("aten.mm.default", (256, 256), (256, 256)), MeshShape.of(2))["R,R"] - 4e-6
    large = costs_of(one_op("aten.mm.default", (4096, 4096), (4096, 4096)), MeshShape.of(2))["R,R"] - 4e-6
    assert small > 3 * large / 16**3


def test_attention_counts_its_flops_and_half_of_them_where_causal():
    shape = (4, 32, 4096, 128)
    full, causal = (
        costs_of(
            one_op("aten._scaled_dot_product_flash_attention_for_cpu.default", shape, shape, shape, rest=(0.0, c)),
            MeshShape.of(2),
        )
        for c in (False, True)
    )
    flops = 4 * 4 * 32 * 4096**2 * 128
    assert full["R,R,R"] == pytest.approx(flops / (794.5e12 * 0.75) + 4e-6, rel=1e-3)
    assert causal["R,R,R"] == pytest.approx(full["R,R,R"] / 2, rel=0.01)
    heads = next(v for k, v in full.items() if k == "S(1),S(1),S(1)")
    assert heads == pytest.approx(full["R,R,R"] / 2, rel=0.01)


def test_causal_attention_of_a_stretch_of_queries_costs_what_its_last_rank_does():
    """The last of 4 stretches sees 3 others and half of its own: 3.5/4 of the keys, where all queries see half.

    In 8 stripes its queries see all keys before the ends of 8 groups, 9/16 on average, less half of their own 32nd.
    """
    shape = (4, 32, 4096, 128)
    op = one_op("aten._scaled_dot_product_flash_attention_for_cpu.default", shape, shape, shape, rest=(0.0, True))
    costs = costs_of(op, MeshShape.of(4))
    merge = 3 * 4 * 32 * 1024 * 128 * 2 / 3350e9 + 7 * 4e-6
    striped = 5 * 4 * 32 * 1024 * 128 * 2 / 3350e9 + 8 * 7 * 4e-6
    assert costs["S(2;8),R,R"] - striped - 4e-6 == pytest.approx((costs["R,R,R"] - 4e-6) / 4 * (9 / 16 - 1 / 64) / 0.5, rel=1e-3)
    assert costs["S(2),R,R"] - merge - 4e-6 == pytest.approx((costs["R,R,R"] - 4e-6) / 4 * (3.5 / 4) / 0.5, rel=1e-3)


def test_a_convolution_counts_every_tap():
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    conv = one_op("aten.convolution.default", (64, 256, 56, 56), (256, 256, 3, 3), rest=rest)
    seconds = costs_of(conv, MeshShape.of(2))["R,R"]
    assert 2 * 64 * 256 * 56 * 56 * 256 * 9 / seconds / 1e12 == pytest.approx(794.5, rel=0.2)


def test_element_wise_work_costs_its_traffic_and_views_cost_nothing():
    seconds = costs_of(one_op("aten.add.Tensor", (8192, 8192), (8192, 8192)), MeshShape.of(2))
    traffic = 3 * 8192 * 8192 * 2 / 3350e9
    assert seconds["R,R"] == pytest.approx(traffic + 4e-6)
    assert seconds["S(0),S(0)"] == pytest.approx(traffic / 2 + 4e-6)
    assert set(costs_of(one_op("aten.permute.default", (8, 8), rest=([1, 0],)), MeshShape.of(2)).values()) == {0.0}


def test_an_embedding_reads_only_the_rows_it_returns():
    s = Sketch()
    table, index = s.placeholder("w", (1 << 17, 4096), "input"), s.placeholder("i", (64,), "input", torch.int64)
    costs = costs_of(s.done(s.op("aten.embedding.default", table, index)), MeshShape.of(2))
    assert costs["R,R"] < 1e-5


def test_the_cast_of_a_parameter_is_paid_where_it_rests():
    s = Sketch()
    w = s.parameter("w", (4096, 4096))
    s.op("aten.mm.default", *[s.op("aten._to_copy.default", w, dtype=torch.bfloat16)] * 2)
    cluster = next(c for c in fuse(s.done(), rows_for).clusters if c.name == "w")
    mesh = MeshShape.of(8)
    model = CostModel(hardware_for(mesh, "H100"), mesh)
    by_rest = {str(row.rest): model.cluster_s(cluster, (row,)) for row in cluster.rows}
    assert by_rest["R"] == pytest.approx(4096 * 4096 * 6 / 3350e9 + 4e-6)
    assert by_rest["S(0)"] == pytest.approx(4096 * 4096 * 6 / 8 / 3350e9 + 4e-6)


@pytest.mark.parametrize("device", DEVICES)
@given(st.lists(st.integers(1, 64), min_size=3, max_size=3), st.integers(0, 2))
@settings(deadline=None, max_examples=25)
def test_a_larger_matmul_never_takes_less_time(device: str, mkn: list[int], grow: int):
    larger = [32 * n + 32 * (i == grow) for i, n in enumerate(mkn)]
    times = [
        costs_of(one_op("aten.mm.default", (m, k), (k, n)), MeshShape.of(2), device)["R,R"]
        for m, k, n in ([32 * n for n in mkn], larger)
    ]
    assert times[0] <= times[1]


def test_sharding_a_cluster_never_costs_more_than_replicating_it():
    s = Sketch()
    x, w = s.input("x", (64, 128)), s.parameter("w", (128, 256))
    y = s.op("aten.gelu.default", s.op("aten.mm.default", x, w))
    fused = fuse(s.done(s.op("aten.sum.dim_IntList", y, [1])), rows_for)
    mesh = MeshShape.of(2, 4)
    model = CostModel(hardware_for(mesh, "A100"), mesh)
    for c in fused.clusters:
        costs = model.cluster_costs(c, list(itertools.product(c.rows, repeat=2)))
        assert np.all(costs <= costs[0] * (1 + 1e-9))
        assert model.cluster_s(c, (c.rows[-1], c.rows[0])) == costs[(len(c.rows) - 1) * len(c.rows)]


def test_formulas_can_be_read():
    assert text("matmul_flops") == "matmul_flops = 2*b*k*m*n"
    assert all(name in text(name) for name in FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_read_of_a_formula_is_what_is_computed(name: str):
    found = symbols(name)
    numbers = {argument: 3.0 + 2**k for k, argument in enumerate(found)}
    shown = expression(name).subs({symbol: numbers[argument] for argument, symbol in found.items()})
    assert float(shown) == pytest.approx(float(FORMULAS[name](**numbers)), rel=1e-12)
    assert expression(name).free_symbols == set(found.values())
