"""Every model of the main job, every strategy, several meshes: the numbers of one process, the collectives of the plan.

Each test forks the ranks once and tries several plans in them. By default every model, strategy and mesh is tried, but not each
with each: the whole cross product is ``slow`` (``make test-all``).
"""

from __future__ import annotations

import pytest

from tests.helpers.equality import try_all
from tests.helpers.models import ZOO
from tests.helpers.prepared import trial
from tests.helpers.ranks import run_ranks

STRATEGIES = ("auto", "ddp", "zero3", "tp")
MESHES = ((2,), (4,), (2, 2))
SAMPLE = {
    "mlp": STRATEGIES,
    "cnn": ("auto", "tp"),
    "transformer": ("ddp", "tp"),
    "gpt2": ("ddp", "zero3", "tp"),
    "llama": ("tp",),
    "qwen3": ("tp",),
    "bert": ("tp",),
    "vit": ("auto", "zero3"),
    "t5": ("tp",),
}
"""What runs on 2x2 by default; llama and t5 under other strategies below, and in stages in test_pipeline.py."""


def assert_equal_to_one_process(
    names: tuple[str, ...], sizes: tuple[int, ...], strategies: tuple[str, ...], *, adam: bool
) -> None:
    trials = [trial(name, sizes, strategy) for name in names for strategy in strategies]
    ranks = 1
    for n in sizes:
        ranks *= n
    for rank, found in enumerate(run_ranks(ranks, lambda rank: try_all(rank, trials, adam=adam), timeout=500)):
        wrong = {label: differences for label, differences in found.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


def test_the_sample_has_every_model():
    assert list(SAMPLE) == list(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_training_on_2x2_equals_one_process(name):
    assert_equal_to_one_process((name,), (2, 2), SAMPLE[name], adam=False)


@pytest.mark.parametrize(("sizes", "name"), [((2,), "cnn"), ((4,), "mlp")])
def test_training_on_one_axis_equals_one_process(sizes, name):
    assert_equal_to_one_process((name,), sizes, STRATEGIES, adam=True)


@pytest.mark.parametrize(("strategy", "name"), [("auto", "gpt2"), ("zero3", "transformer")])
def test_five_steps_of_adamw_equal_one_process(strategy, name):
    assert_equal_to_one_process((name,), (2, 2), (strategy,), adam=True)


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_plan_forced_by_memory_equals_one_process(name):
    assert_equal_to_one_process((name,), (2, 2), ("auto in less memory",), adam=False)


def test_a_plan_for_the_machine_at_hand_equals_one_process():
    assert_equal_to_one_process(("mlp",), (2, 2), ("auto on CPU",), adam=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", ZOO)
def test_every_strategy_and_optimizer_equals_one_process(name, sizes):
    assert_equal_to_one_process((name,), sizes, STRATEGIES, adam=True)
