"""Rewrite: from the global graph and a plan to one rank's graphs."""

if __name__ == "passes":
    raise ImportError("import meshwright.passes, not passes: under its bare name every class would exist twice")

from meshwright.passes.lower import lower
from meshwright.passes.program import EmittedCollective, LocalProgram, count_collectives

__all__ = ["EmittedCollective", "LocalProgram", "count_collectives", "lower"]
