"""Causal attention of a stretch of the queries, keys and values being whole: queries ``[start, start + L)`` see keys
``[0, start + L)``.

Kernels know one causal mask only, the square one, so a stretch is two calls: all keys before the stretch, and the stretch's
own keys with the mask. Each gives the result and the log-sum-exp of the scores over its own keys; the results are weighted
by what their scores have in the sum over both. The backward kernels recompute ``exp(score - logsumexp)``, and with the
log-sum-exp over both that is the probability over both, so gradients of the two calls are exact as they are::

    q [B,H,L,D]  ->  a, lse_a = attention(q, k[:start], v[:start])
                     b, lse_b = attention(q, k[start:start+L], v[start:start+L], causal)
                     lse = log(exp(lse_a) + exp(lse_b));  out = a + (b - a) * exp(lse_b - lse)

The first stretch has no keys before it. Programs of all ranks have the same ops, so it takes the first key as if it were
one, at a score that is nothing beside any other.

Source: merging partial softmaxes as in FlashAttention (arXiv:2205.14135, section 3.1). A ring exchange of keys and values
would merge the same way, piece by piece.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.passes.local.piece import Piece, form, overload

aten = torch.ops.aten
Results = tuple[Any | None, ...]

FAR = 10**9
"""Taken from the log-sum-exp of keys that must not count: ``exp(-FAR)`` is zero in every element type, without infinities."""


@form("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(piece: Piece) -> Results:
    """One call, or two that are merged where a causal mask meets a stretch of the queries."""
    stretch = _stretch(piece, query=0)
    if stretch is None:
        return piece.default()
    start, length = stretch
    (query, key, value), scale = piece.inputs[:3], {"scale": piece.op.kwarg("scale")}
    kernel, dropout = overload(piece.op.target), piece.op.arg(3, 0.0)
    earlier = [_keys(piece, x, 0, max(start, 1)) for x in (key, value)]
    own = [_keys(piece, x, start, length) for x in (key, value)]
    a, lse_a = piece.results(piece.call(kernel, query, *earlier, dropout, False, **scale))
    b, lse_b = piece.results(piece.call(kernel, query, *own, dropout, True, **scale))
    lse_a = piece.call(aten.sub.Tensor, lse_a, _penalty(start))
    lse = piece.call(aten.logaddexp.default, lse_a, lse_b)
    share = piece.call(aten.exp.default, piece.call(aten.sub.Tensor, lse_b, lse))
    out_dtype, lse_dtype = (v.dtype for v in piece.op.outs if v is not None)
    if out_dtype != lse_dtype:
        share = piece.call(aten._to_copy.default, share, dtype=out_dtype)
    return piece.call(aten.lerp.Tensor, a, b, piece.call(aten.unsqueeze.default, share, -1)), lse


@form("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(piece: Piece) -> Results:
    """As the forward; gradients of keys are addends: those before the stretch, its own, and zeros for those behind."""
    stretch = _stretch(piece, query=1)
    if stretch is None:
        return piece.default()
    start, length = stretch
    gout, query, key, value, out, lse = piece.inputs
    kernel, dropout, scale = overload(piece.op.target), piece.op.arg(6), {"scale": piece.op.kwarg("scale")}
    far = piece.call(aten.add.Tensor, lse, _penalty(start))
    calls = ((0, max(start, 1), far, False), (start, length, lse, True))
    made = []
    for first, count, sums, causal in calls:
        seen = [_keys(piece, x, first, count) for x in (key, value)]
        made.append(piece.results(piece.call(kernel, gout, query, *seen, out, sums, dropout, causal, **scale)))
    earlier, own = made
    grad_query = piece.call(aten.add.Tensor, earlier[0], own[0])
    behind = piece.op.ins[2].shape[2] - start - length
    return grad_query, *(_whole(piece, a, b, start, behind) for a, b in zip(earlier[1:], own[1:], strict=True))


def _stretch(piece: Piece, query: int) -> tuple[int, int] | None:
    """(start, length) of this rank's queries, where they are a part and the mask is causal."""
    placements, causal = piece.spec.ins[query], piece.op.arg(4 if query == 0 else 7, False)
    if not causal or piece.ways(placements, 2) == 1:
        return None
    return piece.span(placements, 2, piece.op.ins[query].shape[2])


def _penalty(start: int) -> int:
    return 0 if start else FAR


def _keys(piece: Piece, x: Any, start: int, length: int) -> Any:
    return piece.call(aten.slice.Tensor, x, 2, start, start + length)


def _whole(piece: Piece, earlier: Any, own: Any, start: int, behind: int) -> Any:
    """The gradient of all keys, zero behind the stretch."""
    seen = piece.call(aten.cat.default, [piece.call(aten.slice.Tensor, earlier, 2, 0, start), own], 2)
    return piece.call(aten.constant_pad_nd.default, seen, [0, 0, 0, behind])
