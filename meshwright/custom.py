"""Rules for ops that Meshwright does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.passes.local import Form, register_form
from meshwright.planner.rules import register
from meshwright.planner.rules.registry import Rule


def rule(
    target: str | torch._ops.OpOverload, rows: str | Rule, *, linear: Iterable[Sequence[int]] = (), local: Form | None = None
) -> None:
    """Declare how an op may be sharded.

    The usual rule is one string that names the index behind each dim, as an einsum does; ``_`` is a dim that must stay
    whole, ``...`` any leading dims, ``(bs)`` a dim merged from two. A shared index that the result lacks is summed over::

        mw.rule("mylib.scale_rows.default", "mn,m->mn")
        mw.rule("mylib.projected.default", "...k,nk->...n", linear=[(0,), (1,)])
        mw.rule("mylib.row_norm.default", "..._,_->..._")

    Register it before planning, on every rank. ``meshwright.prove`` checks a rule and lists placements that it misses.

    Args:
        target: the overload, or its name ``"namespace.op.overload"``.
        rows: factor text, or a function from an ``Op`` to its rows over one mesh axis (without the replicated one).
        linear: for factor text, groups of tensor inputs in which the op is linear, so that partial sums pass through:
            ``[(0,), (1,)]`` for a product, ``[(0, 1)]`` for a sum.
        local: how one rank runs the op on its pieces, where that is not simply the same op on smaller tensors.

    Raises:
        InputError: the target is no op's name; or, when an op is planned, the text does not fit its tensors.
    """
    register(str(target), rows, linear=linear)
    if local is not None:
        register_form(str(target), local)
