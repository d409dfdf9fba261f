"""Every cost formula, as a sympy expression: printed in reports, compiled for use.

Symbols are those of ``SYMBOLS``; units are SI. :func:`compiled` gives the numpy function of an expression.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import sympy as sp

(m, k, n, b) = sp.symbols("m k n b", positive=True)
(heads, queries, keys, width) = sp.symbols("h s_q s_k d", positive=True)
(group, volume, size) = sp.symbols("p V bytes", positive=True)
(alpha, beta, base, hop, hops, share) = sp.symbols("alpha B a_0 a_1 hops f", positive=True)
(flops, rate, ceiling, wave, tile) = sp.symbols("F P eta W t", positive=True)
(traffic, memory_rate, overhead) = sp.symbols("Q M o", positive=True)
outputs, taps = sp.symbols("y w", positive=True)

FORMULAS: dict[str, sp.Expr] = {
    # FLOPs
    "matmul_flops": 2 * b * m * k * n,
    "attention_flops": 4 * b * heads * queries * keys * width,
    "attention_backward_flops": sp.Rational(5, 2) * 4 * b * heads * queries * keys * width,
    "convolution_flops": 2 * outputs * taps,
    # kernels
    "matmul_s": 2 * (k + tile) * (b * (m + tile) * (n + tile) + wave / 2) / (rate * ceiling),
    "flops_s": flops / (rate * ceiling),
    "roofline_s": sp.Max(flops, traffic / memory_rate) + overhead,
    # bytes that each rank sends, then the time of a collective
    "all_gather_volume": size * (group - 1) / group,
    "reduce_scatter_volume": size * (group - 1) / group,
    "all_to_all_volume": size * (group - 1) / group,
    "all_reduce_volume": 2 * size * (group - 1) / group,
    "collective_s": alpha * (base + hop * hops) + volume / (share * beta),
}
"""Name to expression.

Source: matmul, attention (QK^T and PV, and 2.5 times that backwards: FlashAttention-2, arXiv:2307.08691, section 4.1) and
convolution by counting multiply-adds; volumes: ring algorithms (Thakur et al. 2005; NCCL's ``busbw``). ``matmul_s``: the
measured ceiling, with half a tile more at each edge and half a wave of tiles more at the end (what quantisation costs on
average), so that it grows with every size.
"""

_ARGUMENTS: dict[str, tuple[sp.Symbol, ...]] = {
    "matmul_flops": (b, m, k, n),
    "attention_flops": (b, heads, queries, keys, width),
    "attention_backward_flops": (b, heads, queries, keys, width),
    "convolution_flops": (outputs, taps),
    "matmul_s": (b, m, k, n, rate, ceiling, wave, tile),
    "flops_s": (flops, rate, ceiling),
    "roofline_s": (flops, traffic, memory_rate, overhead),
    "all_gather_volume": (size, group),
    "reduce_scatter_volume": (size, group),
    "all_to_all_volume": (size, group),
    "all_reduce_volume": (size, group),
    "collective_s": (alpha, base, hop, hops, volume, share, beta),
}


@cache
def compiled(name: str) -> Callable[..., Any]:
    """The function of a formula, over numbers or numpy arrays, in the order of its arguments."""
    return sp.lambdify(_ARGUMENTS[name], FORMULAS[name], modules=[np])  # by name it would import all that numpy loads late


def text(name: str) -> str:
    """A formula for people: ``"matmul_flops = 2*b*k*m*n"``."""
    return f"{name} = {FORMULAS[name]}"
