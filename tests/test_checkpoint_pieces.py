"""Boxes of a tensor are the very elements of its local slice; who writes a box is shared out; folders name what is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.planner import SavePlan

import meshwright as mw
from meshwright.planner.ir.spec import R, S, local_slice, parse_placements
from meshwright.runtime.checkpoint.catalogue import Place, SavedTensor, _covered
from meshwright.runtime.checkpoint.folder import Writing, checkpoints_in, newest, of_step
from meshwright.runtime.checkpoint.optimizer_state import decoded, encoded
from meshwright.runtime.checkpoint.pieces import Piece, boxes_of
from meshwright.runtime.checkpoint.storage import shared_out
from tests.helpers.pieces import coordinates

CASES = [
    ((12, 5), "S(0)", (2,)),
    ((7, 5), "S(0)S(0)", (2, 2)),
    ((3,), "S(0)", (4,)),
    ((12, 5), "S(0;3)", (2,)),
    ((24, 5), "S(0)S(0;4)", (2, 3)),
    ((24, 6), "S(0;4)S(1;3)", (2, 2)),
    ((24, 6), "S(1)S(0;12)", (3, 2)),
    ((0, 4), "S(0)", (2,)),
    ((), "RR", (2, 2)),
    ((5, 4, 6), "S(2)S(0)", (4, 2)),
]


@pytest.mark.parametrize(("shape", "text", "sizes"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_boxes_are_the_elements_of_the_local_slice_and_cover_the_tensor_once(shape, text, sizes):
    whole, placements = torch.arange(torch.Size(shape).numel()).reshape(shape), parse_placements(text)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for at in coordinates(sizes):
        local = local_slice(whole, placements, sizes, at).contiguous()
        piece = Piece(tuple(shape), local, boxes_of(shape, placements, sizes, at))
        for box in piece.boxes:
            wanted = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(piece.view(box.offsets), wanted)
            seen[box.offsets] = wanted
        assert sum(piece.view(b.offsets).numel() for b in piece.boxes) == local.numel()
    assert sorted(torch.cat([t.reshape(-1) for t in seen.values()]).tolist()) == list(range(whole.numel()))


def test_a_box_that_many_hold_is_written_once_and_work_is_shared_out():
    def plan(mine: torch.Tensor) -> SavePlan:
        pieces = {f"w{i}": Piece.of(torch.zeros(100)) for i in range(12)} | {f"only{len(mine)}": Piece.of(mine)}
        return SavePlan([item for name, piece in pieces.items() for item in piece.__create_write_items__(name, piece)])

    plans = shared_out([plan(torch.zeros(n)) for n in (1, 300, 2, 3)])
    names = [item.index.fqn for p in plans for item in p.items]
    assert len(names) == len(set(names)) == 16
    counts = [sum(item.tensor_data.chunk.sizes[0] for item in p.items) for p in plans]
    assert max(counts) - min(counts) <= 100 and sum(counts) == 1506


# --- catalogues ---------------------------------------------------------------------------------------------------


@given(st.data())
def test_boxes_that_overlap_or_leave_holes_are_seen(data):
    n = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    boxes = data.draw(
        st.lists(st.tuples(*(st.tuples(st.integers(0, m), st.integers(0, m)).map(sorted) for m in n)), min_size=1, max_size=5)
    )
    count = torch.zeros(n, dtype=torch.int64)
    for box in boxes:
        count[tuple(slice(a, b) for a, b in box)] += 1
    places = tuple(Place("f", "k", tuple(a for a, _ in b), tuple(e - a for a, e in b)) for b in boxes)
    full = all(torch.Size(p.sizes).numel() for p in places)
    found = _covered(SavedTensor(torch.float32, tuple(n), places))
    if full:
        assert found == bool((count == 1).all())
    elif found:
        assert bool((count == 1).all())


def test_settings_come_back_as_they_were():
    for value in (1, 1.5, float("inf"), None, True, "x", (0.9, 0.999), [1, (2, None)], {"a": {"b": (1,)}}):
        assert decoded(encoded(value, "x")) == value and type(decoded(encoded(value, "x"))) is type(value)
    tensor = decoded(encoded(torch.tensor(0.1), "lr"))
    assert torch.equal(tensor, torch.tensor(0.1)) and tensor.dtype == torch.float32
    for value in (object(), torch.ones(2), {1: 2}, {"tensor": 1}, print):
        with pytest.raises(mw.InputError, match="cannot hold"):
            encoded(value, "extra")


# --- folders ------------------------------------------------------------------------------------------------------


def _write(folder: Path, step: int | None, keep_last: int | None = None) -> str:
    writing = Writing(folder, step)
    (writing.work / "manifest.json").write_text("{}")
    writing.finish(keep_last)
    return writing.final.name


def test_the_newest_checkpoint_is_the_last_one_that_was_finished(tmp_path: Path):
    folder = tmp_path / "run"
    assert newest(folder) is None
    assert [_write(folder, None), _write(folder, 5), _write(folder, 5), _write(folder, None)] == [
        "step-00000000",
        "step-00000005",
        "step-00000005.1",
        "step-00000006",
    ]
    assert newest(folder) == folder / "step-00000006" and of_step(folder, 5) == folder / "step-00000005.1"
    half = Writing(folder, 9)
    assert newest(folder) == folder / "step-00000006" and "step-00000009" not in checkpoints_in(folder)
    half.give_up()
    half.give_up()
    (folder / "latest").unlink()
    assert newest(folder) == folder / "step-00000006"
    with pytest.raises(mw.InputError, match="no checkpoint of step 9"):
        of_step(folder, 9)


def test_old_checkpoints_go_by_the_time_they_were_written_and_strangers_stay(tmp_path: Path):
    for step in (100, 200, 300):
        _write(tmp_path, step)
    (tmp_path / "step-mine").mkdir()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "step-mine")
    _write(tmp_path, 150, keep_last=2)  # training went on from step 100
    assert sorted(checkpoints_in(tmp_path)) == ["step-00000150", "step-00000300"]
    assert (tmp_path / "step-mine").is_dir() and (tmp_path / "step-00000001").is_symlink()


def test_one_program_writes_to_a_folder_at_a_time_and_leftovers_go(tmp_path: Path):
    (tmp_path / f"step-00000001.tmp-{'a' * 32}").mkdir()
    first = Writing(tmp_path, 1)
    assert len(list(tmp_path.glob("step-*"))) == 1
    with pytest.raises(mw.InputError, match="another program is writing"):
        Writing(tmp_path, 2)
    first.give_up()
    _write(tmp_path, 2)
    with pytest.raises(mw.InputError, match="cannot be written"):
        Writing(tmp_path / "step-00000002" / "manifest.json", 1)


@pytest.mark.parametrize("text", ["", "step-00000007", "../step-00000001", "\xff\xfe", "x" * 5000])
def test_a_latest_that_names_nothing_is_an_error_that_says_what_is_there(text: str, tmp_path: Path):
    _write(tmp_path, 1)
    (tmp_path / "latest").write_bytes(text.encode("latin-1"))
    with pytest.raises(mw.FormatError, match="step-00000001") as caught:
        newest(tmp_path)
    assert "\n" not in str(caught.value)


def test_placements_of_plain_tensors_are_replicated():
    assert boxes_of((2, 3), (R, R), (2, 2), (1, 1)) == boxes_of((2, 3), (), (), ())
    assert boxes_of((4,), (S(0),), (4,), (3,))[0].offsets == (3,)
