"""Causal attention of a stretch of the queries, keys and values being whole: queries ``[start, start + L)`` see keys
``[0, start + L)``.

Kernels know one causal mask only, the square one, so a stretch is two calls: all keys before the stretch, and the stretch's
own keys with the mask. Each gives the result and the log-sum-exp of the scores over its own keys; the results are weighted
by what their scores have in the sum over both. The backward kernels recompute ``exp(score - logsumexp)``, and with the
log-sum-exp over both that is the probability over both, so gradients of the two calls are exact as they are::

    q [B,H,L,D]  ->  a, lse_a = attention(q, k[:start], v[:start])
                     b, lse_b = attention(q, k[start:start+L], v[start:start+L], causal)
                     lse = log(exp(lse_a) + exp(lse_b));  out = a + (b - a) * exp(lse_b - lse)

Queries cut in stripes ``S(2;k)`` are ``k`` stretches on each rank, done one by one.

The first stretch has no keys before it. Programs of all ranks have the same ops, so it takes the first key as if it were
one, at a score that is nothing beside any other.

Source: merging partial softmaxes as in FlashAttention (arXiv:2205.14135, section 3.1). A ring exchange of keys and values
would merge the same way, piece by piece.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.passes.local.piece import Piece, form, overload

aten = torch.ops.aten
Results = tuple[Any | None, ...]

FAR = 10**9
"""Taken from the log-sum-exp of keys that must not count: ``exp(-FAR)`` is zero in every element type, without infinities."""


@form("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(piece: Piece) -> Results:
    """One call; where a causal mask meets stretches of the queries, two for each, merged."""
    stretches = _stretches(piece, query=0)
    if not stretches:
        return piece.default()
    made = [_of_stretch(piece, at, start, length) for at, start, length in stretches]
    return tuple(_joined(piece, parts) for parts in zip(*made, strict=True))


def _of_stretch(piece: Piece, at: int, start: int, length: int) -> tuple[Any, Any]:
    """Result and log-sum-exp of local queries ``[at, at + length)``, which are ``[start, start + length)`` of all."""
    kernel, dropout, scale = overload(piece.op.target), piece.op.arg(3, 0.0), {"scale": piece.op.kwarg("scale")}
    query, (key, value) = _part(piece, piece.inputs[0], at, length), piece.inputs[1:3]
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
    """As the forward; gradients of keys are addends of all stretches."""
    stretches = _stretches(piece, query=1)
    if not stretches:
        return piece.default()
    made = [_gradients_of_stretch(piece, at, start, length) for at, start, length in stretches]
    queries, *keys = zip(*made, strict=True)
    return _joined(piece, queries), *(_summed(piece, parts) for parts in keys)


def _gradients_of_stretch(piece: Piece, at: int, start: int, length: int) -> tuple[Any, Any, Any]:
    """Gradients of local queries ``[at, at + length)`` and, by them, of all keys and values.

    Of the keys: those before the stretch, its own, and zeros for those behind.
    """
    kernel, dropout, scale = overload(piece.op.target), piece.op.arg(6), {"scale": piece.op.kwarg("scale")}
    gout, query, key, value, out, lse = piece.inputs
    gout, query, out, lse = (_part(piece, x, at, length) for x in (gout, query, out, lse))
    far = piece.call(aten.add.Tensor, lse, _penalty(start))
    calls = ((0, max(start, 1), far, False), (start, length, lse, True))
    made = []
    for first, count, sums, causal in calls:
        seen = [_keys(piece, x, first, count) for x in (key, value)]
        made.append(piece.results(piece.call(kernel, gout, query, *seen, out, sums, dropout, causal, **scale)))
    earlier, own = made
    behind = piece.op.ins[2].shape[2] - start - length
    key_grad, value_grad = (_whole(piece, a, b, start, behind) for a, b in zip(earlier[1:], own[1:], strict=True))
    return piece.call(aten.add.Tensor, earlier[0], own[0]), key_grad, value_grad


def _stretches(piece: Piece, query: int) -> list[tuple[int, int, int]]:
    """(local start, start, length) of each stretch of this rank's queries, where they are a part and the mask is causal."""
    placements, causal = piece.spec.ins[query], piece.op.arg(4 if query == 0 else 7, False)
    if not causal or piece.ways(placements, 2) == 1:
        return []
    total = piece.op.ins[query].shape[2]
    axes = [(p, n, i) for p, n, i in zip(placements, piece.sizes, piece.coordinate, strict=True) if p.is_shard and p.dim == 2]
    groups, length, first, within = max(p.split for p, _, _ in axes), total, 0, 0
    if groups == 1:
        return [(0, *piece.span(placements, 2, total))]
    length //= groups
    for p, n, i in axes:
        if p.split == 1:
            groups //= n
            first += i * groups
        else:
            length //= n
            within += i * length
    stripe = total // max(p.split for p, _, _ in axes)
    return [(g * length, (first + g) * stripe + within, length) for g in range(groups)]


def _part(piece: Piece, x: Any, at: int, length: int) -> Any:
    """Local queries ``[at, at + length)``; all of them as they are."""
    if length == piece.in_shape(1 if "backward" in piece.op.target else 0)[2]:
        return x
    return piece.call(aten.slice.Tensor, x, 2, at, at + length)


def _joined(piece: Piece, parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else piece.call(aten.cat.default, list(parts), 2)


def _summed(piece: Piece, parts: Sequence[Any]) -> Any:
    return functools.reduce(lambda a, b: piece.call(aten.add.Tensor, a, b), parts)


def _penalty(start: int) -> int:
    return 0 if start else FAR


def _keys(piece: Piece, x: Any, start: int, length: int) -> Any:
    return piece.call(aten.slice.Tensor, x, 2, start, start + length)


def _whole(piece: Piece, earlier: Any, own: Any, start: int, behind: int) -> Any:
    """The gradient of all keys, zero behind the stretch."""
    seen = piece.call(aten.cat.default, [piece.call(aten.slice.Tensor, earlier, 2, 0, start), own], 2)
    return piece.call(aten.constant_pad_nd.default, seen, [0, 0, 0, behind])
