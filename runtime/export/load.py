"""Running an export: no tracing, no planning, no model source, and nothing of the files is executed.

A graph that runs on another mesh than it was made for computes a wrong loss without any error. So everything is compared first: the
manifest with the world, the mesh and torch; every file with its hash; every graph with its interface, on fake tensors. Only then do
the ranks talk to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.passes.lower_stages import PipelineProgram
from meshwright.passes.program import LocalProgram
from meshwright.planner.ir.errors import FormatError, InputError, RuntimeMismatchError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import divides
from meshwright.runtime.checks import agree
from meshwright.runtime.export.check import fake_mode
from meshwright.runtime.export.graphs import GraphReader, group_markers
from meshwright.runtime.export.manifest import (
    CONSTANTS,
    MODEL,
    PLAN,
    PROGRAMS,
    STATE,
    Manifest,
    MeshRecord,
    read_manifest,
    verify_files,
)
from meshwright.runtime.export.model_tree import Model, ModelRecord
from meshwright.runtime.export.operators import operators
from meshwright.runtime.export.plain import fail, read_record
from meshwright.runtime.export.programs import Place, over_groups, read_program
from meshwright.runtime.export.ranks import picked
from meshwright.runtime.export.structure import count_leaves, restored
from meshwright.runtime.export.write import BUFFER, CONSTANT, ProgramRecord
from meshwright.runtime.files import read_json
from meshwright.runtime.interface import Interface
from meshwright.runtime.library import ProgramLibrary
from meshwright.runtime.mesh import check_mesh, logical_mesh, make_mesh, mesh_shape
from meshwright.runtime.module import ParallelModule
from meshwright.runtime.pipeline import PipelineModule
from meshwright.runtime.programs import RankProgram
from meshwright.runtime.stage_mesh import PIPELINE_AXIS, StageMesh
from meshwright.runtime.staged import RankStages
from meshwright.runtime.tensor_files import TensorFile


def load(
    path: str | PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    compile: bool = False,
    batch: str = "global",
    outputs: str = "auto",
    allow: Sequence[str] = (),
    timeout_s: float | None = None,
) -> ParallelModule | PipelineModule:
    """The module that was exported, on the ranks of this job. Collective: every rank calls it, under torchrun or ``meshwright run``.

    It trains on (and infers) with the very numbers of the module that was exported. It takes the batches that it was exported for and
    refuses others: nothing is planned here. The optimizer's state, where it was exported, is loaded by
    ``pm.load_checkpoint(path / "state", optimizer)``.

    Args:
        path: what :meth:`ParallelModule.export` wrote.
        mesh: with the sizes and axis names of the mesh that it was exported from. Default: made over all ranks of the world.
        compile: whether graphs go through Inductor, whose own cache serves the next start.
        batch, outputs, timeout_s: as for ``autoparallelize``.
        allow: operators besides those of the list that the graphs may call; import the library that defines them first.

    Raises:
        FormatError: the export is malformed, damaged, incomplete or of another version.
        RuntimeMismatchError: it is for another world size, mesh or version of torch; or the ranks have different exports.
        InputError: there is no process group, or an option that cannot be used.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory: load what a module's export() wrote")
    for name, found, choices in (("batch", batch, ("global", "local")), ("outputs", outputs, ("auto", "full"))):
        if found not in choices:
            raise InputError(f"{name} is {found!r}, must be one of {', '.join(map(repr, choices))}")
    manifest = read_manifest(folder)
    _check_allowed(manifest, allow)
    _check_world(manifest, mesh)
    verify_files(folder, manifest.files)
    if manifest.stages and batch != "global":
        raise InputError("an export with stages takes the global batch on every rank: batch='local' is for those without")
    reading, place = Reading(folder, manifest), _place(manifest, mesh)
    if manifest.stages:
        inside = replace(place, sizes=place.sizes[1:], coordinate=place.coordinate[1:])
        stages = reading.programs(PipelineProgram, inside, place.coordinate[0])
        return _staged(reading, stages, mesh or _mesh(manifest), compile, timeout_s)
    return _whole(reading, reading.programs(LocalProgram, place, 0), mesh or _mesh(manifest), compile, batch, outputs)


def _place(manifest: Manifest, mesh: DeviceMesh | None) -> Place:
    """This rank's place on the mesh of the export, found without talking to others."""
    order = torch.arange(manifest.devices) if mesh is None else mesh.mesh
    if mesh is not None and manifest.stages and PIPELINE_AXIS in (mesh.mesh_dim_names or ()):
        order = order.movedim(mesh.mesh_dim_names.index(PIPELINE_AXIS), 0)  # type: ignore[union-attr]
    number = order.flatten().tolist().index(dist.get_rank())
    kind = mesh.device_type if mesh is not None else _device_type()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    shape = MeshShape(manifest.mesh.sizes, manifest.mesh.names)
    return Place(shape.sizes, shape.coordinate(number), device)


