"""The prover refuses wrong rules and finds missing ones; users' rules go through it."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright import prove
from meshwright.custom import rule
from meshwright.passes.local import Piece
from meshwright.planner.ir.errors import InputError, NoRuleError, VerifyError
from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.spec import P_MAX, P, R, Row, S
from meshwright.planner.rules import rows_for, unregister
from meshwright.samples import in_double, random_inputs
from tests.helpers import op_calls
from tests.helpers.op_calls import f

aten = torch.ops.aten
LIBRARY = torch.library.Library("mw_test", "DEF")
LIBRARY.define("halves(Tensor x, Tensor w) -> Tensor")
LIBRARY.define("ramp(Tensor x) -> Tensor")
LIBRARY.impl("halves", lambda x, w: x @ w / 2, "CompositeExplicitAutograd")
LIBRARY.impl("ramp", lambda x: x + torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1), "CompositeExplicitAutograd")
HALVES, RAMP = "mw_test.halves.default", "mw_test.ramp.default"


@pytest.fixture(autouse=True)
def _forget_rules():
    yield
    unregister(HALVES)
    unregister(RAMP)


def _halves() -> tuple[Op, prove.Tensors]:
    return prove.op_of_call(torch.ops.mw_test.halves.default, f(6, 12), f(12, 18))


WRONG = {
    "a sum taken for whole": (aten.mm.default, (f(6, 12), f(12, 18)), Row((S(1), S(0)), (R,))),
    "a shard on the wrong dim": (aten.mm.default, (f(6, 6), f(6, 6)), Row((S(0), R), (S(1),))),
    "adding whole to partial": (aten.add.Tensor, (f(6, 4), f(6, 4)), Row((P, R), (P,))),
    "a partial through a nonlinear op": (aten.tanh.default, (f(6, 4),), Row((P,), (P,))),
    "maxima that are summed": (aten.amax.default, (f(6, 4), [1]), Row((S(1),), (P,))),
    "a sum that is maximised": (aten.sum.dim_IntList, (f(6, 4), [1]), Row((S(1),), (P_MAX,))),
    "softmax over a sharded dim": (aten._softmax.default, (f(6, 4), 1, False), Row((S(1),), (S(1),))),
    "merged dims without groups": (aten.reshape.default, (f(4, 6), [24]), Row((S(1),), (S(0),))),
    "pieces out of order": (aten.split_with_sizes.default, (f(4, 18), [6, 6, 6], 1), Row((S(1),), (S(1), S(1), S(1)))),
    "a vocabulary shard taken for whole": (aten.embedding.default, (f(12, 6), op_calls.i(12, 4)), Row((S(0), R), (R,))),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused(case: str):
    overload, args, row = WRONG[case]
    op, inputs = prove.op_of_call(overload, *args)
    with pytest.raises((VerifyError, RuntimeError)):
        prove.prove(op, inputs, row, 2)


def test_a_wrong_registered_rule_is_refused_with_its_numbers():
    rule(HALVES, "mk,kn->mn", linear=[(0, 1)])
    op, inputs = _halves()
    with pytest.raises(VerifyError, match=r"mw_test\.halves\.default with P,P->P on a mesh of 2 is wrong: result 0: differs by"):
        prove.prove_op(op, inputs)


def test_a_custom_rule_is_one_string():
    mw.rule(torch.ops.mw_test.halves.default, "mk,kn->mn", linear=[(0,), (1,)])
    op, inputs = _halves()
    rows = prove.prove_op(op, inputs)
    assert [str(r) for r in rows] == ["R,R -> R", "S(0),R -> S(0)", "S(1),S(0) -> P", "R,S(1) -> S(1)", "P,R -> P", "R,P -> P"]


def test_a_rule_may_be_a_function_with_its_own_local_form():
    def ramp(piece: Piece):
        start, _ = piece.span(piece.spec.ins[0], 0, piece.op.ins[0].shape[0])
        (made,) = piece.default()
        return (piece.call(aten.add.Tensor, made, start),)

    rule(RAMP, lambda op: [Row((S(0),), (S(0),)), Row((S(1),), (S(1),))], local=ramp)
    op, inputs = prove.op_of_call(torch.ops.mw_test.ramp.default, f(6, 4))
    assert len(prove.prove_op(op, inputs)) == 3


def test_missing_rows_are_listed():
    rule(HALVES, "m_,_n->mn")
    op, inputs = _halves()
    assert {str(r) for r in prove.missing_rows(op, inputs)} == {"S(1),S(0) -> P", "P,R -> P", "R,P -> P"}


def test_an_op_without_a_rule_is_an_error_only_to_the_prover():
    op, inputs = _halves()
    assert rows_for(op) is None
    with pytest.raises(NoRuleError, match=r"mw_test\.halves\.default"):
        prove.prove_op(op, inputs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mk->mn", "name 1 inputs and 1 results"),
        ("mk,kn->m", "names 1 dims"),
        ("mk,k?->mn", "means nothing"),
        ("mk,km->mn", "is 18 in one tensor and 6 in another"),
        ("(ab)k,kn->(ab)n", "cannot be told"),
    ],
)
def test_factor_text_that_does_not_fit_says_why(text: str, message: str):
    rule(HALVES, text)
    op, _ = _halves()
    with pytest.raises(InputError, match=message):
        rows_for(op)


def test_a_target_that_is_no_op_name_is_refused():
    with pytest.raises(InputError, match=r"namespace\.op\.overload"):
        rule("halves", "mk,kn->mn")


KNOWN_GAPS = {
    "aten.copy.default",  # its first operand is not read
    "aten.masked_fill.Scalar",  # infinities add up to themselves
    "aten._to_copy.default",  # random addends are hardly ever zero, so booleans of them are true
    "aten.any.dim",  # likewise
    "aten.all.default",
    "aten.any.dims",
}


@pytest.mark.parametrize(
    "family",
    [op_calls.pointwise, op_calls.activations, op_calls.views, op_calls.cuts_and_joins, op_calls.reductions],
    ids=lambda g: g.__name__,
)
def test_no_rule_misses_a_legal_row(family):
    torch.manual_seed(0)
    for overload, args, kwargs in family():
        op, inputs = prove.op_of_call(overload, *args, **kwargs)
        if op.target not in KNOWN_GAPS and len(op.outs) == 1:
            missing = prove.missing_rows(op, inputs, random_inputs(op, 1))
            assert not missing, f"{op}: {[str(r) for r in missing]}"


def test_random_inputs_are_in_range_and_in_double():
    op, _ = prove.op_of_call(aten.embedding.default, torch.randn(5, 3), torch.tensor([1, 4]))
    weight, indices = random_inputs(in_double(op))
    assert weight.dtype == torch.float64 and int(indices.max()) < 5


def test_the_same_op_is_looked_up_once():
    op, _ = prove.op_of_call(aten.mm.default, f(6, 12), f(12, 18))
    assert rows_for(op) is rows_for(op)
