"""The directory that a run's checkpoints are in: which there are, which is the newest, and one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.checkpoint.catalogue import MANIFEST
from meshwright.runtime.files import publish, remove_leftovers, replace_text, temporary_beside

LATEST, _LOCK = "latest", ".lock"
_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,6}))?")


def checkpoints_in(folder: Path) -> dict[str, tuple[int, int]]:
    """The whole checkpoints of a folder: name to step and, where a step was saved again, which time."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found[path.name] = (int(match[1]), int(match[2] or 0))
    return found


def newest(folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names, or without it the one of the highest step; None where there is none.

    Raises:
        FormatError: ``latest`` names none.
    """
    known = checkpoints_in(folder)
    with contextlib.suppress(FileNotFoundError):
        text = (folder / LATEST).read_bytes()[:200].decode("utf-8", "replace").strip()
        if text not in known:
            raise FormatError(
                f"{folder / LATEST} names {text[:60]!r}, which is not there: remove the file, or load one of "
                f"{', '.join(sorted(known)) or 'another folder'}"
            )
        return folder / text
    return folder / max(known, key=lambda name: known[name]) if known else None


def of_step(folder: Path, step: int) -> Path:
    """The checkpoint of a step, the last one where the step was saved again.

    Raises:
        InputError: there is none.
    """
    known = checkpoints_in(folder)
    fitting = [name for name, (found, _) in known.items() if found == step]
    if not fitting:
        raise InputError(f"{folder} has no checkpoint of step {step}; it has {', '.join(sorted(known)) or 'none'}")
    return folder / max(fitting, key=lambda name: known[name])


def new_name(folder: Path, step: int) -> str:
    """A name for a checkpoint of ``step``: one that was saved before stays until the new one is whole."""
    times = [time for found, time in checkpoints_in(folder).values() if found == step]
    return f"step-{step:08d}" + (f".{max(times) + 1}" if times else "")


class Writing:
    """A checkpoint in the making, on the coordinator: the folder is locked until it is finished or given up.

    Attributes:
        work: where its files go; ``final``: where they will be.
    """

    def __init__(self, folder: Path, step: int | None):
        """Lock the folder and make a directory to write in; without a step, the one behind the last.

        Raises:
            InputError: the folder cannot be made, or someone else is writing there.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"checkpoints cannot be written to {folder}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"another program is writing a checkpoint to {folder}: give each run its own folder") from None
        try:
            remove_leftovers(folder)
            self.step = step if step is not None else 1 + max((s for s, _ in checkpoints_in(folder).values()), default=-1)
            self.final = folder / new_name(folder, self.step)
            self.work = temporary_beside(self.final)
            self.work.mkdir()
        except BaseException:
            self._unlock()
            raise

    def finish(self, keep_last: int | None) -> None:
        """Name the directory, then let ``latest`` name it, then remove old ones."""
        publish(self.work, self.final)
        replace_text(self.final.parent / LATEST, f"{self.final.name}\n")
        if keep_last is not None:
            _remove_old(self.final, keep_last)
        self._unlock()

    def give_up(self) -> None:
        """Remove what was written; harmless after :meth:`finish`."""
        if self._lock >= 0:
            shutil.rmtree(self.work, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # said, since forked children may hold the lock too
        os.close(self._lock)
        self._lock = -1


def _remove_old(newest: Path, keep_last: int) -> None:
    """Keep the newest and those written just before it, by the time of writing: steps may have been repeated."""
    folder = newest.parent
    others = [folder / name for name in checkpoints_in(folder) if name != newest.name]
    for path in sorted(others, key=_written, reverse=True)[keep_last - 1 :]:
        gone = temporary_beside(path)
        os.rename(path, gone)  # never half of it under its name
        shutil.rmtree(gone, ignore_errors=True)


def _written(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


@contextlib.contextmanager
def giving_up(writing: Writing | None) -> Iterator[None]:
    """Give a checkpoint up where the block fails."""
    try:
        yield
    except BaseException:
        if writing is not None:
            writing.give_up()
        raise
