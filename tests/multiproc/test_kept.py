"""Gathered copies of parameters that live for the optimizer's step: never stale, and not gathered again without need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.helpers import pipelines
from tests.helpers.counting import CountCollectives
from tests.helpers.equality import whole
from tests.helpers.models import ALL, loss_of
from tests.helpers.prepared import planned
from tests.helpers.ranks import run_ranks
from tests.multiproc.common import close, start
from tests.multiproc.test_equality import assert_equal_to_one_process

NAME = "mlp"


def losses_with(change: Callable[[torch.nn.Module], Any]) -> Callable[[torch.nn.Module], list[torch.Tensor]]:
    """Train a step, change the parameters in some way, and look at the loss before and behind."""

    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        batch = ALL[NAME].batch()
        loss_of(model(**batch)).backward()
        change(model)
        found = [loss_of(model(**batch))]
        found[0].backward()
        with torch.no_grad():
            found.append(loss_of(model(**batch)))
        return [whole(t).detach() for t in found]

    return run


def _step(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        make(model.parameters()).step()

    return change


def _closure(model: torch.nn.Module) -> None:
    """The closure runs inside the step, before the parameters change."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def again() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model(**ALL[NAME].batch()))
        loss.backward()
        return loss

    opt.step(again)


def _scheduled(model: torch.nn.Module) -> None:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    schedule.step()
    opt.step()


def _load(model: torch.nn.Module) -> None:
    model.load_state_dict(ALL[NAME].model(seed=7).state_dict())


@torch.no_grad()
def _in_place(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.5)


@torch.no_grad()
def _local(model: torch.nn.Module) -> None:
    for p in model.parameters():
        (p.to_local() if isinstance(p, DTensor) else p).mul_(0.5)


@torch.no_grad()
def _forgotten(model: torch.nn.Module) -> None:
    """Changed in a way that nothing shows, and said so."""
    parameters = list(model.parameters())
    torch._foreach_mul_(parameters, 0.5)
    if hasattr(model, "forget_kept"):
        model.forget_kept()


CHANGES = {
    "sgd": _step(lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    "sgd foreach": _step(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
    "adamw foreach": _step(lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)),
    "adamw fused": _step(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "closure": _closure,
    "schedule": _scheduled,
    "load_state_dict": _load,
    "in place": _in_place,
    "local in place": _local,
    "foreach by hand": _forgotten,
}


def test_no_way_to_change_parameters_leaves_a_stale_copy():
    plan = planned(NAME, (2,), "zero1")
    assert plan.kept
    wanted = {name: losses_with(change)(ALL[NAME].model()) for name, change in CHANGES.items()}

    def on_rank(rank):
        for name, change in CHANGES.items():
            found = losses_with(change)(start(NAME, plan))
            for a, b in zip(found, wanted[name], strict=True):
                close(a, b)

    run_ranks(2, on_rank)


def _accumulate(model: torch.nn.Module) -> list[torch.Tensor]:
    """Two steps of three micro-batches each, with inference in between."""
    case, norms = ALL["transformer"], []
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    for step in range(2):
        opt.zero_grad()
        for micro in range(3):
            (loss_of(model(**case.batch(3 * step + micro))) / 3).backward()
            with torch.no_grad():
                model(**case.batch(9))
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        opt.step()
    return norms


def test_micro_batches_gather_once_per_step_and_train_as_one_process():
    plan, model = planned("transformer", (2,), "zero1"), ALL["transformer"].model()
    wanted = _accumulate(model)

    def on_rank(rank):
        pm = start("transformer", plan)
        batch = ALL["transformer"].batch()
        loss_of(pm(**batch)).backward()  # ranks compare their batches in the first call
        opt = torch.optim.SGD(pm.parameters(), lr=0.0)
        opt.step()
        counts = []
        for _ in range(2):
            with CountCollectives() as ran:
                loss_of(pm(**batch)).backward()
            counts.append(dict(ran.counts))
        assert counts[0].pop("all_gather") > 0 and "all_gather" not in counts[1]
        assert counts[0] == counts[1] and counts[0]["reduce_scatter"] > 0
        storages = {s.data_ptr(): s.nbytes() for p in pm.parameters() for s in [p.grad.to_local().untyped_storage()]}
        assert sum(storages.values()) == sum(p.to_local().numel() * 4 for p in pm.parameters()), (
            "sums of gradients lie as the parameters do"
        )
        pm.eval()
        assert all(p.copies.fresh(dict(pm.named_parameters())) is None for p in pm._library.programs)
        pm.train()
        opt.zero_grad()
        for a, b in zip(_accumulate(pm), wanted, strict=True):
            close(a, b)
        for name, p in model.named_parameters():
            close(whole(pm.get_parameter(name)), p.detach())

    run_ranks(2, on_rank)


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "cnn"])
def test_zero1_trains_as_one_process(name):
    assert_equal_to_one_process((name,), (2,), ("zero1",), adam=False)


def test_strategies_on_two_axes_train_as_one_process():
    assert_equal_to_one_process(("mlp",), (2, 2), ("zero1", "hsdp", "zero1+tp"), adam=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "cnn", "tied", "llama_tied", "odd", "frozen", "unused"])
def test_every_kept_strategy_trains_as_one_process(name):
    sizes = (2,) if name == "odd" else (2, 2)
    assert_equal_to_one_process((name,), sizes, ("zero1", "zero2", "hsdp", "zero1+tp"), adam=True)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_stages_gather_once_per_step_and_train_as_one_process(schedule):
    given = pipelines.trial("mlp", schedule, 2, inside=((2,), "zero1"))
    assert given.plan.kept

    def on_rank(rank):
        pm = pipelines.start(given)
        counts = CountCollectives()
        wrong = pipelines.differences(pm, given.case.batch(), given.reference)
        with counts:
            pm.step(given.case.batch())
        runs = pm._programs[0].runs.values()
        forwards = [run.program.local.forward for run in runs]
        gathers = sum("all_gather_into" in str(n.target) for gm in forwards for n in gm.graph.nodes)
        backwards = [run.program.local.backward for run in runs if run.program.local.backward is not None]
        again = sum("all_gather_into" in str(n.target) for gm in backwards for n in gm.graph.nodes)
        return wrong, counts.counts["all_gather"], gathers, again

    for wrong, ran, gathers, again in run_ranks(4, on_rank):
        assert not wrong, wrong
        assert ran == gathers and not again
