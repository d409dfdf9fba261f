"""Gradients own their memory: what a caller does to them in place is done once, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.inputs import call_of
from meshwright.planning import capture_call, plan_capture
from meshwright.request import Request
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from meshwright.target import target_of
from tests.helpers.threads import run_threads


class Way(nn.Module):
    """Three parameters [8, 8], used in a way that the test gives."""

    def __init__(self, way: Callable[..., torch.Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def biases_of_one_value(m: Way, x: torch.Tensor) -> torch.Tensor:
    return ((x @ m.c + m.a[0] + m.b[0]) ** 2).sum()


def views_of_one_value(m: Way, x: torch.Tensor) -> torch.Tensor:
    return ((x + m.a.flatten() @ m.c.flatten() + m.a + m.b.flatten().view(8, 8)) ** 2).sum()


def parts_of_one_value(m: Way, x: torch.Tensor) -> torch.Tensor:
    return (torch.cat([x @ m.c, m.a, m.b + m.a]) ** 2).mean()


def sums(m: Way, x: torch.Tensor) -> torch.Tensor:
    return m.a.sum() + m.b.sum() + (m.c * x.mean()).sum()


def added_to_the_result(m: Way, x: torch.Tensor) -> torch.Tensor:
    return x @ m.c + m.a + m.b.t()


def batch_norms_of_two_branches(m: Way, x: torch.Tensor) -> torch.Tensor:
    def norm(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(y, None, None, p[0], p[1], training=True)

    return torch.relu(norm(x @ m.c, m.a) + norm(x, m.b)).square().mean()


WAYS = [
    biases_of_one_value,
    views_of_one_value,
    parts_of_one_value,
    sums,
    added_to_the_result,
    batch_norms_of_two_branches,
]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_add_up_and_are_clipped_are_those_of_one_device(way: Callable[..., torch.Tensor], strategy: str) -> None:
    model, x = Way(way), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    tangent = torch.randn_like(model(x))
    request, target = Request(alternatives=False, strategy=strategy), target_of(mw.MeshShape.of(2), "CPU")
    captured, times = capture_call(model, call_of({"x": x}), request)
    plan = plan_capture(captured, target, request, "Way", times)
    program = captured.at(plan.recompute).whole

    def on_rank(rank: int) -> dict[str, Any]:
        pm = build(model, program, plan, make_mesh("cpu", plan.mesh.sizes, plan.mesh.names), outputs="full")
        mine = tangent.clone()
        for _ in range(3):
            pm(x=x).backward(mine)
        assert torch.equal(mine, tangent), "the caller's tangent was written"
        added = {n: p.grad.full_tensor().clone() for n, p in pm.named_parameters()}
        norm = pm.clip_grad_norm_(1.0)
        return {"added": added, "norm": norm, "clipped": {n: p.grad.full_tensor() for n, p in pm.named_parameters()}}

    for _ in range(3):
        model(x).backward(tangent)
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clipped = {n: p.grad for n, p in model.named_parameters()}
    for found in run_threads(2, on_rank):
        torch.testing.assert_close(found["added"], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["norm"], norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(found["clipped"], clipped, rtol=1e-5, atol=1e-6)
