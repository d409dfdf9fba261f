"""Safetensors files, written and read piece by piece.

A file is 8 bytes (length of the header, little endian), a JSON header ``{name: {dtype, shape, data_offsets}}`` and the tensors'
bytes. The library of that name holds all tensors in memory while it writes, and maps files while it reads (a file that is cut off
meanwhile then kills the process). Here one tensor is in memory at a time, and reading is ``pread``: only the bytes of the slice.

Source: the format as https://huggingface.co/docs/safetensors describes it; files of both kinds are read by both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.page_sums import PageSums

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT_BYTES = 100_000_000
"""What the safetensors library allows."""
_BUFFER_BYTES = 16 << 20
"""Largest piece that passes through a buffer."""
_BLOCK_BYTES = 1 << 20
"""What is read at once where a digest is taken of it: it is still in the cache then."""
_SEEK_BYTES = 4096
"""Shorter runs are cheaper to read with what lies between them than one by one: a page of most file systems."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    Attributes:
        name: its key.
        shape: its shape; ``dtype``: its dtype.
        make: gives the tensor when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """A tensor that is there already."""
        return cls(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A written file.

    Attributes:
        bytes: its length.
        digest: of all of its bytes; ``""`` where every tensor has its own.
        tensors: checksum of each tensor's bytes (:mod:`~meshwright.runtime.page_sums`), by name, where that was asked for.
    """

    bytes: int
    digest: str
    tensors: Mapping[str, str] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    """The format's word for a dtype.

    Raises:
        InputError: it has none.
    """
    if dtype not in _NAMES:
        raise InputError(f"tensors of {dtype} cannot be written to safetensors")
    return _NAMES[dtype]


# --- digests ------------------------------------------------------------------------------------------------------


class _Crc32:
    """CRC-32 with the interface of ``hashlib``: finds damage at a third of SHA-256's time, no defence against malice."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _Nothing:
    """No digest."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


_DIGESTS: dict[str, Callable[[], Any]] = {"crc32": _Crc32, "sha256": hashlib.sha256, "tensors": _Nothing}


def file_digest(path: Path, kind: str) -> FileRecord:
    """Length and digest of a file.

    Raises:
        FormatError: it cannot be read.
    """
    digest, size, buffer = _DIGESTS[kind](), 0, memoryview(bytearray(4 << 20))
    try:
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                digest.update(buffer[:n])
                size += n
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None
    return FileRecord(size, digest.hexdigest())


# --- writing ------------------------------------------------------------------------------------------------------


def write_tensors(
    path: Path, entries: Iterable[Entry], *, digest: str = "sha256", metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file, one tensor after the other, and wait until it is on disk.

    Args:
        path: a file that is not there yet.
        entries: what to write; their ``make`` is called in another order (larger elements first, so that all are aligned).
        digest: ``"sha256"`` or ``"crc32"`` of the file, or ``"tensors"``: a checksum of each tensor.
        metadata: texts for the header.

    Raises:
        InputError: a dtype that the format lacks, or a name twice.
    """
    ordered = sorted(entries, key=lambda e: -e.dtype.itemsize)
    header = _header(ordered, metadata or {})
    running, size = _DIGESTS[digest](), len(header)
    checks: dict[str, str] = {}
    with open(path, "xb", buffering=0) as file:
        running.update(header)
        _write_all(file, memoryview(header))
        for entry in ordered:
            tensor = entry.make()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
            own = PageSums() if digest == "tensors" else running
            for block in _blocks(tensor.detach()):
                data = bytes_of(block)
                own.update(data)
                _write_all(file, data)
            size += entry.bytes
            if digest == "tensors":
                checks[entry.name] = own.hexdigest()
            del tensor
        os.fsync(file.fileno())
    return FileRecord(size, running.hexdigest(), checks)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for e in entries:
        if e.name in table:
            raise InputError(f"two tensors are called {e.name!r}")
        table[e.name] = {"dtype": dtype_name(e.dtype), "shape": list(e.shape), "data_offsets": [at, at + e.bytes]}
        at += e.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order as contiguous CPU tensors; copies at most a buffer's worth at a time."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
        return
    if tensor.dim() == 0 or tensor.numel() * tensor.itemsize <= _BUFFER_BYTES:
        yield tensor.cpu().contiguous()
        return
    rows = max(1, _BUFFER_BYTES * tensor.shape[0] // (tensor.numel() * tensor.itemsize))
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows].cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dim of size 1 may have any stride
    return flat.view(torch.uint8).numpy().data


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype and shape, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An open safetensors file whose header has been checked against its length.

    Attributes:
        tensors: what is in it, by name.
    """

    def __init__(self, path: Path):
        """Open a file and check its header.

        Raises:
            FormatError: it is missing, cut off, or no safetensors file.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            self.tensors = _checked(self._header(), os.fstat(self._descriptor).st_size - self._data, self._data, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def _header(self) -> dict[str, Any]:
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        self._data = 8 + length
        if length > _HEADER_LIMIT_BYTES or self._data > os.fstat(self._descriptor).st_size:
            raise FormatError(f"{self.path} is cut off or no safetensors file: its header would have {length} bytes")
        try:
            table = json.loads(os.pread(self._descriptor, length, 8))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.path} has a header that is no JSON: {str(error)[:120]}") from None
        if not isinstance(table, dict):
            raise FormatError(f"{self.path} has a header that is no JSON object")
        table.pop("__metadata__", None)
        return table

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        stored = self.tensors[name]
        found = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_box(name, (0,) * len(stored.shape), found)
        return found

    def read_box(self, name: str, offsets: Sequence[int], into: torch.Tensor, check: str | None = None) -> None:
        """Read the box that begins at ``offsets`` and has the shape of ``into``; other dtypes and devices are converted to.

        Args:
            name: of the tensor.
            offsets: where the box begins.
            into: gets the box.
            check: checksum of the tensor's bytes, compared where the box is all of it.

        Raises:
            FormatError: the file was cut off since it was opened, or the checksum is another.
        """
        stored = self.tensors[name]
        assert all(o >= 0 and o + n <= m for o, n, m in zip(offsets, into.shape, stored.shape, strict=True)), name
        running = PageSums() if check is not None and tuple(into.shape) == stored.shape else _Nothing()
        if into.numel():
            self._read(stored, tuple(offsets), into, running)
        if isinstance(running, PageSums) and running.hexdigest() != check:
            raise FormatError(
                f"{self.path} is damaged: {name[:120]!r} has checksum {running.hexdigest()}, the manifest says {check}; load another "
                "checkpoint"
            )

    def check(self, name: str, check: str) -> None:
        """Compare the checksum of a tensor without keeping it.

        Raises:
            FormatError: it is another.
        """
        stored = self.tensors[name]
        left, at, running = math.prod(stored.shape) * stored.dtype.itemsize, stored.start, PageSums()
        buffer = memoryview(bytearray(min(left, _BLOCK_BYTES)))
        while left:
            n = min(left, _BLOCK_BYTES)
            self._fill(buffer[:n], at)
            running.update(buffer[:n])
            left, at = left - n, at + n
        if running.hexdigest() != check:
            raise FormatError(
                f"{self.path} is damaged: {name[:120]!r} has another checksum than the manifest says; load another checkpoint"
            )

    def _read(self, stored: Stored, offsets: tuple[int, ...], into: torch.Tensor, running: Any) -> None:
        depth = _contiguous_from(into.shape, stored.shape)
        run = math.prod(into.shape[depth:]) * stored.dtype.itemsize
        if depth == 0 and into.dtype == stored.dtype and into.device.type == "cpu" and into.is_contiguous():
            memory, at = bytes_of(into), stored.start + _flat(offsets, stored.shape) * stored.dtype.itemsize
            for begin in range(0, len(memory), _BLOCK_BYTES):
                block = memory[begin : begin + _BLOCK_BYTES]
                self._fill(block, at + begin)
                running.update(block)
            return
        rows = into.shape[0] if into.dim() else 1
        step = max(1, _BUFFER_BYTES // max(1, math.prod(stored.shape[1:]) * stored.dtype.itemsize))
        if run >= _SEEK_BYTES:
            step = max(1, _BUFFER_BYTES * rows // (into.numel() * stored.dtype.itemsize))
        for first in range(0, rows, step):
            slab = into[first : first + step] if into.dim() else into
            begin_at = (offsets[0] + first, *offsets[1:]) if into.dim() else ()
            read = (
                self._runs(stored, begin_at, slab.shape, depth)
                if run >= _SEEK_BYTES
                else self._span(stored, begin_at, slab.shape)
            )
            if isinstance(running, PageSums):
                running.update(bytes_of(read))
            slab.copy_(read)

    def _runs(self, stored: Stored, offsets: Sequence[int], shape: Sequence[int], depth: int) -> torch.Tensor:
        """A box read run by run: nothing but its own bytes."""
        found = torch.empty(tuple(shape), dtype=stored.dtype)
        size, memory = stored.dtype.itemsize, bytes_of(found)
        run = math.prod(shape[depth:]) * size
        for k in range(math.prod(shape[:depth])):
            at = list(offsets)
            rest = k
            for dim in reversed(range(depth)):
                rest, i = divmod(rest, shape[dim])
                at[dim] += i
            self._fill(memory[k * run : (k + 1) * run], stored.start + _flat(at, stored.shape) * size)
        return found

    def _span(self, stored: Stored, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box cut out of the whole rows that hold it."""
        if not shape:
            return self._runs(stored, offsets, shape, 0)
        rows = torch.empty((shape[0], *stored.shape[1:]), dtype=stored.dtype)
        self._fill(bytes_of(rows), stored.start + offsets[0] * math.prod(stored.shape[1:]) * stored.dtype.itemsize)
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offsets[dim], shape[dim])
        return rows

    def _fill(self, memory: memoryview, at: int) -> None:
        while memory:
            n = os.preadv(self._descriptor, [memory[: 1 << 30]], at)
            if n == 0:
                raise FormatError(f"{self.path} was cut off while it was read")
            memory, at = memory[n:], at + n


def _contiguous_from(box: Sequence[int], whole: Sequence[int]) -> int:
    """The first dim from which on a box of ``whole`` is contiguous in memory."""
    depth = len(box)
    while depth and box[depth - 1] == whole[depth - 1]:
        depth -= 1
    return max(0, depth - 1)


def _flat(at: Sequence[int], shape: Sequence[int]) -> int:
    """Number of an element in row-major order."""
    number = 0
    for i, n in zip(at, shape, strict=True):
        number = number * n + i
    return number


def _checked(table: Mapping[str, Any], length: int, start: int, path: Path) -> dict[str, Stored]:
    """The header's entries; together they are all of the file's ``length`` bytes of data, none twice."""
    found: dict[str, Stored] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in table.items():
        wrong = FormatError(f"{path} has a malformed entry for {name[:80]!r}")
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
            raise wrong
        shape, offsets, dtype = _counts(entry.get("shape")), _counts(entry.get("data_offsets")), DTYPES[entry["dtype"]]
        if (
            shape is None
            or offsets is None
            or len(offsets) != 2
            or len(shape) > 64
            or math.prod(max(1, n) for n in shape) >= 1 << 56
        ):
            raise wrong
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize or end > length:
            raise wrong
        found[name] = Stored(dtype, shape, start + begin)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise FormatError(f"{path} has tensors that overlap, or bytes that belong to none")
        at = end
    if at != length:
        raise FormatError(f"{path} has {length} bytes of data, its header speaks of {at}")
    return found


def _counts(value: Any) -> tuple[int, ...] | None:
    """A list of sizes; None if it is anything else."""
    fine = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value)
    return tuple(value) if fine else None
