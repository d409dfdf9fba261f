"""A plan over a logical mesh runs on the user's ranks, whatever shape their mesh has; and trains as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.runtime.mesh import logical_mesh, make_mesh
from tests.helpers.equality import Trial, differences, reference_of, try_all
from tests.helpers.models import ALL, ZOO
from tests.helpers.prepared import captured, planned, reference, trial
from tests.helpers.ranks import run_ranks
from tests.helpers.threads import run_threads

MLP = ZOO["mlp"]


# --- arranging ranks ----------------------------------------------------------------------------------------------


def _arranged(rank: int) -> dict[str, object]:
    line, square = make_mesh("cpu", (4,)), make_mesh("cpu", (2, 2), ("dp", "tp"))
    as_square = logical_mesh(line, mw.MeshShape.of(2, 2))
    sums = []
    for axis in range(2):
        x = torch.tensor([rank])
        dist.all_reduce(x, group=as_square.get_group(axis))
        sums.append(x.item())
    refused = ""
    try:
        logical_mesh(line, mw.MeshShape.of(3, 2))
    except mw.RuntimeMismatchError as e:
        refused = str(e)
    return {
        "square": as_square.mesh.tolist(),
        "names": as_square.mesh_dim_names,
        "sums": sums,
        "line": logical_mesh(square, mw.MeshShape.of(4)).mesh.tolist(),
        "same": logical_mesh(square, mw.MeshShape.of(2, 2)) is square,
        "refused": refused,
    }


def test_ranks_are_arranged_in_row_major_order_with_a_group_per_axis():
    for rank, found in enumerate(run_ranks(4, _arranged)):
        assert found["square"] == [[0, 1], [2, 3]] and found["names"] == ("axis0", "axis1")
        assert found["sums"] == [2 * (rank % 2) + 2, 4 * (rank // 2) + 1]
        assert found["line"] == [0, 1, 2, 3] and found["same"]
        assert "for a mesh of 3x2 = 6 devices, found one of 4 = 4: plan again" in str(found["refused"])


def _descending(rank: int) -> str:
    swapped = DeviceMesh("cpu", [[0, 2], [1, 3]])
    with pytest.raises(mw.RuntimeMismatchError) as caught:
        logical_mesh(swapped, mw.MeshShape.of(4))
    plan = mw.autoparallelize(MLP.model(), swapped, MLP.batch(), strategy="zero3").plan
    assert plan.mesh.sizes == (2, 2) and [m.sizes for m in plan.meshes] == [(2, 2)]
    return str(caught.value)


def test_an_arrangement_whose_ranks_do_not_ascend_is_refused_and_never_planned():
    found = run_ranks(4, _descending)
    assert "arranged so is [0, 2, 1, 3], whose ranks do not ascend along every axis" in found[0]


# --- training -----------------------------------------------------------------------------------------------------


def _on_other_shapes(rank: int, trials: list[tuple[tuple[int, ...], Trial]]) -> dict[str, list[str]]:
    meshes = {sizes: make_mesh("cpu", sizes) for sizes, _ in trials}
    return {t.label: differences(t, meshes[sizes], adam=False) for sizes, t in trials}


STRATEGIES = ("auto", "zero3", "tp")


def _trials(
    users: tuple[int, ...], planned_on: tuple[int, ...], strategies: tuple[str, ...] = STRATEGIES
) -> list[tuple[tuple[int, ...], Trial]]:
    return [(users, trial("mlp", planned_on, strategy)) for strategy in strategies]


def test_plans_of_2x2_and_4_run_on_a_mesh_of_the_other_shape():
    trials = _trials((4,), (2, 2)) + _trials((2, 2), (4,), ("auto",))
    for found in run_ranks(4, _on_other_shapes, trials):
        assert found == {t.label: [] for _, t in trials}


@pytest.mark.parametrize("strategies", [("tp",), pytest.param(("auto", "zero3"), marks=pytest.mark.slow)])
def test_eight_ranks_in_one_axis_run_a_plan_of_2x2x2(strategies):
    trials = _trials((8,), (2, 2, 2), strategies)
    for rank, found in enumerate(run_threads(8, lambda rank: _on_other_shapes(rank, trials), timeout=400)):
        wrong = {label: differences for label, differences in found.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


def _on_some_ranks(rank: int, given: Trial) -> list[str]:
    mesh = DeviceMesh("cpu", [1, 2, 3, 4])  # every rank of the world takes part in this
    return [] if rank == 0 else differences(given, mesh, adam=False)


def test_a_mesh_over_some_ranks_of_the_world_is_arranged_by_those_alone():
    given = trial("mlp", (2, 2), "zero3")
    assert run_ranks(5, _on_some_ranks, given) == [[]] * 5


# --- by autoparallelize -------------------------------------------------------------------------------------------


def _losses(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**MLP.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _by_degrees(rank: int, shape: tuple[int, ...], lazy: bool) -> tuple[list[float], tuple[int, ...], tuple[str, ...], bool]:
    mesh = init_device_mesh("cpu", shape)
    pm = mw.autoparallelize(MLP.model(), mesh, None if lazy else MLP.batch(), degrees={"dp": 2, "tp": 2}, alternatives=False)
    if lazy:  # parameters move from the user's mesh to the plan's at the first call
        with torch.no_grad():
            pm(**MLP.batch())
    losses = _losses(pm)
    with torch.no_grad():
        again = pm(**{k: v[:4] for k, v in MLP.batch().items()})  # planned on the same logical mesh
    on_it = all(isinstance(p, DTensor) and p.device_mesh == pm.device_mesh for p in pm.parameters())
    return [*losses, again.item()], tuple(pm.device_mesh.shape), pm.plan.mesh.names, on_it


@pytest.mark.parametrize(("shape", "lazy"), [((4,), False), ((2, 2), True)])
def test_degrees_arrange_the_ranks_of_any_mesh(shape: tuple[int, ...], lazy: bool):
    model = MLP.model()
    expected = _losses(model)
    with torch.no_grad():
        expected.append(model(**{k: v[:4] for k, v in MLP.batch().items()}).item())
    for losses, sizes, names, on_it in run_ranks(4, _by_degrees, shape, lazy):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert sizes == (2, 2) and sorted(names) == ["dp", "tp"] and on_it


def _plan_from_file(rank: int, text: str) -> list[float]:
    plan = mw.Plan.from_json(text)
    return _losses(mw.autoparallelize(MLP.model(), init_device_mesh("cpu", (2, 2)), MLP.batch(), plan=plan))


def test_a_plan_file_runs_on_a_mesh_of_another_shape_of_as_many_ranks():
    text = mw.plan(MLP.model(device="meta"), "4xCPU", MLP.batch(), strategy="ddp", logical_mesh=(4,)).to_json()
    expected = _losses(MLP.model())
    for found in run_ranks(4, _plan_from_file, text):
        assert found == pytest.approx(expected, rel=1e-5)


def test_one_device_runs_without_collectives():
    case = ALL["mlp"]
    plan = planned("mlp", (1,), "auto")
    assert plan.collectives == ()
    given = Trial("one", case, case.model(), captured("mlp"), plan, reference_of(case))
    assert run_ranks(1, try_all, [given]) == [{"one": []}]
    assert reference("mlp").loss == given.reference.loss
