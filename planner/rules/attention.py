"""Scaled dot product attention, all kernels: batch, heads (grouped-query too), and query positions.

Forward ``(q [B,H,Q,D], k [B,G,K,D], v, mask?) -> out [B,H,Q,D], lse [B,H,Q]``; backward ``(gout, q, k, v, out, lse, ...)
-> gq, gk, gv``. With fewer key heads ``G`` than query heads, cutting both by one axis keeps each query head beside its
key head, as both are consecutive.

Cut along the queries, a rank reads all keys and values: they are gathered before, and their gradients are addends. Where to pass
them round instead (ring exchange), so that no rank ever holds them whole: a row ``S(2),S(2),S(2) -> S(2),S(2)`` here; a local form
that exchanges pieces and merges results as ``passes.local.forms_attention`` does; and the exchange as a kind of step in
``planner.ir.redistribute``, priced in ``planner.cost`` as hidden behind the kernels of the piece before.
"""

from __future__ import annotations

from typing import Any

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import P, Placement, R, Row, S
from meshwright.planner.rules.registry import Rows, resolve, rule

FORWARD = (
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
)
BACKWARD = tuple(f"{name.removesuffix('.default')}_backward.default" for name in FORWARD)
KEYS = ("key", "value")
QUERIES = ("grad_out", "grad_out_", "query", "out", "logsumexp")
MASKS = ("attn_mask", "attn_bias")
STRIPES = 8
"""Stripes of the queries per rank under a causal mask: each takes two calls, so that more cost more than they balance."""


@rule(*FORWARD, *BACKWARD)
def attention(op: Op) -> Rows:
    """``S(0),S(0),S(0) -> S(0),S(0)``; heads likewise with dim 1; query positions ``S(2),R,R -> S(2),S(2)``."""
    names = argument_names(op)
    if argument(op, "dropout_p", 0.0) > 0:
        return []
    rows = [_row(op, names, dim) for dim in (0, 1)]
    if _cuts_queries(op, names):
        rows += [_row(op, names, 2), _striped(op, names)]
    found = [row for row in rows if row is not None]
    if op.target in BACKWARD:
        found.append(Row(tuple(P if n in ("grad_out", "grad_out_") else R for n in names), _results(op, P, P, P)))
    return found


def _cuts_queries(op: Op, names: list[str]) -> bool:
    """Whether a stretch of the queries can be run alone: causal ones only where the local form knows how, without a mask."""
    if "efficient" in op.target:  # its logsumexp is padded
        return False
    if not argument(op, "is_causal", False):
        return True
    query, key = (op.ins[names.index(name)].shape for name in ("query", "key"))
    return "for_cpu" in op.target and query[-2] == key[-2] and not set(MASKS) & set(names)


def _striped(op: Op, names: list[str]) -> Row | None:
    """Causal queries cut in stripes, ``S(2;8),R,R -> S(2;8),S(2;8)``: every rank has some that see little and some that see all.

    In one stretch each, the last rank sees almost all keys, twice the mean; in 8 stripes each, at most 1/8 more than the mean.
    """
    row = _row(op, names, 2)
    length = op.ins[names.index("query")].shape[-2]
    if row is None or not argument(op, "is_causal", False) or length % STRIPES:
        return None

    def cut(p: Placement | None) -> Placement | None:
        return S(2, STRIPES) if p == S(2) else p

    return Row(tuple(S(2, STRIPES) if p == S(2) else p for p in row.ins), tuple(map(cut, row.outs)))


def argument_names(op: Op) -> list[str]:
    """Schema name of each tensor input, in the order of ``Op.ins``."""
    schema = [a.name for a in resolve(op.target)._schema.arguments]
    named = [*zip(schema, op.args, strict=False), *op.kwargs]
    return [name for name, value in named if isinstance(value, Value)]


def argument(op: Op, name: str, default: Any) -> Any:
    """An argument by its schema name."""
    schema = [a.name for a in resolve(op.target)._schema.arguments]
    return {**dict(zip(schema, op.args, strict=False)), **dict(op.kwargs)}.get(name, default)


def _row(op: Op, names: list[str], dim: int) -> Row | None:
    """The row that cuts dim 0 (batch), 1 (heads) or 2 (query positions)."""
    ndim = len(op.ins[names.index("query")].shape)
    if ndim != 4:
        return None
    by_name = dict(zip(names, op.ins, strict=True))
    ins = []
    for name, value in by_name.items():
        if name in QUERIES or (name in KEYS and dim < 2 and (dim == 0 or value.shape[1] > 1)):
            ins.append(S(dim) if value.shape else R)
        elif name in MASKS:
            ins.append(_mask(value, dim, ndim))
        else:
            ins.append(R)
    shared_keys = dim == 2 or (dim == 1 and by_name["key"].shape[1] == 1)
    if op.target in FORWARD:
        return Row(tuple(ins), _results(op, S(dim), S(dim)))
    keys = P if shared_keys else S(dim)
    mask = ins[names.index("attn_bias")] if "attn_bias" in names else R
    return Row(tuple(ins), _results(op, S(dim), keys, keys, mask if mask.is_shard else P))


def _mask(mask: Value, dim: int, ndim: int) -> Placement:
    """A mask aligned from the right; it stays whole where it broadcasts."""
    at = dim - (ndim - len(mask.shape))
    return S(at) if at >= 0 and mask.shape[at] > 1 else R


def _results(op: Op, *placements: Placement) -> tuple[Placement | None, ...]:
    """Placements of the results; seeds and other by-products beyond them are whole."""
    padded = (*placements, *(R,) * len(op.outs))
    return tuple(None if v is None else p if v.shape else R for v, p in zip(op.outs, padded, strict=False))
