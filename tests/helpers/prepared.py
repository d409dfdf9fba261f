"""Captures, plans and references of the zoo, each made once per test session."""

from __future__ import annotations

import functools

from meshwright.planner import remat, search, trace
from meshwright.planner.cost import hardware_for
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from tests.helpers.equality import Reference, Trial, reference_of
from tests.helpers.models import ALL


def toy_hardware(mesh: MeshShape) -> Hardware:
    """A device so slow, without fixed costs, that sharding pays for models of a few thousand parameters."""
    device = Device(
        name="toy",
        memory_bytes=1 << 40,
        memory_bytes_per_s=1e9,
        peak_flops_per_s={"float32": 1e9, "bfloat16": 2e9},
        matmul_efficiency={"float32": 0.7, "bfloat16": 0.7},
        kernel_overhead_s=0.0,
        source="made up for tests",
    )
    links = tuple(Link("toy", 2e9 / (axis + 1), 1e-7, "made up for tests") for axis in range(mesh.num_axes))
    return Hardware(device, links, "made up for tests")


@functools.cache
def captured(name: str, precision: str | None = None) -> Capture:
    """The training step of a model of the zoo."""
    case = ALL[name]
    return remat.save_few(trace.capture(case.model(), (), case.batch(), precision=precision))


@functools.cache
def planned(
    name: str, sizes: tuple[int, ...], strategy: str = "auto", precision: str | None = None, micro_batches: int = 1
) -> Plan:
    """A plan by the search.

    Args:
        name: model of the zoo.
        sizes: of the mesh.
        strategy: on toy hardware; or ``"auto in less memory"``: three fifths of the ddp plan's; or ``"auto on CPU"``: the record of
            local runs, for which replication is best at this size.
        precision: as in ``capture``.
        micro_batches: pieces of the batch that the devices must be able to share.
    """
    mesh, limit = MeshShape.of(*sizes), None
    hardware = hardware_for(mesh, "CPU", None) if strategy.endswith("on CPU") else toy_hardware(mesh)
    if strategy.endswith("in less memory"):
        limit = planned(name, sizes, "ddp", precision).predicted.peak_memory_bytes * 3 // 5
    options = search.Options(
        strategy=strategy.split()[0],
        memory_limit_bytes=limit,
        alternatives=False,
        model=name,
        micro_batches=micro_batches,
    )
    return search.make_plan(captured(name, precision), mesh, hardware, options)


@functools.cache
def reference(name: str) -> Reference:
    """One process's numbers."""
    return reference_of(ALL[name])


def trial(name: str, sizes: tuple[int, ...], strategy: str) -> Trial:
    """A model, mesh and strategy to compare with one process."""
    label = f"{name} {strategy} on {'x'.join(map(str, sizes))}"
    return Trial(label, ALL[name], ALL[name].model(), captured(name), planned(name, sizes, strategy), reference(name))
