"""Every strategy x model x number of micro-batches x schedule, pruned to what makes sense: the numbers of one process.

A small part runs by default; the whole by ``pytest -m slow tests/multiproc/test_cross_product.py``, some minutes for each model.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import strategy_trial, try_all

MODELS = {
    "gpt2": "gpt2_padded",
    "llama": "llama_padded",
    "t5": "t5_padded",
    "llama_tied": "llama_tied_padded",
    "unet_deep": "unet_ten",
}
"""Models by their name with eight samples, and with ten: for five micro-batches, of padded tokens where there are tokens."""

Cell = tuple[str, dict[str, Any]]

# On two ranks, whole batch: every strategy without stages, and the two that need one micro-batch only.
WHOLE: tuple[Cell, ...] = (
    *((name, {}) for name in ("ddp", "data_parallel", "zero1", "zero2", "zero3", "tp", "auto")),
    ("model_parallel", {}),
    ("pipeline", {"schedule": "gpipe", "micro_batches": 1}),
    ("pipeline", {"schedule": "zbv", "micro_batches": 1}),
)
SEQUENCE: tuple[Cell, ...] = (("tp+sp", {}), ("tp-sp", {}))
# On two ranks in micro-batches, without stages and with every schedule.
PIECES: tuple[Cell, ...] = (
    ("ddp", {"micro_batches": 4}),
    ("zero1", {"micro_batches": 4}),
    ("zero2", {"micro_batches": 2}),
    ("zero3", {"micro_batches": 4}),
    ("tp", {"micro_batches": 2}),
    ("pipeline", {"schedule": "gpipe", "micro_batches": 2}),
    ("pipeline", {"schedule": "1f1b", "micro_batches": 4}),
    ("pipeline", {"schedule": "interleaved_1f1b", "micro_batches": 4}),
    ("pipeline", {"schedule": "zero_bubble", "micro_batches": 2}),
    ("pipeline", {"schedule": "zbv", "micro_batches": 4}),
)
# Five micro-batches of ten samples.
FIVE: tuple[Cell, ...] = (
    ("ddp", {"micro_batches": 5}),
    ("zero1", {"micro_batches": 5}),
    ("tp", {"micro_batches": 5}),
    ("pipeline", {"schedule": "gpipe", "micro_batches": 5}),
    ("pipeline", {"schedule": "1f1b", "micro_batches": 5}),
    ("pipeline", {"schedule": "zbv", "micro_batches": 5}),
)
# On four ranks.
FOUR_WHOLE: tuple[Cell, ...] = (
    ("ddp", {}),
    ("zero1", {}),
    ("zero3", {}),
    ("hsdp", {"logical_mesh": (2, 2)}),
    ("tp", {"logical_mesh": (2, 2)}),
    ("zero1+tp", {"logical_mesh": (2, 2)}),
    ("zero3", {"degrees": {"dp": 2, "tp": 2}}),
    ("ddp+pipeline", {"schedule": "naive"}),
    ("3d", {"schedule": "naive"}),
)
FOUR_PIECES: tuple[Cell, ...] = (
    ("ddp+pipeline", {"schedule": "1f1b", "micro_batches": 4}),
    ("3d", {"schedule": "gpipe", "micro_batches": 2}),
    ("zero1", {"degrees": {"pp": 2}, "schedule": "zero_bubble", "micro_batches": 4}),
    ("zero2", {"degrees": {"pp": 2}, "schedule": "1f1b", "micro_batches": 2}),
    ("zero3", {"degrees": {"pp": 2}, "schedule": "interleaved_1f1b", "micro_batches": 4}),
    ("tp", {"degrees": {"pp": 2}, "schedule": "zbv", "micro_batches": 4}),
    ("pipeline", {"schedule": "1f1b", "micro_batches": 4}),
    ("pipeline", {"schedule": "zbv", "micro_batches": 4}),
)


def assert_equal_to_one_process(ranks: int, name: str, cells: tuple[Cell, ...]) -> None:
    trials = [strategy_trial(name, strategy, ranks, **options) for strategy, options in cells]
    wrong = [
        f"rank {rank}: {label}: {d[:3]}"
        for rank, found in enumerate(run_ranks(ranks, try_all, trials, timeout=900))
        for label, d in found.items()
        if d
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "cnn"])
def test_strategies_on_two_ranks_equal_one_process(name):
    sequence = SEQUENCE if name not in ("cnn", "unet_deep") else ()
    assert_equal_to_one_process(2, name, (*WHOLE, *sequence))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_on_two_ranks_equal_one_process(name):
    assert_equal_to_one_process(2, name, PIECES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS.values())
def test_five_micro_batches_of_padded_batches_equal_one_process(name):
    assert_equal_to_one_process(2, name, FIVE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "cnn"])
def test_strategies_on_four_ranks_equal_one_process(name):
    assert_equal_to_one_process(4, name, FOUR_WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_on_four_ranks_equal_one_process(name):
    assert_equal_to_one_process(4, name, FOUR_PIECES)


def test_a_sample_of_all_that_equals_one_process():
    assert_equal_to_one_process(2, "gpt2_padded", (FIVE[1], FIVE[4]))
    assert_equal_to_one_process(2, "cnn", (("data_parallel", {}), ("model_parallel", {})))


def test_terms_of_a_loss_that_read_no_batch_count_once():
    cells = (
        ("zero1", {"micro_batches": 4}),
        ("tp", {"micro_batches": 2}),
        ("pipeline", {"schedule": "1f1b", "micro_batches": 4}),
        ("pipeline", {"schedule": "zbv", "micro_batches": 4}),
    )
    assert_equal_to_one_process(2, "regularised", cells)


@pytest.mark.slow
def test_terms_of_a_loss_that_read_no_batch_count_once_on_four_ranks():
    assert_equal_to_one_process(2, "regularised", (*WHOLE, *PIECES))
    assert_equal_to_one_process(4, "regularised", (*FOUR_WHOLE, *FOUR_PIECES))
