"""Placements as arrays say what :mod:`meshwright.planner.ir.spec` says of each, and many steps cost what each of them does."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.cost.steps import Steps
from meshwright.planner.ir.cuts import Cuts, divide, padded, piece_numels, piece_shapes
from meshwright.planner.ir.graph import Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.redistribute import KINDS, step_axis
from meshwright.planner.ir.spec import P, R, S, divides, max_local_shape
from meshwright.planner.solve.network import Wish, networks_of

SHAPES = [(), (8,), (6, 4), (24, 8), (1, 24, 5)]
PLACED = st.tuples(*[st.sampled_from([R, P, S(0), S(1), S(2), S(0, 2), S(0, 4), S(1, 4)])] * 2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SHAPES), PLACED), min_size=1, max_size=6), st.sampled_from([(2, 2), (2, 4), (3, 2)]))
def test_pieces_of_many_values_are_those_of_each(values, sizes) -> None:
    values = [(shape, p) for shape, p in values if all(q.dim < len(shape) for q in p if q.is_shard)]
    if not values:
        return
    shape, cuts = padded([s for s, _ in values]), Cuts.of([p for _, p in values], 2)
    assert divide(shape, cuts, sizes).tolist() == [divides(s, p, sizes) for s, p in values]
    pieces = [max_local_shape(s, p, sizes) for s, p in values]
    assert [tuple(row[: len(s)]) for row, (s, _) in zip(piece_shapes(shape, cuts, sizes).tolist(), values, strict=True)] == pieces
    assert piece_numels(shape, cuts, sizes).tolist() == [math.prod(p) for p in pieces]


def test_arcs_of_a_network_cost_what_each_step_does() -> None:
    mesh = MeshShape.of(2, 4)
    costs = CostModel(hardware_for(mesh, "H100"), mesh)
    values = [Value("a", (1, 64, 24), torch.bfloat16), Value("b", (48, 64), torch.float32)]
    used = [((S(1), P), (R, S(2)), (S(0), R)), ((S(0, 4), S(0)), (P, P), (S(1), S(0, 8)))]
    wishes = [Wish(v, u, uneven) for v, u in zip(values, used, strict=True) for uneven in (False, True)]
    networks = networks_of([*wishes, wishes[0]], costs, mesh.sizes)
    assert networks[0] is networks[-1] and len({id(n) for n in networks}) == len(networks) - 1
    for wish, found in zip(wishes, networks, strict=False):
        assert found.network.num_arcs
        for arc, (axis, kind, size) in enumerate(found.arcs):
            tail, head = (found.nodes[n[arc]] for n in (found.network.tails, found.network.heads))
            assert step_axis(tail, head) == axis
            assert costs.step_s(wish.value, tail, axis, head[axis]) == (kind, size, found.network.seconds[arc])


def test_steps_over_an_axis_of_one_device_are_free() -> None:
    mesh = MeshShape.of(1, 2)
    costs = CostModel(hardware_for(mesh, "H100"), mesh)
    cuts = Cuts.of([(S(0), R), (R, R)], 2)
    zero, gather = np.array([0]), np.array([KINDS.index("all_gather")])
    size, seconds = costs.steps_s(
        Steps((Value("v", (8,), torch.float32),), np.array([0, 0]), cuts, zero, np.array([1]), zero, gather)
    )
    assert (size.tolist(), seconds.tolist()) == ([32], [0.0])
