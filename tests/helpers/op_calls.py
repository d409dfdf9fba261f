"""One call of every op that has a rule, by family, on odd and even shapes: what the rules' proofs run on.

Sizes are products of 2 and 3 in most dims, so that meshes of 2 and 3 divide them, and primes in some, so that they do
not. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import meshwright.planner.ir.random_ops  # noqa: F401  (defines meshwright::uniform)

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def f(*shape: int) -> torch.Tensor:
    """Random floats."""
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return f(*shape).abs() + 0.1


def i(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    """Random integers below ``high``."""
    return torch.randint(low, high, shape)


def b(*shape: int) -> torch.Tensor:
    """Random booleans."""
    return torch.rand(shape) < 0.5


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    return op, args, kwargs


def matmul() -> Iterator[Call]:
    yield call(aten.mm.default, f(6, 12), f(12, 18))
    yield call(aten.mm.default, f(6, 7), f(7, 5))
    yield call(aten.mm.default, i(9, 6, 4), i(9, 4, 6))
    yield call(aten.bmm.default, f(6, 4, 12), f(6, 12, 3))
    yield call(aten.bmm.default, f(1, 4, 6), f(1, 6, 1))
    yield call(aten.mv.default, f(6, 12), f(12))
    yield call(aten.dot.default, f(12), f(12))
    yield call(aten.addmm.default, f(18), f(6, 12), f(12, 18))
    yield call(aten.addmm.default, f(6, 18), f(6, 12), f(12, 18), beta=2, alpha=3)
    yield call(aten.addmm.default, f(1, 18), f(6, 12), f(12, 18))
    yield call(aten.baddbmm.default, f(6, 1, 12), f(6, 4, 3), f(6, 3, 12), beta=2)
    yield call(aten.linear.default, f(2, 6, 12), f(18, 12))
    yield call(aten.linear.default, f(6, 12), f(18, 12), f(18))


def pointwise() -> Iterator[Call]:
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.atan2.default):
        yield call(op, f(4, 6, 12), f(12))
    yield call(aten.add.Tensor, f(6, 1), f(4, 1, 12), alpha=3)
    yield call(aten.add.Tensor, f(6, 4), 2.0)
    yield call(aten.add.Tensor, f(), f(6))
    yield call(aten.add.Scalar, f(6), 2.0)
    yield call(aten.mul.Tensor, f(6, 1), f(6, 12))
    yield call(aten.mul.Tensor, f(6, 4), b(6, 4))
    yield call(aten.mul.Scalar, f(6, 5), 2.0)
    yield call(aten.div.Tensor, f(6, 4), positive(6, 1))
    yield call(aten.div.Tensor, f(6, 4), 3.0)
    yield call(aten.div.Tensor_mode, f(6, 4), positive(4), rounding_mode="floor")
    yield call(aten.neg.default, f(7, 6))
    yield call(aten.clone.default, f(7, 6))
    yield call(aten.copy.default, f(6, 4), f(4))
    yield call(aten.where.self, b(6, 4), f(6, 4), f())
    yield call(aten.where.ScalarOther, b(6, 4), f(6, 4), 0)
    yield call(aten.where.ScalarOther, b(6, 4), f(6, 4), 1)
    yield call(aten.where.ScalarSelf, b(6, 4), 0.0, f(6, 4))
    yield call(aten.masked_fill.Scalar, f(6, 4), b(4), 0)
    yield call(aten.masked_fill.Scalar, f(6, 4), b(6, 4), float("-inf"))
    yield call(aten.addcmul.default, f(6, 4), f(6, 1), f(4), value=2)
    yield call(aten.addcdiv.default, f(6, 4), f(6, 1), positive(4))
    yield call(aten.lerp.Scalar, f(6, 4), f(6, 4), 0.3)
    yield call(aten._to_copy.default, f(6, 4), dtype=torch.int64)
    yield call(aten._to_copy.default, i(6, 4, 6), dtype=torch.float64)
    yield call(aten._to_copy.default, b(6, 4), dtype=torch.float64)
    yield call(aten._to_copy.default, f(6, 4), dtype=torch.bool)


def activations() -> Iterator[Call]:
    for op in (aten.exp, aten.tanh, aten.sigmoid, aten.relu, aten.silu, aten.abs, aten.cos, aten.erf, aten.sign):
        yield call(op.default, f(6, 7))
    for op in (aten.log, aten.sqrt, aten.rsqrt, aten.reciprocal):
        yield call(op.default, positive(6, 7))
    yield call(aten.pow.Tensor_Scalar, f(6, 4), 2)
    yield call(aten.clamp.default, f(6, 4), -0.5, 0.5)
    yield call(aten.gelu.default, f(6, 4), approximate="tanh")
    yield call(aten.gelu_backward.default, f(6, 4), f(6, 4), approximate="tanh")
    yield call(aten.threshold_backward.default, f(6, 4), f(6, 4), 0)
    yield call(aten.leaky_relu_backward.default, f(6, 4), f(6, 4), 0.1, False)
    yield call(aten.elu_backward.default, f(6, 4), 1.0, 1.0, 1.0, False, f(6, 4))
    yield call(aten.softplus_backward.default, f(6, 4), f(6, 4), 1.0, 20.0)
    yield call(aten.hardtanh_backward.default, f(6, 4), f(6, 4), -1.0, 1.0)
    for op in (aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward, aten.hardswish_backward):
        yield call(op.default, f(6, 4), f(6, 4))
    for op in (aten.eq, aten.ne, aten.lt, aten.ge):
        yield call(op.Tensor, i(3, 6, 4), i(3, 4))
        yield call(op.Scalar, i(3, 6, 4), 1)
    yield call(aten.bitwise_and.Tensor, b(6, 1), b(1, 4))
    yield call(aten.logical_not.default, b(6, 4))
    yield call(aten.bucketize.Tensor, f(6, 4), torch.linspace(-1, 1, 5, dtype=torch.float64))
    yield call(aten.isin.Tensor_Tensor, i(9, 6, 4), i(9, 3))
    yield call(aten.floor_divide.default, i(9, 6, 4), i(9, 4, low=1))


def views() -> Iterator[Call]:
    yield call(aten.reshape.default, f(4, 6, 12), [24, 12])
    yield call(aten.reshape.default, f(24, 36), [4, 6, 3, 12])
    yield call(aten.reshape.default, f(4, 6), [1, 4, 1, 6, 1])
    yield call(aten.reshape.default, f(6, 4), [2, 12])
    yield call(aten.reshape.default, f(12, 6), [18, 4])
    yield call(aten.reshape.default, f(2, 5, 6), [10, 6])
    yield call(aten.reshape.default, f(1), [])
    yield call(aten.view.default, f(6, 12), [72])
    yield call(aten._unsafe_view.default, f(72), [6, 12])
    yield call(aten.unsqueeze.default, f(6, 4), 1)
    yield call(aten.squeeze.dim, f(6, 1, 4), 1)
    yield call(aten.squeeze.default, f(6, 1, 2))
    yield call(aten.squeeze.dims, f(6, 1, 2), [1, 2])
    yield call(aten.t.default, f(6, 5))
    yield call(aten.transpose.int, f(6, 4, 2), -1, 0)
    yield call(aten.permute.default, f(6, 4, 2, 3), [3, 0, -2, 1])
    yield call(aten.expand.default, f(1, 6, 1), [4, 6, 12])
    yield call(aten.expand.default, f(6), [4, 2, 6])


def cuts_and_joins() -> Iterator[Call]:
    yield call(aten.select.int, f(3, 6, 4), 0, 1)
    yield call(aten.select.int, f(6, 4, 3), -1, 2)
    yield call(aten.select_backward.default, f(6, 4), [6, 3, 4], 1, 2)
    yield call(aten.slice.Tensor, f(4, 18), 1, 6, 12)
    yield call(aten.slice.Tensor, f(4, 18), 1, -6, 9223372036854775807)
    yield call(aten.slice.Tensor, f(4, 18), 1, 5, 11)
    yield call(aten.slice.Tensor, f(4, 18), 1, 0, 18, 3)
    yield call(aten.slice.Tensor, f(18, 4), 0, 6)
    yield call(aten.slice_backward.default, f(4, 6), [4, 18], 1, 6, 12, 1)
    yield call(aten.slice_backward.default, f(4, 5), [4, 18], 1, 6, 11, 1)
    yield call(aten.slice_scatter.default, f(4, 18), f(4, 6), 1, 6, 12)
    yield call(aten.select_scatter.default, f(4, 18, 6), f(4, 6), 1, 6)
    yield call(aten.split_with_sizes.default, f(4, 18), [6, 6, 6], 1)
    yield call(aten.split_with_sizes.default, f(4, 18), [12, 3, 3], -1)
    yield call(aten.split.Tensor, f(18, 4), 6)
    yield call(aten.split.Tensor, f(18, 4), 7)
    yield call(aten.cat.default, [f(4, 6), f(4, 6)], 1)
    yield call(aten.cat.default, [f(4, 6), f(2, 6), f(6, 6)])
    yield call(aten.cat.default, [b(4, 6), b(4, 6)], -1)
    yield call(aten.cat.default, [f(0), f(4, 6)], 1)
    yield call(aten.cat.default, [f(4), f(0), f(2)])
    yield call(aten.stack.default, [f(4, 6), f(4, 6)], 1)
    yield call(aten.unbind.int, f(3, 4, 6))
    yield call(aten.flip.default, f(4, 6), [1])
    yield call(aten.roll.default, f(4, 6), [2], [0])
    yield call(aten.roll.default, f(4, 6), [2])
    yield call(aten.tril.default, f(6, 4, 4), 1)
    yield call(aten.triu.default, f(4, 4))
    yield call(aten.constant_pad_nd.default, f(4, 6), [1, 2], 0.0)
    yield call(aten.constant_pad_nd.default, f(4, 6), [0, 0, 1, 1], 1.0)
    yield call(aten.repeat.default, f(4, 6), [2, 1, 3])
    yield call(aten.diagonal.default, f(4, 6, 4), 0, 0, 2)
    yield call(aten.unfold.default, f(6, 12), 1, 4, 2)


def reductions() -> Iterator[Call]:
    yield call(aten.sum.default, f(4, 6))
    yield call(aten.sum.default, b(4, 6))
    yield call(aten.sum.dim_IntList, f(4, 6, 12), [0, -1], True)
    yield call(aten.sum.dim_IntList, f(4, 6, 7), [1])
    yield call(aten.sum.dim_IntList, f(4, 6), [])
    yield call(aten.sum.dim_IntList, f(6), [0])
    yield call(aten.mean.default, f(4, 6))
    yield call(aten.mean.dim, f(4, 6, 5), [1, 2])
    yield call(aten.mean.dim, f(4, 6, 5), [-3], True)
    yield call(aten.amax.default, f(4, 6), [1])
    yield call(aten.amax.default, f(4, 6), [1], True)
    yield call(aten.amin.default, f(4, 6), [0])
    yield call(aten.max.default, f(4, 6))
    yield call(aten.any.dim, b(4, 6), 1)
    yield call(aten.all.default, b(4, 6))
    yield call(aten.any.dims, b(4, 6, 2), [0, 2], True)
    yield call(aten.prod.dim_int, f(4, 6), 1)
    yield call(aten.logsumexp.default, f(4, 6), [1])
    yield call(aten.linalg_vector_norm.default, f(4, 6), 2, [1], True)
    yield call(aten.linalg_vector_norm.default, f(4, 6))
    yield call(aten.var_mean.correction, f(4, 6), [1], correction=1, keepdim=True)
    yield call(aten.var.correction, f(4, 6), [0])
    yield call(aten.argmax.default, f(4, 6), -1)
    yield call(aten.argmax.default, f(4, 6))
    yield call(aten.max.dim, f(4, 6), 1)
    yield call(aten.min.dim, f(4, 6), 0, True)
    yield call(aten.cumsum.default, f(4, 6), 1)
    yield call(aten.cumprod.default, f(4, 6), 0)
    yield call(aten.sort.default, f(4, 6))
    yield call(aten.sort.stable, f(4, 6), stable=True, dim=0)
    yield call(aten.argsort.default, f(4, 6), 0, True)
    yield call(aten.topk.default, f(4, 6), 2)
    yield call(aten.topk.default, f(4, 6), 3, 0)


def normalization() -> Iterator[Call]:
    for op in (aten._softmax.default, aten._log_softmax.default):
        yield call(op, f(4, 6, 3), 1, False)
    yield call(aten._safe_softmax.default, f(4, 6), -1)
    yield call(aten._softmax_backward_data.default, f(4, 6), f(4, 6), -1, torch.float64)
    yield call(aten._log_softmax_backward_data.default, f(4, 6), f(4, 6), 0, torch.float64)
    for weights in ((f(12), f(12)), (f(12), None), (None, None)):
        yield call(aten.native_layer_norm.default, f(4, 6, 12), [12], *weights, 1e-5)
        mask = [True, weights[0] is not None, weights[1] is not None]
        y, mean, rstd = f(4, 6, 12), f(4, 6, 1), positive(4, 6, 1)
        yield call(aten.native_layer_norm_backward.default, y, f(4, 6, 12), [12], mean, rstd, *weights, mask)
    yield call(aten.native_layer_norm.default, f(4, 6, 12), [6, 12], f(6, 12), f(6, 12), 1e-5)
    yield call(
        aten.native_layer_norm_backward.default, f(6, 12), f(6, 12), [12], f(6, 1), f(6, 1), f(12), f(12), [True, False, False]
    )
    for c, groups in ((12, 6), (8, 2), (6, 1)):
        x, w = f(6, c, 4, 2), f(c)
        yield call(aten.native_group_norm.default, x, w, f(c), 6, c, 8, groups, 1e-5)
        statistics = f(6, groups), positive(6, groups)
        yield call(aten.native_group_norm_backward.default, f(6, c, 4, 2), x, *statistics, w, 6, c, 8, groups, [True, True, True])
    yield call(aten.native_group_norm.default, f(6, 12, 4), None, None, 6, 12, 4, 3, 1e-5)


def convolution() -> Iterator[Call]:
    one, two = [1, 1], [2, 2]
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 6, 3, 3), None, one, one, one, False, [0, 0], 1)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 6, 2, 2), f(12), two, [0, 0], one, False, [0, 0], 1)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 1, 3, 3), f(12), one, one, one, False, [0, 0], 6)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 3, 3, 3), None, one, one, one, False, [0, 0], 2)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(6, 12, 3, 3), f(12), two, one, one, True, one, 1)
    yield call(aten.convolution.default, f(4, 6, 9), f(12, 6, 3), None, [1], [1], [1], False, [0], 1)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 6, 3, 3), f(12), two, [0], [1], False, [0], 1)
    yield call(aten.convolution.default, f(4, 6, 8, 8), f(12, 6, 2, 2), None, [2], [0], [1], False, [0], 1)
    every = [True, True, True]
    back = aten.convolution_backward.default
    yield call(back, f(4, 12, 4, 4), f(4, 6, 8, 8), f(12, 6, 2, 2), None, [2], [0], [1], False, [0], 1, [True, True, False])
    yield call(back, f(4, 12, 8, 8), f(4, 6, 8, 8), f(12, 6, 3, 3), [12], one, one, one, False, [0, 0], 1, every)
    yield call(back, f(4, 12, 8, 8), f(4, 6, 8, 8), f(12, 6, 3, 3), None, one, one, one, False, [0, 0], 1, [False, True, False])
    yield call(back, f(4, 12, 4, 4), f(4, 6, 8, 8), f(12, 6, 2, 2), [12], two, [0, 0], one, False, [0, 0], 1, every)
    yield call(back, f(4, 12, 8, 8), f(4, 6, 8, 8), f(12, 1, 3, 3), [12], one, one, one, False, [0, 0], 6, every)
    yield call(back, f(4, 12, 16, 16), f(4, 6, 8, 8), f(6, 12, 3, 3), [12], two, one, one, True, one, 1, every)


def pooling() -> Iterator[Call]:
    x = f(4, 6, 8, 8)
    yield call(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
    y, at = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    yield call(aten.max_pool2d_with_indices_backward.default, f(*y.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at)
    yield call(aten.avg_pool2d.default, x, [2, 2])
    yield call(aten.avg_pool2d_backward.default, f(4, 6, 4, 4), x, [2, 2], [2, 2], [0, 0], False, True, None)
    yield call(aten._adaptive_avg_pool2d.default, x, [2, 3])
    yield call(aten._adaptive_avg_pool2d_backward.default, f(4, 6, 2, 3), x)
    yield call(aten.upsample_nearest2d.default, x, [16, 12])
    yield call(aten.upsample_nearest2d_backward.default, f(4, 6, 16, 12), [16, 12], [4, 6, 8, 8])
    yield call(aten.upsample_nearest2d.vec, x, None, [2.0, 2.0])
    yield call(aten.upsample_bilinear2d.default, x, [16, 12], True)
    yield call(aten.upsample_bilinear2d_backward.default, f(4, 6, 16, 12), [16, 12], [4, 6, 8, 8], True)
    yield call(aten.reflection_pad2d.default, x, [1, 1, 1, 1])


def vocabulary() -> Iterator[Call]:
    for padding in (-1, 0, 7):
        yield call(aten.embedding.default, f(12, 6), i(12, 4, 6), padding)
        yield call(aten.embedding_dense_backward.default, f(4, 6, 18), i(12, 4, 6), 12, padding, False)
    yield call(aten.embedding.default, f(7, 6), i(7, 4))
    yield call(aten.embedding_dense_backward.default, f(24, 6), i(12, 24), 12, -1, True)
    target = i(12, 6)
    target[2] = -100
    for weight in (None, positive(12)):
        yield call(aten.nll_loss_forward.default, f(6, 12), target, weight, 2, -100)
        yield call(aten.nll_loss_forward.default, f(6, 12), i(12, 6), weight, 2, 3)
        yield call(aten.nll_loss_forward.default, f(6, 12), target, weight, 0, -100)
        yield call(aten.nll_loss_forward.default, f(6, 12), target, weight, 1, -100)
        yield call(aten.nll_loss_backward.default, f(), f(6, 12), target, weight, 2, -100, positive())
        yield call(aten.nll_loss_backward.default, f(), f(6, 12), target, weight, 1, -100, positive())
        yield call(aten.nll_loss_backward.default, f(6), f(6, 12), i(12, 6), weight, 0, 3, positive())
    yield call(aten.nll_loss2d_forward.default, f(2, 12, 4, 3), i(12, 2, 4, 3), None, 2, -100)
    yield call(aten.nll_loss2d_backward.default, f(), f(2, 12, 4, 3), i(12, 2, 4, 3), None, 2, -100, positive())


def indexing() -> Iterator[Call]:
    yield call(aten.gather.default, f(6, 12), 1, i(12, 6, 4))
    yield call(aten.gather.default, f(6, 12), 0, i(6, 2, 4))
    yield call(aten.scatter.src, f(6, 12), 1, torch.rand(6, 12).argsort(1)[:, :4], f(6, 4))
    yield call(aten.scatter.value, f(6, 12), 1, i(12, 6, 4), 0)
    yield call(aten.scatter.value, f(6, 12), 1, i(12, 6, 4), 2.0)
    yield call(aten.scatter_add.default, f(6, 12), 1, i(12, 6, 4), f(6, 4))
    yield call(aten.index_select.default, f(6, 12), 1, i(12, 4))
    yield call(aten.index_add.default, f(6, 12), 1, i(12, 4), f(6, 4))
    yield call(aten.index.Tensor, f(6, 12, 4), [None, i(12, 6, 2)])
    yield call(aten.index.Tensor, f(6, 12, 4), [i(6, 6, 1), i(12, 2)])
    yield call(aten.index.Tensor, f(6, 12, 4), [i(6, 4), None, i(4, 4)])
    yield call(aten.index.Tensor, f(6, 12), [None, i(12)])
    yield call(aten._unsafe_index.Tensor, f(6, 12, 4), [None, i(12, 6), None])
    for accumulate in (False, True):
        at = torch.randperm(12)[:6]
        yield call(aten.index_put.default, f(6, 12, 4), [None, at], f(6, 6, 4), accumulate)
        yield call(aten.index_put.default, f(6, 12, 4), [None, at], f(6, 1), accumulate)
    yield call(aten.index_put.default, f(6, 12, 4), [i(6, 6, 1), i(12, 2)], f(6, 2, 4), True)
    yield call(aten._unsafe_index_put.default, f(6, 12), [None, i(12, 6)], f(6, 6), True)


def attention() -> Iterator[Call]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    kinds = (
        (6, 6, 6, 6, False),
        (6, 2, 6, 6, False),
        (6, 3, 4, 6, False),
        (4, 1, 6, 6, False),
        (6, 6, 6, 6, True),
        (6, 2, 6, 6, True),
        (2, 2, 4, 4, True),
    )
    for heads, key_heads, queries, keys, causal in kinds:
        q, k, v = f(2, heads, queries, 8), f(2, key_heads, keys, 8), f(2, key_heads, keys, 8)
        out, lse = forward(q, k, v, 0.0, causal)
        yield call(forward, q, k, v, 0.0, causal)
        if heads == key_heads:
            yield call(backward, f(*q.shape), q, k, v, out, lse, 0.0, causal)
    for shape in ((6, 6), (2, 1, 6, 6), (2, 4, 6, 6), (1, 1, 1, 6)):
        q, k, v, mask = f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), f(*shape)
        out, lse = forward(q, k, v, 0.0, False, attn_mask=mask, scale=0.5)
        yield call(forward, q, k, v, 0.0, False, attn_mask=mask, scale=0.5)
        yield call(backward, f(*q.shape), q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=0.5)


def creation() -> Iterator[Call]:
    yield call(aten.full.default, [6, 4], 0.0, dtype=torch.float64)
    yield call(aten.full.default, [6, 4], 2, dtype=torch.int64)
    yield call(aten.full.default, [], 0.0)
    yield call(aten.zeros.default, [6, 4])
    yield call(aten.ones.default, [6])
    yield call(aten.empty.memory_format, [6])
    yield call(aten.scalar_tensor.default, 3.0)
    yield call(aten.zeros_like.default, f(6, 4))
    yield call(aten.full_like.default, f(6, 4), 2)
    yield call(aten.new_zeros.default, f(6), [4, 6])
    yield call(aten.new_full.default, f(6, 2), [6], 2)
    yield call(aten.arange.default, 12)
    yield call(aten.arange.start, 3, 15)
    yield call(aten.arange.start_step, 0, 24, 2, dtype=torch.int64)
    for exact in (True, False):
        yield call(torch.ops.meshwright.uniform.default, torch.tensor(7), 3, [6, 4], "", [], [], exact)


FAMILIES = (
    matmul,
    pointwise,
    activations,
    views,
    cuts_and_joins,
    reductions,
    normalization,
    convolution,
    pooling,
    vocabulary,
    indexing,
    attention,
    creation,
)
