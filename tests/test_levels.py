"""In which order levels of recomputation are planned, and when none is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from meshwright.planner import levels
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.levels import Tried
from meshwright.planner.meshes import MeshRequest, logical_meshes
from meshwright.planner.repeat import Folded, capture_folded
from meshwright.planner.search import Beaten, Options, search_unless_beaten
from meshwright.target import target_of
from tests.test_repeat import BATCH, Tower


@dataclass
class Blocks:
    """Ten blocks, any number of which can be computed again."""

    counts: tuple[int, ...] = tuple(range(11))
    num_parts: int = 10


class Levels:
    """What each level promises and gives, and what was asked in which order."""

    def __init__(self, bounds: dict[str, tuple[float, float]]):
        self.bounds, self.planned, self.enough = bounds, list[str](), dict[str, float]()

    def promise(self, recompute: Recompute, enough_s: float, close: float) -> tuple[float, float]:
        self.enough[recompute.level] = enough_s
        return self.bounds[recompute.level]

    def is_hurt(self, recompute: Recompute, few: int, part: float) -> bool:
        bound_s, free_s = self.bounds[recompute.level]
        return math.isinf(bound_s) or bound_s > free_s * (1 + part)

    def best(self, beats: Callable[[float], float] = lambda bound_s: math.inf) -> list[Tried[str]]:
        return levels.best(Blocks(), 1, levels.Asks(self.attempt, self.promise, self.is_hurt, beats), training=True)

    def attempt(self, recompute: Recompute) -> Tried[str]:
        self.planned.append(str(recompute))
        time_s = self.bounds[recompute.level][0] if not recompute.is_mixed else math.inf
        return Tried(recompute, str(recompute), time_s, 0.0, 10.0, False)


HURT = {"none": (3.0, 1.0), "selective": (1.5, 1.2), "full": (1.6, 1.4)}


def test_where_memory_does_not_hurt_levels_come_in_their_order():
    asked = Levels({**HURT, "none": (1.0, 1.0)})
    found = asked.best()
    assert asked.planned[0] == "none" and found[0].recompute.level == "none"
    assert not asked.enough, "only a look at few meshes"


def test_where_it_does_the_lowest_bound_comes_first_and_no_bound_is_made_tighter_than_the_lowest():
    asked = Levels(HURT)
    found = asked.best()
    assert asked.planned[:3] == ["selective", "full", "none"]
    assert found[0].step_time_s == 1.5
    assert asked.enough == {"full": math.inf, "selective": 1.6, "none": 1.5}


def test_where_the_first_level_cannot_fit_the_lowest_bound_comes_first():
    asked = Levels({"none": (math.inf, math.inf), "selective": (70.0, 1.2), "full": (1.6, 1.4)})
    found = asked.best()
    assert asked.planned[:2] == ["full", "selective"]
    assert found[0].recompute.level == "full"


def test_nothing_is_planned_where_all_is_beaten():
    asked, told = Levels(HURT), list[float]()
    found = asked.best(beats=lambda bound_s: told.append(bound_s) or 1.4)
    assert found == [] and asked.planned == []
    assert told == [pytest.approx(1.6 / 0.9)], "asked once, as soon as one bound is known, which may be a tenth too low"
    assert asked.enough == {"full": math.inf, "selective": 1.4, "none": 1.4}, "no other need be above what beats it"


def test_all_is_planned_where_one_level_may_be_better_than_what_beats_another():
    asked = Levels(HURT)
    assert asked.best(beats=lambda bound_s: 1.55)[0].recompute.level == "selective"
    assert asked.planned[:3] == ["selective", "full", "none"]


def test_rough_bounds_are_made_tighter_where_that_shows_that_all_is_beaten():
    class Rough(Levels):
        def promise(self, recompute: Recompute, enough_s: float, close: float) -> tuple[float, float]:
            bound_s, free_s = super().promise(recompute, enough_s, close)
            return (0.95 * bound_s if close < 0 else bound_s), free_s

    asked = Rough(HURT)
    assert asked.best(beats=lambda bound_s: 1.45) == [] and asked.planned == []
    assert asked.enough == {"full": math.inf, "selective": 1.45, "none": pytest.approx(0.95 * 1.5)}


# --- on a program -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tower() -> Folded:
    return capture_folded(Tower(6), kwargs=BATCH)


def test_a_search_that_is_beaten_says_what_plans_take_at_least(tower: Folded, monkeypatch: pytest.MonkeyPatch):
    target = target_of("1x4xH100", None)
    meshes, told = logical_meshes(target.topology, MeshRequest(), search=True), list[float]()

    def beats(bound_s: float) -> float:
        told.append(bound_s)
        return 0.5 * bound_s

    best = search_unless_beaten(tower, meshes, Options(), None, beats)
    assert isinstance(best, Plan) and not told, "memory hurts nowhere"
    monkeypatch.setattr(levels, "_HURTS", -1.0)
    beaten = search_unless_beaten(tower, meshes, Options(), None, beats)
    assert isinstance(beaten, Beaten) and told[0] >= beaten.bound_s
    assert 0.4 * best.objective_s < beaten.bound_s <= best.objective_s * (1 + 1e-6)
    assert {a.strategy for a in beaten.alternatives} == {a.strategy for a in best.alternatives}
    going_on = search_unless_beaten(tower, meshes, Options(), None, lambda bound_s: math.inf)
    assert isinstance(going_on, Plan) and going_on.predicted.step_time_s == pytest.approx(best.predicted.step_time_s, rel=1e-2)
