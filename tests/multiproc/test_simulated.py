"""Eight simulated ranks in one process: two models on 8 and 2x4, and a vocabulary that eight does not divide."""

from __future__ import annotations

import pytest

from meshwright.planner import search, trace
from meshwright.planner.ir.mesh import MeshShape
from tests.helpers.equality import Trial, reference_of, try_all
from tests.helpers.models import BATCH, SEQ, Case, _tokens, gpt2
from tests.helpers.prepared import toy_hardware, trial
from tests.helpers.threads import run_threads


def assert_equal(trials: list[Trial], ranks: int = 8) -> None:
    for rank, found in enumerate(run_threads(ranks, lambda rank: try_all(rank, trials, adam=False), timeout=400)):
        wrong = {label: differences for label, differences in found.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


STRATEGIES = ("auto", "zero3", "tp")


@pytest.mark.parametrize(("name", "sizes", "strategies"), [("gpt2", (2, 4), ("tp",)), ("mlp", (8,), STRATEGIES)])
def test_eight_ranks_equal_one_process(name, sizes, strategies):
    assert_equal([trial(name, sizes, strategy) for strategy in strategies])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_eight_ranks_equal_one_process_under_every_strategy(name, sizes):
    assert_equal([trial(name, sizes, strategy) for strategy in STRATEGIES])


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.slow), "tp"])
def test_a_vocabulary_of_30522_on_2x4_equals_one_process(strategy):
    case = Case("gpt2_30522", lambda: gpt2(vocab=30522, hidden=8, heads=4, layers=1), _tokens(30522, BATCH, SEQ))
    mesh = MeshShape.of(2, 4)
    capture = trace.capture(case.model(), (), case.batch())
    options = search.Options(strategy=strategy, alternatives=False)
    plan = search.make_plan(capture, mesh, toy_hardware(mesh), options)
    assert_equal([Trial(strategy, case, case.model(), capture, plan, reference_of(case))])
