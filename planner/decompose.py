"""Which ops are taken apart at capture, and how.

Two aims: few kinds of ops (each needs a sharding rule), and *partial sums that flow*: every mean becomes a sum divided
by a global count, every fused bias an add after the product, so that a sum over a sharded dim stays an unreduced addend
until one collective completes it. Ops with good kernels stay whole: products, convolutions, attention, layer and group
normalisation, embedding, softmax, pooling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""Values of ATen's ``reduction`` argument."""

_TORCHS_OWN = (
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten.stack.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.tril.default,
    aten.triu.default,
    aten.repeat.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.addr.default,
    aten.mv.default,
    aten.dot.default,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.glu.default,
    aten.glu_backward.default,
    aten.std.correction,
    aten.lerp.Scalar,
    aten.eye.default,
    aten.linspace.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
)
"""Ops whose decomposition in torch is what is wanted; means and variances in them meet the entries below."""


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = aten.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return aten.add(product, bias if beta == 1 else bias * beta)


def _dims(x: torch.Tensor, dims: Sequence[int] | int | None) -> list[int]:
    """Reduced dims, non-negative; all of them where none is given."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(x.dim()))
    return sorted({d % x.dim() if x.dim() else 0 for d in ([dims] if isinstance(dims, int) else dims)})


def _count(x: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def _sum(x: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not x.dim():
        return x if dtype is None else x.to(dtype)
    return aten.sum.dim_IntList(x, list(dims), keepdim, dtype=dtype)


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dims = _dims(x, dim)
    return aten.div(_sum(x, dims, keepdim, dtype), _count(x, dims))


def _mean_all(x: Any, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(x, None, False, dtype=dtype)


def _var_mean(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    count = _count(x, dims)
    mean = aten.div(_sum(x, dims, True), count)
    centred = aten.sub(x, mean)
    spread = _sum(aten.mul(centred, centred), dims, keepdim)
    var = aten.div(spread, max(count - (1 if correction is None else correction), 0))
    return var, mean if keepdim else aten.reshape(mean, list(var.shape))


def _var(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half-precision values in float32, as ATen's kernels compute them inside."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    """``x - m - log(sum(exp(x - m)))``: with ``dim`` sharded, one max and one sum are reduced."""
    if not x.dim():
        return NotImplemented
    wide = _wide(x)
    shifted = aten.sub(wide, aten.amax(wide, [dim], True))
    out = aten.sub(shifted, aten.log(_sum(aten.exp(shifted), [dim], True)))
    return out if half_to_float else out.to(x.dtype)


def _log_softmax_backward(grad: Any, out: Any, dim: int, input_dtype: torch.dtype) -> Any:
    if not out.dim():
        return NotImplemented
    wide = _wide(grad)
    return aten.sub(wide, aten.mul(aten.exp(_wide(out)), _sum(wide, [dim], True))).to(input_dtype)


def _weight_total(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore: int) -> torch.Tensor:
    """What a mean negative log likelihood divides by; depends on targets (and class weights) only."""
    kept = aten.ne(target, ignore)
    if weight is None:
        return _sum(kept.to(x.dtype), range(target.dim()), False)
    each = aten.index(weight, [aten.where(kept, target, torch.zeros_like(target))])
    return _sum(aten.mul(each, kept), range(target.dim()), False)


def _nll_forward(op: Any) -> Callable[..., Any]:
    """A mean becomes the sum form divided by the total weight."""

    def decompose(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
        if reduction != MEAN:
            return NotImplemented
        total = _weight_total(x, target, weight, ignore_index)
        return aten.div(op(x, target, weight, SUM, ignore_index)[0], total), total

    return decompose


def _nll_backward(op: Any) -> Callable[..., Any]:
    """The mean's divisor is applied to the incoming gradient; the sum form does not read the total weight."""

    def decompose(grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any) -> Any:
        if reduction != MEAN:
            return NotImplemented
        return op(aten.div(grad, total), x, target, weight, SUM, ignore_index, total)

    return decompose


def _convolution(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    if bias is None:
        return NotImplemented
    out = aten.convolution(x, weight, None, *rest)
    return aten.add(out, aten.reshape(bias, [-1] + [1] * (weight.dim() - 2)))


def _convolution_backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any) -> Any:
    *settings, mask = rest
    if not mask[2]:
        return NotImplemented
    grad_bias = _sum(grad, [0, *range(2, grad.dim())], False)
    if not mask[0] and not mask[1]:
        return None, None, grad_bias
    grad_x, grad_weight, _ = aten.convolution_backward(grad, x, weight, None, *settings, [mask[0], mask[1], False])
    return grad_x, grad_weight, grad_bias


def _dropout_backward(grad: Any, kept: Any, scale: float) -> Any:
    return aten.mul(aten.mul(grad, kept), scale)


def table() -> dict[Any, Callable[..., Any]]:
    """Overload to decomposition, for the joint trace; returning NotImplemented keeps the op."""
    ours: dict[Any, Callable[..., Any]] = {
        aten.addmm.default: _addmm,
        aten.mean.default: _mean_all,
        aten.mean.dim: _mean,
        aten.var_mean.correction: _var_mean,
        aten.var.correction: _var,
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_forward(aten.nll_loss_forward.default),
        aten.nll_loss_backward.default: _nll_backward(aten.nll_loss_backward.default),
        aten.nll_loss2d_forward.default: _nll_forward(aten.nll_loss2d_forward.default),
        aten.nll_loss2d_backward.default: _nll_backward(aten.nll_loss2d_backward.default),
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
        aten.native_dropout_backward.default: _dropout_backward,
    }
    return {**get_decompositions(_TORCHS_OWN), **ours}
