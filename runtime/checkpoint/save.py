"""Saving: plan together, copy or not, write, and give the finished directory its name.

Asynchronously the same runs in a thread: the training loop goes on as soon as this rank has copied what it writes (its share of the
checkpoint, not all that it holds), so later steps in place do not reach the file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.planner.ir.errors import CheckpointError, InputError, MeshwrightError
from meshwright.runtime.checkpoint.catalogue import DIGEST, FORMAT, MANIFEST, STATE, VERSION, with_check
from meshwright.runtime.checkpoint.folder import Writing
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.storage import PieceSavePlanner, PieceWriter
from meshwright.runtime.checkpoint.together import Group, error_of_torch
from meshwright.runtime.files import write_json
from meshwright.runtime.tensor_files import FileRecord, file_digest

_log = logging.getLogger("meshwright")


class Saving:
    """A checkpoint that is being written, or is there.

    Attributes:
        path: where it is once :meth:`wait` has returned.
        step: its step.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.step = path, step
        self._error: MeshwrightError | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is on disk under its name.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error
        return self.path


def save(
    group: Group,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
    folder: Path,
    *,
    step: int | None,
    keep_last: int | None,
    asynchronous: bool,
) -> Saving:
    """Write a checkpoint. Collective.

    Args:
        group: the ranks.
        pieces: this rank's tensors by full name.
        state: contents of ``state.json``, on the first rank.
        aliases: other names of tied parameters.
        folder: of the run's checkpoints.
        step: the step it is of; None: the one behind the last in the folder.
        keep_last: how many to keep; None: all.
        asynchronous: whether to return once what is written has been copied.

    Raises:
        InputError: the folder cannot be written to.
        CheckpointError: it could not be written.
    """
    begun: list[Writing] = []

    def begin() -> tuple[str, str, int]:
        begun.append(Writing(folder, step))
        return str(begun[0].work), str(begun[0].final), begun[0].step

    work, final, number = group.from_first(begin)
    saving, writing = Saving(Path(final), number), begun[0] if begun else None
    copied = threading.Event()

    def finish(tensors: dict[str, Any], records: dict[str, FileRecord]) -> None:
        assert writing is not None and state is not None
        write_json(writing.work / STATE, {**state, "step": number})
        records = {**records, STATE: file_digest(writing.work / STATE, DIGEST)}
        files = {name: [record.bytes, record.digest] for name, record in records.items()}
        head = {"format": FORMAT, "version": VERSION, "files": files, "aliases": dict(aliases)}
        write_json(writing.work / MANIFEST, with_check({**head, "tensors": tensors}))
        writing.finish(keep_last)

    def run() -> None:
        try:
            writer = PieceWriter(Path(work), copied.set if asynchronous else None, finish)
            dcp.save(dict(pieces), storage_writer=writer, planner=PieceSavePlanner(), process_group=group.group)
        except CheckpointException as failed:
            saving._error = error_of_torch(failed)
        except Exception as failed:
            text = str(failed).splitlines()[0] if str(failed) else ""
            saving._error = CheckpointError(f"the checkpoint of step {number} was not written: {type(failed).__name__}: {text}")
        finally:
            if writing is not None:
                writing.give_up()
            copied.set()
        if asynchronous and saving._error is not None:
            _log.error("%s", saving._error)

    if not asynchronous:
        run()
        saving.wait()
        return saving
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the thread has another stream than whoever computes now
    saving._thread = threading.Thread(target=run, name="checkpoint")
    saving._thread.start()
    copied.wait()
    return saving


def check_request(step: Any, keep_last: Any, extra: Any) -> None:
    """Refuse what cannot be meant.

    Raises:
        InputError: a step or a number to keep that is none, or extras that are no table.
    """
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**17):
            raise InputError(f"{name}={value!r}: it must be a whole number of at least {least}")
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(f"extra is {type(extra).__name__}: it must be a table of numbers, texts and lists")
