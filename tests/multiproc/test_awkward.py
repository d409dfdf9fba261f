"""Everyday awkwardness on several ranks: each of these once broke somebody's parallel training."""

from __future__ import annotations

import pytest

from tests.multiproc.test_equality import assert_equal_to_one_process

STRATEGIES = ("auto", "zero3", "tp")
SAMPLE = {
    "unet": ("zero3",),
    "unused": ("auto", "tp"),
    "gpt2_odd": ("zero3", "tp"),
    "tied": ("auto", "tp"),
    "llama_tied": ("tp",),
    "logits": ("auto", "zero3"),
    "nested": ("zero3", "tp"),
    "frozen": ("auto", "zero3"),
}
"""What is tried by default."""


@pytest.mark.parametrize("name", SAMPLE)
def test_it_trains_as_in_one_process(name):
    assert_equal_to_one_process((name,), (2, 2), SAMPLE[name], adam=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_it_trains_as_in_one_process_under_every_strategy(name):
    assert_equal_to_one_process((name,), (2, 2), STRATEGIES, adam=False)


def test_sizes_that_nothing_divides_train_as_in_one_process():
    assert_equal_to_one_process(("odd",), (2,), STRATEGIES, adam=False)


@pytest.mark.slow
def test_sizes_that_nothing_divides_train_on_2x2_as_in_one_process():
    """``zero3`` is refused: the batch of 6 does not divide over four devices (``test_solve_search``)."""
    assert_equal_to_one_process(("odd",), (2, 2), ("auto", "tp"), adam=False)