def _check_allowed(manifest: Manifest, allow: Sequence[str]) -> None:
    missing = [name for name in manifest.operators if name not in allow]
    if missing:
        raise InputError(
            f"the export calls operators of other libraries: {', '.join(missing)[:300]}; if you trust them, import their libraries and pass "
            f"allow={tuple(manifest.operators)!r}"
        )


def _check_world(manifest: Manifest, mesh: DeviceMesh | None) -> None:
    needed = f"{manifest.devices} devices ({manifest.mesh})"
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"there is no process group, and the export is for {needed}: start the script with torchrun or `meshwright run -n "
            f"{manifest.devices} script.py`, and call torch.distributed.init_process_group() first"
        )
    if mesh is None:
        if dist.get_world_size() != manifest.devices:
            raise RuntimeMismatchError(
                f"the export is for {needed}, the world has {dist.get_world_size()} ranks: start {manifest.devices}, or export for this world"
            )
        return
    check_mesh(mesh)
    found = _record_of(mesh)
    if found not in (manifest.mesh, manifest.given):
        given = "" if manifest.given == manifest.mesh else f" or {manifest.given}"
        raise RuntimeMismatchError(
            f"the export is for a mesh of {manifest.mesh}{given}, found one of {found}: make a mesh of these sizes and names, or export "
            "for this one"
        )


def _mesh(manifest: Manifest) -> DeviceMesh:
    return make_mesh(_device_type(), manifest.mesh.sizes, manifest.mesh.names)


def _device_type() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


Read = tuple[ProgramRecord, Plan, dict[str, torch.Tensor], Any]
"""A program that was read: what goes in and out, its plan, its constants, and its graphs over unnamed groups."""


