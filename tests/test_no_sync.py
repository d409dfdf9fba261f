"""Gradients that wait under ``no_sync``: the numbers of one device, reductions once, and no more memory than planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.inputs import call_of
from meshwright.planner.ir.errors import InputError
from meshwright.planning import capture_call, plan_capture
from meshwright.request import Request
from meshwright.runtime import no_sync
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import ParallelModule, build
from meshwright.runtime.no_sync import waits
from meshwright.target import target_of
from tests.helpers.counting import CountCollectives
from tests.helpers.models import ALL, loss_of
from tests.helpers.threads import run_threads

PASSES = 3


def made(name: str, sizes: tuple[int, ...], **options: Any) -> Callable[[], ParallelModule]:
    """Plans once; what is returned builds a rank's module."""
    case, target = ALL[name], target_of(mw.MeshShape.of(*sizes), "CPU")
    request = Request(alternatives=False, accumulate=PASSES, **options)
    captured, times = capture_call(case.model(), call_of(case.batch()), request)
    plan = plan_capture(captured, target, request, name, times)
    program, model = captured.at(plan.recompute).whole, case.model()

    def on_rank() -> ParallelModule:
        pm = build(model, program, plan, make_mesh("cpu", plan.mesh.sizes, plan.mesh.names))
        assert isinstance(pm, ParallelModule)
        return pm

    return on_rank


def steps(model: Any, name: str) -> Iterator[list[torch.Tensor]]:
    """Two steps of three passes and one, the gradients before each update."""
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step, passes in enumerate((PASSES, 1)):
        for i in range(passes):
            last = not isinstance(model, ParallelModule) or i == passes - 1
            with nullcontext() if last else model.no_sync():
                (loss_of(model(**ALL[name].batch(PASSES * step + i))) / passes).backward()
        yield [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        opt.step()
        opt.zero_grad()


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("regularised", (2,), {"strategy": "ddp"}),
        ("transformer", (2,), {"strategy": "zero1"}),
        pytest.param("transformer", (2,), {"strategy": "zero2"}, marks=pytest.mark.slow),
        ("tied", (2,), {"strategy": "zero3"}),
        ("transformer", (2, 2), {"strategy": "zero1+tp"}),
        pytest.param("odd", (3,), {"strategy": "ddp"}, marks=pytest.mark.slow),
        ("gpt2", (2, 2), {"degrees": {"dp": 2, "tp": 2}}),
        ("bert", (2,), {"strategy": "ddp", "precision": "bf16-mixed"}),
    ],
)
def test_gradients_that_waited_are_those_of_one_device(name: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    build_one = made(name, sizes, **options)
    wanted = list(steps(ALL[name].model(), name)) if "precision" not in options else None

    def on_rank(rank: int) -> list[list[torch.Tensor]]:
        return list(steps(build_one(), name))

    def reduced_at_once(rank: int) -> list[list[torch.Tensor]]:
        pm = build_one()
        pm.no_sync = nullcontext  # type: ignore[method-assign]
        return list(steps(pm, name))

    ranks = torch.Size(sizes).numel()
    wanted = run_threads(ranks, reduced_at_once)[0] if wanted is None else wanted
    for found in run_threads(ranks, on_rank):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_reductions_run_once_in_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case, build_one, sums = ALL["transformer"], made("transformer", (2,), strategy="ddp"), list[int]()
    reduce = no_sync.dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        sums.append(tensor.nbytes)
        return reduce(tensor, **options)

    def on_rank(rank: int) -> tuple[list[int], list[bool], int]:
        pm, found, waiting = build_one(), [], []
        for i in range(PASSES):
            with pm.no_sync() if i < PASSES - 1 else nullcontext():
                loss = loss_of(pm(**case.batch(i)))
            with CountCollectives() as counted_here:
                loss.backward()
            found.append(counted_here.counts.total())
            waiting.append(all(waits(p.grad) for p in pm.parameters()))
        return found, waiting, sum(p.grad.to_local().nbytes for p in pm.parameters())

    monkeypatch.setattr(no_sync.dist, "all_reduce", counted)
    found = run_threads(2, on_rank)
    for counts, waiting, _ in found:
        assert counts == [1, 1, 1], "the number of labels that count alone is summed"
        assert waiting == [True, True, False]
    assert sum(sums) == sum(nbytes for *_, nbytes in found) and len(sums) == 2, "one buffer on each rank, in the last pass"


def test_passes_may_overlap_and_gradients_of_before_count_once() -> None:
    case, build_one = ALL["transformer"], made("transformer", (2,), strategy="ddp")

    def on_rank(rank: int) -> list[torch.Tensor]:
        pm = build_one()
        loss_of(pm(**case.batch(0))).backward()
        with pm.no_sync():
            loss_of(pm(**case.batch(1))).backward()
            second = loss_of(pm(**case.batch(2)))
        late = loss_of(pm(**case.batch(3)))
        with pm.no_sync():
            unfinished = loss_of(pm(**case.batch(4)))
        second.backward()
        late.backward()
        unfinished.backward()
        with pytest.raises(InputError, match="parameters were added up under no_sync"):
            pm.clip_grad_norm_(1.0)
        with pytest.raises(InputError, match="run forward and backward of the last pass outside"):
            torch.optim.SGD(pm.parameters(), lr=1.0).step()
        loss_of(pm(**case.batch(5))).backward()
        added = [p.grad.full_tensor().clone() for p in pm.parameters()]
        pm.zero_grad()
        loss_of(pm(**case.batch(0))).backward()
        return [*added, *(p.grad.full_tensor() for p in pm.parameters())]

    model = case.model()
    for i in range(6):
        loss_of(model(**case.batch(i))).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(model(**case.batch(0))).backward()
    wanted += [p.grad for p in model.parameters()]
    for found in run_threads(2, on_rank):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_module_in_micro_batches_says_what_to_do_instead() -> None:
    case, target = ALL["transformer"], target_of(mw.MeshShape.of(2), "CPU")
    request = Request(alternatives=False, strategy="ddp", micro_batches=2)
    captured, times = capture_call(case.model(), call_of(case.batch()), request)
    plan = plan_capture(captured, target, request, "transformer", times)

    def on_rank(rank: int) -> None:
        pm = build(case.model(), captured.at(plan.recompute).whole, plan, make_mesh("cpu", plan.mesh.sizes, plan.mesh.names))
        with pytest.raises(InputError, match="as many more micro_batches"), pm.no_sync():
            pass

    run_threads(2, on_rank)
