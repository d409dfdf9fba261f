"""``compile=True``: both graphs through Inductor, the same numbers."""

from __future__ import annotations

import pytest

from tests.helpers.equality import gathered, scalar_of
from tests.helpers.models import ALL
from tests.helpers.prepared import reference
from tests.helpers.ranks import run_ranks
from tests.multiproc.common import close, start, zero3


def assert_compiled_is_equal(name: str) -> None:
    plan, wanted = zero3(name, (2,)), reference(name)

    def on_rank(rank):
        pm = start(name, plan, compile=True)
        for _ in range(2):
            pm.zero_grad()
            loss = scalar_of(pm(**ALL[name].batch()))
            loss.backward()
        close(loss.detach(), wanted.loss)
        largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
        for n, p in pm.named_parameters():
            if wanted.gradients[n] is None:
                assert p.grad is None
            else:
                assert float((gathered(p.grad) - wanted.gradients[n]).abs().max()) <= 1e-5 * largest

    run_ranks(2, on_rank, timeout=400)


def test_a_compiled_step_equals_one_process():
    assert_compiled_is_equal("mlp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "cnn", "unused", "mlp_dropout"])
def test_compiled_models_equal_one_process(name):
    assert_compiled_is_equal(name)
