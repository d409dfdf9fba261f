"""Whole plans: strategies, pins, memory, determinism, folding, and the second price."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from meshwright.planner import blocks, fuse, rules, search
from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.ir.errors import InfeasibleError, InputError, NoRuleError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import R, S
from meshwright.planner.ir.verify import planned_steps
from meshwright.planner.search import make_plan
from meshwright.planner.solve.evaluate import evaluate
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.optimise import Effort, optimise
from meshwright.planner.solve.precision import unreduced_values
from meshwright.planner.solve.price import price
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.strategies import STRATEGIES
from meshwright.planner.solve.tables import build_tables
from meshwright.planner.trace import capture
from tests.helpers.legal_plans import replicated_plan
from tests.helpers.models import ZOO

HIDDEN, DEPTH = 64, 4


class Stack(nn.Module):
    """Equal layers, and a loss."""

    def __init__(self, hidden: int = HIDDEN, depth: int = DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.head = nn.Linear(hidden, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def stack() -> Capture:
    return capture(Stack(), (), {"x": torch.zeros(16, HIDDEN)})


@pytest.fixture(scope="module")
def gpt2() -> Capture:
    return capture(ZOO["gpt2"].model(), (), ZOO["gpt2"].batch())


def planned(program: Capture, *sizes: int, device: str = "CPU", names: tuple[str, ...] | None = None, **options) -> Plan:
    mesh = MeshShape.of(*sizes, names=names)
    options.setdefault("alternatives", False)
    return make_plan(program, mesh, hardware_for(mesh, device, None), **options)


def rest(plan: Plan, program: Capture) -> dict[str, str]:
    """Parameter and input names to placements at rest."""
    return {
        i.name: "".join(map(str, plan.inputs[i.value.name])) for i in program.graph.inputs if i.role in ("parameter", "input")
    }


# --- strategies ---------------------------------------------------------------------------------------------------


def test_ddp_replicates_parameters_and_reduces_every_gradient_once(stack: Capture):
    plan = planned(stack, 2, 2, device="H100", strategy="ddp")
    assert {v for k, v in rest(plan, stack).items() if k != "x"} == {"RR"}
    assert rest(plan, stack)["x"] == "S(0)S(0)"
    hidden = sum(c.count for c in plan.collectives if c.hidden)
    at_the_end = 2, "the first layer's bias, over two axes: nothing runs after its gradient is made"
    assert hidden + at_the_end[0] == 2 * 2 * (DEPTH + 1), "weights and biases, over two axes"
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


def test_zero3_shards_every_parameter_and_gathers_it_in_both_phases(stack: Capture):
    plan = planned(stack, 4, strategy="fsdp")
    assert plan.strategy == "zero3"
    placements = {k: v for k, v in rest(plan, stack).items() if k != "x"}
    assert set(placements.values()) == {"S(0)"}
    gathers = [r for r in plan.redistributions if r.value in plan.inputs or r.path[-1] == (R,)]
    assert {r.phase for r in gathers} == {"forward", "backward"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_parameter_that_is_widened_to_the_batch_does_not_stop_the_batch(strategy: str):
    """A vision transformer's class token becomes ``[B, 1, H]``: that is sharded along ``B`` however the token lies."""
    program = capture(ZOO["vit"].model(), (), ZOO["vit"].batch())
    plan = planned(program, 2, strategy=strategy)
    attention = [op for op in program.graph.ops if "scaled_dot_product" in op.target]
    assert attention and {plan.ops[op.name].outs[0] for op in attention} == {(S(0),)}


def test_zero3_says_which_parameters_it_cannot_cut():
    program = capture(Stack(hidden=6), (), {"x": torch.zeros(8, 6)})
    plan = planned(program, 8, strategy="zero3")
    assert any("rest whole" in note and "layers.0.bias" in note for note in plan.notes)


def test_tp_never_gathers_a_parameter_and_shards_every_matrix(stack: Capture):
    plan = planned(stack, 2, 2, strategy="tp")
    placements = rest(plan, stack)
    for name, placement in placements.items():
        if name.startswith("layers") and name.endswith("weight"):
            assert re.fullmatch(r"RS\(\d(;\d+)?\)", placement), (name, placement)
    assert placements["x"] == "S(0)R"
    assert not any(c.hidden and c.kind == "all_gather" for c in plan.collectives)


