"""The operators that an exported graph may call: a list, not a namespace.

Every one is a function of its arguments: it reads no file, keeps no state, changes no argument and draws no random numbers of its
own. A namespace is no protection: ``aten.from_file`` reads and creates any file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

import meshwright.planner.ir.random_ops  # noqa: F401  (defines meshwright::uniform)
from meshwright.passes.micro_batches import OVER_TIME
from meshwright.planner.ir.errors import InputError

_ATEN = """
__lshift__.Scalar|Tensor __rshift__.Scalar|Tensor __xor__.Scalar|Tensor _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
_adaptive_avg_pool3d _conj_physical _grouped_mm _log_softmax _log_softmax_backward_data _safe_softmax
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward _softmax
_softmax_backward_data _to_copy _unsafe_index.Tensor _unsafe_index_put _unsafe_view abs acos acosh adaptive_avg_pool1d
adaptive_max_pool2d adaptive_max_pool2d_backward add.Scalar|Tensor addcdiv addcmul addmm addmv alias all.default|dim|dims amax
amin angle any.default|dim|dims arange.default|start|start_step argmax argmin argsort.default|stable asin asinh atan atan2
atanh avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d baddbmm bitwise_and.Scalar|Scalar_Tensor|Tensor
bitwise_left_shift.Scalar_Tensor|Tensor|Tensor_Scalar bitwise_not bitwise_or.Scalar|Scalar_Tensor|Tensor
bitwise_right_shift.Scalar_Tensor|Tensor|Tensor_Scalar bitwise_xor.Scalar|Scalar_Tensor|Tensor bmm bucketize.Tensor cat ceil
celu chunk clamp.Tensor|default clamp_max.Tensor|default clamp_min.Tensor|default clip.Tensor|default clone col2im
conj_physical constant_pad_nd contiguous convolution convolution_backward copysign.Scalar|Tensor cos cosh
count_nonzero.dim_IntList cummax cummin cumprod cumsum deg2rad detach diagonal digamma
div.Scalar|Scalar_mode|Tensor|Tensor_mode dot elu elu_backward embedding embedding_dense_backward eq.Scalar|Tensor erf erfc
erfinv exp exp2 expand expm1 fill.Scalar|Tensor flatten.using_ints flip float_power.Scalar|Tensor_Scalar|Tensor_Tensor floor
floor_divide.Scalar|default fmax fmin fmod.Scalar|Tensor frac frexp.Tensor full full_like gather gcd ge.Scalar|Tensor gelu
gelu_backward gt.Scalar|Tensor hardshrink hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh
hardtanh_backward heaviside hypot i0 index.Tensor index_add index_put index_select isfinite isinf isnan isneginf isposinf
kthvalue lcm ldexp.Tensor le.Scalar|Tensor leaky_relu leaky_relu_backward lerp.Scalar|Tensor lgamma linear log log10 log1p
log2 log_softmax.int logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logit_backward
logsumexp lt.Scalar|Tensor masked_fill.Scalar|Tensor masked_scatter max.default|dim|other max_pool2d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices maximum mean.default|dim median.dim min.default|dim|other minimum
mish mish_backward mm mode mul.Scalar|Tensor mv nan_to_num native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward ne.Scalar|Tensor neg new_full new_ones new_zeros nextafter nll_loss2d_backward nll_loss2d_forward
nll_loss_backward nll_loss_forward ones ones_like outer permute positive pow.Scalar|Tensor_Scalar|Tensor_Tensor
prod.default|dim_int rad2deg reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6
remainder.Scalar|Scalar_Tensor|Tensor repeat replication_pad2d replication_pad3d reshape roll round.decimals|default rsqrt
rsub.Scalar scalar_tensor scatter.reduce|src|value scatter_add scatter_reduce.two searchsorted.Tensor select.int
select_backward select_scatter selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh slice.Tensor
slice_backward slice_scatter softmax.int softplus softplus_backward softshrink sort.default|stable split.Tensor
split_with_sizes sqrt square squeeze.default|dim|dims stack std.correction sub.Scalar|Tensor sum.default|dim_IntList t tan
tanh tanh_backward threshold threshold_backward topk transpose.int tril triu true_divide.Tensor trunc unbind.int unflatten.int
unfold unsqueeze upsample_bicubic2d.default|vec upsample_bicubic2d_backward upsample_bilinear2d.default|vec
upsample_bilinear2d_backward upsample_linear1d.default|vec upsample_linear1d_backward upsample_nearest1d.default|vec
upsample_nearest1d_backward upsample_nearest2d.default|vec upsample_nearest2d_backward var.correction|dim var_mean.correction
view.default|dtype where.Scalar|ScalarOther|ScalarSelf|default|self xlogy.Scalar_Other|Scalar_Self|Tensor zeros zeros_like
"""
"""Overloads ``name.overload``; ``name`` alone is ``name.default``, ``name.a|b`` are two overloads."""

_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor")

Operators = Mapping[str, Callable[..., Any]]


@cache
def operators(extra: tuple[str, ...] = ()) -> Operators:
    """What may be called, by the name that files use.

    Args:
        extra: overloads that the caller allows besides, ``"mylib.op.default"``: of a library that it has imported.

    Raises:
        InputError: there is no such overload.
    """
    found: dict[str, Callable[..., Any]] = {"operator.getitem": operator.getitem, **OVER_TIME}
    for word in _ATEN.split():
        name, _, overloads = word.partition(".")
        for overload in (overloads or "default").split("|"):
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None and overload in packet.overloads():  # releases of torch differ in a few
                found[f"aten.{name}.{overload}"] = getattr(packet, overload)
    for name in _COLLECTIVES:
        found[f"_c10d_functional.{name}.default"] = getattr(torch.ops._c10d_functional, name).default
    found["meshwright.uniform.default"] = torch.ops.meshwright.uniform.default
    return {**found, **{name: _named(name) for name in extra}}


def _named(name: str) -> Callable[..., Any]:
    parts = name.split(".")
    if len(parts) == 3 and all(p.isidentifier() for p in parts):
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        if packet is not None and parts[2] in packet.overloads():
            return getattr(packet, parts[2])
    raise InputError(
        f"operator {name!r} does not exist here: write it as 'library.name.overload', and import the library that defines it first"
    )


def name_of(target: Any) -> str:
    """The name that files use for a target of a graph."""
    if target is operator.getitem:
        return "operator.getitem"
    return next((name for name, function in OVER_TIME.items() if function is target), str(target))
