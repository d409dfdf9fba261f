"""Torch's own functions stand for the operators that they call, with the same arguments."""

from __future__ import annotations

import pytest
import torch

from meshwright.passes import lower
from meshwright.planner.ir.mesh import MeshShape
from meshwright.runtime.direct_calls import DIRECT, call_directly
from tests.helpers.legal_plans import replicated_plan
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.prepared import captured

X, ROWS = torch.arange(1.0, 13.0).reshape(3, 4) / 10, torch.tensor([2, 0])
CALLS = {
    "add": (X, 2.0), "addmm": (X[:, 0], X.T, X[:, :3]), "amax": (X, [1], True), "bmm": (X[None], X.T[None]), "cat": ([X, X], 1),
    "clone": (X,), "div": (X, X), "embedding": (X, ROWS, -1, False, False), "mean": (X, [0], True), "mm": (X, X.T), "mul": (X, 3),
    "native_layer_norm": (X, [4], X[0], X[1], 1e-5), "permute": (X, [1, 0]), "reshape": (X, [2, -1]), "select": (X, 1, 2),
    "split_with_sizes": (X, [1, 3], 1), "sub": (X, X), "sum": (X, [0], False), "transpose": (X, 0, 1), "unsqueeze": (X, 1),
    "where": (X > 0.5, X, X * 2),
}  # fmt: skip
"""Arguments by the operator's name; one tensor for those that are not named here."""


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_the_function_runs_the_operator(op) -> None:
    args = CALLS.get(op._schema.name.partition("::")[2], (X,))
    with LiveBytes() as wanted:
        expected = op(*args)
    with LiveBytes() as ran:
        found = DIRECT[op](*args)
    operators = [[name for name, _ in traced.trace] for traced in (ran, wanted)]
    assert operators[0] == operators[1] != []
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_all_calls_of_a_program_are_direct_but_those_with_an_argument_left_open() -> None:
    program = captured("gpt2")
    local = lower(program, replicated_plan(program, MeshShape.of(1)), (0,), ("g",))
    assert sum(n.target in DIRECT for g in local.graphs for n in g.graph.nodes) > 20
    call_directly(local.graphs)
    left = [n for g in local.graphs for n in g.graph.nodes if n.target in DIRECT]
    assert all(None in (*n.args, *n.kwargs.values()) for n in left)
    assert "torch.ops.aten.reshape" not in local.forward.code and "torch.reshape(" in local.forward.code
