"""The method by which parallel modules are exported; with and without pipeline stages it is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.checkpoint.methods import Checkpointed
from meshwright.runtime.export.graphs import group_markers
from meshwright.runtime.export.manifest import STATE, MeshRecord
from meshwright.runtime.export.model_tree import ModelRecord, united
from meshwright.runtime.export.pt2 import FOLDER, check_format, pt2_groups, write_for_others
from meshwright.runtime.export.structure import structure_of
from meshwright.runtime.export.write import ProgramRecord, WrittenProgram, plain_graphs, write_files
from meshwright.runtime.files import new_directory
from meshwright.runtime.mesh import mesh_shape


class Exported(Checkpointed):
    """What :class:`ParallelModule` and :class:`PipelineModule` share."""

    _given_mesh: MeshRecord

    def _sources(self) -> Sequence[Any]:
        """The rank's programs, before they were made callable."""
        raise NotImplementedError

    def _record(self) -> ModelRecord:
        """The model as this rank holds it."""
        raise NotImplementedError

    def _prepare(self, batch: Any) -> None:
        """Make the program for a batch in evaluation mode, without a gradient; collective."""
        raise NotImplementedError

    def _num_places(self) -> int:
        """Number of ranks along the pipeline axis; 1 without stages."""
        raise NotImplementedError

    def _axes_inside(self) -> int:
        """Number of mesh axes that the graphs' collectives run along."""
        raise NotImplementedError

    def export(
        self,
        path: str | PathLike[str],
        *,
        inference: Sequence[Any] = (),
        optimizer: torch.optim.Optimizer | None = None,
        operators: Sequence[str] = (),
        format: str = "json",
    ) -> Path:
        """Write this module so that :func:`meshwright.load` runs it without the planner and without the model's source. Collective.

        The graphs of every program that there is (a training step with its gradients, and one for each other call that was made) are
        written as readable JSON, tensors as safetensors, and a manifest with the SHA-256 of every file. The directory appears whole.

        Args:
            path: a directory that is not there yet; the same one on all ranks.
            inference: batches for which a program in evaluation mode is to be there too; it is planned now where there is none.
            optimizer: made from this module's parameters; its state is written as well.
            operators: operators of libraries of your own, ``"mylib.op.default"``, that the graphs may call; ``load`` must be told
                too.
            format: ``"pt2"`` writes every rank's graphs as ``torch.export`` programs besides, ``"aoti"`` as AOTInductor packages (for
                programs without collectives: others would deadlock). They are for other tools: :func:`meshwright.load` never opens
                them.

        Raises:
            InputError: ``path`` is there already, or something cannot be written.
            CheckpointError: the state could not be written.
        """
        check_format(format)
        _ = self.plan  # a module that is planned at its first call says so
        group, final = self._checkpoint_group(), Path(path)
        for batch in inference:
            self._prepare(batch)
        group.from_first(lambda: _refuse_existing(final))
        count = self._axes_inside()
        mine = group.each_own(
            lambda: [plain_graphs(source.lowered(group_markers(count)), operators) for source in self._sources()]
        )
        records = group.each(self._record)
        everyone = group.to_first(mine)
        with contextlib.ExitStack() as stack:
            work = Path(group.from_first(lambda: str(stack.enter_context(new_directory(final)))))
            if format != "json":
                group.each_own(lambda: self._write_for_others(work, format, group.rank))
            self.save_checkpoint(work / STATE, optimizer, step=0)
            group.from_first(lambda: self._write(work, united(records), everyone, operators))
            group.from_first(lambda: stack.pop_all().close())
        return final

    def _write_for_others(self, work: Path, kind: str, rank: int) -> None:
        for k, source in enumerate(self._sources()):
            program = source.lowered(pt2_groups(self._axes_inside()))
            write_for_others(program, kind, work / FOLDER / str(k), f"rank-{rank}")

    def _write(self, work: Path, model: ModelRecord, everyone: Sequence[Any], operators: Sequence[str]) -> None:
        places = self._num_places()
        each = len(everyone) // places  # ranks of the group are in ascending order, and so are those of the mesh
        programs = [
            WrittenProgram(
                record=ProgramRecord(source.interface, structure_of(source.structure)),
                plan=source.plan,
                constants=source.constants,
                graphs=[[everyone[rank][k] for rank in self._ranks_at(place, each)] for place in range(places)],
            )
            for k, source in enumerate(self._sources())
        ]
        named = dict(self.named_buffers())
        buffers = {b.name: named[b.name] for b in model.buffers if not b.persistent and b.same_as is None}
        shape = mesh_shape(self.device_mesh)
        write_files(work, model, programs, buffers, MeshRecord(shape.sizes, shape.names), self._given_mesh, operators)

    def _ranks_at(self, place: int, each: int) -> list[int]:
        """Numbers in the group of the ranks at a place along the pipeline axis, in row-major order of the mesh inside."""
        ranks = self.device_mesh.mesh.flatten().tolist()
        numbers = {rank: i for i, rank in enumerate(sorted(ranks))}
        return [numbers[rank] for rank in ranks[place * each : (place + 1) * each]]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _refuse_existing(final: Path) -> None:
    if final.exists():
        raise InputError(f"{final} is there already: export to a new directory")
