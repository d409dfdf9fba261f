"""Rows follow from factors: merged dims shard in groups, broadcast dims stay whole."""

from __future__ import annotations

import doctest

import pytest
import torch

from meshwright import prove
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.rules import einsum, rows_for, views
from meshwright.planner.rules.views import regroup

aten = torch.ops.aten


def _op(target: str, *shapes: tuple[int, ...], out: tuple[int, ...]) -> Op:
    ins = tuple(Value(f"x{i}", shape, torch.float32) for i, shape in enumerate(shapes))
    return Op("y", target, ins, (), ins, (Value("y", out, torch.float32),))


@pytest.mark.parametrize(
    ("text", "shapes", "out", "rows"),
    [
        ("mk,kn->mn", ((4, 6), (6, 8)), (4, 8), ["S(0),R -> S(0)", "S(1),S(0) -> P", "R,S(1) -> S(1)"]),
        ("bsh->(bs)h", ((2, 3, 4),), (6, 4), ["S(0) -> S(0)", "S(1) -> S(0;2)", "S(2) -> S(1)"]),
        ("b(khd)->bkhd", ((2, 24),), (2, 2, 3, 4), ["S(0) -> S(0)", "S(1) -> S(1)", "S(1;2) -> S(2)", "S(1;6) -> S(3)"]),
        (
            "...k,nk->...n",
            ((2, 3, 4), (5, 4)),
            (2, 3, 5),
            ["S(0),R -> S(0)", "S(1),R -> S(1)", "S(2),S(1) -> P", "R,S(0) -> S(2)"],
        ),
        ("s_->s_", ((4, 6),), (4, 6), ["S(0) -> S(0)"]),
        ("...,...->...", ((4, 1), (6,)), (4, 6), ["S(0),R -> S(0)", "R,S(0) -> S(1)"]),
        ("k,k->", ((4,), (4,)), (), ["S(0),S(0) -> P"]),
    ],
)
def test_factor_text_gives_rows(text, shapes, out, rows):
    assert [str(r) for r in einsum(_op("t.t.default", *shapes, out=out), text)] == rows


def test_factors_of_size_one_and_whole_dims_make_no_rows():
    assert einsum(_op("t.t.default", (1, 4), out=(1, 4)), "a_->a_") == []


@pytest.mark.parametrize(
    ("src", "dst", "ins", "outs", "outer"),
    [
        ((6, 4), (2, 12), [[2, 3], [4]], [[2], [3, 4]], []),
        ((4, 3), (6, 2), [[], []], [[], []], [(0, 0)]),
        ((2, 1, 3), (2, 3), [[2], [], [3]], [[2], [3]], []),
        ((5, 4, 3), (5, 6, 2), [[5], [], []], [[5], [], []], [(1, 1)]),
        ((1, 1), (), [[], []], [], []),
        ((0, 3), (3, 0), [[], []], [[], []], []),
    ],
)
def test_shapes_regroup_into_common_factors(src, dst, ins, outs, outer):
    factors, found_outer = regroup(src, dst)
    named = [[[factors.sizes[f] for f in dim] for dim in dims] for dims in (factors.ins[0], factors.outs[0])]
    assert named == [ins, outs] and found_outer == outer


def test_a_fused_projection_shards_in_groups_through_its_split():
    op, _ = prove.op_of_call(aten.split_with_sizes.default, torch.randn(2, 4, 12), [4, 4, 4], 2)
    assert "S(2;3) -> S(2),S(2),S(2)" in map(str, rows_for(op))


def test_views_of_parameters_hold_uneven_too():
    op, _ = prove.op_of_call(aten.permute.default, torch.randn(7, 5), [1, 0])
    assert [(str(r), r.uneven) for r in rows_for(op)[1:3]] == [("S(0) -> S(1)", True), ("S(1) -> S(0)", True)]


def test_grouped_query_heads_shard_with_their_keys():
    op, _ = prove.op_of_call(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.randn(2, 8, 4, 8),
        *[torch.randn(2, 2, 4, 8)] * 2,
        0.0,
        True,
    )
    assert [str(r) for r in rows_for(op)[1:3]] == ["S(0),S(0),S(0) -> S(0),S(0)", "S(1),S(1),S(1) -> S(1),S(1)"]


@pytest.mark.parametrize(
    ("queries", "keys", "masked", "rows"), [(4, 4, False, 3), (4, 6, False, 2), (4, 4, True, 2)], ids=["square", "cross", "mask"]
)
def test_causal_queries_are_cut_where_the_mask_is_the_square_one(queries, keys, masked, rows):
    """A causal mask of another shape, or another mask beside it, has no local form."""
    q, k = Value("q", (2, 8, queries, 8), torch.float32), Value("k", (2, 8, keys, 8), torch.float32)
    mask = Value("m", (queries, keys), torch.float32)
    outs = (q, Value("lse", (2, 8, queries), torch.float32))
    kwargs, ins = ((("attn_mask", mask),), (q, k, k, mask)) if masked else ((), (q, k, k))
    op = Op("y", "aten._scaled_dot_product_flash_attention_for_cpu.default", (q, k, k, 0.0, True), kwargs, ins, outs)
    found = [str(r) for r in rows_for(op)[1:]]
    assert len(found) == rows and ("S(2),R,R -> S(2),S(2)" in found) == (rows == 3)


def test_adding_a_number_carries_no_partial_sum():
    op, _ = prove.op_of_call(aten.add.Tensor, torch.randn(4), 1.0)
    assert "P -> P" not in map(str, rows_for(op))


def test_zeros_may_be_made_partial_and_ones_not():
    for fill, partial in ((0.0, True), (1.0, False)):
        op, _ = prove.op_of_call(aten.full.default, [4], fill)
        assert (" -> P" in map(str, rows_for(op))) == partial


CUDA_ATTENTION = {
    "aten._scaled_dot_product_flash_attention.default": ["S(0)", "S(1)", "S(2)"],
    "aten._scaled_dot_product_efficient_attention.default": ["S(0)", "S(1)"],
    "aten._scaled_dot_product_cudnn_attention.default": ["S(0)", "S(1)", "S(2)"],
}


@pytest.mark.parametrize("target", CUDA_ATTENTION)
def test_attention_of_other_devices_has_the_same_rows(target: str):
    q = Value("q", (2, 4, 8, 16), torch.bfloat16)
    more = (None, True) if "flash" not in target else ()
    outs = (q, Value("lse", (2, 4, 8), torch.float32), Value("seed", (), torch.int64))
    op = Op("y", target, (q, q, q, *more), (), (q, q, q), outs)
    rows = rows_for(op)
    assert rows is not None and [str(r.ins[0]) for r in rows[1:]] == CUDA_ATTENTION[target]
    assert all(str(r.outs[2]) == "R" for r in rows)


@pytest.mark.parametrize("module", [prove, views], ids=lambda m: m.__name__)
def test_examples_in_docstrings_run(module):
    torch.manual_seed(0)
    tried = doctest.testmod(module)
    assert tried.attempted > 0 and tried.failed == 0
