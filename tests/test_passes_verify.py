"""Wrong plans and wrong programs, and the exact messages about them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from meshwright.passes import lower
from meshwright.passes.base import check_graph
from meshwright.passes.overlap import OverlapCollectives, is_wait
from meshwright.passes.redistribute import Step
from meshwright.passes.rewrite import RewriteForRank
from meshwright.passes.verify import VerifyProgram
from meshwright.passes.views import is_collective
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.heavy import HEAVY
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Collective, OpSpec, Plan, Redistribution
from meshwright.planner.ir.spec import P, R, S
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.trace import capture
from tests.helpers.legal_plans import greedy_plan, replicated_plan
from tests.helpers.models import ALL


@pytest.fixture(scope="module")
def program():
    return capture(ALL["mlp"].model(), kwargs=ALL["mlp"].batch())


@pytest.fixture(scope="module")
def plan(program) -> Plan:
    return replicated_plan(program, MeshShape.of(2))


def refused(plan: Plan, program, message: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(message)):
        verify_plan(plan, program.graph)


def test_a_legal_plan_passes(plan, program) -> None:
    verify_plan(plan, program.graph)


def test_a_plan_for_another_program_is_refused(plan, program) -> None:
    refused(replace(plan, graph_hash="0" * 64), program, "the plan is for program 000000000000, this one is")


def test_a_missing_op_is_named(plan, program) -> None:
    ops = dict(plan.ops)
    gone = next(iter(ops))
    del ops[gone]
    refused(replace(plan, ops=ops), program, f"the plan says nothing about op {gone} (1 missing)")
    refused(
        replace(plan, ops={**plan.ops, "mm_99": OpSpec((), ())}),
        program,
        "the plan names op mm_99, which the program does not have",
    )


def test_an_input_that_comes_in_as_addends_is_refused(plan, program) -> None:
    name = program.graph.inputs_of("parameter")[0].value.name
    refused(
        replace(plan, inputs={**plan.inputs, name: (P,)}), program, "comes in as P: nothing outside the program makes addends"
    )


def test_a_spec_of_the_wrong_arity_is_refused(plan, program) -> None:
    op = next(op for op in program.graph.ops if op.target == "aten.mm.default")
    refused(
        replace(plan, ops={**plan.ops, op.name: OpSpec(((R,),), ((R,),))}), program, "has 1 inputs and 1 results, the op 2 and 1"
    )


def test_a_dim_that_does_not_divide_is_refused(program) -> None:
    op = next(op for op in program.graph.ops if op.target == "aten.mm.default")
    plan = replicated_plan(program, MeshShape.of(5))
    spec = OpSpec(((S(0),), (R,)), ((S(0),),))
    refused(
        replace(plan, ops={**plan.ops, op.name: spec}), program, "cannot be S(0) on mesh 5: a sharded dim is not divided evenly"
    )


def test_a_gradient_that_ends_elsewhere_than_its_parameter_is_refused(plan, program) -> None:
    outputs = tuple(
        (S(0),) if o.role == "gradient" and o.value.shape else p for o, p in zip(program.graph.outputs, plan.outputs, strict=True)
    )
    refused(replace(plan, outputs=outputs), program, "ends as S(0), but its parameter lies as R: they must agree")


def test_a_result_that_ends_partial_is_refused(plan, program) -> None:
    outputs = tuple((P,) if o.role == "output" else p for o, p in zip(program.graph.outputs, plan.outputs, strict=True))
    refused(replace(plan, outputs=outputs), program, "ends as P: a result must be complete")


def test_an_illegal_step_of_a_path_is_named(plan, program) -> None:
    op = next(op for op in program.graph.ops if op.target == "aten.mm.default")
    wanted = OpSpec(((R,), (S(1),)), ((S(1),),))
    path = Redistribution(op.ins[1].name, op.phase, ((R,), (P,), (S(1),)))
    wrong = replace(plan, ops={**plan.ops, op.name: wanted}, redistributions=(path,))
    refused(wrong, program, "has the step R -> P, which is not a legal change of one axis")


def test_a_value_that_would_have_to_become_partial_is_refused(plan, program) -> None:
    op = next(op for op in program.graph.ops if op.target == "aten.mm.default")
    wrong = OpSpec(((P,), (R,)), ((P,),))
    refused(replace(plan, ops={**plan.ops, op.name: wrong}), program, "no path of legal steps leads there")


def test_predicted_collectives_must_be_those_that_run(program) -> None:
    plan = greedy_plan(program, MeshShape.of(2), batch_axes=(0,))
    wrong = replace(plan, collectives=(*plan.collectives, Collective("all_gather", 0, 0, 0.0, False, 3)))
    with pytest.raises(VerifyError, match=r"the plan predicts \d+ all_gather over axis 'axis0', the lowered program has"):
        lower(program, wrong, (0,), ("g",))


def test_a_lost_collective_is_found(program) -> None:
    plan = greedy_plan(program, MeshShape.of(2), batch_axes=(0,))
    gm = RewriteForRank(program, plan, (0,), ("g",))(program.gm)
    node = next(n for n in gm.graph.nodes if is_collective(n) and not is_wait(n))
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    with pytest.raises(VerifyError, match="the plan asks for 1 .* the lowered program has 0"):
        VerifyProgram(plan, program.graph)(gm)


def test_coordinate_and_groups_must_fit_the_mesh(plan, program) -> None:
    with pytest.raises(VerifyError, match=r"coordinate \(2,\) is not on mesh 2"):
        lower(program, plan, (2,), ("g",))
    with pytest.raises(VerifyError, match="1 group names are needed"):
        lower(program, plan, (1,), ("g", "h"))


def test_overlap_waits_for_gradients_at_the_end_and_gathers_ahead(program) -> None:
    plan = greedy_plan(program, MeshShape.of(2), batch_axes=(0,), parameters={"*": (S(0),)})
    gm = OverlapCollectives(ahead=1)(RewriteForRank(program, plan, (0,), ("g",))(program.gm))
    check_graph(gm)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == "backward"]
    last_big = max(i for i, n in enumerate(nodes) if str(n.target) in HEAVY)
    results = next(reversed(gm.graph.nodes)).args[0]
    for node in results:
        if node is not None and is_wait(node) and node.meta["phase"] == "backward":
            assert nodes.index(node) > last_big
    for i, node in enumerate(nodes):
        if is_wait(node) and node.meta["step"].kind == "all_gather" and node not in results:
            issued = nodes.index(node.args[0])
            assert sum(str(n.target) in HEAVY for n in nodes[issued:i]) <= 2, node


def test_shape_of_a_step_is_the_largest_piece() -> None:
    step = Step((9, 4), torch.float32, (S(0),), (R,), (2,), (1,), "g")
    assert step.buffer_shape == (5, 4) and step.result_bytes == 9 * 4 * 4
