"""Ranks agree before they communicate: a difference is an error that names the rank, not a hang.

Every rank gathers every rank's facts and compares all with the first rank's, so that all raise the same error.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.errors import RuntimeMismatchError
from meshwright.runtime.dtensor import Layout
from meshwright.runtime.mesh import gather_objects

_ADVICE: dict[str, str] = {
    "plan": "plan on one rank and broadcast the plan",
    "graph": "the ranks must build the same model with the same options",
    "world size": "start all ranks from one launcher",
    "mesh": "make the mesh with the same sizes on all ranks",
    "batch mode": "pass the same batch= on all ranks",
    "collectives": "the ranks lowered one plan to different programs: please report it",
    "call": "all ranks must make the same calls in the same order",
    "batch": "with batch='global' every rank passes the same whole batch; pass batch='local' if each rank loads its own piece",
    "torch": "install the same version on all machines",
}


def agree(facts: Mapping[str, Any], mesh: DeviceMesh, where: str) -> None:
    """Compare ``facts`` on all ranks of the mesh.

    Args:
        facts: what must be equal, by what it is (see ``_ADVICE``); values are compared and printed.
        mesh: over which ranks.
        where: when this happens, for the message.

    Raises:
        RuntimeMismatchError: on every rank, naming the first rank that differs, both values and what to do.
    """
    everyone = gather_objects(dict(facts), mesh)
    ranks = mesh.mesh.flatten().tolist()
    for name in dict.fromkeys(key for theirs in everyone for key in theirs):
        for rank, theirs in zip(ranks, everyone, strict=True):
            if not _equal(theirs.get(name), everyone[0].get(name)):
                raise RuntimeMismatchError(
                    f"{where}: rank {rank} differs from rank {ranks[0]} in its {name}: found {_short(theirs.get(name))}, "
                    f"rank {ranks[0]} has {_short(everyone[0].get(name))}; {_advice(name)}"
                )


def _equal(a: Any, b: Any) -> bool:
    """Equality; floats to 3 digits, since ranks may compute a batch by kernels that do not repeat their last bits."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3) or (a != a and b != b)
    return a == b


def _advice(name: str) -> str:
    return next((text for start, text in _ADVICE.items() if name.startswith(start)), "make them equal")


def _short(value: Any, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes: CRC-32, some gigabytes per second."""
    plain = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def batch_fingerprint(tensor: torch.Tensor) -> int | float:
    """What must be equal on all ranks of a global batch's tensor: its bytes, or the sum of magnitudes of floats."""
    return float(tensor.detach().double().abs().sum()) if tensor.is_floating_point() else fingerprint(tensor)


def check_parameter(name: str, found: Any, layout: Layout) -> None:
    """Refuse a parameter that is no longer what the plan is for.

    Args:
        name: its FQN.
        found: what the module holds now.
        layout: how it lay when it was placed.

    Raises:
        RuntimeMismatchError: it is no DTensor, or has another dtype, shape, placement, mesh, device or piece.
    """
    if not isinstance(found, DTensor):
        raise changed(name, f"is a {type(found).__name__}", "a DTensor")
    difference = layout.difference(found)
    if difference is not None:
        what, now, needed = difference
        raise changed(name, f"has {what} {now}", str(needed))


def changed(name: str, found: str, needed: str) -> RuntimeMismatchError:
    """The error for a parameter that is not as the plan left it."""
    return RuntimeMismatchError(
        f"parameter {name} was changed outside: it {found}, the plan needs {needed}; "
        "copy values in place (under torch.no_grad(), p.copy_(...)), use load_state_dict, or plan again for the changed model"
    )
