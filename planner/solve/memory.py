"""Bytes per device of what rests: parameters, optimizer state, buffers, inputs. What comes and goes: :mod:`.liveness`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.hardware import Device

# Bytes of optimizer state per parameter element: two float32 moments, none, or one float32 momentum.
OPTIMIZER_BYTES: Mapping[str, int] = {"adamw": 8, "adam": 8, "sgd": 0, "sgd-momentum": 4}
GATHERED_COPIES = 2
# Fraction of the device's memory left to the allocator, the communication library and the context. A stated guess.
RESERVE = 0.06
_AT_REST = {"buffer": "buffers", "constant": "buffers", "seed": "buffers", "input": "inputs", "tangent": "inputs"}


@dataclass(frozen=True, slots=True)
class Trained:
    """What is held for every element of a trained parameter all the time, besides itself.

    Attributes:
        state_bytes: the optimizer's state.
        adds_up: whether gradients of earlier passes are held while a pass runs: in the parameter's own placement and type.
    """

    state_bytes: int
    adds_up: bool = False


def usable_bytes(device: Device) -> int:
    """What a plan may use of a device's memory unless told otherwise: all but the reserve."""
    return int(device.memory_bytes * (1 - RESERVE))


def optimizer_bytes(optimizer: str | int) -> int:
    """Bytes of state per parameter element.

    Raises:
        InputError: an unknown name or a negative number.
    """
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    if optimizer in OPTIMIZER_BYTES:
        return OPTIMIZER_BYTES[str(optimizer)]
    raise InputError(
        f"optimizer {optimizer!r} is unknown: use one of {', '.join(OPTIMIZER_BYTES)}, or the bytes of state per parameter element"
    )


def parameters_with_gradient(graph: OpGraph) -> frozenset[str]:
    """Value names of the parameters that get a gradient."""
    named = {name for o in graph.outputs_of("gradient") if o.value is not None for name in (o.name,)}
    return frozenset(p.value.name for p in graph.inputs_of("parameter") if named.intersection((p.name, *p.aliases)))


def rest_bytes(source: GraphInput, numel: int, trained: Trained, has_gradient: bool) -> dict[str, int]:
    """Bytes by category of ``numel`` elements of a placeholder."""
    size = numel * source.value.dtype.itemsize
    if source.role != "parameter":
        return {_AT_REST[source.role]: size}
    if not has_gradient:
        return {"parameters": size}
    return {"parameters": size, "optimizer": numel * trained.state_bytes, **({"accumulated": size} if trained.adds_up else {})}


def resting_units(
    graph_gradients: frozenset[str], members: Sequence[Cluster], trained: Trained, times: Callable[[str], int]
) -> dict[str, int]:
    """Category to bytes of the placeholders of a class, all members together, for an element of one.

    Args:
        graph_gradients: value names of the parameters that get a gradient.
        members: clusters of the class.
        trained: what training holds per parameter element.
        times: name of a value to how many it stands for.
    """
    total: dict[str, int] = {}
    for source in (m.source for m in members if m.source is not None):
        name = source.value.name
        for category, size in rest_bytes(source, 1, trained, name in graph_gradients).items():
            total[category] = total.get(category, 0) + size * times(name)
    return total