def test_an_unknown_strategy_is_named_with_the_known_ones(stack: Capture):
    with pytest.raises(
        InputError,
        match=r"strategy 'ddq' is unknown: use one of auto, ddp, data_parallel, zero1, zero2, zero3, fsdp, hsdp, tp, tp\+sp, tp-sp, ",
    ):
        planned(stack, 2, strategy="ddq")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_batch_that_does_not_divide_is_refused_by_name(strategy: str):
    program = capture(Stack(), (), {"x": torch.zeros(6, HIDDEN)})
    with pytest.raises(InputError, match=rf"{strategy}.*4 devices of mesh 2x2.*input 'x' has 6 samples"):
        planned(program, 2, 2, strategy=strategy)
    plan = planned(program, 2, 2)
    assert any("batch of 6 does not divide" in note for note in plan.notes)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_auto_is_never_slower_than_a_named_strategy(gpt2: Capture, sizes: tuple[int, ...]):
    plan = planned(gpt2, *sizes, alternatives=True)
    assert {a.strategy for a in plan.alternatives} == {s.name for s in STRATEGIES.values() if s.compared} - {"auto"}
    for other in plan.alternatives:
        assert other.fits and other.step_time_s is not None
        assert plan.predicted.step_time_s <= other.step_time_s
    assert 0 <= plan.gap <= Effort().gap


def test_axis_names_are_respected_when_asked(stack: Capture):
    plan = planned(stack, 2, 2, names=("dp", "tp"), respect_axis_names=True, device="H100")
    placements = rest(plan, stack)
    assert placements["x"] in ("S(0)R", "RR")
    for op in stack.graph.ops:
        if op.target == "aten.mm.default" and op.phase == "forward":
            assert plan.ops[op.name].ins[1][0] == R, "weights are whole over dp in use"


# --- memory -------------------------------------------------------------------------------------------------------


def test_auto_fits_where_only_sharding_does(stack: Capture):
    ddp = planned(stack, 4, strategy="ddp").predicted.peak_memory_bytes
    zero3 = planned(stack, 4, strategy="zero3").predicted.peak_memory_bytes
    limit = (ddp + zero3) // 2
    plan = planned(stack, 4, memory_limit_bytes=limit, alternatives=True)
    assert plan.predicted.peak_memory_bytes <= limit
    fits = {a.strategy: a.fits for a in plan.alternatives}
    assert fits["zero3"] and not fits["ddp"]
    with pytest.raises(InfeasibleError, match="no plan on mesh 4 under strategy 'ddp' fits") as caught:
        planned(stack, 4, strategy="ddp", memory_limit_bytes=limit)
    assert caught.value.binding == "memory" and caught.value.needed_bytes <= ddp * 1.0001


def test_the_smallest_memory_that_is_named_does_fit(stack: Capture):
    with pytest.raises(InfeasibleError, match="What helps") as caught:
        planned(stack, 4, memory_limit_bytes=1000)
    needed = caught.value.needed_bytes
    assert needed is not None
    plan = planned(stack, 4, memory_limit_bytes=needed)
    assert plan.predicted.peak_memory_bytes <= needed
    with pytest.raises(InfeasibleError):  # the solver sees the peak up to copies of activations: a little less may fit
        planned(stack, 4, memory_limit_bytes=int(needed * 0.7))


def test_the_optimizer_state_counts(stack: Capture):
    by_name = {
        o: planned(stack, 2, strategy="ddp", optimizer=o).predicted.memory_bytes for o in ("adamw", "sgd", "sgd-momentum", 12)
    }
    parameters = by_name["sgd"]["parameters"]
    assert [m["optimizer"] for m in by_name.values()] == [2 * parameters, 0, parameters, 3 * parameters]
    with pytest.raises(InputError, match="optimizer 'adma' is unknown"):
        planned(stack, 2, optimizer="adma")


# --- pins ---------------------------------------------------------------------------------------------------------


def test_pins_hold_for_parameters_inputs_ops_and_modules(stack: Capture):
    op = next(o for o in stack.graph.ops if o.target == "aten.mm.default")
    pins = {"layers.*.weight": "S(0)R", "layers.2.bias": "RS(0)", "x": "RS(0)", op.name: "S(0)R", "layers.3": "S(0)S(1)"}
    plan = planned(stack, 2, 2, pins=pins)
    placements = rest(plan, stack)
    assert {placements[f"layers.{i}.weight"] for i in range(DEPTH)} == {"S(0)R"}
    assert placements["layers.2.bias"] == "RS(0)" and placements["x"] == "RS(0)"
    assert plan.ops[op.name].outs == ((S(0), R),)
    last = [o for o in stack.graph.ops if o.phase == "forward" and o.module_path.endswith("layers.3")][-1]
    assert plan.ops[last.name].outs == ((S(0), S(1)),)


def test_a_pin_that_matches_nothing_is_refused(stack: Capture):
    with pytest.raises(InputError, match=r"pin 'layer.0.weight' matches no parameter, input, op or module"):
        planned(stack, 2, pins={"layer.0.weight": "S(0)"})


def test_a_pin_of_another_mesh_is_refused(stack: Capture):
    with pytest.raises(InputError, match=r"'S\(0\)R' has 2 placements, but mesh 2 has 1 axes"):
        planned(stack, 2, pins={"head.weight": "S(0)R"})


def test_an_impossible_pin_is_refused_with_what_is_possible(stack: Capture):
    with pytest.raises(InputError, match=r"parameter 'head.weight' cannot be S\(2\) on mesh 2; possible: R, S\(0\), S\(1\)"):
        planned(stack, 2, pins={"head.weight": "S(2)"})


