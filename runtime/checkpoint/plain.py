"""Plain safetensors out of a checkpoint: whole tensors under the model's names, as one device or Hugging Face reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.checkpoint.catalogue import INDEX, MODEL, SINGLE, Catalogue, read_catalogue
from meshwright.runtime.checkpoint.folder import newest
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.storage import read_pieces
from meshwright.runtime.files import new_directory
from meshwright.runtime.tensor_files import Entry, write_tensors

MAX_FILE_BYTES = 5 * 10**9
"""Where a new file begins; Hugging Face's own default."""


def to_safetensors(checkpoint: str | Path, folder: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """Write the parameters and persistent buffers of a checkpoint as plain safetensors; needs no ranks and no model.

    One tensor is in memory at a time. A tied parameter is written once, under its first name.

    Args:
        checkpoint: one checkpoint, or the folder of a run's (the newest is taken).
        folder: a directory that is not there yet: ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        max_file_bytes: when to begin a new file.

    Returns:
        ``folder``.

    Raises:
        InputError: there is no checkpoint, or ``folder`` is there already.
        FormatError: the checkpoint is malformed or damaged.
    """
    source = newest(Path(checkpoint)) or Path(checkpoint)
    write_plain(read_catalogue(source), Path(folder), max_file_bytes)
    return Path(folder)


def write_plain(catalogue: Catalogue, folder: Path, max_file_bytes: int) -> None:
    """Write what a catalogue lists."""
    entries = [
        Entry(name.removeprefix(MODEL), saved.shape, saved.dtype, partial(whole, catalogue, name))
        for name, saved in catalogue.tensors.items()
        if name.startswith(MODEL)
    ]
    if not entries:
        raise InputError(f"{catalogue.folder} holds no parameters")
    files = _files(entries, max_file_bytes)
    with new_directory(folder) as work:
        for name, mine in files.items():
            write_tensors(work / name, mine, digest="crc32")
        if len(files) > 1:
            where = {e.name: name for name, mine in files.items() for e in mine}
            table = {"metadata": {"total_size": sum(e.bytes for e in entries)}, "weight_map": where}
            (work / INDEX).write_text(json.dumps(table, indent=2))


def _files(entries: Iterable[Entry], max_file_bytes: int) -> dict[str, list[Entry]]:
    parts: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not parts or entry.bytes > room:
            parts.append([])
            room = max_file_bytes
        parts[-1].append(entry)
        room -= entry.bytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def whole(catalogue: Catalogue, name: str) -> torch.Tensor:
    """A tensor of a checkpoint, put together."""
    saved = catalogue.tensors[name]
    found = torch.empty(saved.shape, dtype=saved.dtype)
    read_pieces({name: Piece.of(found)}, catalogue)
    return found
