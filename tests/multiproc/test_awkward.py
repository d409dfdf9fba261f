"""Everyday awkwardness on several ranks: each of these once broke somebody's parallel training."""

from __future__ import annotations

import pytest

from tests.multiproc.test_equality import assert_equal_to_one_process


@pytest.mark.parametrize("name", ["unet", "unused", "gpt2_odd", "tied", "llama_tied", "logits", "nested", "frozen"])
def test_it_trains_as_in_one_process(name):
    assert_equal_to_one_process((name,), (2, 2), ("auto", "zero3", "tp"), adam=False)


def test_sizes_that_nothing_divides_train_as_in_one_process():
    assert_equal_to_one_process(("odd",), (2,), ("zero3", "tp"), adam=False)
    assert_equal_to_one_process(("odd",), (2, 2), ("auto",), adam=False)
