"""Ops long enough to hide a collective behind."""

from __future__ import annotations

HEAVY = frozenset(
    f"aten.{name}.default"
    for name in (
        "mm",
        "bmm",
        "convolution",
        "convolution_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    )
)
"""Overload names; the planner and the passes mean the same by it."""
