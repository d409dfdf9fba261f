"""When gradients are reduced under micro-batches: once per step where they are held whole, else by every micro-batch in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.passes.lower_stages import StageProgram, lower_stages
from meshwright.passes.verify import KINDS
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.plan import Plan, Redistribution
from meshwright.planner.ir.spec import R
from meshwright.planner.ir.verify import made_placements
from meshwright.planner.micro import time_specs
from meshwright.planner.stage_memory import gradient_bytes, rank_memory, resting_of
from tests.helpers.counting import CountCollectives
from tests.helpers.equality import RTOL, Trial, compare
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import ALL, loss_of
from tests.helpers.pipelines import differences, start
from tests.helpers.prepared import captured, planned, reference
from tests.helpers.ranks import run_ranks


def plan_of(name: str, strategy: str, micro_batches: int, *, whole: bool = False, precision: str | None = None) -> Plan:
    """Two ranks that share every micro-batch, no stages."""
    times = time_specs(captured(name, precision).graph, micro_batches)
    pipeline = Pipeline(1, "gpipe", (), micro_batches, times.inputs, times.ops, whole)
    return replace(planned(name, (2,), strategy, precision, micro_batches), pipeline=pipeline)


def reduced_whole(name: str, micro_batches: int) -> Plan:
    """Parameters rest in pieces, but their gradients are all-reduced and cut: cheaper than scattering each of many micro-batches."""
    plan, graph = plan_of(name, "zero3", micro_batches), captured(name).graph
    made, listed = made_placements(plan, graph), {(r.value, r.phase, r.path[-1]): r for r in plan.redistributions}
    for result, final in zip(graph.outputs, plan.outputs, strict=True):
        if result.role == "gradient" and result.value is not None and made[result.value.name][0].is_partial:
            value = result.value.name
            listed[value, "backward", final] = Redistribution(value, "backward", (made[value], (R,), final))
    return replace(plan, redistributions=tuple(listed.values()))


def kinds_in(stage: StageProgram) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of one micro-batch's backward, and of what is done once per step for gradients."""
    assert stage.local.backward is not None
    once = [f.program for f in stage.finishes if f.role == "gradient"]
    found = []
    for programs in ([stage.local.backward], once):
        names = [part for gm in programs for n in gm.graph.nodes for part in str(n.target).split(".")[1:2]]
        found.append({k: sum(KINDS.get(n) == k for n in names) for k in ("all_reduce", "reduce_scatter")})
    return found[0], found[1]


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize(
    ("strategy", "whole", "kind", "is_once"),
    [("ddp", False, "all_reduce", True), ("zero1", True, "reduce_scatter", True), ("zero2", False, "reduce_scatter", False)],
)
def test_gradients_are_reduced_per_step_or_per_micro_batch(strategy, whole, kind, is_once, precision):
    plan = plan_of("llama", strategy, 4, whole=whole, precision=precision)
    stage = lower_stages(captured("llama", precision), plan, (0,), ("group",)).stage(0, 0)
    each, once = kinds_in(stage)
    assert (once if is_once else each)[kind] > 0
    assert (each if is_once else once)[kind] == 0
    assert each["all_reduce"] == 0


def _step(rank: int, trials: dict[str, Trial]) -> dict[str, tuple[list[str], dict[str, int], int, int]]:
    """What differs from one process, the collectives of a step, and the bytes of gradients before and after what is done once."""
    found = {}
    for label, given in trials.items():
        pm = start(given)
        wrong = differences(pm, given.case.batch(), given.reference)
        (run,) = pm._programs[0].runs.values()
        finish, held = run.finish, []

        def measured(*args: Any, finish: Any = finish, held: list[int] = held, run: Any = run, **kwargs: Any) -> Any:
            live = LiveBytes()
            live.start_with(run.sums.values())
            held.append(live.now)
            with live:
                made = finish(*args, **kwargs)
            held.append(live.now)
            return made

        run.finish = measured
        pm.step(given.case.batch())
        run.finish = finish
        with CountCollectives() as ran:
            pm.step(given.case.batch())
        found[label] = wrong, dict(ran.counts), held[0], held[1]
    return found


