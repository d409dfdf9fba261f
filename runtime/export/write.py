"""Writing an export: what every rank has is put together on the first rank, in a directory that appears whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.passes.lower_stages import PipelineProgram
from meshwright.passes.program import LocalProgram
from meshwright.planner.ir.plan import Plan
from meshwright.runtime.export.manifest import (
    CONSTANTS,
    FORMAT,
    MODEL,
    PLAN,
    PROGRAMS,
    VERSION,
    Manifest,
    MeshRecord,
    ProgramHead,
    file_heads,
    torch_version,
)
from meshwright.runtime.export.model_tree import ModelRecord
from meshwright.runtime.export.plain import pretty, to_plain
from meshwright.runtime.export.ranks import merged
from meshwright.runtime.export.records import hooks
from meshwright.runtime.export.structure import Structure
from meshwright.runtime.interface import Interface
from meshwright.runtime.tensor_files import Entry, write_tensors

CONSTANT, BUFFER = "constant", "buffer"
"""Prefixes of the tensors in ``constants.safetensors``: ``constant.0.value`` of program 0, ``buffer.name``."""


@dataclass(frozen=True)
class ProgramRecord:
    """A program as its caller sees it, and the form of its output."""

    interface: Interface
    structure: Structure


@dataclass(frozen=True)
class WrittenProgram:
    """One program to write.

    Attributes:
        record: what goes in and out.
        plan: its plan.
        constants: values by value name.
        graphs: for each place along the pipeline axis (one where there are no stages), every rank's graphs as JSON data, in row-major
            order.
    """

    record: ProgramRecord
    plan: Plan
    constants: Mapping[str, torch.Tensor]
    graphs: Sequence[Sequence[Any]]


def plain_graphs(program: LocalProgram | PipelineProgram, extra: Sequence[str]) -> Any:
    """A rank's graphs, over the groups of ``group_markers``, as JSON data."""
    return to_plain(type(program), program, hooks(None, extra))


def write_files(
    folder: Path,
    model: ModelRecord,
    programs: Sequence[WrittenProgram],
    buffers: Mapping[str, torch.Tensor],
    mesh: MeshRecord,
    given: MeshRecord,
    extra: Sequence[str],
) -> None:
    """Write all files but the state, which lies in ``folder`` already where it is to be; the manifest comes last.

    Args:
        folder: a new directory.
        model: the whole model.
        programs: the first is that of the first plan.
        buffers: those that are no part of the ``state_dict``, by FQN.
        mesh: on which they run; ``given``: as the user made it.
        extra: operators besides those of the list.
    """
    (folder / MODEL).write_text(pretty(to_plain(ModelRecord, model)) + "\n", encoding="utf-8")
    programs[0].plan.save(folder / PLAN)
    for k, program in enumerate(programs):
        _write_program(folder / PROGRAMS / str(k), program, k)
    tensors = {f"{BUFFER}.{name}": t for name, t in buffers.items()}
    tensors.update((f"{CONSTANT}.{k}.{n}", t) for k, program in enumerate(programs) for n, t in program.constants.items())
    write_tensors(folder / CONSTANTS, [Entry.of(name, t.detach().cpu().contiguous()) for name, t in tensors.items()])
    pipeline = programs[0].plan.pipeline
    Manifest(
        format=FORMAT,
        version=VERSION,
        meshwright=_version(),
        torch=torch_version(),
        model=model.name,
        mesh=mesh,
        given=given,
        stages=0 if pipeline is None else pipeline.degree,
        operators=tuple(extra),
        programs=tuple(_head(k, p.record.interface) for k, p in enumerate(programs)),
        files=file_heads(folder),
        check="",
    ).write(folder)


def _write_program(folder: Path, program: WrittenProgram, k: int) -> None:
    folder.mkdir(parents=True)
    (folder / "program.json").write_text(pretty(to_plain(ProgramRecord, program.record)) + "\n", encoding="utf-8")
    if k:
        program.plan.save(folder / PLAN)
    for place, ranks in enumerate(program.graphs):
        text = pretty(merged(ranks, f"program {k}"))
        (folder / f"graphs-{place}.json").write_text(text + "\n", encoding="utf-8")


def _head(k: int, interface: Interface) -> ProgramHead:
    given = {i.value: i for i in interface.inputs}
    tensors = [f"{path}: {_text(given[value].dtype, given[value].shape)}" for path, value in interface.call.items()]
    plain = [f"{path}: {text}" for path, text in interface.plain.items()]
    outputs = [
        f"{o.name}: {o.constant!r}" if o.shape is None or o.dtype is None else f"{o.name}: {_text(o.dtype, o.shape)}"
        for o in interface.outputs
    ]
    return ProgramHead(str(k), interface.training, (*tensors, *plain), tuple(outputs))


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _version() -> str:
    """Of this package, whose root this part must not import."""
    return sys.modules["meshwright"].__version__