def test_a_pin_against_the_strategy_is_named(stack: Capture):
    with pytest.raises(InfeasibleError, match=r"strategy 'ddp' together with pin 'head.weight'") as caught:
        planned(stack, 2, strategy="ddp", pins={"head.weight": "S(1)"})
    assert "head.weight" in caught.value.binding


# --- the plan as a whole ------------------------------------------------------------------------------------------


def test_equal_input_gives_the_same_plan_byte_for_byte(gpt2: Capture):
    first, second = (planned(gpt2, 2) for _ in range(2))
    assert first.hash == second.hash
    texts = [{k: v for k, v in p.to_json_dict().items() if k != "solver"} for p in (first, second)]
    assert texts[0] == texts[1]
    assert Plan.from_json(first.to_json()).hash == first.hash


def test_the_listed_collectives_are_the_planned_steps(gpt2: Capture):
    plan = planned(gpt2, 2, 2, strategy="tp")
    steps = [s for s in planned_steps(plan, gpt2.graph) if s.kind != "slice"]
    assert sum(c.count for c in plan.collectives) == len(steps) > 0


def test_folded_costs_are_those_of_the_unfolded_program(stack: Capture):
    """The folded optimum, repeated for every layer, has the same price unfolded, and loses at most what ties forbid."""
    mesh = MeshShape.of(4)
    costs = CostModel(hardware_for(mesh, "H100", None), mesh)
    plain = fuse.fuse(stack.graph, rules.rows_for)
    folded = blocks.fold(plain)
    assert len(set(folded.class_of)) < len(plain.clusters)
    tables = [
        build_tables(stack.graph, c, c.class_of, mesh, costs, trained=Trained(8), memory_limit_bytes=None)
        for c in (plain, folded)
    ]
    free, tied = (optimise(t.problem, Restriction(), t.cache, Effort(gap=1e-6, nodes=2000)) for t in tables)
    assert free is not None and tied is not None
    spread = tuple(tied.chosen[g] for g in tables[1].class_of)
    unfolded = price(tables[0].problem, Restriction(), spread)
    again = price(tables[1].problem, Restriction(), tied.chosen)
    assert unfolded.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)
    assert unfolded.memory_bytes == again.memory_bytes
    assert free.bound_s <= tied.objective_s * (1 + 1e-9) and tied.bound_s <= free.objective_s * 1.02


def test_a_replicated_plan_written_by_hand_costs_its_compute(stack: Capture):
    mesh = MeshShape.of(2, 2)
    clusters = fuse.fuse(stack.graph, rules.rows_for)
    found = evaluate(
        replicated_plan(stack, mesh), stack.graph, clusters, CostModel(hardware_for(mesh, "H100", None), mesh), Trained(8)
    )
    assert found.collectives == ()
    assert found.outcome.step_time_s == pytest.approx(sum(found.outcome.compute_s)) and sum(found.outcome.compute_s) > 0


def test_an_axis_of_one_device_takes_no_part(stack: Capture):
    plan = planned(stack, 1, 2)
    assert all(p[0] == R for p in plan.inputs.values())
    assert {c.axis for c in plan.collectives} <= {1}
    assert planned(stack, 2).predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-2)


def test_low_precision_gradients_are_cast_before_they_are_reduced():
    program = capture(Stack(), (), {"x": torch.zeros(16, HIDDEN)}, precision="bf16-mixed")
    kept = unreduced_values(program.graph)
    assert kept
    plan = planned(program, 2, strategy="ddp", device="H100")
    assert not [s for s in planned_steps(plan, program.graph) if s.value.name in kept]
    steps = planned_steps(plan, program.graph)
    reduced = {s.value.dtype for s in steps if s.phase == "backward" and s.value.shape and s.kind != "slice"}
    assert reduced == {torch.float32}


def test_inference_has_one_phase():
    program = capture(Stack(), (), {"x": torch.zeros(16, HIDDEN)}, training=False)
    plan = planned(program, 2, alternatives=True)
    assert not plan.training and plan.predicted.memory_bytes.get("optimizer", 0) == 0
    assert {r.phase for r in plan.redistributions} <= {"forward"}


def test_an_op_without_a_rule_is_replicated_and_told_or_refused():
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(x)

    program = capture(Odd(), (torch.eye(4).repeat(4, 1, 1),), training=False)
    plan = planned(program, 2)
    assert plan.fallbacks and plan.fallbacks[0].count == 1
    with pytest.raises(NoRuleError, match=plan.fallbacks[0].target.split(".")[1]):
        planned(program, 2, on_missing_rule="error")


def test_options_are_checked_before_anything_runs():
    with pytest.raises(InputError, match="on_missing_rule is 'ignore'"):
        search.Options(on_missing_rule="ignore")
    with pytest.raises(InputError, match="must be positive"):
        search.Options(memory_limit_bytes=-1)
