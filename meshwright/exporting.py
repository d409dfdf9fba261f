"""An export made on one machine: every rank's graphs are lowered here, one after the other, without ranks."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.debug import Progress
from meshwright.inputs import Call
from meshwright.lazy import program_for
from meshwright.passes import lower
from meshwright.passes.lower_stages import lower_stages
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planning import capture_call, model_name
from meshwright.request import Request
from meshwright.runtime.checkpoint.catalogue import read_catalogue
from meshwright.runtime.export.graphs import group_markers
from meshwright.runtime.export.manifest import STATE, MeshRecord
from meshwright.runtime.export.model_tree import model_record
from meshwright.runtime.export.pt2 import FOLDER, check_format, pt2_groups, write_for_others
from meshwright.runtime.export.structure import structure_of
from meshwright.runtime.export.write import ProgramRecord, WrittenProgram, plain_graphs, write_files
from meshwright.runtime.files import new_directory
from meshwright.runtime.inputs import CallBinder
from meshwright.runtime.interface import interface_of
from meshwright.runtime.params import class_name
from meshwright.runtime.stage_mesh import stage_axes
from meshwright.runtime.tensor_files import Entry, write_tensors


def export_plan(
    model: nn.Module,
    call: Call,
    plan: Plan,
    path: Path,
    weights: Path | None = None,
    *,
    format: str = "json",
    progress: Progress | None = None,
) -> Path:
    """Write what ``load`` runs, from a plan and a model in this process.

    Args:
        model: the model that the plan is for, with real values.
        call: of the batch that it is for.
        plan: the plan.
        path: a directory that is not there yet.
        weights: safetensors to pack instead of the model's own values: a file, or a directory as ``save_pretrained`` writes it.
        format: as for a module's ``export``.
        progress: called with the name of each phase as it begins.

    Raises:
        InputError: the plan is for another model or batch, a tensor has no values, or ``path`` is there already.
        FormatError: ``weights`` are malformed.
    """
    check_format(format)
    tell = progress or (lambda phase: None)
    without = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if without:
        raise InputError(
            f"{without[0]} and {len(without) - 1} other tensors of the model have no values: make it on a real device"
        )
    tell("capture")
    capture = capture_for(model, call, plan)
    interface = interface_of(capture, plan, CallBinder(model.forward), tuple(m.training for m in model.modules()))
    record = model_record(model, class_name(model), CallBinder(model.forward).signature)
    named = dict(model.named_buffers())
    constants = {i.value.name: capture.constants[i.name] for i in capture.graph.inputs_of("constant")}
    tell("lower")
    program = WrittenProgram(
        ProgramRecord(interface, structure_of(capture.out_spec)),
        plan,
        constants,
        [[plain_graphs(p, ()) for p in ranks] for ranks in _all_programs(capture, plan, group_markers(plan.mesh.num_axes))],
    )
    mesh = _mesh(plan)
    with new_directory(path) as work:
        tell("write")
        _write_state(model, work / STATE, weights)
        if format != "json":
            ranks = itertools.chain(*_all_programs(capture, plan, pt2_groups(plan.mesh.num_axes)))
            for rank, mine in enumerate(ranks):
                write_for_others(mine, format, work / FOLDER / "0", f"rank-{rank}")
        buffers = {b.name: named[b.name] for b in record.buffers if not b.persistent and b.same_as is None}
        write_files(work, record, [program], buffers, mesh, mesh, ())
    return path


def capture_for(model: nn.Module, call: Call, plan: Plan) -> Capture:
    """The whole program that ``plan`` is for.

    Raises:
        InputError: it is for another.
    """
    for fold in (True, False):  # the plan may be for a capture without folding
        folded, _ = capture_call(model, call, Request(precision=plan.precision, fold_capture=fold), plan.training)
        found = program_for(plan, folded)
        if found is not None:
            return found
    raise InputError(
        f"the plan is for another program: {plan.model} with graph {plan.graph_hash[:12]}, and this is {model_name(model)}: model, batch "
        "shapes, precision and training mode must be those it was planned with"
    )


def _all_programs(capture: Capture, plan: Plan, groups: Sequence[str]) -> Iterator[list[Any]]:
    """For each place along the pipeline axis, every rank's program."""
    coordinates = list(itertools.product(*map(range, plan.mesh.sizes)))
    if plan.pipeline is None:
        yield [lower(capture, plan, at, groups) for at in coordinates]
        return
    for place in range(plan.pipeline.degree):
        mine = plan.pipeline.stages_of(place)
        yield [lower_stages(capture, plan, at, groups, mine) for at in coordinates]


def _mesh(plan: Plan) -> MeshRecord:
    if plan.pipeline is None:
        return MeshRecord(plan.mesh.sizes, plan.mesh.names)
    shape = stage_axes(plan.pipeline, plan.mesh)
    return MeshRecord(shape.sizes, shape.names)


def _write_state(model: nn.Module, folder: Path, weights: Path | None) -> None:
    folder.mkdir()
    if weights is None:
        unique: dict[int, tuple[str, torch.Tensor]] = {}
        for name, t in model.state_dict(keep_vars=True).items():
            unique.setdefault(id(t), (name, t.detach().contiguous()))
        write_tensors(folder / "model.safetensors", [Entry.of(name, t) for name, t in unique.values()])
        return
    read_catalogue(weights)  # what is malformed is refused here already
    files = [weights] if weights.is_file() else [*weights.glob("*.safetensors"), *weights.glob("*.safetensors.index.json")]
    for file in files:
        shutil.copyfile(file, folder / ("model.safetensors" if weights.is_file() else file.name))
