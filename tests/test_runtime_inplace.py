"""Reductions write into their operand only where nobody else reads it."""

from __future__ import annotations

from meshwright.passes import lower
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.trace import capture
from meshwright.runtime.inplace import reduce_in_place
from tests.helpers.legal_plans import greedy_plan
from tests.helpers.models import ALL


def test_only_operands_that_are_dead_afterwards_are_overwritten() -> None:
    case = ALL["mlp"]
    program = capture(case.model(), kwargs=case.batch())
    local = reduce_in_place(lower(program, greedy_plan(program, MeshShape.of(2), batch_axes=(0,)), (0,), ("g",)))
    reductions = [n for g in (local.forward, local.backward) for n in g.graph.nodes if "all_reduce" in str(n.target)]
    assert any(n.target.name() == "_c10d_functional::all_reduce_" for n in reductions)
    for node in reductions:
        operand = node.all_input_nodes[0]
        if node.target.name() == "_c10d_functional::all_reduce_":
            assert operand.op == "call_function" and list(operand.users) == [node]
