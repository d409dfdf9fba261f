"""Safetensors files written and read piece by piece agree with the library; damaged ones are refused."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.runtime import tensor_files
from meshwright.runtime.files import new_directory, plain_name, read_json, remove_leftovers, write_json
from meshwright.runtime.page_sums import PageSums
from meshwright.runtime.tensor_files import DTYPES, Entry, TensorFile, file_digest, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"x{i}": (torch.rand(3, 5) * 9).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    strided = {"columns": torch.randn(6, 8)[:, 2:5], "transposed": torch.randn(4, 3, 2).permute(2, 0, 1)}
    return {**found, **strided, "scalar": torch.tensor(7.5), "empty": torch.empty(0, 4), "one": torch.ones(1)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and tensor_files.bytes_of(a) == tensor_files.bytes_of(b)


def test_the_library_reads_what_is_written_here_and_the_other_way_round(tmp_path: Path):
    given = tensors()
    record = write_tensors(tmp_path / "a.safetensors", [Entry.of(n, t) for n, t in given.items()])
    assert file_digest(tmp_path / "a.safetensors", "sha256") == record
    theirs = load_file(tmp_path / "a.safetensors")
    assert all(same(given[n], theirs[n]) for n in given) and len(theirs) == len(given)
    save_file({n: t.contiguous() for n, t in given.items()}, tmp_path / "b.safetensors")
    with TensorFile(tmp_path / "b.safetensors") as file:
        assert all(same(given[n], file.read(n)) for n in given)


def test_large_tensors_that_are_not_contiguous_pass_through_a_bounded_buffer(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_BUFFER_BYTES", 64)
    whole = torch.randn(37, 11).t()
    write_tensors(tmp_path / "a.safetensors", [Entry.of("w", whole)])
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert same(whole, file.read("w"))


@given(st.data())
def test_any_box_is_read_as_the_slice_it_is(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    path = tmp_path_factory.mktemp("box") / "a.safetensors"
    write_tensors(path, [Entry.of("pad", torch.ones(3)), Entry.of("w", whole)])
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    wanted = whole[tuple(slice(a, b) for a, b in bounds)]
    seek, buffer = data.draw(st.sampled_from([1, 16, 4096])), data.draw(st.sampled_from([1, 50, 1 << 20]))
    into = data.draw(st.sampled_from(["plain", "strided", "float"]))
    target = torch.full(wanted.shape, -1, dtype=torch.float64 if into == "float" else torch.int64)
    if into == "strided":
        target = torch.full((*wanted.shape, 2), -1)[..., 0]
    old = tensor_files._SEEK_BYTES, tensor_files._BUFFER_BYTES
    tensor_files._SEEK_BYTES, tensor_files._BUFFER_BYTES = seek, buffer
    try:
        with TensorFile(path) as file:
            file.read_box("w", [a for a, _ in bounds], target)
    finally:
        tensor_files._SEEK_BYTES, tensor_files._BUFFER_BYTES = old
    assert torch.equal(target, wanted.to(target.dtype))


def _file(table: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MALFORMED = {
    "empty": b"",
    "four bytes": b"abcd",
    "header beyond the end": _file({}, length=1 << 40),
    "header length of 2**63": b"\xff" * 8,
    "no JSON": _file(b"{"),
    "no UTF-8": _file(b"\xff\xfe{}"),
    "nested without end": _file(b"[" * 100_000),
    "a number of a million digits": _file(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "a list": _file([]),
    "entry is a number": _file({"a": 1}),
    "unknown dtype": _file({"a": _entry(dtype="F33")}, b"\0" * 8),
    "dtype is a list": _file({"a": _entry(dtype=[])}, b"\0" * 8),
    "negative shape": _file({"a": _entry(shape=[-2])}, b"\0" * 8),
    "shape is a text": _file({"a": _entry(shape="2")}, b"\0" * 8),
    "shape of floats": _file({"a": _entry(shape=[2.0])}, b"\0" * 8),
    "huge shape": _file({"a": _entry(shape=[1 << 61, 8])}, b"\0" * 8),
    "10**5 dims": _file({"a": _entry(shape=[1] * 100_000, offsets=[0, 4])}, b"\0" * 4),
    "cut off": _file({"a": _entry()}, b"\0" * 7),
    "bytes behind": _file({"a": _entry()}, b"\0" * 9),
    "overlap": _file({"a": _entry(), "b": _entry()}, b"\0" * 8),
    "hole": _file({"a": _entry(offsets=(4, 12))}, b"\0" * 12),
    "offsets backwards": _file({"a": _entry(offsets=(8, 0))}, b"\0" * 8),
    "one offset": _file({"a": _entry(offsets=(8,))}, b"\0" * 8),
    "no offsets": _file({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_a_typed_error_of_one_line(text: bytes, tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(text)
    with pytest.raises(mw.FormatError) as caught:
        TensorFile(tmp_path / "a.safetensors")
    assert "a.safetensors" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_one_cut_off_while_it_is_read_are_errors(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(mw.FormatError, match="No such file"):
        TensorFile(path)
    write_tensors(path, [Entry.of("w", torch.ones(100, 100))], digest="crc32")
    with TensorFile(path) as file:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(mw.FormatError, match="cut off while"):
            file.read("w")


def test_the_digest_is_that_of_the_file_and_names_and_dtypes_are_checked(tmp_path: Path):
    record = write_tensors(tmp_path / "a", [Entry.of("w", torch.ones(3))], digest="crc32")
    assert record.digest == f"{zlib.crc32((tmp_path / 'a').read_bytes()):08x}"
    with pytest.raises(mw.InputError, match="two tensors"):
        write_tensors(tmp_path / "b", [Entry.of("w", torch.ones(1))] * 2)
    with pytest.raises(mw.InputError, match="complex128"):
        write_tensors(tmp_path / "b", [Entry.of("w", torch.ones(1, dtype=torch.complex128))])


# --- checksums ----------------------------------------------------------------------------------------------------


def _checksum(data: bytes, cuts: list[int]) -> str:
    found = PageSums()
    for a, b in itertools.pairwise([0, *sorted(cuts), len(data)]):
        found.update(memoryview(data)[a:b])
    return found.hexdigest()


@given(st.integers(0, 20_000), st.lists(st.integers(0, 20_000), max_size=4), st.randoms(use_true_random=False))
def test_a_checksum_does_not_depend_on_how_the_bytes_come_and_every_flipped_bit_shows(size, cuts, chance):
    data = chance.randbytes(size)
    found = _checksum(data, [])
    assert _checksum(data, [min(c, size) for c in cuts]) == found
    weights = [pow(0x9E3779B97F4A7C15, i, 1 << 64) for i in range(size // 4096)]
    sums = [sum(int.from_bytes(data[4096 * i + 8 * j :][:8], "little") for j in range(512)) for i in range(size // 4096)]
    total = sum(w * s for w, s in zip(weights, sums, strict=True)) % (1 << 64)
    assert found == f"{total:016x}{zlib.crc32(data[size // 4096 * 4096 :]):08x}"
    if size:
        at = chance.randrange(size)
        flipped = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        assert _checksum(flipped, []) != found


def test_zeroed_and_exchanged_pages_show():
    data = torch.ones(3 * 300 * 1024 // 4).numpy().tobytes() + torch.arange(4096.0).numpy().tobytes()
    for at in range(0, 3 * 300 * 1024 - 4096, 10 * 4096):
        assert _checksum(data[:at] + bytes(4096) + data[at + 4096 :], []) != _checksum(data, [])
    assert _checksum(data[:-8192] + data[-4096:] + data[-8192:-4096], []) != _checksum(data, [])


# --- directories and JSON -----------------------------------------------------------------------------------------


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path):
    with new_directory(tmp_path / "a") as work:
        write_json(work / "x.json", {"k": [1, 2]})
        assert not (tmp_path / "a").exists()
    assert read_json(tmp_path / "a" / "x.json") == {"k": [1, 2]}
    with pytest.raises(RuntimeError, match="broke"), new_directory(tmp_path / "b") as work:
        (work / "half").write_text("x")
        raise RuntimeError("broke")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(mw.InputError, match="there already"), new_directory(tmp_path / "a"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(mw.InputError, match="cannot be made"), new_directory(tmp_path / "file" / "b"):
        pass


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"step-1.tmp-{'a' * 32}").mkdir()
    (folder / f"latest.tmp-{'b' * 32}").write_text("")
    (folder / f"link.tmp-{'c' * 32}").symlink_to(outside)
    (folder / "notes.tmp-mine").write_text("")
    remove_leftovers(folder)
    assert sorted(p.name for p in folder.iterdir()) == [f"link.tmp-{'c' * 32}", "notes.tmp-mine"]
    assert (outside / "keep").exists()


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000, "9" * 10_000, "\xff"])
def test_json_that_is_none_is_a_typed_error_of_one_line(text: str, tmp_path: Path):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(mw.FormatError) as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_json_is_limited_in_size_and_must_be_there(tmp_path: Path):
    with pytest.raises(mw.FormatError, match="missing"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": "xxxxxxxx"}')
    with pytest.raises(mw.FormatError, match="more than the 4"):
        read_json(tmp_path / "a.json", limit_bytes=4)
    with pytest.raises(mw.InputError, match="JSON cannot"):
        write_json(tmp_path / "b.json", {"a": torch.ones(1)})


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".hidden", "a\0b", "a\\b", 3, None, "x" * 300, "ü"])
def test_a_name_with_a_path_in_it_is_refused(name: object):
    with pytest.raises(mw.FormatError, match="plain file name"):
        plain_name(name, "the manifest")