def test_zero1_reduces_once_and_zero2_never_holds_whole_gradients_and_the_plan_counts_what_is_held():
    case, kinds = ALL["transformer"], {"ddp": False, "zero1": True, "zero2": False, "zero3": False}
    trials = {
        f"{strategy} {m}": Trial("", case, case.model(), captured(case.name), plan, reference(case.name))
        for strategy, whole in kinds.items()
        for m in (2, 4)
        for plan in [plan_of(case.name, strategy, m, whole=whole)]
    }
    trials["reduced whole 4"] = replace(trials["zero3 4"], plan=reduced_whole(case.name, 4))
    size = sum(p.numel() * 4 for p in case.model().parameters())
    for found in run_ranks(2, _step, trials, timeout=300):
        assert not any(wrong for wrong, _, _, _ in found.values()), found
        counts = {label: ran for label, (_, ran, _, _) in found.items()}
        for strategy, kind in (("ddp", "all_reduce"), ("zero1", "reduce_scatter")):
            assert counts[f"{strategy} 2"][kind] == counts[f"{strategy} 4"][kind] > 0
        for strategy in ("zero2", "zero3"):
            assert counts[f"{strategy} 4"]["reduce_scatter"] == 2 * counts[f"{strategy} 2"]["reduce_scatter"] > 0
        assert counts["zero1 4"]["all_gather"] == counts["zero2 4"]["all_gather"] == counts["zero1 2"]["all_gather"]
        assert counts["zero3 4"]["all_gather"] == 2 * counts["zero3 2"]["all_gather"]
        held = {label: n / size for label, (_, _, n, _) in found.items()}
        assert held["ddp 4"] == pytest.approx(1.0, abs=0.02) and held["zero1 4"] == pytest.approx(1.0, abs=0.02)
        assert held["zero2 4"] == pytest.approx(0.5, abs=0.02) and held["zero3 4"] == pytest.approx(0.5, abs=0.02)
        assert held["reduced whole 4"] == pytest.approx(1.0, abs=0.02)
        left = {label: n / size for label, (_, _, _, n) in found.items()}
        assert left["ddp 4"] == pytest.approx(1.0, abs=0.02), "sums are freed, or reduced where they are"
        assert left["zero1 4"] == pytest.approx(0.5, abs=0.02)
        for label, (_, _, measured, _) in found.items():
            counted = gradient_bytes(trials[label].plan, captured(case.name).graph).values()
            assert sum(g.sums for g in counted) == pytest.approx(measured, rel=0.002), label


def test_the_whole_sums_of_zero1_are_counted():
    case = ALL["transformer"]
    pieces, whole = (plan_of(case.name, "zero1", 4, whole=w) for w in (False, True))
    graph = captured(case.name).graph
    resting = [resting_of(plan, graph, gradient_bytes(plan, graph)) for plan in (whole, pieces)]
    held = [
        rank_memory(plan, rests, [], [0], [{"gradients": int(rests.fresh.sum())}])[0]["gradients"]
        for plan, rests in zip((whole, pieces), resting, strict=True)
    ]
    more = held[0] - held[1]
    assert more == pytest.approx(sum(p.numel() * 4 for p in case.model().parameters()), rel=0.02)


def test_few_reductions_are_under_way_at_once_at_the_end_of_a_step():
    plan = plan_of("transformer", "ddp", 4)
    program = lower_stages(captured("transformer"), plan, (0,), ("group",), bucket_bytes=1 << 12)
    (finish,) = (f for f in program.stage(0, 0).finishes if f.role == "gradient")
    flying = most = total = 0
    for node in finish.program.graph.nodes:
        kind = str(node.target).partition("_c10d_functional.")[2]
        flying += (kind == "all_reduce.default") - (kind == "wait_tensor.default")
        total += kind == "all_reduce.default"
        most = max(most, flying)
    assert total > 4 and most == 2 and flying == 0


def _peak(rank: int, plans: dict[str, Plan]) -> dict[str, int]:
    """Most bytes on this rank during a step, optimizer state there."""
    case, found = ALL["transformer"], {}
    for strategy, plan in plans.items():
        pm = mw.autoparallelize(case.model(), (2,), case.batch(), plan=plan)
        opt = torch.optim.AdamW(pm.parameters())
        pm.step(case.batch())
        opt.step()
        opt.zero_grad()
        live = LiveBytes()
        live.start_with([*pm.parameters(), *pm.buffers()])
        live.start_with(t for state in opt.state.values() for t in state.values())
        with live:
            for _ in range(plan.accumulate):
                pm.step(case.batch())
        found[strategy] = live.peak
    return found


def test_the_peak_of_a_step_in_micro_batches_is_as_predicted():
    case = ALL["transformer"]
    options: Any = {"hardware": "CPU", "alternatives": False, "micro_batches": 4}
    plans = {
        s: mw.plan(case.model(), mw.MeshShape.of(2), case.batch(), strategy=s, accumulate=n, **options)
        for s, n in (("ddp", 1), ("zero1", 2))
    }
    plans["zbv"] = mw.plan(case.model(), mw.MeshShape.of(2), case.batch(), degrees={"pp": 2}, schedule="zbv", **options)
    found = run_ranks(2, _peak, plans)
    for strategy, plan in plans.items():
        measured = max(peaks[strategy] for peaks in found)
        assert 0.97 < plan.predicted.peak_memory_bytes / measured < 1.10, (strategy, plan.predicted.memory_bytes, measured)


def _clipped(rank: int, given: Trial) -> tuple[float, dict[str, torch.Tensor]]:
    pm = start(given)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-3, foreach=True)
    for _ in range(3):
        opt.zero_grad()
        pm.step(given.case.batch())
        norm = pm.clip_grad_norm_(0.5)
        opt.step()
    return float(norm), pm.full_state_dict()


def test_clipping_sees_the_reduced_gradients_of_zero1():
    case = ALL["llama_tied"]
    model, batch = case.model(), case.batch()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        opt.zero_grad()
        loss_of(model(**batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    plan = plan_of(case.name, "zero1", 4, whole=True)
    given = Trial("", case, case.model(), captured(case.name), plan, reference(case.name))
    for found, state in run_ranks(2, _clipped, given):
        assert found == pytest.approx(float(norm), rel=1e-5)
        assert not compare(state, dict(model.state_dict()), RTOL, 1e-5)
