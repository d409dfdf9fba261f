"""``compile=True``: both graphs through Inductor, the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.runtime.compile import _convert_bools
from meshwright.runtime.random import SeedSequence
from tests.helpers import pipelines
from tests.helpers.equality import Trial, gathered, scalar_of
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, planned, reference
from tests.helpers.ranks import run_ranks
from tests.helpers.run_capture import run
from tests.multiproc.common import close, start, zero3

STREAM = {"base": 5, "count": 0}
"""Random state in which every step starts."""


def numbers(name: str) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | None]]:
    """Loss and gradients of one process; of a model with dropout those of its captured program with the same seed."""
    if not ALL[name].random:
        return reference(name).loss, reference(name).gradients
    ran = run(captured(name), ALL[name].model(), seed=SeedSequence(**STREAM).draw(), **ALL[name].batch())
    return scalar_of(ran.output), ran.gradients


def assert_compiled_is_equal(name: str) -> None:
    plan, (wanted, gradients) = zero3(name, (2,)), numbers(name)

    def on_rank(rank):
        pm = start(name, plan, compile=True)
        for _ in range(2):
            pm.zero_grad()
            pm.load_random_state(STREAM)
            loss = scalar_of(pm(**ALL[name].batch()))
            loss.backward()
        close(loss.detach(), wanted)
        largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
        for n, p in pm.named_parameters():
            if gradients[n] is None:
                assert p.grad is None
            else:
                assert float((gathered(p.grad) - gradients[n]).abs().max()) <= 1e-5 * largest

    run_ranks(2, on_rank, timeout=400)


def test_a_compiled_step_equals_one_process():
    assert_compiled_is_equal("mlp")


@pytest.mark.slow
def test_gradients_wait_for_a_compiled_pass_too():
    plan, (_, gradients) = planned("transformer", (2,), "ddp"), numbers("transformer")

    def on_rank(rank):
        pm = start("transformer", plan, compile=True)
        for passes in (2, 1):
            pm.zero_grad()
            for i in range(passes):
                with pm.no_sync() if i < passes - 1 else nullcontext():
                    (scalar_of(pm(**ALL["transformer"].batch())) / passes).backward()
            largest = max(float(g.abs().max()) for g in gradients.values())
            for n, p in pm.named_parameters():
                assert float((gathered(p.grad) - gradients[n]).abs().max()) <= 1e-5 * largest

    run_ranks(2, on_rank, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "cnn", "unused", "mlp_dropout"])
def test_compiled_models_equal_one_process(name):
    assert_compiled_is_equal(name)


def _compiled_in_stages(rank: int, given: Trial) -> list[str]:
    return pipelines.differences(pipelines.start(given, compile=True), given.case.batch(), given.reference)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_compiled_stages_equal_one_process(schedule):
    assert run_ranks(2, _compiled_in_stages, pipelines.trial("mlp", schedule, 4), timeout=400) == [[], []]


def test_bools_that_travel_as_bytes_are_converted_by_value_for_inductor():
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.uint8) * 1).view(torch.bool)

    x = torch.tensor([True, False, True])
    module = make_fx(there_and_back, tracing_mode="fake")(x)
    _convert_bools(module)
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    assert torch.equal(module(x), x)
