"""Plan: capture, rules, cost and the ILP that chooses every op's sharding."""

if __name__ == "planner":
    raise ImportError("import meshwright.planner, not planner: under its bare name every class would exist twice")
