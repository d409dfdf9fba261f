"""Matrix products: one string each."""

from __future__ import annotations

from meshwright.planner.ir.graph import Op
from meshwright.planner.ir.spec import P, Row
from meshwright.planner.rules.factors import einsum
from meshwright.planner.rules.registry import Rows, rule

PRODUCTS = {
    "aten.mm.default": "mk,kn->mn",
    "aten.bmm.default": "bmk,bkn->bmn",
    "aten.mv.default": "mk,k->m",
    "aten.dot.default": "k,k->",
    "aten.vdot.default": "k,k->",
    "aten.outer.default": "m,n->mn",
}
"""Linear in each operand."""

SUMS_OF_PRODUCTS = {
    "aten.addmm.default": "mn,mk,kn->mn",
    "aten.addmv.default": "m,mk,k->m",
    "aten.baddbmm.default": "bmn,bmk,bkn->bmn",
}
"""``beta * first + alpha * second @ third``; the first operand broadcasts."""


@rule(*PRODUCTS)
def product(op: Op) -> Rows:
    """``mm`` with ``k`` sharded: ``S(1),S(0) -> P``."""
    return einsum(op, PRODUCTS[op.target], linear=[(0,), (1,)])


@rule(*SUMS_OF_PRODUCTS)
def sum_of_products(op: Op) -> Rows:
    """As the product; where the contracted factor is sharded the added operand must be partial too."""
    added, rest = SUMS_OF_PRODUCTS[op.target].split(",", 1)
    rows = einsum(op, f"{added[len(added) - len(op.ins[0].shape) :]},{rest}", linear=[(0, 1), (0, 2)])
    return [added_partial(row, 0) for row in rows]


@rule("aten.linear.default")
def linear(op: Op) -> Rows:
    """``x @ weight.T + bias``."""
    if len(op.ins) == 2:
        return einsum(op, "...k,nk->...n", linear=[(0,), (1,)])
    return [added_partial(row, 2) for row in einsum(op, "...k,nk,n->...n", linear=[(0, 2), (1, 2)])]


@rule("aten._grouped_mm.default")
def grouped(op: Op) -> Rows:
    """Rows sorted by group, each group with a matrix of its own; or sums over the rows of each group (the weights' gradient).

    ``offs`` are positions in the whole list of rows, so rows and groups stay whole; the matrices' dims shard::

        x [T,K], w [E,K,N], offs [E] -> y [T,N]        K (partial), N
        x [K,T], g [T,N],   offs [E] -> gw [E,K,N]     K, N
    """
    if len(op.ins) != 3:
        return []
    forms = {(2, 3): "_k,_kn,_->_n", (2, 2): "k_,_n,_->_kn"}
    form = forms.get((len(op.ins[0].shape), len(op.ins[1].shape)))
    return [] if form is None else einsum(op, form, linear=[(0,), (1,)])


def added_partial(row: Row, index: int) -> Row:
    """The row with the operand that is added made partial where the result is."""
    if row.outs[0] != P or P in row.ins:
        return row
    return Row(tuple(P if i == index else p for i, p in enumerate(row.ins)), row.outs)
