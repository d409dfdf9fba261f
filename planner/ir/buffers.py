"""How large the buffers are that small collectives share: what ``passes.bucket`` makes, and what is priced and counted by."""

REDUCE_BYTES = 25 << 20
"""Largest buffer of reductions of gradients, and of whatever else shares one but what :data:`GATHER_BYTES` is for."""

GATHER_BYTES = 4 << 20
"""Largest buffer of gathers of what lies at rest: one is in use, one under way."""
