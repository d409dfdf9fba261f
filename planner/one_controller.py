"""Data parallelism run by one controller, as ``torch.nn.DataParallel`` does it: what the first device hands out for every call.

The plan is that of ddp. Before every call the first device scatters its batch and broadcasts all parameters, behind it the outputs
beside the loss are gathered on it. All that goes through one link and hides behind nothing. Kept to be compared with.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.cost.comm import measured_s
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.hardware import Hardware, Link
from meshwright.planner.ir.plan import Collective, Plan


def controlled(plan: Plan, graph: OpGraph, hardware: Hardware) -> Plan:
    """``plan``, made for ddp, with the first device as its controller: its traffic counted in time and collectives.

    Args:
        plan: for ``graph``, without stages.
        graph: the program.
        hardware: of the plan's mesh; what leaves the first device takes its slowest link.
    """
    devices = plan.mesh.num_devices
    if devices == 1:
        return replace(plan, one_controller=True)
    axis = min(range(plan.mesh.num_axes), key=lambda a: hardware.links[a].bytes_per_s)
    link = hardware.links[axis]
    outputs = [o.value for o in graph.outputs_of("output") if o.value is not None and o.value.shape]
    parts = (
        ("broadcast", [i.value for i in graph.inputs_of("parameter")], 1.0),
        ("scatter", [i.value for i in graph.inputs_of("input") if i.value.shape], (devices - 1) / devices),
        ("gather", outputs, (devices - 1) / devices),
    )
    found = [
        Collective(
            kind, axis, sum(v.size_bytes for v in values), sum(_seconds(link, kind, devices, v, share) for v in values), False
        )
        for kind, values, share in parts
        if values
    ]
    seconds, predicted = sum(c.time_s for c in found), plan.predicted
    predicted = replace(predicted, exposed_s=predicted.exposed_s + seconds, step_time_s=predicted.step_time_s + seconds)
    return replace(plan, one_controller=True, collectives=(*plan.collectives, *found), predicted=predicted)


def _seconds(link: Link, kind: str, devices: int, value: Value, share: float) -> float:
    """Of one value: as measured, else a message to or from each of the other devices, and the share of the value that travels."""
    known = measured_s(link, kind, devices, value.size_bytes)
    return (devices - 1) * link.latency_s + share * value.size_bytes / link.bytes_per_s if known is None else known
