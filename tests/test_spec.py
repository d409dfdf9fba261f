"""Placements: text, pieces, and paths between them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.mesh import Cluster, MeshShape
from meshwright.planner.ir.redistribute import default_path, legal_step, step_axis, step_kind
from meshwright.planner.ir.spec import (
    P_MAX,
    P,
    Placement,
    R,
    S,
    divides,
    even_local_shape,
    format_placements,
    join_shards,
    local_slice,
    max_local_shape,
    parse_placements,
)

PLACEMENTS = [R, P, P_MAX, S(0), S(1), S(0, 3), S(0, 6)]
ANY = st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=3).map(tuple)


def coordinates(sizes):
    return itertools.product(*map(range, sizes))


@given(ANY)
def test_text_reads_back(placements):
    assert parse_placements(format_placements(placements)) == placements


@pytest.mark.parametrize("text", ["S", "S(x)", "RQ", "P(avg)", "S(0;)"])
def test_wrong_text_says_where(text):
    with pytest.raises(InputError, match=r"is wrong at .* expected R, S\(dim\)"):
        parse_placements(text)


@settings(deadline=None)
@given(ANY, st.sampled_from([(2,), (3,), (2, 2), (2, 3), (2, 3, 2)]))
def test_pieces_join_to_the_whole_and_have_the_stated_shape(placements, sizes):
    placements = (*placements, R, R)[: len(sizes)]
    whole = torch.arange(72 * 12).reshape(72, 12)
    if any(p.is_partial for p in placements) or not divides(whole.shape, placements, sizes):
        return
    pieces = {c: local_slice(whole, placements, sizes, c) for c in coordinates(sizes)}
    assert torch.equal(join_shards(pieces, placements, sizes), whole)
    assert {tuple(p.shape) for p in pieces.values()} == {even_local_shape(whole.shape, placements, sizes)}


def test_two_ranks_of_a_fused_qkv_hold_a_part_of_each_group():
    assert local_slice(torch.arange(12), (S(0, 3),), (2,), (0,)).tolist() == [0, 1, 4, 5, 8, 9]


def test_sharding_groups_and_inside_groups_commute():
    whole = torch.arange(24)
    for i, j in coordinates((2, 3)):
        ab = local_slice(whole, (S(0), S(0, 4)), (2, 3), (i, j))
        ba = local_slice(whole, (S(0, 4), S(0)), (3, 2), (j, i))
        assert torch.equal(ab, ba)


@pytest.mark.parametrize(("length", "sizes"), [(53, (4,)), (6, (4,)), (3, (4,)), (30522, (2, 4)), (7, (2, 4))])
def test_uneven_pieces_join_and_the_largest_is_predicted(length, sizes):
    whole, placements = torch.arange(length), (S(0),) * len(sizes)
    pieces = {c: local_slice(whole, placements, sizes, c) for c in coordinates(sizes)}
    assert torch.equal(join_shards(pieces, placements, sizes), whole)
    assert max(p.numel() for p in pieces.values()) == max_local_shape((length,), placements, sizes)[0]


def test_partial_values_join_by_their_reduction():
    pieces = {(0,): torch.tensor([1, 5]), (1,): torch.tensor([4, 2])}
    assert join_shards(pieces, (P,), (2,)).tolist() == [5, 7]
    assert join_shards(pieces, (P_MAX,), (2,)).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("shape", "placements", "sizes", "expected"),
    [
        ((8,), "S(0)S(0)", (2, 4), True),
        ((6,), "S(0)S(0)", (2, 4), False),
        ((12,), "S(0;3)", (2,), True),
        ((12,), "S(0;3)", (8,), False),
        ((12,), "S(0)S(0;3)", (2, 2), False),
        ((24,), "S(0)S(0;4)", (2, 3), True),
        ((24,), "S(0;2)S(0;4)", (2, 2), False),
        ((8,), "S(1)", (2,), False),
    ],
)
def test_divides(shape, placements, sizes, expected):
    assert divides(shape, parse_placements(placements), sizes) is expected


def test_nothing_becomes_partial():
    assert [step_kind(p, P) for p in PLACEMENTS] == [None] * len(PLACEMENTS)
    with pytest.raises(ValueError, match="cannot become partial"):
        default_path((R,), (P,), (4,), (2,))


def test_an_inner_shard_must_be_given_up_before_the_outer():
    inner, outer = parse_placements("RS(0)"), parse_placements("S(0)S(0)")
    assert not legal_step(outer, 0, R)
    assert legal_step(outer, 1, R)
    assert not legal_step(inner, 0, S(0))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([R, P, S(0), S(1), S(0, 4)]), min_size=2, max_size=2).map(tuple), st.data())
def test_default_path_takes_legal_steps_to_the_end(src, data):
    dst = data.draw(st.lists(st.sampled_from([R, S(0), S(1), S(0, 4)]), min_size=2, max_size=2).map(tuple))
    shape, sizes = (16, 4), (2, 2)
    if not (divides(shape, src, sizes) and divides(shape, dst, sizes)):
        return
    path = default_path(src, dst, shape, sizes)
    assert path[0] == src
    assert path[-1] == dst
    for here, there in itertools.pairwise(path):
        axis = step_axis(here, there)
        assert legal_step(here, axis, there[axis])


def test_mesh_coordinates_are_row_major():
    mesh = MeshShape.of(2, 3)
    assert [mesh.coordinate(r) for r in range(6)] == list(coordinates((2, 3)))
    assert mesh.num_devices == math.prod(mesh.sizes)


@pytest.mark.parametrize(("text", "sizes"), [("8x8xH100", (8, 8)), ("4xA100-80", (4,)), ("2x1xCPU", (2,)), ("1x1xH200", (1,))])
def test_cluster_text(text, sizes):
    assert Cluster.parse(text).mesh.sizes == sizes


@pytest.mark.parametrize("text", ["", "H100", "0x8xH100", "8x0xH100", "8x8", "axbxH100", "2x2x2xH100"])
def test_wrong_cluster_text_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="for example '8x8xH100'"):
        Cluster.parse(text)


def test_mesh_names_must_be_distinct():
    with pytest.raises(InputError, match="distinct axis names"):
        MeshShape((2, 2), ("a", "a"))


def test_placements_are_ordered_and_hashable():
    assert len({R, P, P_MAX, S(0), S(0, 3), Placement("R")}) == 5
    assert sorted([S(1), S(0)]) == [S(0), S(1)]


def test_equal_placements_are_one_object_also_after_pickling_and_copying() -> None:
    for p in (R, P, S(1), S(0, 3)):
        same = [pickle.loads(pickle.dumps(p)), copy.deepcopy(p), dataclasses.replace(p), parse_placements(str(p))[0]]
        assert all(q is p for q in same)
    assert dataclasses.replace(S(1), dim=2) is S(2)
