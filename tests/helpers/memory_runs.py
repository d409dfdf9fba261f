"""Predicted against measured memory: one training step of a plan on simulated ranks, every live storage followed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.inputs import call_of
from meshwright.planner.ir.plan import Plan
from meshwright.planning import capture_call, plan_capture
from meshwright.request import Request
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from meshwright.target import target_of
from tests.helpers.equality import scalar_of
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.threads import run_threads


@dataclass(frozen=True)
class Measured:
    """One plan, run.

    Attributes:
        plan: the plan.
        peaks: most bytes alive on each rank, within forward and backward.
        at: op after which the first rank's peak was.
        trace: (op, bytes) after every op of the first rank.
    """

    plan: Plan
    peaks: tuple[int, ...]
    at: str
    trace: list[tuple[str, int]]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.plan.predicted.peak_memory_bytes / max(self.peaks)


def measure(
    make: Callable[[], nn.Module], batch: Mapping[str, Any], sizes: tuple[int, ...], *, waits: bool = False, **options: Any
) -> Measured:
    """Plan and run two steps; the second is measured, with optimizer state there, and as many passes as are added up.

    Args:
        make: makes the model.
        batch: global, by keyword.
        sizes: of the mesh.
        waits: whether gradients of all passes but the last wait under ``no_sync``.
        **options: fields of ``Request``.
    """
    torch.manual_seed(0)
    model = make()
    request = Request(alternatives=False, **options)
    target = target_of(mw.MeshShape.of(*sizes), "CPU")
    captured, times = capture_call(model, call_of(dict(batch)), request)
    plan = plan_capture(captured, target, request, type(model).__name__, times)
    capture = captured.at(plan.recompute).whole

    def on_rank(rank: int) -> tuple[int, str, list[tuple[str, int]]]:
        pm = build(model, capture, plan, make_mesh("cpu", plan.mesh.sizes, plan.mesh.names))
        opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
        _step(pm, batch, opt)
        opt.zero_grad()
        gc.collect()
        live = LiveBytes()
        live.start_with([*pm.parameters(), *pm.buffers()])
        live.start_with(t for state in opt.state.values() for t in state.values() if isinstance(t, torch.Tensor))
        with live:
            for i in range(request.accumulate):
                with pm.no_sync() if waits and i < request.accumulate - 1 else nullcontext():
                    returned = pm(**batch)  # held until the backward is done, as training loops do and the prediction says
                    scalar_of(returned).backward()
                    del returned
        return live.peak, live.at, live.trace

    ranks = 1
    for n in plan.mesh.sizes:
        ranks *= n
    found = run_threads(ranks, on_rank)
    return Measured(plan, tuple(peak for peak, _, _ in found), found[0][1], found[0][2])


def _step(pm: nn.Module, batch: Mapping[str, Any], opt: torch.optim.Optimizer) -> None:
    opt.zero_grad()
    scalar_of(pm(**batch)).backward()
    opt.step()
