"""How each captured op is written in the small vocabulary.

    before                                after
    t = aten.t(w)                         permute = aten.permute(w, [1, 0])
    d = aten.detach(t)                    mm = aten.mm(x, permute)
    m = aten.mm(x, d)                     reshape = aten.reshape(mm, [2, 8, 4])
    v = aten._unsafe_view(m, [2, 8, 4])
    c = aten.clone(v)

A rewrite takes the old node and its arguments, already in the new graph, and returns the new node, or a tuple of them
in the place of a multi-result op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.planner.builder import Builder, dtype_of, shape_of

aten = torch.ops.aten
prims = torch.ops.prims

Rewrite = Callable[[Builder, fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def _padded(args: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments with the defaults of those left out."""
    return args + defaults[len(args) :]


def _to_copy(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.cast(args[0], node.meta["val"].dtype, node.meta["val"])


def _as_reshape(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.reshape(args[0], shape_of(node), node.meta["val"])


def _t(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    rank = len(shape_of(args[0]))
    return b.permute(args[0], list(reversed(range(rank))), node.meta["val"])


def _transpose(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    rank = len(shape_of(args[0]))
    dims = list(range(rank))
    if rank:
        i, j = args[1] % rank, args[2] % rank
        dims[i], dims[j] = j, i
    return b.permute(args[0], dims, node.meta["val"])


def _permute(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.permute(args[0], [d % len(args[1]) for d in args[1]], node.meta["val"])


def _expand(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.expand(args[0], shape_of(node), node.meta["val"])


def _slice(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    x, dim, start, end, step = _padded(args, (None, 0, None, None, 1))
    shape = shape_of(x)
    dim = dim % len(shape)
    start, end, step = slice(start, end, step).indices(shape[dim])
    if (start, end, step) == (0, shape[dim], 1):
        return x
    return b.emit(aten.slice.Tensor, x, dim, start, end, step, val=node.meta["val"])


def _slice_backward(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    grad, sizes, dim, start, end, step = args
    dim = dim % len(sizes)
    start, end, step = slice(start, end, step).indices(sizes[dim])
    if (start, end, step) == (0, sizes[dim], 1):
        return grad
    return b.emit(aten.slice_backward.default, grad, list(sizes), dim, start, end, step, val=node.meta["val"])


def _select_backward(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    grad, sizes, dim, index = args
    dim = dim % len(sizes)
    return b.emit(aten.select_backward.default, grad, list(sizes), dim, index % sizes[dim], val=node.meta["val"])


def _select(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    x, dim, index = args
    shape = shape_of(x)
    dim = dim % len(shape)
    return b.emit(aten.select.int, x, dim, index % shape[dim], val=node.meta["val"])


def _split(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    dim = dim % len(shape_of(args[0]))
    pieces = node.meta["val"]
    if len(pieces) == 1:
        return (args[0],)
    sizes = [piece.shape[dim] for piece in pieces]
    return b.emit(aten.split_with_sizes.default, args[0], sizes, dim, val=pieces)


def _full_of(value: Any) -> Rewrite:
    return lambda b, node, args, kwargs: b.full(node, value)


def _full_arg(index: int) -> Rewrite:
    return lambda b, node, args, kwargs: b.full(node, args[index])


def _arange(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    start, end, step = {1: (0, *args, 1), 2: (*args, 1), 3: args}[len(args)]
    val = node.meta["val"]
    return b.emit(aten.arange.start_step, start, end, step, val=val, dtype=val.dtype, device=val.device)


def _sum_all(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    x = b.cast(args[0], node.meta["val"].dtype)
    dims = list(range(len(shape_of(x))))
    return b.emit(aten.sum.dim_IntList, x, dims, False, val=node.meta["val"]) if dims else x


def _sum_dims(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    val = node.meta["val"]
    x = args[0]
    if kwargs.get("dtype") is not None or not x.meta["val"].is_floating_point():
        x = b.cast(x, val.dtype)
    rank = len(shape_of(x))
    dims = sorted({d % rank for d in (args[1] if len(args) > 1 and args[1] else range(rank))}) if rank else []
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    if all(shape_of(x)[d] == 1 for d in dims):
        return b.reshape(x, tuple(val.shape), val)
    return b.emit(aten.sum.dim_IntList, x, dims, keepdim, val=val)


def _neutral(neutral: float, overload: Any) -> Rewrite:
    """``x + 0``, ``x * 1``, ``x ** 1`` are ``x`` where they change neither shape nor dtype."""

    def rewrite(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
        x, other = args[:2]
        if not kwargs and not isinstance(other, fx.Node) and other == neutral and dtype_of(x) == dtype_of(node):
            return x
        return b.emit(overload, *args, val=node.meta["val"], **kwargs)

    return rewrite


def _copy(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    val = node.meta["val"]
    return b.expand(b.cast(args[1], val.dtype), tuple(val.shape), val)


def _nll_backward(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """In the sum form the total weight is not read: a constant stands for it."""
    if args[4] == 2:
        total = args[6].meta["val"]
        one = b.emit(aten.full.default, [], 1.0, dtype=total.dtype, device=total.device)
        args = (*args[:6], one)
    return b.emit(node.target, *args, val=node.meta["val"])


# --- random ops ---------------------------------------------------------------------------------------------------


def _const(b: Builder, x: fx.Node, value: Any, dtype: torch.dtype | None = None) -> fx.Node:
    """A constant in the shape of ``x``."""
    return b.emit(aten.full.default, list(shape_of(x)), value, dtype=dtype or dtype_of(x), device=x.meta["val"].device)


def _dropout(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """``keep = uniform >= p``; ``x * keep / (1 - p)``."""
    x, p, train = (*args, True)[:3]
    if train is False or p == 0:
        return x, _const(b, x, True, torch.bool)
    keep = b.emit(aten.ge.Scalar, b.uniform(shape_of(x)), p)
    kept = b.emit(aten.mul.Tensor, x, keep)
    return b.emit(aten.mul.Tensor, kept, 0.0 if p == 1 else 1.0 / (1.0 - p)), keep


def _bernoulli(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    x = args[0]
    chance = args[1] if len(args) > 1 and not isinstance(args[1], torch.Generator) else kwargs.get("p")
    u = b.uniform(shape_of(x))
    drawn = b.emit(aten.lt.Tensor, u, x) if chance is None else b.emit(aten.lt.Scalar, u, chance)
    return b.cast(drawn, dtype_of(node))


def _rand(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.cast(b.uniform(shape_of(node)), dtype_of(node))


def _uniform_between(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    _, low, high = _padded(args[:3], (None, 0.0, 1.0))
    scaled = b.emit(aten.mul.Tensor, b.uniform(shape_of(node)), float(high - low))
    return b.cast(b.emit(aten.add.Tensor, scaled, float(low)), dtype_of(node))


def _normal(b: Builder, node: fx.Node) -> fx.Node:
    """Standard normal numbers. Source: Box and Muller, A note on the generation of random normal deviates, 1958."""
    shape = shape_of(node)
    one_minus = b.emit(aten.add.Tensor, b.emit(aten.neg.default, b.uniform(shape)), 1.0)
    radius = b.emit(aten.sqrt.default, b.emit(aten.mul.Tensor, b.emit(aten.log.default, one_minus), -2.0))
    angle = b.emit(aten.mul.Tensor, b.uniform(shape), 2.0 * math.pi)
    return b.emit(aten.mul.Tensor, radius, b.emit(aten.cos.default, angle))


def _randn(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return b.cast(_normal(b, node), dtype_of(node))


def _normal_scaled(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    _, mean, std = _padded(args[:3], (None, 0.0, 1.0))
    scaled = b.emit(aten.mul.Tensor, _normal(b, node), float(std))
    return b.cast(b.emit(aten.add.Tensor, scaled, float(mean)), dtype_of(node))


def _randint(low_at: int | None, high_at: int) -> Rewrite:
    def rewrite(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
        low = 0 if low_at is None else args[low_at]
        scaled = b.emit(aten.mul.Tensor, b.uniform(shape_of(node)), float(args[high_at] - low))
        whole = b.emit(aten.add.Tensor, b.emit(aten.floor.default, scaled), float(low))
        return b.cast(whole, dtype_of(node))

    return rewrite


# --- the table ----------------------------------------------------------------------------------------------------

REMOVED = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten.sym_constrain_range_for_size.default,
    }
)
"""Checks of what a static capture has settled."""


def _same(b: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    return args[0]


def _each(rewrite: Rewrite, *targets: Any) -> dict[Any, Rewrite]:
    return dict.fromkeys(targets, rewrite)


REWRITES: dict[Any, Rewrite] = {
    **_each(
        _same,
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.positive.default,
        aten.contiguous.default,
    ),
    **_each(
        _as_reshape,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
    ),
    **_each(_to_copy, aten._to_copy.default, prims.convert_element_type.default),
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    **_each(_split, aten.split.Tensor, aten.split_with_sizes.default),
    **_each(
        _full_of(0),
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.empty_strided.default,
        aten.new_empty_strided.default,
    ),
    **_each(_full_of(1), aten.ones.default, aten.ones_like.default, aten.new_ones.default),
    **_each(_full_arg(1), aten.full.default, aten.full_like.default, aten.fill.Scalar),
    aten.new_full.default: _full_arg(2),
    aten.scalar_tensor.default: _full_arg(0),
    **_each(_arange, aten.arange.default, aten.arange.start, aten.arange.start_step),
    **_each(_neutral(0, aten.add.Tensor), aten.add.Tensor, aten.add.Scalar),
    **_each(_neutral(0, aten.sub.Tensor), aten.sub.Tensor, aten.sub.Scalar),
    **_each(_neutral(1, aten.mul.Tensor), aten.mul.Tensor, aten.mul.Scalar),
    **_each(_neutral(1, aten.div.Tensor), aten.div.Tensor, aten.div.Scalar),
    aten.pow.Tensor_Scalar: _neutral(1, aten.pow.Tensor_Scalar),
    aten.sum.default: _sum_all,
    aten.sum.dim_IntList: _sum_dims,
    **_each(_copy, aten.copy.default, aten.fill.Tensor),
    **_each(_nll_backward, aten.nll_loss_backward.default, aten.nll_loss2d_backward.default),
    aten.native_dropout.default: _dropout,
    **_each(_bernoulli, aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor),
    **_each(_rand, aten.rand.default, aten.rand_like.default),
    aten.uniform.default: _uniform_between,
    **_each(_randn, aten.randn.default, aten.randn_like.default),
    aten.normal_functional.default: _normal_scaled,
    aten.randint.default: _randint(None, 0),
    aten.randint.low: _randint(0, 1),
    aten.randint_like.default: _randint(None, 1),
    aten.randint_like.low_dtype: _randint(1, 2),
}
"""Overload to rewrite; an op that is not here is copied, its dims made non-negative."""
