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
from meshwright.planner.ir.spec import P, R, S
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


def test_grouped_products_shard_the_matrices_dims_and_keep_rows_and_groups_whole():
    """Proved by hand: the kernel takes bfloat16 only, and not the strides that the prover makes."""
    grouped = torch.ops.aten._grouped_mm.default
    torch.manual_seed(0)
    x, w, g = torch.randn(16, 32).bfloat16(), torch.randn(2, 32, 48).bfloat16(), torch.randn(16, 48).bfloat16()
    ends = torch.tensor([6, 16], dtype=torch.int32)
    for a, b in ((x, w), (x.T, g)):
        whole = grouped(a, b, ends)
        op, _ = prove.op_of_call(grouped, a, b, ends)
        rows = {(row.ins[:2], row.outs) for row in rows_for(op) or () if any(p.is_shard for p in row.ins)}
        assert rows == ({((S(1), S(1)), (P,)), ((R, S(2)), (S(1),))} if b is w else {((S(0), R), (S(1),)), ((R, S(1)), (S(2),))})
        for (pa, pb), (out,) in rows:
            pieces = [
                grouped(
                    a if pa == R else a.chunk(2, pa.dim)[k].contiguous(),
                    b if pb == R else b.chunk(2, pb.dim)[k].contiguous(),
                    ends,
                )
                for k in range(2)
            ]
            found = pieces[0] + pieces[1] if out == P else torch.cat(pieces, out.dim)
            torch.testing.assert_close(found, whole, atol=0.2, rtol=0.05)
