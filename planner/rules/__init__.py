"""Sharding rules: for each op, the legal placements over one mesh axis."""

from meshwright.planner.rules import (  # noqa: F401  (each registers its ops)
    attention,
    convolution,
    creation,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    reductions,
    views,
)
from meshwright.planner.rules.factors import Factors, einsum, factor_rows
from meshwright.planner.rules.registry import has_rule, register, replicated, rows_for, unregister

__all__ = ["Factors", "einsum", "factor_rows", "has_rule", "register", "replicated", "rows_for", "unregister"]
