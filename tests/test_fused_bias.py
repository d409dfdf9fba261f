"""A bias is added in its product only where the product is whole and nobody else reads it."""

from __future__ import annotations

import torch

from meshwright.passes import lower
from meshwright.passes.program import LocalProgram
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.trace import capture
from meshwright.runtime.fused_bias import fuse_biases
from tests.helpers.legal_plans import replicated_plan
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, planned


def kinds(program: LocalProgram) -> list[str]:
    return [str(n.target) for n in program.forward.graph.nodes if n.op == "call_function"]


def test_a_whole_product_and_its_bias_are_one_kernel_of_the_same_result() -> None:
    case = ALL["mlp"]
    program = capture(case.model(), kwargs=case.batch())
    plan = replicated_plan(program, MeshShape.of(1))
    plain, fused = lower(program, plan, (0,), ("g",)), fuse_biases(lower(program, plan, (0,), ("g",)))
    assert kinds(plain).count("aten.mm.default") == kinds(fused).count("aten.addmm.default") == 3
    assert "aten.mm.default" not in kinds(fused)
    state, batch = dict(case.model().named_parameters()), case.batch()
    given = [
        state[i.name].detach() if i.role == "parameter" else batch[i.name] for i in program.graph.inputs if i.role != "tangent"
    ]
    for a, b in zip(plain.forward(*given), fused.forward(*given), strict=True):
        torch.testing.assert_close(a, b)


def test_a_bias_behind_a_sum_over_ranks_stays_behind_it() -> None:
    plan = planned("mlp", (2,), "tp")
    fused = fuse_biases(lower(captured("mlp"), plan, (0,), ("g",)))
    reduced = [n for n in fused.forward.graph.nodes if str(n.target) == "_c10d_functional.wait_tensor.default"]
    added = [u for n in reduced for u in n.users if str(u.target) == "aten.add.Tensor"]
    assert added, "the row-wise product is summed before its bias is added"
