"""Programs for other tools: ``torch.export`` files and AOTInductor packages, one per rank and graph. We never load either.

Reading a ``.pt2`` file can run code of whoever wrote it (three ways were found in torch 2.13), and an AOTInductor package is a shared
library. They are written for people who trust themselves; :func:`meshwright.load` does not look at them.

Collectives name the process group of mesh axis ``i`` ``mw.i``: whoever runs a file registers its groups under these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from meshwright.passes.lower_stages import PipelineProgram
from meshwright.passes.program import LocalProgram
from meshwright.passes.views import is_collective
from meshwright.planner.ir.errors import InputError
from meshwright.runtime.compile import package

FOLDER = "pt2"
FORMATS = ("json", "pt2", "aoti")


def pt2_groups(num_axes: int) -> tuple[str, ...]:
    """Names of the process groups in files for other tools."""
    return tuple(f"mw.{i}" for i in range(num_axes))


def check_format(name: str) -> None:
    """Refuse a format that there is not.

    Raises:
        InputError: it is unknown.
    """
    if name not in FORMATS:
        raise InputError(f"format is {name!r}, must be one of {', '.join(map(repr, FORMATS))}")


def write_for_others(program: LocalProgram | PipelineProgram, kind: str, folder: Path, rank: str) -> None:
    """Write every graph of one rank's program.

    Args:
        program: over :func:`pt2_groups`.
        kind: ``"pt2"`` or ``"aoti"``.
        folder: made where it is not there.
        rank: what the files' names end with.

    Raises:
        InputError: a package would deadlock, or torch cannot export a graph.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, gm in _graphs(program):
        if kind == "aoti":
            _refuse_collectives(name, gm)
        exported = _exported(name, gm)
        if kind == "pt2":
            exported._example_inputs = None  # they would be copies of all parameters
            torch.export.save(exported, folder / f"{name}-{rank}.pt2")
        else:
            package(exported, folder / f"{name}-{rank}.aoti.pt2")


def _graphs(program: LocalProgram | PipelineProgram) -> Iterator[tuple[str, fx.GraphModule]]:
    if isinstance(program, PipelineProgram):
        several = len(program.stages) > 1
        for i, stages in enumerate(program.stages):
            for k, stage in stages.items():
                prefix = f"stage{k}-micro{i}-" if several else f"stage{k}-"
                yield from ((prefix + name, gm) for name, gm in _graphs(stage.local))
        return
    for name in ("forward", "again", "backward"):
        gm = getattr(program, name)
        if gm is not None:
            yield name, gm


def _refuse_collectives(name: str, gm: fx.GraphModule) -> None:
    found = next((n for n in gm.graph.nodes if is_collective(n)), None)
    if found is not None:
        raise InputError(
            f"an AOTInductor package of {name} would hold Python's lock while it waits in {found.name}, for which gloo needs a thread that "
            "wants the lock: it deadlocks (measured, torch 2.13; NCCL was not tried). Compile at load instead: load(dir, compile=True)"
        )


def _exported(name: str, gm: fx.GraphModule) -> Any:
    """The graph as ``torch.export`` has it."""
    examples = tuple(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    try:
        return torch.export.export(gm, examples, strict=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"torch.export cannot take {name} of this program: {type(error).__name__}: {reason}") from None
