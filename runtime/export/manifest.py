"""The head of an export: what it is for, and every file of it with its SHA-256.

folder/
  manifest.json              format and versions, mesh, signature, files
  plan.json                  the plan; programs that were planned later have one of their own beside their graphs
  model.json                 modules, parameters and buffers by name; how the model is called
  programs/0/program.json    what goes in and out
  programs/0/graphs-0.json   the graphs of all ranks (with stages: of the ranks at one place along the pipeline axis)
  state/...                  parameters, buffers, optimizer and random state: a checkpoint
  constants.safetensors      what the graphs read besides
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from meshwright.planner.ir.errors import FormatError, RuntimeMismatchError
from meshwright.runtime.export.plain import pretty, read_record, to_plain
from meshwright.runtime.files import plain_name, read_json
from meshwright.runtime.tensor_files import file_digest

NAME, PLAN, MODEL, CONSTANTS, STATE, PROGRAMS = (
    "manifest.json",
    "plan.json",
    "model.json",
    "constants.safetensors",
    "state",
    "programs",
)
FORMAT, VERSION = "meshwright export", 1


@dataclass(frozen=True)
class MeshRecord:
    """Axes of a mesh, by size and name."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True)
class ProgramHead:
    """One program: its folder, whether it has a backward, and its inputs and outputs in words."""

    folder: str
    training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class FileHead:
    """A file: its path inside the export, its length and SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The head of an export.

    Attributes:
        format, version: of the files.
        meshwright, torch: versions that wrote it.
        model: class name of the model.
        mesh: on which it runs, the pipeline axis first where there are stages; ``given``: as the user made it.
        stages: number of ranks along the pipeline axis; 0 where there are no stages.
        operators: operators besides those of the list.
        programs: in order; the first is that of the first plan.
        files: all others.
        check: SHA-256 of all of the above.
    """

    format: str
    version: int
    meshwright: str
    torch: str
    model: str
    mesh: MeshRecord
    given: MeshRecord
    stages: int
    operators: tuple[str, ...]
    programs: tuple[ProgramHead, ...]
    files: tuple[FileHead, ...]
    check: str

    @property
    def devices(self) -> int:
        count = 1
        for n in self.mesh.sizes:
            count *= n
        return count

    @property
    def digest(self) -> str:
        """SHA-256 of everything but ``check``."""
        return sha256(json.dumps(to_plain(Manifest, replace(self, check="")), sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write it, with its check."""
        data = to_plain(Manifest, replace(self, check=self.digest))
        (folder / NAME).write_text(pretty(data) + "\n", encoding="utf-8")


def file_heads(folder: Path) -> tuple[FileHead, ...]:
    """Every file of a folder that is being written; hidden ones (a lock of the state's) are removed."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.name.startswith("."):
            path.unlink()
            continue
        record = file_digest(path, "sha256")
        found.append(FileHead(path.relative_to(folder).as_posix(), record.bytes, record.digest))
    return tuple(found)


def torch_version() -> str:
    """Major and minor version: graphs of one are not promised to mean the same in another."""
    return ".".join(torch.__version__.split(".")[:2])


def read_manifest(folder: Path) -> Manifest:
    """Read and check the head; other files are not opened.

    Raises:
        FormatError: it is missing, damaged, of another version, or names files that cannot be its own.
        RuntimeMismatchError: it was made with another torch.
    """
    where = folder / NAME
    data = read_json(where)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FormatError(
            f"{where} is of format {str(data.get('format'))[:40]!r} version {str(data.get('version'))[:10]}, this version reads "
            f"{FORMAT!r} version {VERSION}: export again"
        )
    found = read_record(Manifest, data, str(where))
    if found.check != found.digest:
        raise FormatError(f"{where} is damaged or was edited: it does not have the SHA-256 that it states: export again")
    if found.torch != torch_version():
        raise RuntimeMismatchError(
            f"{folder} was exported with torch {found.torch}, this is torch {torch.__version__}: export with this one, or run with that"
        )
    _check_paths(found, where)
    mesh = found.mesh
    fine = mesh.sizes and len(mesh.sizes) == len(mesh.names) == len(set(mesh.names)) and all(n > 0 for n in mesh.sizes)
    if not fine or not found.programs or found.devices > 1 << 31 or found.stages not in (0, mesh.sizes[0]):
        raise FormatError(f"{where} has a mesh of sizes {mesh.sizes} and names {mesh.names}: export again")
    return found


def _check_paths(manifest: Manifest, where: Path) -> None:
    paths = [f.path for f in manifest.files]
    if len(set(paths)) != len(paths):
        raise FormatError(f"{where} lists a file twice: export again")
    for path in (*paths, *(f"{PROGRAMS}/{p.folder}" for p in manifest.programs)):
        parts = path.split("/")
        if len(parts) > 4:
            raise FormatError(f"{where} names the file {path[:80]!r}: too many folders")
        for part in parts:
            plain_name(part, str(where))


def verify_files(folder: Path, files: Iterable[FileHead]) -> None:
    """Compare files with their lengths and SHA-256; the state has no others, for whoever reads it takes what is there.

    Raises:
        FormatError: one is missing, a link, too many, or differs.
    """
    files = tuple(files)
    listed = {folder / head.path for head in files}
    for path in (folder / STATE).rglob("*") if (folder / STATE).is_dir() else ():
        if not path.is_dir() and not path.name.startswith(".") and path not in listed:
            raise FormatError(f"{path} is not in the manifest: copy the whole export again")
    for head in files:
        path = folder / head.path
        inside = [folder / p for p in Path(head.path).parents[:-1]]
        if any(p.is_symlink() for p in (path, *inside)):
            raise FormatError(f"{path} is a symbolic link: an export holds files only")
        if not path.is_file():
            raise FormatError(f"{path} is missing: copy the whole export again")
        if path.stat().st_size != head.bytes:
            raise FormatError(
                f"{path} has {path.stat().st_size} bytes, its manifest says {head.bytes}: copy the whole export again"
            )
        if file_digest(path, "sha256").digest != head.sha256:
            raise FormatError(f"{path} is damaged or was edited: it does not have the SHA-256 that its manifest states")
