"""Cuts of a further program that keep every parameter's readers on the stages that hold it."""

from __future__ import annotations

import numpy as np
import pytest

import meshwright as mw
from meshwright.passes.lower_stages import lower_stages
from meshwright.planner.homes import cuts_at_homes
from tests.helpers.prepared import captured
from tests.helpers.stages import forward_ops, staged_plan


def _holders(name: str, cuts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    plan = staged_plan(captured(name), cuts, 1)
    return lower_stages(captured(name), plan, (0,), ("none",)).holders


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "t5"])
@pytest.mark.parametrize("stages", [2, 4])
def test_cuts_at_homes_hold_the_same_parameters(name, stages):
    ops = forward_ops(captured(name))
    holders = _holders(name, tuple(ops[len(ops) * k // stages] for k in range(1, stages)))
    found = cuts_at_homes(captured(name).graph, holders, stages, np.ones(len(ops) + 1))
    again = _holders(name, found)
    assert {n: set(s) for n, s in again.items()} == {n: set(s) for n, s in holders.items()}


def test_parameters_in_another_order_are_refused():
    graph = captured("mlp").graph
    names = [i.name for i in graph.inputs_of("parameter")]
    homes = {name: (len(names) - k,) for k, name in enumerate(names)}
    with pytest.raises(mw.InputError, match="uses its parameters in another order"):
        cuts_at_homes(graph, homes, len(names) + 1, np.ones(len(graph.ops)))


def test_too_few_ops_are_refused():
    graph = captured("mlp").graph
    with pytest.raises(mw.InputError, match="too few ops"):
        cuts_at_homes(graph, {}, 1000, np.ones(len(graph.ops)))