class Reading:
    """An export whose files are what its manifest says.

    Attributes:
        manifest: its head.
        model: its modules, on the meta device.
        plan: the first program's.
        fake_mode: of the graphs' fake values.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._paths = {f.path for f in manifest.files}
        record = read_record(ModelRecord, read_json(self._path(MODEL)), MODEL)
        self.model = Model(record, MODEL)
        self.plan = self._plan(PLAN)
        self.fake_mode = fake_mode()

    def _path(self, name: str) -> Path:
        """A file that was verified.

        Raises:
            FormatError: the manifest does not list it.
        """
        if name not in self._paths:
            raise FormatError(f"{self.folder / name} is not in the manifest: export again")
        return self.folder / name

    def _plan(self, name: str) -> Plan:
        plan = Plan.from_json(self._path(name).read_text(encoding="utf-8"))
        pipeline, inside = plan.pipeline, self.manifest.mesh.sizes[1 if self.manifest.stages else 0 :]
        if (0 if pipeline is None else pipeline.degree) != self.manifest.stages or plan.mesh.sizes != inside:
            raise FormatError(f"{self.folder / name} is for another mesh than the manifest says: export again")
        return plan

    def programs(self, kind: Any, place: Place, along: int) -> list[Read]:
        """Every program of the rank at a place inside its stage, and at ``along`` among the pipeline's ranks."""
        found = []
        for k in range(len(self.manifest.programs)):
            where = f"{PROGRAMS}/{k}"
            record = read_record(ProgramRecord, read_json(self._path(f"{where}/program.json")), f"{where}/program.json")
            plan = self.plan if k == 0 else self._plan(f"{where}/{PLAN}")
            self._check_record(record, place, f"{where}/program.json")
            data = read_json(self._path(f"{where}/graphs-{along}.json"))
            graphs = self._graphs(kind, data, record.interface, place, plan, f"{where}/graphs-{along}.json")
            found.append((record, plan, self._constants(k, record.interface, place.device), graphs))
        return found

    def _graphs(self, kind: Any, data: Any, interface: Interface, place: Place, plan: Plan, where: str) -> Any:
        ranks = 1
        for n in place.sizes:
            ranks *= n
        reader = GraphReader(group_markers(len(place.sizes)), place.device, operators(self.manifest.operators))
        with self.fake_mode:
            try:
                mine = picked(data, place.index, ranks, where)
            except RecursionError:
                raise FormatError(f"{where} is nested too deep: not a file of an export") from None
            return read_program(kind, mine, interface, place, plan.pipeline, reader, where)

    def _check_record(self, record: ProgramRecord, place: Place, where: str) -> None:
        """Whether a program's interface speaks of this model and this mesh."""
        interface, count = record.interface, len(list(self.model.modules()))
        if len(interface.modes) != count:
            fail(where, len(interface.modes), f"training modes of {count} modules")
        if count_leaves(record.structure, where) != len(interface.outputs):
            fail(where, len(interface.outputs), "as many outputs as the structure has leaves")
        if interface.loss is not None and not 0 <= interface.loss < len(interface.outputs):
            fail(where, interface.loss, "the index of an output")
        held = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        values = {i.value for i in interface.inputs}
        for i in interface.inputs:
            self._check_input(i, place, where)
            for name in (i.name, *i.aliases) if i.role in ("parameter", "buffer") else ():
                t = held.get(name) if i.role == "parameter" else buffers.get(name)
                if t is None or tuple(t.shape) != i.shape or t.dtype != i.dtype:
                    fail(where, name, f"a {i.role} of the model with the shape {list(i.shape)}")
        for path, value in interface.call.items():
            if value not in values:
                fail(where, path, "the path of an input")
        if any(name not in held for name in interface.kept):
            fail(where, list(interface.kept), "parameters of the model")

    def _check_input(self, i: Any, place: Place, where: str) -> None:
        if i.role not in ("parameter", "buffer", "input", "tangent", "constant", "seed") or len(i.placements) != len(place.sizes):
            fail(where, i.name, f"an input of a known role with one placement per mesh axis ({len(place.sizes)})")
        if any(n < 0 for n in i.shape) or any(p.is_shard and p.dim >= len(i.shape) for p in i.placements):
            fail(where, i.name, "placements that its shape allows")
        if i.role in ("input", "tangent") and not divides(i.shape, i.placements, place.sizes):
            fail(where, i.name, "a shape that the mesh divides")

    def _constants(self, k: int, interface: Interface, device: torch.device) -> dict[str, torch.Tensor]:
        with TensorFile(self._path(CONSTANTS)) as file:
            return {
                i.value: self._tensor(file, f"{CONSTANT}.{k}.{i.value}", i.shape, i.dtype).to(device)
                for i in interface.of("constant")
            }

    def _tensor(self, file: TensorFile, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        stored = file.tensors.get(name)
        if stored is None or stored.shape != shape or stored.dtype != dtype:
            fail(CONSTANTS, name if stored is None else list(stored.shape), f"{name} with the shape {list(shape)}")
        return file.read(name)

    def fill(self, module: ParallelModule | PipelineModule) -> None:
        """Give a module the values that were exported. Collective."""
        with TensorFile(self._path(CONSTANTS)) as file, torch.no_grad():
            persistent = set(module.state_dict())
            for name, buffer in module.named_buffers():
                if name not in persistent:
                    buffer.copy_(self._tensor(file, f"{BUFFER}.{name}", tuple(buffer.shape), buffer.dtype))
        module.load_checkpoint(self.folder / STATE)


def _whole(reading: Reading, found: Sequence[Read], given: DeviceMesh, compile: bool, batch: str, outputs: str) -> ParallelModule:
    mesh = logical_mesh(given, reading.plan.mesh)
    agree({"export": reading.manifest.digest, "torch": torch.__version__, "batch mode": batch}, mesh, "start-up")
    programs = [
        RankProgram(
            interface=record.interface,
            plan=plan,
            constants=constants,
            lowered=partial(over_groups, graphs),
            fake_mode=reading.fake_mode,
            restore=partial(restored, record.structure),
            structure=record.structure,
        )
        for record, plan, constants, graphs in found
    ]
    library = ProgramLibrary(reading.model, mesh, programs[0].interface.rests, batch=batch, compile=compile, replan=None)
    module = ParallelModule(reading.model, library, reading.plan, outputs, _record_of(given))
    for program in programs:
        library.add_program(program)
    reading.fill(module)
    return module


def _staged(reading: Reading, found: Sequence[Read], given: DeviceMesh, compile: bool, timeout_s: float | None) -> PipelineModule:
    pipeline = reading.plan.pipeline
    assert pipeline is not None
    mesh = StageMesh.of(given, pipeline, reading.plan.mesh, timeout_s)
    agree({"export": reading.manifest.digest, "torch": torch.__version__}, mesh.whole, "start-up")
    programs = [
        RankStages(record.interface, plan, constants, partial(over_groups, graphs), reading.fake_mode, record.structure)
        for record, plan, constants, graphs in found
    ]
    module = PipelineModule(reading.model, programs[0], mesh, _record_of(given), compile=compile, replan=None)
    for program in programs[1:]:
        module.add_program(program)
    reading.fill(module)
    return module


def _record_of(mesh: DeviceMesh) -> MeshRecord:
    shape = mesh_shape(mesh)
    return MeshRecord(shape.sizes, shape.names)
