"""Cutting programs into stages and batches into micro-batches, run in this process and compared with the whole model."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random

import numpy as np
import pytest
import torch
from torch import fx

from meshwright.passes.lower_stages import lower_stages
from meshwright.passes.weights_apart import split_backward
from meshwright.planner.cost import CostModel
from meshwright.planner.ir.errors import InfeasibleError, InputError, PlanFormatError, VerifyError
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.pipeline import SCHEDULES, Pipeline, check_schedule
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import S
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.micro import time_specs
from meshwright.planner.stage_cuts import Loads, Profile, choose_cuts, profile
from tests.helpers import pipelines
from tests.helpers.equality import FLOOR, RTOL, compare
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, planned, reference, toy_hardware
from tests.helpers.stages import forward_ops, run_stages, staged_plan

FAMILIES = ("gpt2", "llama", "llama_tied", "t5", "unet_deep")


def differences(name: str, plan: Plan) -> list[str]:
    """What is not as in one process."""
    case, wanted = ALL[name], reference(name)
    loss, gradients = run_stages(captured(name), plan, case.model(), case.batch())
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    made = {n: g for n, g in wanted.gradients.items() if g is not None}
    wrong = compare({"loss": loss}, {"loss": wanted.loss}, RTOL, 0.0)
    return wrong + compare(gradients, made, RTOL, FLOOR * largest, "gradient of ")


def random_cuts(name: str, seed: int) -> tuple[tuple[str, ...], int, str]:
    """Up to four stages cut anywhere, micro-batches, and whether the backward is split."""
    dice, ops = random.Random(seed), forward_ops(captured(name))
    cuts = tuple(ops[i] for i in sorted(dice.sample(range(len(ops)), dice.choice([1, 2, 3]))))
    return cuts, dice.choice([1, 2, 4]), dice.choice(["gpipe", "zero_bubble"])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_cuts_give_the_gradients_of_one_process(name, seed):
    cuts, micro_batches, schedule = random_cuts(name, seed)
    assert not differences(name, staged_plan(captured(name), cuts, micro_batches, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "bert", "transformer", "qwen3", "vit", "frozen"])
@pytest.mark.parametrize("seed", range(2, 25))
def test_many_random_cuts_give_the_gradients_of_one_process(name, seed):
    cuts, micro_batches, schedule = random_cuts(name, seed)
    assert not differences(name, staged_plan(captured(name), cuts, micro_batches, schedule))


@pytest.mark.parametrize("name", ["nested", "unused", "regularised", "frozen", "tied", "input_statistics", "bert", "transformer"])
def test_awkward_models_in_micro_batches(name):
    ops = forward_ops(captured(name))
    assert not differences(name, staged_plan(captured(name), (ops[len(ops) // 2],), 4))


def test_batch_normalisation_runs_in_stages_with_one_micro_batch():
    ops = forward_ops(captured("cnn"))
    assert not differences("cnn", staged_plan(captured("cnn"), (ops[len(ops) // 3], ops[len(ops) // 2]), 1))


@pytest.mark.parametrize("name", ["mlp_dropout", "gpt2_dropout"])
def test_dropout_draws_the_same_numbers_in_any_number_of_micro_batches_and_stages(name):
    capture, case = captured(name), ALL[name]
    ops = forward_ops(capture)
    whole = run_stages(capture, staged_plan(capture, (), 1), case.model(), case.batch())
    cut = run_stages(capture, staged_plan(capture, (ops[len(ops) // 3], ops[len(ops) // 2]), 4), case.model(), case.batch())
    largest = max(float(g.abs().max()) for g in whole[1].values())
    assert not compare({"loss": cut[0]}, {"loss": whole[0]}, RTOL, 0.0) + compare(cut[1], whole[1], RTOL, FLOOR * largest)


# --- what crosses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_between_blocks_only_the_residual_stream_crosses(name):
    capture = captured(name)
    block = [op for op in capture.graph.ops if op.phase == "forward" and op.module_path.endswith((".h.0", ".layers.0"))][-1]
    program = lower_stages(capture, staged_plan(capture, (block.name,), 1), (0,), ("none",))
    first, second = program.stages[0][0], program.stages[0][1]
    assert [slot.name for slot in first.sends] == [block.name] == [slot.name for slot in second.receives]
    assert len(second.upstream) == len(first.downstream) == 1


def test_a_skip_over_a_stage_is_passed_through_it():
    capture = captured("unet_deep")
    ops = forward_ops(capture)
    program = lower_stages(capture, staged_plan(capture, (ops[4], ops[len(ops) // 2]), 1), (0,), ("none",))
    middle = program.stages[0][1]
    assert {s.name for s in middle.receives} & {s.name for s in middle.sends}
    assert {s.name for s in middle.downstream} & {s.name for s in middle.upstream}


def test_a_tied_weight_is_held_by_its_stages_and_its_gradient_crosses_no_boundary():
    capture = captured("llama_tied")
    ops = forward_ops(capture)
    program = lower_stages(capture, staged_plan(capture, (ops[len(ops) // 2],), 2), (0,), ("none",))
    tied = next(i for i in capture.graph.inputs_of("parameter") if i.aliases)
    assert program.holders[tied.name] == (0, 1)
    crossing = [slot for stage in program.stages[0].values() for slot in stage.upstream]
    assert all(slot.shape != tied.value.shape for slot in crossing)


# --- splitting the backward ---------------------------------------------------------------------------------------


def test_a_convolution_makes_its_two_gradients_apart():
    graph = fx.Graph()
    grad, x, w = (graph.placeholder(n) for n in ("grad", "x", "w"))
    conv = torch.ops.aten.convolution_backward.default
    both = graph.call_function(conv, (grad, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]))
    gx, gw = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    graph.output((gw, gx))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    tensors = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4), torch.randn(3, 5, 3, 3)
    halves = split_backward(gm, [1])
    first = halves.first(*tensors)
    (later,) = halves.later(*first[1:])
    masks = [n.args[10] for half in (halves.first, halves.later) for n in half.graph.nodes if n.target is conv]
    assert masks == [[True, False, False], [False, True, False]]
    wanted = gm(*tensors)
    torch.testing.assert_close((later, first[0]), wanted)


# --- where to cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_as_balanced_as_enumeration_finds_them(seed):
    dice = np.random.default_rng(seed)
    n, stages = int(dice.integers(6, 10)), int(dice.integers(2, 5))
    names, none = tuple(f"op{i}" for i in range(n)), np.zeros(n)
    found = Profile(names, dice.random(n) + 0.1, none, none, dice.integers(1, 100, n).astype(float), (), none)
    link = Link("test", 1e3, 1e-3, "made up")
    cuts = choose_cuts(dataclasses.replace(found, alive_bytes=np.append(found.alive_bytes[:-1], 0.0)), stages, link, 4)

    def slowest(at: tuple[int, ...]) -> float:
        edges = [-1, *at, n - 1]
        sent = [0.0, *(2 * (found.alive_bytes[i] / 1e3 + 4e-3) for i in at), 0.0]
        return max(
            float(found.work_s[a + 1 : b + 1].sum()) + sent[k] + sent[k + 1] for k, (a, b) in enumerate(itertools.pairwise(edges))
        )

    alive = np.append(found.alive_bytes[:-1], 0.0)
    places = [i for i in range(n - 1) if (i == 0 or alive[i] <= alive[i - 1]) and alive[i] <= alive[i + 1]]
    places = places if len(places) >= stages - 1 else list(range(n - 1))
    best = min(map(slowest, itertools.combinations(places, stages - 1)))
    assert slowest(tuple(found.names.index(c) for c in cuts)) <= best * 1.0101


def test_a_stage_ends_behind_a_block_without_being_told():
    capture, mesh = captured("gpt2"), MeshShape.of(1)
    hardware = toy_hardware(mesh)
    found = profile(capture.graph, staged_plan(capture, (), 1), CostModel(hardware, mesh))
    (cut,) = choose_cuts(found, 2, hardware.links[0], 4)
    assert capture.graph.by_name[cut].module_path == "transformer.h.0"


def test_more_stages_than_places_are_refused():
    capture, mesh = captured("mlp"), MeshShape.of(1)
    hardware = toy_hardware(mesh)
    found = profile(capture.graph, staged_plan(capture, (), 1), CostModel(hardware, mesh))
    with pytest.raises(InputError, match="places where it can be cut, which makes at most"):
        choose_cuts(found, 64, hardware.links[0], 4)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "blamed"), [("cnn", "stem.1"), ("contrastive", "scores")])
def test_a_model_that_micro_batches_would_change_is_refused_with_the_op(name, blamed):
    with pytest.raises(InputError, match="cannot run in 4 micro-batches") as caught:
        time_specs(captured(name).graph, 4)
    assert blamed in str(caught.value)


def test_micro_batches_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(InputError, match="5 micro-batches do not divide the batch of 8 samples"):
        time_specs(captured("mlp").graph, 5)


@pytest.mark.parametrize(
    ("schedule", "degree", "stages", "micro_batches", "says"),
    [
        ("gpipe", 2, 3, 2, "cannot be dealt out evenly"),
        ("gpipe", 2, 4, 2, "needs 1 stages per rank"),
        ("naive", 2, 2, 2, "runs one micro-batch"),
        ("1f1b", 4, 4, 2, "at least as many micro-batches as stages"),
        ("interleaved_1f1b", 2, 4, 5, "use a multiple of 2 micro-batches"),
        ("zbv", 2, 2, 4, "needs 2 stages per rank"),
        ("zigzag", 2, 2, 4, "is unknown"),
        ("gpipe", 2, 2, 0, "must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(schedule, degree, stages, micro_batches, says):
    with pytest.raises(InputError, match=says):
        check_schedule(schedule, degree, stages, micro_batches)


def test_a_model_without_a_loss_cannot_be_cut():
    capture = captured("logits")
    with pytest.raises(InputError, match="a step needs the loss, and the model returns output"):
        lower_stages(capture, staged_plan(capture, (forward_ops(capture)[1],), 1), (0,), ("none",))


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_plan_with_stages_reads_back_equal_and_has_another_hash():
    capture = captured("mlp")
    plan = staged_plan(capture, (forward_ops(capture)[2],), 4, "1f1b")
    assert plan.pipeline is not None and plan.pipeline.inputs
    assert Plan.from_json(plan.to_json()) == plan
    assert len({plan.hash, dataclasses.replace(plan, pipeline=None).hash}) == 2
    fewer = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, micro_batches=2))
    assert fewer.hash != plan.hash


def test_a_malformed_placement_over_micro_batches_is_refused():
    with pytest.raises(PlanFormatError, match="exactly one is needed"):
        Pipeline.from_json_dict(Pipeline(2, "gpipe", ("a",), 2, {"x": S(0)}).to_json_dict() | {"inputs": {"x": "S(0)R"}})


def test_cuts_that_are_no_forward_ops_in_order_are_refused():
    capture = captured("mlp")
    ops = forward_ops(capture)
    for cuts, says in ((("nothing",), "no forward op"), ((ops[3], ops[1]), "not in execution order")):
        with pytest.raises(VerifyError, match=says):
            verify_plan(staged_plan(capture, cuts, 1), capture.graph)


def test_folded_schedules_lead_forth_and_back():
    assert [Pipeline(2, "zbv", ("a", "b", "c")).rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert [Pipeline(2, "zero_bubble", ("a", "b", "c")).rank_of(s) for s in range(4)] == [0, 1, 0, 1]
    assert all(s.name == name for name, s in SCHEDULES.items())


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_stage_is_planned_so_that_its_devices_can_share_every_micro_batch(micro_batches):
    given = pipelines.trial("gpt2", "gpipe", micro_batches, 2, ((2, 2), "auto"))
    lower_stages(given.capture, given.plan, (1, 0), ("none", "none"))


def test_devices_that_cannot_share_a_micro_batch_are_refused():
    with pytest.raises(InfeasibleError, match="no plan on mesh 2x2 satisfies 4 micro-batches"):
        planned("gpt2", (2, 2), "ddp", micro_batches=4)


def test_cuts_within_windows_are_those_of_all_places():
    rng = np.random.default_rng(0)
    for case in range(200):
        places = int(rng.integers(2, 25))
        work = np.ones(places) if case % 3 == 0 else rng.random(places) * rng.choice([0, 1, 1, 1], places)
        total, sizes = np.append(0.0, np.cumsum(work)), np.array([0.0, *rng.choice([1.0, 1.0, 2.0, 3.0], places - 1), 0.0])
        sent, stages = sizes * rng.choice([0.0, 0.01, 0.2]), int(rng.integers(2, places + 1))
        loads = Loads(total, sent)

        def load(i: int, j: int, total: np.ndarray = total, sent: np.ndarray = sent) -> float:
            return float(total[j] - total[i] + sent[j] + sent[i])

        least, cheapest = {(0, 0): 0.0}, {(0, 0): 0.0}
        for k in range(1, stages + 1):
            for j in range(k, places + 1):
                least[k, j] = min(max(least.get((k - 1, i), np.inf), load(i, j)) for i in range(j))
        limit = least[stages, places] * 1.01
        for k in range(1, stages + 1):
            for j in range(k, places + 1):
                fitting = [cheapest.get((k - 1, i), np.inf) for i in range(j) if load(i, j) <= limit]
                cheapest[k, j] = min(fitting, default=np.inf) + sizes[j]
        assert loads.least_maximum(stages) == pytest.approx(least[stages, places]), case
        ends = [0, *loads.fewest_bytes(sizes, stages, limit), places]
        assert all(load(i, j) <= limit for i, j in itertools.pairwise(ends)), case
        assert sizes[ends].sum() == pytest.approx(cheapest[stages, places]), case
