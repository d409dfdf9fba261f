"""Whole models, lowered for every rank: results equal the global graph for *any* legal plan."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch.utils import _pytree as pytree

from meshwright.passes import LocalProgram, count_collectives, lower
from meshwright.passes.base import text_of
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import R, S
from meshwright.planner.remat import save_few
from meshwright.planner.trace import capture
from tests.helpers.legal_plans import greedy_plan, random_plan, replicated_plan
from tests.helpers.local_runs import Whole, lower_all, run_local_programs, run_whole
from tests.helpers.models import ALL


@functools.cache
def captured(name: str, remat: bool = True) -> tuple[Capture, Whole]:
    """The model in float64 (a wrong sum then stands out from rounding), and what it computes whole."""
    case = ALL[name]
    model = case.model().double()
    batch = pytree.tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, case.batch())
    found = capture(model, kwargs=batch)
    found = save_few(found) if remat else found
    return found, run_whole(found, model, batch)


def check(name: str, mesh: MeshShape, make, *, remat: bool = True) -> tuple[Plan, list[LocalProgram]]:
    """Lower the plan that ``make(capture, mesh)`` gives, run it on simulated ranks, compare every result."""
    program, whole = captured(name, remat)
    plan = make(program, mesh)
    programs = lower_all(program, plan)
    found = run_local_programs(program, plan, programs, whole)
    largest = max(
        (
            w.abs().max().item()
            for o, w in zip(program.graph.outputs, whole.results, strict=True)
            if o.role == "gradient" and w is not None
        ),
        default=1.0,
    )
    for output, got, wanted in zip(program.graph.outputs, found, whole.results, strict=True):
        if got is not None:
            atol = 2e-6 * (largest if output.role == "gradient" else 1.0)  # some models compute their loss in float32
            torch.testing.assert_close(got, wanted, rtol=2e-6, atol=atol, msg=lambda m, o=output: f"{o.role} {o.name}: {m}")
    assert len({p.sequence_hash for p in programs}) == 1
    return plan, programs


MODELS = ["mlp", "cnn", "gpt2", "unet", "tied", "unused", "odd", "mlp_dropout", "logits", "nested", "frozen"]


@pytest.mark.parametrize("name", MODELS)
def test_any_legal_plan_is_right_on_2x2(name: str) -> None:
    check(name, MeshShape.of(2, 2), lambda c, m: random_plan(c, m, seed=1))


@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("odd", 1), ("tied", 0), ("tied", 1)])
def test_many_random_plans_are_right_on_six_ranks(name: str, seed: int) -> None:
    check(name, MeshShape.of(2, 3), lambda c, m: random_plan(c, m, seed=10 + seed), remat=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(ALL))
def test_every_model_is_right_under_random_plans(name: str, seed: int) -> None:
    check(name, MeshShape.of(2, 2), lambda c, m: random_plan(c, m, seed))


def test_a_replicated_plan_has_no_collective() -> None:
    _, programs = check("mlp", MeshShape.of(2), replicated_plan)
    assert programs[0].collectives == ()


def test_sharded_batch_reduces_every_gradient_in_few_buffers() -> None:
    plan, programs = check("mlp", MeshShape.of(4), lambda c, m: greedy_plan(c, m, batch_axes=(0,)))
    logical, wire = count_collectives(programs[0]), count_collectives(programs[0], logical=False)
    assert sum(logical.values()) == sum(c.count for c in plan.collectives)
    assert wire["backward", 0, "all_reduce"] < logical["backward", 0, "all_reduce"]


def test_parameters_at_rest_in_pieces_are_gathered_in_both_phases() -> None:
    _, programs = check("gpt2", MeshShape.of(2), lambda c, m: greedy_plan(c, m, batch_axes=(0,), parameters={"*": (S(0),)}))
    counts = count_collectives(programs[0])
    assert counts["forward", 0, "all_gather"] and counts["backward", 0, "all_gather"] and counts["backward", 0, "reduce_scatter"]


def test_an_axis_of_one_device_changes_nothing() -> None:
    check("mlp", MeshShape.of(1, 2), lambda c, m: greedy_plan(c, m, batch_axes=(1,), parameters={"*": (R, S(0))}))


def test_all_ranks_run_the_same_text_but_for_constants() -> None:
    program, _ = captured("odd")
    plan = random_plan(program, MeshShape.of(2, 2), seed=3)
    texts = set()
    for p in (lower(program, plan, (i, j), ("g0", "g1")) for i in range(2) for j in range(2)):
        texts.add("".join(re.sub(r"\d+", "0", text_of(g)) for g in (p.forward, p.backward)))
    assert len(texts) == 1


def test_lowering_twice_gives_the_same_program_and_leaves_the_capture_alone() -> None:
    program, _ = captured("mlp")
    plan = random_plan(program, MeshShape.of(2, 2), seed=5)
    before = text_of(program.gm)
    first, second = (lower(program, plan, (1, 0), ("g0", "g1")) for _ in range(2))
    assert text_of(first.forward) == text_of(second.forward) and text_of(first.backward) == text_of(second.backward)
    assert text_of(program.gm) == before


def test_without_buckets_every_collective_travels_alone() -> None:
    program, _ = captured("mlp")
    plan = greedy_plan(program, MeshShape.of(2), batch_axes=(0,))
    lowered = lower(program, plan, (0,), ("g",), bucket_bytes=0)
    assert count_collectives(lowered) == count_collectives(lowered, logical=False)


def test_forward_only_programs_save_nothing() -> None:
    case = ALL["mlp"]
    program = capture(case.model().eval(), kwargs=case.batch(), training=False)
    lowered = lower(program, greedy_plan(program, MeshShape.of(2), batch_axes=(0,)), (0,), ("g",))
    assert lowered.backward is None and lowered.saved == () and lowered.gradients == ()


def test_saved_values_are_those_of_the_graph_and_share_no_storage() -> None:
    program, whole = captured("gpt2")
    lowered = lower(program, replicated_plan(program, MeshShape.of(2)), (0,), ("g",))
    assert set(lowered.saved) <= {v.name for v in program.graph.saved}  # of a view, what it is a view of is saved or passed again
    with torch.no_grad():
        results = lowered.forward(*[whole.inputs[name] for name in lowered.inputs])
    kept = results[len(results) - len(lowered.saved) :]
    assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept)


def test_passes_leave_numbered_readable_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DUMP", str(tmp_path))
    program, _ = captured("mlp")
    lower(program, greedy_plan(program, MeshShape.of(2), batch_axes=(0,)), (1,), ("g",))
    names = sorted(p.name for p in (tmp_path / "rank-1").iterdir())
    assert names[0] == "00_rewrite_for_rank.txt" and "99_backward.txt" in names
    assert "all_reduce" in (tmp_path / "rank-1" / "99_backward.txt").read_text()


def test_gathers_of_parameters_share_buffers_and_each_is_issued_before_the_last_one_is_used_up() -> None:
    program, _ = captured("gpt2")
    lowered = lower(program, greedy_plan(program, MeshShape.of(2), batch_axes=(0,), parameters={"*": (S(0),)}), (0,), ("g",))
    logical, wire = count_collectives(lowered), count_collectives(lowered, logical=False)
    assert wire["forward", 0, "all_gather"] * 4 <= logical["forward", 0, "all_gather"]


def test_reductions_to_pieces_hold_little_more_than_two_of_the_largest_buffers() -> None:
    program, _ = captured("gpt2")
    plan = greedy_plan(program, MeshShape.of(2), batch_axes=(0,), parameters={"*": (S(0),)})
    lowered = lower(program, plan, (0,), ("g",), bucket_bytes=4096)
    held, most, largest = {}, 0, 0
    for node in lowered.backward.graph.nodes:
        if "reduce_scatter_tensor" in str(node.target):
            held[node] = node.args[0].meta["val"].nbytes
            largest = max(largest, held[node])
        elif "wait_tensor" in str(node.target):
            held.pop(node.all_input_nodes[0], None)
        most = max(most, sum(held.values()))
    assert largest < most <= 3 * largest
