"""Every cost formula, once: as a function of numbers or numpy arrays that planning computes with, and as a sympy expression for reports.

The body of a function is what sympy is shown, too: it works on symbols as it does on arrays. Units are SI.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import sympy as sp

Number = Any
"""A number, a numpy array, or a sympy expression."""


# FLOPs


def matmul_flops(b: Number, m: Number, k: Number, n: Number) -> Number:
    """Source: counting multiply-adds."""
    return 2 * b * k * m * n


def attention_flops(b: Number, heads: Number, queries: Number, keys: Number, width: Number) -> Number:
    """Source: counting multiply-adds of QK^T and PV (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
    return 4 * b * width * heads * keys * queries


def attention_backward_flops(b: Number, heads: Number, queries: Number, keys: Number, width: Number) -> Number:
    """Source: 2.5 times those of the forward (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
    return 10 * b * width * heads * keys * queries


def convolution_flops(outputs: Number, taps: Number) -> Number:
    """Source: counting multiply-adds."""
    return 2 * taps * outputs


# seconds of kernels


def matmul_s(b: Number, m: Number, k: Number, n: Number, rate: Number, ceiling: Number, wave: Number, tile: Number) -> Number:
    """The measured ceiling, with half a tile more at each edge and half a wave of tiles more at the end (what quantisation costs on average),
    so that it grows with every size."""
    return (wave / 2 + b * (m + tile) * (n + tile)) * (2 * k + 2 * tile) / (rate * ceiling)


def flops_s(flops: Number, rate: Number, ceiling: Number) -> Number:
    return flops / (rate * ceiling)


def roofline_s(
    flops: Number,
    traffic: Number,
    memory_rate: Number,
    overhead: Number,
    *,
    larger: Callable[[Number, Number], Number] = np.maximum,
) -> Number:
    return overhead + larger(flops, traffic / memory_rate)


# bytes that each rank sends, then the time of a collective


def all_gather_volume(size: Number, group: Number) -> Number:
    """Source: ring algorithms (Thakur et al. 2005; NCCL's ``busbw``), as for the other volumes."""
    return size * (group - 1) / group


def reduce_scatter_volume(size: Number, group: Number) -> Number:
    return size * (group - 1) / group


def all_to_all_volume(size: Number, group: Number) -> Number:
    return size * (group - 1) / group


def all_reduce_volume(size: Number, group: Number) -> Number:
    return 2 * size * (group - 1) / group


def collective_s(alpha: Number, base: Number, hop: Number, hops: Number, volume: Number, share: Number, beta: Number) -> Number:
    return alpha * (base + hop * hops) + volume / (beta * share)


FORMULAS: dict[str, Callable[..., Number]] = {
    formula.__name__: formula
    for formula in (
        matmul_flops,
        attention_flops,
        attention_backward_flops,
        convolution_flops,
        matmul_s,
        flops_s,
        roofline_s,
        all_gather_volume,
        reduce_scatter_volume,
        all_to_all_volume,
        all_reduce_volume,
        collective_s,
    )
}

# How arguments are written where not by their own name.
_SYMBOLS = {
    "heads": "h",
    "queries": "s_q",
    "keys": "s_k",
    "width": "d",
    "outputs": "y",
    "taps": "w",
    "rate": "P",
    "ceiling": "eta",
    "wave": "W",
    "tile": "t",
    "flops": "F",
    "traffic": "Q",
    "memory_rate": "M",
    "overhead": "o",
    "size": "bytes",
    "group": "p",
    "volume": "V",
    "base": "a_0",
    "hop": "a_1",
    "share": "f",
    "beta": "B",
}


def symbols(name: str) -> dict[str, sp.Symbol]:
    """Argument of a formula to its symbol, all of them positive."""
    import sympy as sp  # a fifth of a second, which planning does not need

    arguments = inspect.signature(FORMULAS[name]).parameters.values()
    return {a.name: sp.Symbol(_SYMBOLS.get(a.name, a.name), positive=True) for a in arguments if a.default is a.empty}


def expression(name: str) -> sp.Expr:
    """A formula in symbols."""
    import sympy as sp

    larger = {"larger": sp.Max} if "larger" in inspect.signature(FORMULAS[name]).parameters else {}
    return FORMULAS[name](**symbols(name), **larger)


def text(name: str) -> str:
    """A formula for people: ``"matmul_flops = 2*b*k*m*n"``."""
    return f"{name} = {expression(name)}"
