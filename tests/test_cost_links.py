"""Collectives that were measured over a link cost what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import meshwright as mw
from meshwright.planner.cost.comm import collective_s, collectives_s
from meshwright.planner.cost.links import GLOO
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Link, Measured
from meshwright.planner.ir.mesh import MeshShape
from tests.helpers.models import ALL
from tests.helpers.prepared import toy_hardware

PAIRS = Measured("all_reduce", 2, (100, 200, 400), (1.0, 1.0, 5.0))
EIGHT = Measured("all_reduce", 8, (100, 400), (3.0, 9.0))
LINK = Link("gloo", GLOO.bytes_per_s, GLOO.latency_s, "made up for tests", (EIGHT, PAIRS))


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1.0), (100, 1.0), (150, 1.0), (200, 1.0), (300, 3.0), (400, 5.0), (500, 7.0), (1400, 25.0)]
)
def test_between_measured_sizes_lie_straight_lines_and_the_last_goes_on(size, seconds):
    assert collective_s(LINK, "all_reduce", 2, size) == pytest.approx(seconds)


@pytest.mark.parametrize(("group", "seconds"), [(1, 0.0), (2, 5.0), (4, 7.0), (8, 9.0), (15, 18.0)])
def test_between_measured_groups_the_logarithm_counts_and_beyond_them_the_hops(group, seconds):
    assert collective_s(LINK, "all_reduce", group, 400) == pytest.approx(seconds)


def test_one_size_alone_goes_on_in_proportion():
    link = Link("gloo", 1.0, 1.0, "made up for tests", (Measured("all_gather", 4, (100,), (2.0,)),))
    assert [collective_s(link, "all_gather", 4, n) for n in (0, 100, 300)] == pytest.approx([2.0, 2.0, 6.0])
    assert collective_s(link, "all_gather", 2, 100) == pytest.approx(2.0 / 3)


def test_kinds_that_were_not_measured_cost_what_the_librarys_algorithms_do():
    assert collective_s(LINK, "all_gather", 4, 1 << 20) == collective_s(GLOO, "all_gather", 4, 1 << 20)


@given(st.integers(2, 20), st.lists(st.integers(0, 2000), min_size=1, max_size=8))
def test_many_at_once_cost_what_each_does_and_larger_ones_no_less(group, sizes):
    found = collectives_s(LINK, "all_reduce", group, np.array(sorted(sizes)))
    assert found == pytest.approx([collective_s(LINK, "all_reduce", group, n) for n in sorted(sizes)])
    assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize(
    ("group", "sizes", "seconds"), [(1, (1,), (1.0,)), (2, (), ()), (2, (2, 1), (1.0, 1.0)), (2, (1, 2), (2.0, 1.0))]
)
def test_measurements_that_make_no_sense_are_refused(group, sizes, seconds):
    with pytest.raises(InputError, match=f"measured all_reduce of groups of {group}: found .*; needed are"):
        Measured("all_reduce", group, sizes, seconds)


def test_one_controller_pays_for_each_parameter_what_a_broadcast_was_measured_to_take():
    case, mesh, seconds = ALL["gpt2"], MeshShape.of(2), 7.0
    plain = toy_hardware(mesh)
    told = Link(
        "toy", plain.links[0].bytes_per_s, 1e-7, "made up for tests", (Measured("broadcast", 2, (0, 1 << 40), (seconds,) * 2),)
    )
    plan = mw.plan(
        case.model(), mesh, case.batch(), strategy="data_parallel", hardware=replace(plain, links=(told,)), alternatives=False
    )
    (broadcast,) = (c for c in plan.collectives if c.kind == "broadcast")
    assert broadcast.time_s == pytest.approx(seconds * len({id(p) for p in case.model().parameters()}))
    (scatter,) = (c for c in plan.collectives if c.kind == "scatter")
    assert scatter.time_s < 1e-3
