"""Placements to torch's and back, exchanges over a mesh, whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import local_slice, parse_placements
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.mesh import (
    broadcast_tensor,
    broadcast_text,
    check_mesh,
    gather_objects,
    make_mesh,
    mesh_shape,
    our_placements,
    torch_placements,
)
from tests.helpers.threads import run_threads

TEXTS = ["RR", "S(0)R", "RS(1)", "S(0)S(0)", "S(0)S(1)", "S(0;3)R", "S(0;3)S(1)", "S(0)S(0;4)", "S(0)S(0;6)", "S(0)S(0;2)"]


def test_placements_go_to_torch_and_back():
    for text in TEXTS:
        ours = parse_placements(text)
        back = our_placements(torch_placements(ours, (2, 2)), (2, 2))
        assert back == ours or text == "S(0)S(0;2)", text  # two groups dealt out by axis 0 leave a plain shard
    assert our_placements(torch_placements(parse_placements("P(max)P"), (2, 2)), (2, 2)) == parse_placements("P(max)P")


@pytest.mark.parametrize("text", ["S(0;3)S(0;3)", "S(0;4)S(0)"])
def test_placements_that_dtensor_cannot_gather_are_refused(text):
    with pytest.raises(
        InputError, match=r"parameter w cannot rest in .*: DTensor cannot gather dim 0 when axis 0 shards it in groups"
    ):
        torch_placements(parse_placements(text), (2, 2), "parameter w")


def test_dtensors_hold_our_pieces_and_gather_to_the_whole():
    def on_rank(rank):
        mesh = make_mesh("cpu", (2, 2), ("dp", "tp"))
        assert mesh_shape(mesh) == MeshShape((2, 2), ("dp", "tp"))
        for shape in ((24, 5), (7, 3), (1, 1)):
            for text in TEXTS:
                ours = parse_placements(text)
                if shape[0] % 24 and ";" in text:
                    continue
                whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
                spread = torch_placements(ours, (2, 2))
                local = local_slice(whole, ours, (2, 2), mesh.get_coordinate()).contiguous()
                assert torch.equal(distribute_tensor(whole, mesh, spread).to_local(), local), text
                made = DTensor.from_local(local, mesh, spread, run_check=False, shape=whole.shape, stride=whole.stride())
                assert torch.equal(gather_whole(made), whole), text
                assert torch.equal(made.full_tensor(), whole), text

    run_threads(4, on_rank)


def test_objects_are_gathered_in_mesh_order_and_the_first_ranks_win():
    def on_rank(rank):
        for layout in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1, 2, 3]):
            mesh = DeviceMesh("cpu", torch.tensor(layout))
            order = torch.tensor(layout).flatten().tolist()
            assert gather_objects(rank, mesh) == order
            assert broadcast_text(f"from {rank}", mesh) == f"from {order[0]}"
            mine = torch.full((3,), float(rank))
            broadcast_tensor(mine, mesh)
            assert mine.tolist() == [float(order[0])] * 3

    run_threads(4, on_rank)


def test_a_mesh_may_cover_some_of_the_ranks():
    def on_rank(rank):
        mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 4]]))
        if rank in (0, 1, 3, 4):
            assert gather_objects(rank, mesh) == [0, 1, 3, 4]
            assert broadcast_text(f"from {rank}" if rank == 0 else None, mesh) == "from 0"

    run_threads(6, on_rank)


def test_a_mesh_whose_ranks_are_not_ascending_is_refused():
    def on_rank(rank):
        check_mesh(DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]])))
        with pytest.raises(InputError, match=r"mesh \[3, 2, 1, 0\] does not list its ranks in ascending order along axis 0"):
            check_mesh(DeviceMesh("cpu", torch.tensor([3, 2, 1, 0])))

    run_threads(4, on_rank)


def test_without_a_process_group_the_message_says_how_to_start_one():
    with pytest.raises(InputError, match=r"mesh 2x2 needs 4 ranks but there is no process group: .*meshwright run -n 4"):
        make_mesh("cpu", (2, 2))
