"""Shared by the tests that run a parallel module on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.planner import remat, trace
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, S
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import ParallelModule, build
from meshwright.runtime.programs import Request
from tests.helpers.legal_plans import greedy_plan
from tests.helpers.models import ALL
from tests.helpers.prepared import captured

SHARDED: Mapping[str, Placements] = {"*": (S(0), S(0))}


def zero3(name: str, sizes: tuple[int, ...] = (2, 2), precision: str | None = None) -> Plan:
    """Parameters sharded along dim 0 over all axes, the batch too; no solver."""
    capture = captured(name, precision)
    axes = tuple(range(len(sizes)))
    return greedy_plan(capture, MeshShape.of(*sizes), batch_axes=axes, parameters={"*": (S(0),) * len(sizes)})


def start(name: str, plan: Plan, precision: str | None = None, model: Any = None, **options: Any) -> ParallelModule:
    """The parallel module of a model of the zoo on a mesh of this world."""
    mesh = make_mesh("cpu", plan.mesh.sizes)
    return build(model if model is not None else ALL[name].model(), captured(name, precision), plan, mesh, **options)


def replan(request: Request) -> tuple[Capture, Plan]:
    """Every rank captures and plans alike (the greedy plan is deterministic), parameters staying where they are."""
    capture = trace.capture(request.module, request.args, request.kwargs, precision=request.precision, training=request.training)
    capture = remat.save_few(capture) if request.training else capture
    sizes = (2,) * len(next(iter(request.pins.values())))
    return capture, greedy_plan(capture, MeshShape.of(*sizes), batch_axes=(0,), parameters=request.pins)


def close(found: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-5) -> None:
    """Within ``rtol`` of the largest element."""
    limit = rtol * float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
