"""Logical meshes: which there are, what is under their axes, what users may say about them, and the search over them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.planner.cost import Topology
from meshwright.planner.cost.links import NDR, NVLINK4
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import R, S
from meshwright.planner.meshes import MeshRequest, factorisations, finer, logical_meshes
from meshwright.planner.on_mesh import OnMesh
from meshwright.planner.program import Program
from meshwright.planner.search import Options, make_plan, search_plan
from meshwright.planner.solve.optimise import Effort
from meshwright.target import target_of
from tests.helpers.models import ZOO
from tests.helpers.prepared import captured, toy_hardware

EXACT = Effort(gap=1e-9, nodes=10_000)


def sizes_of(text: str, **request) -> list[tuple[int, ...]]:
    target = target_of(text)
    return [m.mesh.sizes for m in logical_meshes(target.topology, MeshRequest(**request), search=target.searched)]


# --- which meshes there are ---------------------------------------------------------------------------------------


def test_factorisations_are_all_ordered_products():
    for devices, axes in itertools.product(range(1, 25), (1, 2, 3)):
        found = factorisations(devices, axes)
        tuples = itertools.chain.from_iterable(itertools.product(range(2, devices + 1), repeat=n) for n in range(1, axes + 1))
        expected = [t for t in tuples if math.prod(t) == devices] or [(1,)]
        assert sorted(found) == sorted(expected)


def test_a_cluster_is_arranged_in_every_factorisation_the_given_one_first():
    assert sizes_of("8x8xH100") == [(8, 8), (64,), (2, 32), (4, 16), (16, 4), (32, 2)]
    assert sizes_of("1x7xH100") == [(7,)]
    assert sizes_of("7x13xH100") == [(7, 13), (91,), (13, 7)]
    assert sizes_of("1x1xH100") == [(1,)]


def test_axes_of_size_one_are_no_axes():
    topology = Topology.of_machines(MeshShape.of(1, 4), "CPU")
    assert [m.mesh.sizes for m in logical_meshes(topology, MeshRequest(), search=True)] == [(4,), (2, 2)]
    assert [m.mesh.sizes for m in logical_meshes(topology, MeshRequest("given"), search=True)] == [(1, 4)]


def test_a_mesh_can_be_fixed():
    assert sizes_of("8x8xH100", logical_mesh="given") == [(8, 8)]
    assert sizes_of("8x8xH100", logical_mesh=(4, 2, 8)) == [(4, 2, 8)]
    assert sizes_of("8x8xH100", logical_mesh={"outer": 16, "tp": 4}) == [(16, 4)]
    assert sizes_of("8x8xH100", pinned_axes=2) == [(8, 8)]
    assert sizes_of("8x8xH100", pinned_axes=1, logical_mesh="search") == [(64,)]


def test_axes_that_are_named_are_for_what_they_are_called_where_that_is_asked():
    topology = target_of("8x8xH100").topology
    named = {"data": 8, "x": 2, "tp": 4}
    (free,) = logical_meshes(topology, MeshRequest(named), search=True)
    (used,) = logical_meshes(topology, MeshRequest(named, respect_axis_names=True), search=True)
    assert free.mesh == used.mesh == MeshShape((8, 2, 4), ("data", "x", "tp")) and free.hardware == used.hardware
    assert not free.rules and used.demand == "the axis names"
    assert [r.batch for r in used.rules] == ["batch only", "free", "whole"]
    given = target_of(MeshShape((4, 2), ("fsdp", "tp")), "H100").topology
    (as_given,) = logical_meshes(given, MeshRequest("given", respect_axis_names=True), search=True)
    assert [r.batch for r in as_given.rules] == ["batch only", "whole"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"no axis of mesh 8x8 \(node, device\) is called dp, data, fsdp, cp, tp, model: name the axes, as logical_mesh="),
        ({"logical_mesh": {"a": 8, "b": 8}}, r"no axis of mesh 8x8 \(a, b\) is called dp"),
        ({"logical_mesh": {"dp": 8, "tp": 4}}, r"logical_mesh 8x4 has 32 devices, but there are 64"),
        ({"logical_mesh": {"dp": 64, "tp": 0}}, r"logical_mesh 64x0 has 0 devices, but there are 64"),
        ({"logical_mesh": {"pp": 8, "tp": 8}}, r"is the mesh inside a stage: say how many stages with degrees=\{'pp': ...\}"),
        ({"logical_mesh": {8: 8, "tp": 8}}, r"names an axis 8: names are words"),
        ({"logical_mesh": (8, 8)}, r"logical_mesh and respect_axis_names each say which logical mesh to use"),
        ({"logical_mesh": {"dp": 8, "tp": 8}, "degrees": {"tp": 8}}, r"degrees and logical_mesh and respect_axis_names each say"),
    ],
)
def test_axis_names_that_say_nothing_or_something_else_are_refused(request_, message):
    with pytest.raises(InputError, match=message):
        sizes_of("8x8xH100", respect_axis_names=True, **request_)


def test_sizes_that_were_written_down_are_not_searched_unless_asked():
    target = target_of(MeshShape.of(2, 2), "CPU")
    for said, expected in ((None, [(2, 2)]), ("search", [(2, 2), (4,)])):
        found = logical_meshes(target.topology, MeshRequest(said), search=target.searched)
        assert [m.mesh.sizes for m in found] == expected


# --- links --------------------------------------------------------------------------------------------------------


def test_an_axis_has_the_link_of_its_worst_group():
    nodes_of_4 = Topology.of_machines(MeshShape.of(3, 4), "H100", 4)
    (uneven, inner) = nodes_of_4.hardware(MeshShape.of(4, 3)).links
    assert inner.name == "NVLink4 + 1x InfiniBand NDR 400", "{3, 4, 5} is in two nodes, though {0, 1, 2} is in one"
    assert inner.bytes_per_s == NDR.bytes_per_s
    assert uneven.name.endswith("InfiniBand NDR 400")
    assert not nodes_of_4.inside((4, 3), 1) and nodes_of_4.inside((6, 2), 1)


def test_links_of_a_record_are_split_and_merged():
    fast, slow, slower = (Link(name, rate, 1e-6, "made up") for name, rate in (("a", 100e9), ("b", 10e9), ("c", 1e9)))
    device = target_of("1x1xCPU").hardware.device
    topology = Topology.of_record(MeshShape.of(2, 2, 4), Hardware(device, (slower, slow, fast)))
    assert topology.hardware(MeshShape.of(2, 2, 4)).links == (slower, slow, fast)
    assert topology.hardware(MeshShape.of(2, 2, 2, 2)).links == (slower, slow, fast, fast)
    (outer, inner) = topology.hardware(MeshShape.of(2, 8)).links
    assert outer == slower and inner.bytes_per_s == 40e9, "four devices of each run side by side over b"
    (all_of_them,) = topology.hardware(MeshShape.of(16)).links
    assert all_of_them.bytes_per_s == 8e9, "eight over c"
    (straddling, _) = topology.hardware(MeshShape.of(8, 2)).links
    assert straddling.bytes_per_s == 4e9, "{0, 2, ..., 14}: four over c"


def test_ranks_out_of_order_have_the_links_of_where_they_are():
    swapped = Topology.of_machines(MeshShape.of(2, 2), "H100", 2, numbers=(0, 2, 1, 3))
    assert [link.name for link in swapped.hardware(MeshShape.of(2, 2)).links] == ["NVLink4", "InfiniBand NDR 400"]
    assert not swapped.ascending((4,)) and swapped.ascending((2, 2))


# --- degrees ------------------------------------------------------------------------------------------------------


def test_degrees_fix_axes_in_every_order_and_leave_the_rest():
    target = target_of("8x8xH100")
    found = logical_meshes(target.topology, MeshRequest(degrees={"tp": 8}), search=True)
    assert [(m.mesh.sizes, m.mesh.names) for m in found] == [((8, 8), ("axis0", "tp")), ((8, 8), ("tp", "axis0"))]
    assert {(r.batch, r.use) for m in found for r in m.rules} == {("whole", "free"), ("free", "whole")}
    both = logical_meshes(target.topology, MeshRequest(degrees={"dp": 16, "model": 4}), search=True)
    assert sorted((m.mesh.sizes, m.mesh.names) for m in both) == [((4, 16), ("tp", "dp")), ((16, 4), ("dp", "tp"))]
    left = logical_meshes(target.topology, MeshRequest(degrees={"dp": 8, "cp": 2}), search=True)
    assert len(left) == 6 and all(sorted(m.mesh.names) == ["cp", "dp", "tp"] for m in left)
    all_tp = logical_meshes(target.topology, MeshRequest(degrees={"dp": 1, "cp": 1}), search=True)
    assert sorted(m.mesh.sizes for m in all_tp) == sorted(factorisations(64, 2))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, r"degrees tp=3 = 3 do not divide the 64 devices of 8x8: choose divisors of 64"),
        ({"tp": 16, "dp": 8}, r"degrees tp=16 x dp=8 = 128 do not divide the 64 devices"),
        ({"tp": 8, "dp": 2, "cp": 2}, r"degrees tp=8 x dp=2 x cp=2 = 32, but 8x8 has 64 devices: the product must be 64"),
        ({"tq": 8}, r"degree 'tq' is not known: use dp, cp, tp"),
        ({"pp": 2}, r"degree 'pp' is not planned yet: use dp, cp, tp"),
        ({"tp": 0}, r"degree tp=0 must be a whole number of devices, at least 1"),
        ({"tp": 2.0}, r"degree tp=2.0 must be a whole number"),
        ({"tp": 2, "model": 2}, r"name 'tp' twice"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_numbers(degrees, message):
    with pytest.raises(InputError, match=message):
        sizes_of("8x8xH100", degrees=degrees)


def test_only_one_thing_may_say_which_mesh():
    with pytest.raises(InputError, match="degrees and logical_mesh each say which logical mesh to use"):
        MeshRequest((8, 8), {"tp": 8})
    with pytest.raises(InputError, match="degrees and respect_axis_names each say"):
        MeshRequest(None, {"tp": 8}, True)
    with pytest.raises(InputError, match="logical_mesh='best' is not known: use 'search', 'given'"):
        MeshRequest("best")
    with pytest.raises(
        InputError, match=r"logical_mesh 8x4 has 32 devices, but there are 64 \(8x8\): give sizes whose product is 64"
    ):
        sizes_of("8x8xH100", logical_mesh=(8, 4))


# --- the search ---------------------------------------------------------------------------------------------------


def searched(program: Capture, devices: int, effort: Effort = EXACT, **options) -> Plan:
    """The best plan on any arrangement of toy devices in nodes of half of them."""
    shape = MeshShape.of(2, devices // 2) if devices % 2 == 0 else MeshShape.of(devices)
    topology = Topology.of_record(shape, toy_hardware(shape))
    meshes = logical_meshes(topology, MeshRequest(), search=True)
    return search_plan(program, meshes, Options(effort=effort, alternatives=False, **options))


def exhaustive(program: Capture, devices: int, **options) -> float:
    """Step time of the best plan when every mesh is solved by itself."""
    shape = MeshShape.of(2, devices // 2) if devices % 2 == 0 else MeshShape.of(devices)
    topology = Topology.of_record(shape, toy_hardware(shape))
    times = []
    for sizes in factorisations(devices, 2):
        mesh = MeshShape.of(*sizes)
        try:
            plan = make_plan(program, mesh, topology.hardware(mesh), alternatives=False, effort=EXACT, **options)
        except (InfeasibleError, InputError):
            continue
        times.append(plan.predicted.step_time_s)
    return min(times)


@pytest.mark.parametrize(("name", "devices"), [("mlp", 4), ("mlp", 8), ("mlp", 12), ("tied", 8), ("gpt2", 4)])
@pytest.mark.parametrize("strategy", ["auto", "tp"])
def test_the_search_finds_what_solving_every_mesh_finds(name: str, devices: int, strategy: str):
    program = captured(name)
    plan = searched(program, devices, strategy=strategy)
    assert plan.predicted.step_time_s == pytest.approx(exhaustive(program, devices, strategy=strategy), rel=1e-5)
    for tried in plan.meshes:
        if tried.verdict == "excluded":
            assert tried.bound_s is not None and tried.bound_s >= plan.objective_s * (1 - 1e-6)


def test_bounds_are_below_what_solving_gives():
    program = captured("gpt2")
    shape = MeshShape.of(2, 4)
    topology = Topology.of_record(shape, toy_hardware(shape))
    prepared = Program.of(program, topology.hardware(shape), Options())
    for where in logical_meshes(topology, MeshRequest(), search=True):
        on = OnMesh(prepared, where)
        found = on.solve("auto")
        assert on.floor_s <= found.bound_s <= found.objective_s


def test_what_is_excluded_is_excluded_within_the_gap_that_the_plan_states():
    plan = searched(captured("gpt2"), 8, Effort())
    assert plan.meshes[0].verdict == "chosen" and plan.meshes[0].sizes == plan.mesh.sizes
    assert {m.sizes for m in plan.meshes} == {(8,), (2, 4), (4, 2)}
    bounds = [m.bound_s for m in plan.meshes if m.bound_s is not None]
    assert plan.bound_s == pytest.approx(min(bounds), rel=1e-9)
    assert plan.gap <= Effort().gap
    assert Plan.from_json(plan.to_json()).meshes == plan.meshes


def test_auto_is_not_slower_than_named_strategies_on_their_own_meshes():
    shape = MeshShape.of(2, 4)
    topology = Topology.of_record(shape, toy_hardware(shape))
    meshes = logical_meshes(topology, MeshRequest(), search=True)
    plan = search_plan(captured("gpt2"), meshes, Options())
    for other in plan.alternatives:
        assert other.fits and other.step_time_s >= plan.predicted.step_time_s
        assert math.prod(other.mesh) == 8
        mesh = MeshShape.of(*other.mesh)
        alone = make_plan(captured("gpt2"), mesh, topology.hardware(mesh), strategy=other.strategy, alternatives=False)
        assert other.step_time_s == pytest.approx(alone.predicted.step_time_s, rel=3e-2)


def test_degrees_are_kept():
    target = target_of("2x4xH100")
    program = captured("gpt2")
    meshes = logical_meshes(target.topology, MeshRequest(degrees={"tp": 4}), search=True)
    plan = search_plan(program, meshes, Options(alternatives=False))
    tp = plan.mesh.names.index("tp")
    assert plan.mesh.sizes[tp] == 4 and plan.mesh.num_devices == 8
    for i in program.graph.inputs_of("input"):
        assert plan.inputs[i.value.name][tp] == R, "the batch is whole over the axis for tensor parallelism"
    meshes = logical_meshes(target.topology, MeshRequest(degrees={"dp": 8}), search=True)
    plan = search_plan(program, meshes, Options(alternatives=False))
    for i in program.graph.inputs_of("input"):
        assert plan.inputs[i.value.name] in ((S(0),), (R,))


# --- what cannot be divided ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Dims that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


ODD = {"x": torch.zeros(3, 7)}


def test_one_device_is_a_plan_without_collectives():
    plan = mw.plan(ZOO["mlp"].model(), "1x1xH100", ZOO["mlp"].batch())
    assert plan.mesh.sizes == (1,) and plan.collectives == ()
    assert all(a.fits for a in plan.alternatives)


@pytest.mark.parametrize("cluster", ["1x7xH100", "1x13xCPU", "7x1xH100", "13x7xH100"])
def test_a_prime_number_of_devices_is_planned(cluster: str):
    plan = mw.plan(ZOO["mlp"].model(), cluster, ZOO["mlp"].batch(), alternatives=False)
    assert plan.mesh.num_devices == target_of(cluster).mesh.num_devices
    assert any("does not divide over all" in note for note in plan.notes)


def test_dims_that_nothing_divides_are_replicated():
    plan = mw.plan(Odd(), "2x4xH100", ODD, on_missing_rule="error")
    assert {a.strategy: a.fits for a in plan.alternatives} == {"ddp": False, "zero1": False, "zero3": False, "tp": True}
    assert "3 samples (shape [3, 7]), which 8 does not divide" in plan.alternatives[0].reason


def test_a_strategy_that_no_mesh_can_have_is_refused_with_its_reason():
    with pytest.raises(
        InputError, match=r"strategy 'ddp' shards the batch over 8 devices of mesh 8, but input 'x' has 3 samples"
    ):
        mw.plan(Odd(), "2x4xH100", ODD, strategy="ddp")


def test_a_limit_under_the_parameters_is_infeasible_by_category_and_size():
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    with pytest.raises(InfeasibleError, match=r"no plan on mesh .* fits .* over the limit by") as caught:
        mw.plan(model, "1x2xH100", (torch.zeros(2, 1024),), memory_limit="1MiB")
    assert caught.value.binding == "memory" and caught.value.needed_bytes > 2 * 2**20


def test_a_degree_says_what_its_axis_is_for_whatever_the_strategy():
    plan = mw.plan(ZOO["mlp"].model(), "1x4xH100", ZOO["mlp"].batch(), strategy="ddp", degrees={"tp": 2})
    tp = plan.mesh.names.index("tp")
    weights = {name: p for name, p in plan.inputs.items() if name.startswith("parameter")}
    assert plan.mesh.sizes[tp] == 2 and any(p[tp].is_shard for p in weights.values())
    assert all(p[1 - tp].is_replicate for p in weights.values()), "ddp over the other axis"


def test_the_device_is_not_needed_for_its_links():
    device = Device("D", 1 << 30, 1e9, {"float32": 1e9}, {"float32": 1.0}, 0.0, "made up")
    assert Topology.of_record(MeshShape.of(4), Hardware(device, (NVLINK4,))).hardware(MeshShape.of(2, 2)).links == (
        NVLINK4,
        NVLINK4,
    )


# --- three axes ---------------------------------------------------------------------------------------------------


def test_the_best_mesh_is_split_and_tried_with_three_axes():
    shape = MeshShape.of(2, 4)
    topology = Topology.of_record(shape, toy_hardware(shape))
    where = logical_meshes(topology, MeshRequest("given"), search=True)[0]
    assert [m.mesh.sizes for m in finer(topology, where)] == [(2, 2, 2)]
    program, options = captured("mlp"), Options(effort=EXACT)
    two = search_plan(program, (where,), options)
    three = search_plan(program, (where,), options, lambda where: finer(topology, where))
    assert {m.sizes for m in three.meshes} == {(2, 4), (2, 2, 2)}
    assert three.predicted.step_time_s <= two.predicted.step_time_s
    if three.mesh.num_axes == 2:
        assert three.meshes[1].verdict in ("not better", "slower")
    else:
        alone = make_plan(program, three.mesh, topology.hardware(three.mesh), effort=EXACT, alternatives=False)
        assert alone.predicted.step_time_s <= three.predicted.step_time_s * (1 + 1e-9)


def test_a_given_mesh_of_three_axes_is_among_the_finer_ones():
    topology = Topology.of_machines(MeshShape.of(3, 2, 2, names=("a", "b", "c")), "CPU")
    found = logical_meshes(topology, MeshRequest(), search=True)
    assert [m.mesh.sizes for m in found] == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    by_sizes = {m.mesh.sizes: m for m in found}
    finest = finer(topology, by_sizes[3, 4])
    assert finest[0].mesh.names == ("a", "b", "c") and finest[0].mesh.sizes == (3, 2, 2)
    assert finer(topology, by_sizes[12,]) == ()
