"""What is in a checkpoint: which tensors, of which shapes, in which files. Checked before anything is read.

Three kinds: a checkpoint of ours (``manifest.json``), and plain safetensors, one file or several with an index, as a single-device
program or Hugging Face's ``save_pretrained`` writes them. Those hold parameters and buffers only.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.files import plain_name, read_json
from meshwright.runtime.tensor_files import DTYPES, FileRecord, TensorFile, dtype_name, file_digest

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "meshwright checkpoint", 1
MODEL = "model."
"""Prefix of parameters and buffers; ``optim.exp_avg.`` and the like of an optimizer's tensors."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DIGEST = "crc32"
"""Of ``state.json``; tensors have theirs box by box. Finds damage: whoever can change a file can change its digest too, so nothing
stronger would help."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box of a tensor is: ``key`` of ``file`` holds the box of ``sizes`` at ``offsets``; ``check`` is its checksum, None if it
    has none."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    check: str | None = None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, and the boxes that it was saved in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        boxes = [[p.file, p.key, list(p.offsets), list(p.sizes), p.check] for p in self.places]
        return {"dtype": dtype_name(self.dtype), "shape": list(self.shape), "boxes": boxes}


@dataclass(frozen=True)
class Catalogue:
    """What is in a checkpoint.

    Attributes:
        folder: where its files are.
        tensors: by name; parameters and buffers begin with :data:`MODEL`.
        files: records of its files; empty for plain safetensors, which have none.
        state: the contents of ``state.json``.
        aliases: other names of tied parameters, to the one they were saved under.
    """

    folder: Path
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return not self.files

    def only(self, names: Iterable[str]) -> Catalogue:
        """With some of its tensors."""
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def verify(self) -> None:
        """Check the bytes of all tensors.

        Raises:
            FormatError: one is damaged.
        """
        check_places(self.folder, [p for tensor in self.tensors.values() for p in tensor.places])


def check_places(folder: Path, places: Iterable[Place]) -> None:
    """Check the bytes of boxes against their checksums.

    Raises:
        FormatError: one is damaged.
    """
    by_file: dict[str, list[Place]] = {}
    for p in places:
        by_file.setdefault(p.file, []).append(p)
    for file, mine in by_file.items():
        with TensorFile(folder / file) as opened:
            for p in mine:
                if p.check is not None:
                    opened.check(p.key, p.check)


def read_catalogue(path: Path) -> Catalogue:
    """Read what a checkpoint says of itself, and check that it can be so.

    Args:
        path: a checkpoint's own directory, a directory with ``model.safetensors`` or ``model.safetensors.index.json``, or a
            safetensors file.

    Raises:
        FormatError: it is malformed.
        InputError: there is none.
    """
    if path.is_file():
        return _plain(path.parent, [path.name])
    if (path / MANIFEST).exists():
        return _ours(path)
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / SINGLE).exists():
        return _plain(path, [SINGLE])
    raise InputError(f"{path} holds no checkpoint: no {MANIFEST}, {INDEX} or {SINGLE}")


# --- ours ---------------------------------------------------------------------------------------------------------


def with_check(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the CRC-32 of all of it but that."""
    rest = {key: value for key, value in manifest.items() if key != "check"}
    return {"check": f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}", **rest}


def _ours(path: Path) -> Catalogue:
    data, where = read_json(path / MANIFEST), path / MANIFEST
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FormatError(
            f"{where} is of format {str(data.get('format'))[:40]!r} version {str(data.get('version'))[:10]}, this version reads "
            f"{FORMAT!r} version {VERSION}"
        )
    if with_check(data) != data:
        raise FormatError(f"{where} is damaged: it does not have the CRC-32 that it says; load another checkpoint")
    files = {plain_name(name, str(where)): _record(r, where) for name, r in _mapping(data, "files", where).items()}
    tensors = {name: _tensor(name, t, files, where) for name, t in _mapping(data, "tensors", where).items()}
    aliases = _mapping(data, "aliases", where)
    if any(not isinstance(name, str) or MODEL + name not in tensors for name in aliases.values()):
        raise FormatError(f"{where} has an alias of a tensor that is not there")
    if STATE not in files:
        raise FormatError(f"{where} does not list {STATE}")
    for name, record in files.items():
        if not (path / name).is_file():
            raise FormatError(f"{path / name} is missing: the checkpoint is not whole")
        if (path / name).stat().st_size != record.bytes:
            raise FormatError(f"{path / name} has {(path / name).stat().st_size} bytes, the manifest says {record.bytes}")
    if file_digest(path / STATE, DIGEST).digest != files[STATE].digest:
        raise FormatError(
            f"{path / STATE} is damaged: it does not have the CRC-32 that the manifest says; load another checkpoint"
        )
    found = Catalogue(path, tensors, files, read_json(path / STATE), aliases)
    _check_keys(found)
    return found


