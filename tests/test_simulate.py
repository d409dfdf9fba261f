"""The orders of schedules against torch's own, and the simulator against formulas and a dumber simulation."""

from __future__ import annotations

import random

import pytest
from torch.distributed.pipelining import schedules

from meshwright.planner.ir.errors import InputError, VerifyError
from meshwright.planner.ir.pipeline import Pipeline, check_schedule
from meshwright.planner.orders import Action, orders
from meshwright.planner.simulate import StageBytes, simulate

TORCH = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def pipeline(schedule: str, degree: int, micro_batches: int, each: int = 1) -> Pipeline:
    return Pipeline(degree, schedule, tuple(f"op{i}" for i in range(degree * each - 1)), micro_batches)


def torchs(p: Pipeline, rank: int) -> list[Action]:
    """What torch's schedule computes on a rank, without process groups."""
    made = TORCH[p.schedule].__new__(TORCH[p.schedule])
    rounds = max(1, p.micro_batches // p.degree)
    made.pp_group_size, made.n_local_stages, made.num_stages = p.degree, p.stages_per_rank, p.num_stages
    made._n_microbatches, made.microbatches_per_round = p.micro_batches, p.micro_batches // rounds
    found = made._calculate_single_rank_operations(rank)
    return [Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in found if a is not None]


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_orders_are_those_of_torchs_schedules(schedule, degree):
    for each in (2,) if schedule == "zbv" else (1, 2, 3):
        for micro_batches in (1, 2, 3, 4, 5, 6, 8, 12):
            p = pipeline(schedule, degree, micro_batches, each)
            try:
                check_schedule(schedule, degree, p.num_stages, micro_batches)
            except InputError:
                continue
            for rank, order in enumerate(orders(p)):
                assert list(order) == torchs(p, rank), f"{p} rank {rank}"


@pytest.mark.parametrize(("degree", "micro_batches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 16)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_the_textbooks(schedule, degree, micro_batches):
    p = pipeline(schedule, degree, max(micro_batches, degree) if schedule == "1f1b" else micro_batches)
    found = simulate(p, orders(p), lambda a: {"F": 1.0, "B": 2.0}[a.kind])
    m = p.micro_batches
    assert found.step_s == pytest.approx(3 * (m + degree - 1))
    assert found.bubble == pytest.approx((degree - 1) / (m + degree - 1))


@pytest.mark.parametrize(("degree", "micro_batches", "each"), [(2, 8, 2), (4, 8, 2), (4, 16, 3)])
def test_the_bubble_of_interleaved_stages_is_the_textbooks(degree, micro_batches, each):
    p = pipeline("interleaved_1f1b", degree, micro_batches, each)
    found = simulate(p, orders(p), lambda a: {"F": 1.0, "B": 2.0}[a.kind])
    assert found.bubble == pytest.approx((degree - 1) / (micro_batches * each + degree - 1))


def test_zero_bubble_schedules_idle_less():
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    bubbles = []
    for schedule, each in (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zbv", 2)):
        p = pipeline(schedule, 4, 8, each)
        bubbles.append(simulate(p, orders(p), lambda a: seconds[a.kind]).bubble)
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] < 0.1 < bubbles[0]


@pytest.mark.parametrize(
    ("schedule", "each", "most"),
    [("gpipe", 1, (8, 8)), ("1f1b", 1, (2, 1)), ("interleaved_1f1b", 2, (5, 3))],
)
def test_micro_batches_in_flight(schedule, each, most):
    p = pipeline(schedule, 2, 8, each)
    found = simulate(p, orders(p), lambda a: 1.0, held=lambda stage: StageBytes(1.0))
    assert found.peak_bytes == most


@pytest.mark.parametrize("seed", range(30))
def test_the_simulator_equals_a_fixed_point_of_its_own_equations(seed):
    dice = random.Random(seed)
    schedule = dice.choice(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
    degree = dice.choice([2, 3, 4])
    p = pipeline(schedule, degree, degree * dice.choice([1, 2]), 1 if schedule in ("gpipe", "1f1b") else 2)
    order, length, sends = orders(p), {}, [dice.random() for _ in range(p.num_stages)]
    for actions in order:
        length.update({a: dice.random() + 0.1 for a in actions})
    found = simulate(p, order, length.__getitem__, sends.__getitem__)
    began = dict.fromkeys(length, 0.0)
    for _ in range(len(length) + 1):
        for rank, actions in enumerate(order):
            free = 0.0
            for a in actions:
                needs = [free]
                if a.kind == "F" and a.stage:
                    needs.append(_made(began, length, "F", a.stage - 1, a.micro_batch) + _sent(p, sends, a.stage - 1))
                if a.kind in "BI":
                    needs.append(_made(began, length, "F", a.stage, a.micro_batch))
                    if a.stage < p.num_stages - 1:
                        needs.append(_made(began, length, a.kind, a.stage + 1, a.micro_batch) + _sent(p, sends, a.stage))
                began[a] = max(needs)
                free = began[a] + length[a]
            assert rank < degree
    assert found.began_s == pytest.approx(began)


def _made(began: dict[Action, float], length: dict[Action, float], kind: str, stage: int, i: int) -> float:
    a = Action(kind, stage, i)
    return began[a] + length[a]


def _sent(p: Pipeline, sends: list[float], boundary: int) -> float:
    return sends[boundary] if p.rank_of(boundary) != p.rank_of(boundary + 1) else 0.0


def test_orders_that_wait_for_each_other_are_an_error():
    p = pipeline("gpipe", 2, 1)
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    with pytest.raises(VerifyError, match="wait for each other for ever: at B0@0, F0@1"):
        simulate(p, ((backward, forward), (Action("F", 1, 0), Action("B", 1, 0))), lambda a: 1.0)


def test_a_rank_that_moves_data_itself_takes_the_time_at_both_ends():
    p = pipeline("gpipe", 2, 1)
    found = simulate(p, orders(p), lambda a: {"F": 1.0, "B": 2.0}[a.kind], moving_s=lambda boundary: 0.25)
    forward, backward = Action("F", 1, 0), Action("B", 0, 0)
    assert found.began_s[forward] == 1.5  # computed, sent, received
    assert found.began_s[backward] == 5.0  # the last stage does not send between its forward and its backward
    assert found.step_s == 7.0 and found.busy_s == (3.0, 3.0)


def test_nothing_is_moved_between_stages_of_one_rank():
    p = pipeline("zbv", 2, 2, 2)
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
    still = simulate(p, orders(p), lambda a: seconds[a.kind])
    moving = simulate(p, orders(p), lambda a: seconds[a.kind], moving_s=lambda boundary: 9.0 * (boundary == 1))
    assert still.began_s == moving.began_s
