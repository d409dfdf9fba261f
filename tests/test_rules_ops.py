"""Every rule is proved on every op family: pieces put together equal the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from meshwright import prove
from meshwright.passes.local import run_local
from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import R, S
from meshwright.planner.rules import rows_for
from tests.helpers.op_calls import FAMILIES, Call

Family = Callable[[], Iterator[Call]]


def _ops(family: Family) -> Iterator[tuple[Op, prove.Tensors]]:
    torch.manual_seed(0)
    for overload, args, kwargs in family():
        yield prove.op_of_call(overload, *args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_row_of_a_family_holds_on_two_and_three_ranks(family: Family):
    for op, inputs in _ops(family):
        if not op.target.startswith("meshwright.uniform") or op.args[-1]:
            prove.prove_op(op, inputs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_rows_of_two_axes_hold_together(family: Family):
    """Every pair of rows on 2x2, where both divide: offsets compose, shards nest."""
    mesh = MeshShape.of(2, 2)
    proved = 0
    for op, inputs in _ops(family):
        if op.target.startswith("meshwright.uniform") and not op.args[-1]:
            continue
        rows = rows_for(op) or ()
        proved += sum(prove.prove_rows(op, inputs, pair, mesh) for pair in itertools.product(rows, repeat=2))
    assert proved > 0


def test_uneven_rows_hold_where_nothing_divides():
    aten = torch.ops.aten
    for overload, args in ((aten.t.default, ()), (aten.permute.default, ([1, 0],)), (aten.reshape.default, ([1, 7, 5],))):
        op, inputs = prove.op_of_call(overload, torch.randn(7, 5), *args)
        uneven = [row for row in prove.prove_op(op, inputs, sizes=(2, 3, 4)) if row.uneven]
        assert len(uneven) == 2, op


def test_random_shards_differ_and_replicas_agree_when_each_rank_draws_its_own():
    op, _ = prove.op_of_call(torch.ops.meshwright.uniform.default, torch.tensor(7), 3, [8, 6], "", [], [], False)
    spec, mesh = OpSpec(((R, R),), ((S(0), R),)), MeshShape.of(2, 2)
    drawn = {
        at: run_local(op, spec, mesh, at, [torch.tensor(7)], lambda target, *args: target(*args))[0]
        for at in ((0, 0), (0, 1), (1, 0))
    }
    assert drawn[0, 0].shape == (4, 6)
    assert torch.equal(drawn[0, 0], drawn[0, 1]) and not torch.equal(drawn[0, 0], drawn[1, 0])
