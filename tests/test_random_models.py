"""Models, plans and loops put together at random train as on one device."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.inputs import call_of
from meshwright.planner.ir.errors import InputError
from meshwright.planner.repeat import Folded
from meshwright.planning import capture_call, plan_capture
from meshwright.request import Request
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from meshwright.target import target_of
from tests.helpers.random_models import SAMPLES, RandomModel, batch_of
from tests.helpers.stages import forward_ops, run_stages, staged_plan
from tests.helpers.threads import run_threads

PASSES = 3
Numbers = dict[str, torch.Tensor]


def drawn(seed: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A mesh and what is asked of the plan."""
    dice = random.Random(1000 + seed)
    options: dict[str, Any] = {"strategy": dice.choice(["ddp", "zero1", "zero2", "zero3", "tp", "auto"])}
    sizes = dice.choice([(2,), (4,), (2, 2)])
    if dice.random() < 0.4:
        options["micro_batches"] = dice.choice([2, SAMPLES // torch.Size(sizes).numel()])
    if dice.random() < 0.3:
        options["recompute"] = dice.choice(["selective", "full"])
    return sizes, options


def one_device(model: torch.nn.Module) -> Numbers:
    """Losses, sums of gradients of some passes, their norm, and the gradients clipped."""
    losses = []
    for i in range(PASSES):
        losses.append(model(**batch_of(i)))
        losses[-1].backward()
    added = {f"sum {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses).detach(), **added, "norm": norm, **clipped}


def on_ranks(model: RandomModel, captured: Folded, plan: mw.Plan, waits: bool) -> list[Numbers]:
    """The same of every rank; ``waits``: under ``no_sync``."""

    def on_rank(rank: int) -> Numbers:
        pm = build(model, captured.at(plan.recompute).whole, plan, make_mesh("cpu", plan.mesh.sizes, plan.mesh.names))
        losses = []
        for i in range(PASSES):
            with pm.no_sync() if waits and i < PASSES - 1 else nullcontext():
                losses.append(pm.step(batch_of(i)))
        added = {f"sum {n}": p.grad.full_tensor().clone() for n, p in pm.named_parameters() if p.grad is not None}
        norm = pm.clip_grad_norm_(0.5)
        clipped = {n: p.grad.full_tensor() for n, p in pm.named_parameters() if p.grad is not None}
        return {"losses": torch.stack(losses), **added, "norm": norm, **clipped}

    return run_threads(torch.Size(plan.mesh.sizes).numel(), on_rank)


def assert_alike(found: Numbers, wanted: Numbers, label: str) -> None:
    """Equal up to the order of sums; a gradient that one of them leaves out is zero."""
    largest = max(float(t.abs().max()) for t in wanted.values())
    for name in wanted.keys() | found.keys():
        zero = torch.zeros(())
        a, b = found.get(name, zero), wanted.get(name, zero)
        assert float((a - b).abs().max()) <= 2e-5 * largest, f"{label}: {name}"


def check(seed: int) -> bool:
    """Whether the plan was not refused."""
    model, (sizes, options) = RandomModel(seed), drawn(seed)
    captured, times = capture_call(model, call_of(batch_of(0)), Request(alternatives=False, **options))
    try:
        request, target = Request(alternatives=False, **options), target_of(mw.MeshShape.of(*sizes), "CPU")
        plan = plan_capture(captured, target, request, "random", times)
    except InputError as error:
        assert "micro-batches: op" in str(error) and model.loss.__name__ == "share_of_the_batch", f"{seed}: {model} {options}"
        return False
    wanted = one_device(RandomModel(seed))
    for found in on_ranks(model, captured, plan, waits=seed % 2 == 0 and "micro_batches" not in options):
        assert_alike(found, wanted, f"{seed}: {model} on {sizes} {options}")
    return True


def check_stages(seed: int) -> None:
    """Two or three stages cut anywhere, in micro-batches."""
    model, dice = RandomModel(seed), random.Random(seed)
    captured, _ = capture_call(model, call_of(batch_of(0)), Request())
    ops = forward_ops(captured.whole)
    cuts = tuple(ops[i] for i in sorted(dice.sample(range(len(ops)), dice.choice([1, 2]))))
    try:
        plan = staged_plan(captured.whole, cuts, dice.choice([1, 2, 4]), dice.choice(["gpipe", "zero_bubble"]))
    except InputError:
        assert model.loss.__name__ == "share_of_the_batch"
        return
    loss, gradients = run_stages(captured.whole, plan, model, batch_of(0))
    wanted = model(**batch_of(0))
    wanted.backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_alike({"loss": loss, **gradients}, {"loss": wanted.detach(), **whole}, f"{seed}: {model} cut at {cuts}")


@pytest.mark.parametrize("seed", range(5))
def test_random_models_train_as_on_one_device(seed: int) -> None:
    check(seed)
    check_stages(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 155, 10))
def test_many_random_models_train_as_on_one_device(first: int) -> None:
    seeds = range(first, first + 10)
    assert sum(map(check, seeds)) > len(seeds) // 2, "most are not refused"
    for seed in seeds:
        check_stages(seed)
