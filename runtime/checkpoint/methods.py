"""The methods by which parallel modules are saved and loaded; with and without pipeline stages they are the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.plan import Plan
from meshwright.runtime.checkpoint import load as loading
from meshwright.runtime.checkpoint.catalogue import MODEL, read_catalogue
from meshwright.runtime.checkpoint.contents import Held, saved_pieces
from meshwright.runtime.checkpoint.load import Loaded
from meshwright.runtime.checkpoint.optimizer_state import encoded, merged, scalars_of
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.plain import MAX_FILE_BYTES, write_plain
from meshwright.runtime.checkpoint.save import Saving, check_request, save
from meshwright.runtime.checkpoint.storage import read_pieces
from meshwright.runtime.checkpoint.together import Group
from meshwright.runtime.files import temporary_beside
from meshwright.runtime.state import Tree


class Checkpointed(nn.Module):
    """What :class:`ParallelModule` and :class:`PipelineModule` share."""

    plan: Plan
    device_mesh: DeviceMesh
    _tree: Tree

    def random_state(self) -> dict[str, int]:
        raise NotImplementedError

    def load_random_state(self, state: Mapping[str, int]) -> None:
        raise NotImplementedError

    def forget_kept(self) -> None:
        """Free gathered copies of parameters; nothing where there are none."""

    def save_checkpoint(
        self,
        folder: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> Saving:
        """Write parameters, persistent buffers, an optimizer, the step and random state to ``folder/step-...``. Collective.

        The directory appears under its name when all of it is on disk, and ``folder/latest`` names it then: whoever is killed at any
        moment leaves the old checkpoint or the new one. Every rank writes its share; the folder must be the same one on all.

        Args:
            folder: of the run's checkpoints; made where it is not there. One run at a time writes to it.
            optimizer: made from this module's parameters.
            step: the step it is of. Default: one more than the highest in the folder.
            extra: what else is to come back: a table of numbers, texts, lists (a scheduler's ``state_dict()``, a place in the data).
            asynchronous: return as soon as this rank has copied what it writes, and write in the background. The next save waits for
                this one; call :meth:`wait_for_checkpoint` before the process group is destroyed.
            keep_last: remove all but so many checkpoints, the last written ones. Default: keep all.

        Returns:
            The checkpoint: its path, and ``wait()``.

        Raises:
            InputError: the folder cannot be written to, or something cannot be saved.
            CheckpointError: it, or the one still being written in the background, could not be written.
        """
        check_request(step, keep_last, extra)
        group = self._checkpoint_group()
        self.wait_for_checkpoint()
        held = Held.by(self)

        def mine() -> tuple[dict[str, Any] | None, Any, dict[str, int], dict[str, str]]:
            scalars = None if optimizer is None else scalars_of(optimizer, held.names)
            return scalars, encoded(dict(extra or {}), "extra"), self.random_state(), dict(held.aliases)

        everyone = group.each(mine)
        state = group.from_first(
            lambda: {
                "optimizer": merged([scalars for scalars, _, _, _ in everyone]),
                "extra": everyone[0][1],
                "random": everyone[0][2],
                "plan": {"hash": self.plan.hash, "strategy": self.plan.strategy, "mesh": str(self.plan.mesh)},
                "torch": torch.__version__,
                "ranks": group.size,
            }
        )
        aliases = {alias: first for _, _, _, theirs in everyone for alias, first in theirs.items()}
        pieces = saved_pieces(held, optimizer, group.rank)
        saving = save(group, pieces, state, aliases, Path(folder), step=step, keep_last=keep_last, asynchronous=asynchronous)
        self.__dict__["_checkpoint_saving"] = saving
        return saving

    def load_checkpoint(
        self,
        path: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        optional: bool = False,
    ) -> Loaded:
        """Load a checkpoint that any plan, mesh and number of ranks may have written, or plain safetensors. Collective.

        Its structure is checked before anything is changed; then each rank reads its own slices and checks them as it reads. A module
        that was filled from a damaged checkpoint does not run until another one is loaded.

        Args:
            path: the folder of a run's checkpoints (the newest is taken), one checkpoint of it, a safetensors file, or a directory with
                ``model.safetensors`` or its index, as Hugging Face's ``save_pretrained`` makes it.
            optimizer: gets the state that was saved; how it runs (``foreach``, ``fused``) stays its own. Without: model alone.
            step: which checkpoint of the folder.
            strict: whether names must match exactly.
            optional: whether there may be none yet; the result then has no path.

        Raises:
            InputError: there is none, or it is of another model or optimizer.
            FormatError: it is malformed or damaged.
        """
        group = self._checkpoint_group()
        self.wait_for_checkpoint()
        found = group.from_first(lambda: loading.find(Path(path), step, optional))
        if found is None:
            return Loaded(None)
        catalogue = group.each_own(lambda: read_catalogue(found))
        held = Held.by(self)
        wanted, to_come, numbers = group.each_own(
            lambda: (
                loading.wanted_of(held, catalogue),
                None if optimizer is None else loading.restoring(optimizer, held, catalogue),
                (loading.step_of(catalogue), loading.extra_of(catalogue), loading.random_state(catalogue)),
            )
        )
        everyone = group.gather((wanted.missing, wanted.cast, [*held.tensors, *held.aliases]))
        missing, cast, known = ([n for part in everyone for n in part[i]] for i in range(3))
        unexpected = loading.unexpected_in(catalogue, known)
        if strict:
            loading.check_names(found, tuple(dict.fromkeys(missing)), unexpected)
        pieces = dict(wanted.pieces)
        if to_come is not None:
            pieces.update((name, Piece.of(t)) for name, t in to_come.tensors().items())
        self.forget_kept()
        try:
            read_pieces(pieces, catalogue, group)
        except Exception:
            self._tree.spoil()
            raise
        if to_come is not None:
            to_come.finish()
        number, extra, random = numbers
        if random is not None:
            self.load_random_state(random)
        generators = group.each_own(lambda: loading.put_generators(group, catalogue))
        return Loaded(found, number, extra, tuple(dict.fromkeys(missing)), unexpected, tuple(dict.fromkeys(cast)), generators)

    def save_safetensors(self, folder: str | PathLike[str], *, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
        """Write parameters and persistent buffers as plain safetensors, whole tensors under the model's names. Collective.

        What Hugging Face's ``from_pretrained`` and ``safetensors.torch.load_model`` read; no optimizer. Ranks write their pieces beside
        ``folder`` first, and the first rank puts them together, one tensor at a time.

        Args:
            folder: a directory that is not there yet.
            max_file_bytes: when to begin a new file.

        Raises:
            InputError: ``folder`` is there already.
            CheckpointError: it could not be written.
        """
        group, final = self._checkpoint_group(), Path(folder)
        self.wait_for_checkpoint()

        def beside() -> str:
            if final.exists():
                raise InputError(f"{final} is there already: write to a new directory")
            return str(temporary_beside(final))

        held, between = Held.by(self), Path(group.from_first(beside))
        pieces = {MODEL + name: Piece.of(t) for name, t in held.tensors.items()}
        state: dict[str, Any] = {}
        try:
            saved = save(group, pieces, state, {}, between, step=0, keep_last=None, asynchronous=False)
            group.from_first(lambda: write_plain(read_catalogue(saved.path), final, max_file_bytes))
        finally:
            if group.rank == 0:
                shutil.rmtree(between, ignore_errors=True)
        return final

    def _checkpoint_group(self) -> Group:
        """The ranks of this module with a process group for checkpoints, made at the first use."""
        if "_checkpoint_ranks" not in self.__dict__:
            self.__dict__["_checkpoint_ranks"] = Group(self.device_mesh)
        return self.__dict__["_checkpoint_ranks"]

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background is there; call it before the process group is destroyed.

        Raises:
            CheckpointError: it could not be written, and nobody was told yet.
        """
        saving: Saving | None = self.__dict__.pop("_checkpoint_saving", None)
        if saving is not None and not saving._told:
            saving.wait()
