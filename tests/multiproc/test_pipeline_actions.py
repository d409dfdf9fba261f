"""What runs in a step is what the planner simulates: the same actions in the same order, and as many bytes held."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cost import CostModel
from meshwright.planner.orders import Action, orders
from meshwright.planner.pipelined import held_by_stage
from meshwright.planner.simulate import StageBytes, simulate
from meshwright.planner.stage_cuts import profile
from meshwright.runtime.engine import Logged
from tests.helpers.pipelines import Trial, start, trial
from tests.helpers.prepared import toy_hardware
from tests.helpers.ranks import run_ranks

SCHEDULES = (("gpipe", 4), ("1f1b", 8), ("interleaved_1f1b", 8), ("zero_bubble", 8), ("zbv", 8))


def _logged(rank: int, trials: list[Trial]) -> list[list[Logged]]:
    found = []
    for given in trials:
        pm = start(given)
        pm.step(given.case.batch())
        log = pm._programs[0].engine.log_actions()
        pm.step(given.case.batch())
        found.append(list(log))
    return found


def _held(given: Trial, logs: list[list[Logged]]) -> dict[int, StageBytes]:
    """Per stage, what one micro-batch holds after its forward, and how much more after its gradients of inputs."""
    found = {}
    for log in logs:
        before: dict[int, int] = {}
        kept: dict[int, tuple[int, int]] = {}
        for a in log:
            grown = a.held_bytes - before.get(a.stage, 0)
            saved, stashed = kept.get(a.stage, (0, 0))
            kept[a.stage] = (max(saved, grown), stashed) if a.kind == "F" else (saved, grown if a.kind == "I" else stashed)
            before[a.stage] = a.held_bytes
        found.update({stage: StageBytes(saved, stashed) for stage, (saved, stashed) in kept.items()})
    return found


@pytest.fixture(scope="module")
def steps() -> list[tuple[Trial, list[list[Logged]]]]:
    trials = [trial("gpt2", schedule, m) for schedule, m in SCHEDULES]
    by_rank: Any = run_ranks(2, _logged, trials, timeout=200)
    return [(given, [logs[i] for logs in by_rank]) for i, given in enumerate(trials)]


def test_ranks_run_the_actions_that_the_planner_orders(steps):
    for given, logs in steps:
        for log, planned in zip(logs, orders(given.plan.pipeline), strict=True):
            assert [Action(*a[:3]) for a in log] == list(planned), given.label


def test_nothing_is_held_after_the_last_action(steps):
    for _, logs in steps:
        for log in logs:
            last = {a.stage: a.held_bytes for a in log}
            assert set(last.values()) == {0}


def test_ranks_hold_as_many_bytes_as_simulated(steps):
    for given, logs in steps:
        p, sizes = given.plan.pipeline, _held(given, logs)
        found = simulate(p, orders(p), lambda a: 1.0, held=sizes.__getitem__)
        for log, peak in zip(logs, found.peak_bytes, strict=True):
            held: dict[int, int] = {}
            most = 0
            for a in log:
                held[a.stage] = a.held_bytes
                most = max(most, sum(held.values()))
            assert most == pytest.approx(peak, rel=0.1), given.label


def test_the_plan_knows_how_many_bytes_a_stage_keeps(steps):
    given, logs = steps[1]
    hardware = toy_hardware(given.plan.mesh)
    found = profile(given.capture.graph, given.plan, CostModel(hardware, given.plan.mesh))
    planned = [held.saved / given.plan.pipeline.micro_batches for held in held_by_stage(given.plan, found)]
    measured = _held(given, logs)
    for stage in (0, 1):
        assert measured[stage].saved == pytest.approx(planned[stage], rel=0.1)
