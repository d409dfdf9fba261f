"""Directories that appear whole or not at all, and JSON that strangers may have written.

    with new_directory(folder / "step-7") as work:        # folder/step-7.tmp-1f2e...
        write_json(work / "state.json", {...})
    # folder/step-7 is there: every file in it is on disk

A process that is killed leaves ``*.tmp-*`` directories, never a half-written one under the final name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.planner.ir.errors import FormatError, InputError

_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{32}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")
JSON_LIMIT_BYTES = 1 << 30
"""Larger JSON files are refused before they are read."""


# --- directories --------------------------------------------------------------------------------------------------


def temporary_beside(final: Path) -> Path:
    """A name beside ``final`` for work in progress; nobody else has it."""
    return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex}")


def publish(work: Path, final: Path) -> None:
    """Give a finished directory its name: all of it is on disk before the name is.

    Raises:
        InputError: ``final`` is there already.
    """
    for path in work.rglob("*"):
        if path.is_file():
            sync_file(path)
    for path in (work, *work.rglob("*")):
        if path.is_dir():
            sync_directory(path)
    if final.exists():
        raise InputError(f"{final} is there already: write to a new directory")
    os.rename(work, final)
    sync_directory(final.parent)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A directory to write in, which becomes ``final`` when the block ends without an error, and is removed otherwise.

    Raises:
        InputError: ``final`` is there already, or cannot be made.
    """
    if final.exists():
        raise InputError(f"{final} is there already: write to a new directory")
    work = temporary_beside(final)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{final} cannot be made: {error.strerror or error}") from None
    try:
        yield work
        publish(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in ``folder``; nobody else may be writing there."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new text, also after a crash."""
    work = temporary_beside(path)
    with open(work, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Wait until a file's contents are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    sync_file(path)


# --- names and JSON -----------------------------------------------------------------------------------------------


def plain_name(text: Any, what: str) -> str:
    """``text``, if it names a file in a directory and nothing else: ASCII, no separators, no leading dot.

    Raises:
        FormatError: it does not.
    """
    if not isinstance(text, str) or not _PLAIN_NAME.fullmatch(text):
        raise FormatError(f"{what} names the file {str(text)[:80]!r}: a plain file name is needed")
    return text


def write_json(path: Path, data: Any) -> None:
    """Write JSON, an entry of the top level a line.

    Raises:
        InputError: ``data`` is not JSON.
    """
    try:
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()]
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path.name} would hold what JSON cannot: {error}") from None
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_json(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FormatError: the file is missing, too large, no UTF-8, no JSON, nested without end, or no object.
    """
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise FormatError(f"{path} has {size} bytes, more than the {limit_bytes} that such a file may have")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path} is not JSON: {type(error).__name__}: {str(error).splitlines()[0][:160]}") from None
    if not isinstance(data, dict):
        raise FormatError(f"{path} holds a {type(data).__name__}, a JSON object is needed")
    return data
