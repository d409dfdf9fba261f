"""Rewrite: from the global graph and a plan to one rank's graphs."""

if __name__ == "passes":
    raise ImportError("import meshwright.passes, not passes: under its bare name every class would exist twice")