def _mapping(data: Mapping[str, Any], key: str, where: Path) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{where} has no table {key!r}")
    return value


def _record(value: Any, where: Path) -> FileRecord:
    if isinstance(value, list) and len(value) == 2 and _sizes([value[0]]) and isinstance(value[1], str):
        return FileRecord(value[0], value[1])
    raise FormatError(f"{where} has a malformed record of a file: {str(value)[:80]}")


def _sizes(value: Any) -> tuple[int, ...] | None:
    fine = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value)
    return tuple(value) if fine and len(value) <= 64 and math.prod(max(1, n) for n in value) < 1 << 56 else None


def _tensor(name: str, value: Any, files: Container[str], where: Path) -> SavedTensor:
    wrong = FormatError(f"{where} has a malformed entry for tensor {name[:80]!r}")
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str) or not isinstance(value.get("boxes"), list):
        raise wrong
    shape, dtype = _sizes(value.get("shape")), DTYPES.get(value["dtype"])
    if shape is None or dtype is None:
        raise wrong
    places = tuple(_place(box, shape, files) for box in value["boxes"])
    if None in places:
        raise wrong
    found = SavedTensor(dtype, shape, tuple(p for p in places if p is not None))
    if not _covered(found):
        raise FormatError(f"{where}: the boxes of tensor {name[:80]!r} overlap, or are not all of it")
    return found


def _place(box: Any, shape: tuple[int, ...], files: Container[str]) -> Place | None:
    if not isinstance(box, list) or len(box) != 5 or not isinstance(box[4], str):
        return None
    file, key, offsets, sizes = box[0], box[1], _sizes(box[2]), _sizes(box[3])
    if not isinstance(file, str) or not isinstance(key, str) or file not in files or offsets is None or sizes is None:
        return None
    if not len(offsets) == len(sizes) == len(shape) or any(o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)):
        return None
    return Place(file, key, offsets, sizes, box[4])


def _covered(tensor: SavedTensor) -> bool:
    """Whether the boxes, which lie inside, are the whole tensor and none overlaps another."""
    if sum(math.prod(p.sizes) for p in tensor.places) != math.prod(tensor.shape):
        return False
    if not tensor.shape or len(tensor.places) < 2:
        return len(tensor.places) == 1
    dim = max(range(len(tensor.shape)), key=lambda d: len({p.offsets[d] for p in tensor.places}))
    active: list[Place] = []
    for p in sorted(tensor.places, key=lambda p: p.offsets[dim]):
        active = [q for q in active if q.offsets[dim] + q.sizes[dim] > p.offsets[dim]]
        if any(_overlap(p, q) for q in active):
            return False
        active.append(p)
    return True


def _overlap(a: Place, b: Place) -> bool:
    return all(ao < bo + bn and bo < ao + an for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


def _check_keys(catalogue: Catalogue) -> None:
    """Compare the headers of all files with the manifest: a box of another shape would be read from elsewhere."""
    wanted: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for tensor in catalogue.tensors.values():
        for p in tensor.places:
            wanted.setdefault(p.file, {})[p.key] = (tensor.dtype, p.sizes)
    for file, keys in wanted.items():
        with TensorFile(catalogue.folder / file) as opened:
            for key, (dtype, sizes) in keys.items():
                stored = opened.tensors.get(key)
                if stored is None or (stored.dtype, stored.shape) != (dtype, sizes):
                    raise FormatError(f"{catalogue.folder / file} does not hold {key[:120]!r} as the manifest says")


# --- plain safetensors --------------------------------------------------------------------------------------------


def _indexed(path: Path) -> Catalogue:
    where = path / INDEX
    index = _mapping(read_json(where), "weight_map", where)
    files = {plain_name(file, str(where)) for file in index.values()}
    found = _plain(path, sorted(files))
    for name, file in index.items():
        tensor = found.tensors.get(MODEL + name)
        if tensor is None or tensor.places[0].file != file:
            raise FormatError(f"{where} says that {name[:80]!r} is in {file}, where it is not")
    return found


def _plain(folder: Path, files: list[str]) -> Catalogue:
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        with TensorFile(folder / file) as opened:
            for key, stored in opened.tensors.items():
                if MODEL + key in tensors:
                    raise FormatError(f"{folder}: {key[:80]!r} is in two files")
                place = Place(file, key, (0,) * len(stored.shape), stored.shape)
                tensors[MODEL + key] = SavedTensor(stored.dtype, stored.shape, (place,))
    return Catalogue(folder, tensors)
