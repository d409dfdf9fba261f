"""Damaged, hostile and foreign checkpoints: one typed line, nothing run, nothing changed. And plain safetensors, both ways."""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import meshwright as mw
from meshwright.runtime.checkpoint import storage
from meshwright.runtime.checkpoint.catalogue import read_catalogue, with_check
from meshwright.runtime.checkpoint.contents import Held
from meshwright.runtime.checkpoint.load import extra_of, random_state, restoring, step_of, wanted_of
from meshwright.runtime.tensor_files import TensorFile
from tests.helpers.models import ALL
from tests.helpers.prepared import planned
from tests.helpers.ranks import run_ranks
from tests.multiproc.common import start

NAME = "tied"


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def _save(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    pm = start(NAME, planned(NAME, (2,), "zero3"))
    optimizer = _adamw(pm)
    pm.step(ALL[NAME].batch())
    optimizer.step()
    pm.save_checkpoint(folder, optimizer, step=7, extra={"epoch": 1})
    pm.save_safetensors(folder / "one")
    pm.save_safetensors(folder / "several", max_file_bytes=5000)
    return pm.full_state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, _save, folder)[0]


def _copy(saved: tuple[Path, Any], to: Path) -> Path:
    return Path(shutil.copytree(saved[0] / "step-00000007", to / "checkpoint"))


def _inspect(path: Path) -> None:
    """All that is read and checked before a tensor is, without ranks."""
    catalogue = read_catalogue(path)
    catalogue.verify()
    model = ALL[NAME].model()
    held = Held.by(model)
    wanted_of(held, catalogue)
    step_of(catalogue), extra_of(catalogue), random_state(catalogue)
    restoring(_adamw(model), held, catalogue).finish()


def _rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Change manifest and state, with digests that fit, as somebody hostile would."""
    manifest, state = (json.loads((path / name).read_text()) for name in ("manifest.json", "state.json"))
    state = change(manifest, state) or state
    text = json.dumps(state).encode()
    (path / "state.json").write_bytes(text)
    if isinstance(manifest.get("files"), dict) and "state.json" in manifest["files"]:
        manifest["files"]["state.json"] = [len(text), f"{zlib.crc32(text):08x}"]
    (path / "manifest.json").write_text(json.dumps(with_check(manifest)))


def _first(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"][
        "model.head.weight" if "model.head.weight" in manifest["tensors"] else next(iter(manifest["tensors"]))
    ]


Change = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes both in place; what it returns replaces the state."""


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Change] = {
    "another format": lambda m, s: m.update(format="something"),
    "a later version": lambda m, s: m.update(version=2),
    "version is a list": lambda m, s: m.update(version=[1]),
    "no files": lambda m, s: m.pop("files"),
    "files is a list": lambda m, s: m.update(files=[]),
    "a path out of the folder": lambda m, s: m["files"].update({"../../etc/passwd": [1, "0"]}),
    "an absolute path": lambda m, s: m["files"].update({"/etc/passwd": [1, "0"]}),
    "a file that is not there": lambda m, s: m["files"].update({"rank-00009.safetensors": [1, "0"]}),
    "a file of negative length": lambda m, s: m["files"].update({"rank-00000.safetensors": [-1, "0"]}),
    "a file of huge length": lambda m, s: m["files"].update({"rank-00000.safetensors": [1 << 80, "0"]}),
    "a digest that is none": lambda m, s: m["files"].update({"rank-00000.safetensors": [1, 5]}),
    "tensors is a text": lambda m, s: m.update(tensors="all"),
    "a tensor is a number": lambda m, s: m["tensors"].update({"model.x": 1}),
    "a dtype that is none": lambda m, s: _first(m).update(dtype="os.system"),
    "a negative shape": lambda m, s: _first(m).update(shape=[-1, 4]),
    "a huge shape": lambda m, s: _first(m).update(shape=[1 << 61, 1 << 61]),
    "a huge shape with a zero": lambda m, s: _first(m).update(shape=[0, 1 << 61], boxes=[]),
    "a shape of floats": lambda m, s: _first(m).update(shape=[1.5]),
    "no boxes": lambda m, s: _first(m).update(boxes=[]),
    "boxes is a table": lambda m, s: _first(m).update(boxes={}),
    "a box twice": lambda m, s: _first(m)["boxes"].append(_first(m)["boxes"][0]),
    "a box of a foreign file": lambda m, s: _first(m)["boxes"][0].__setitem__(0, "../x.safetensors"),
    "a box of a file that is no text": lambda m, s: _first(m)["boxes"][0].__setitem__(0, ["x"]),
    "a box outside": lambda m, s: _first(m)["boxes"][0].__setitem__(2, [1000, 1000]),
    "a box that the file holds otherwise": lambda m, s: _first(m)["boxes"][0].__setitem__(1, "model.nothing"),
    "an alias of nothing": lambda m, s: m["aliases"].update({"a": "b"}),
    "an alias that is a list": lambda m, s: m["aliases"].update({"a": ["b"]}),
    "no step": lambda m, s: s.pop("step"),
    "a step that is a text": lambda m, s: s.update(step="7"),
    "extras that are a list": lambda m, s: s.update(extra=[1]),
    "extras nested without end": lambda m, s: s.update(extra={"a": _deep(900)}),
    "a scalar of no dtype": lambda m, s: s.update(extra={"a": {"tensor": "load", "value": 1}}),
    "a scalar that is too large": lambda m, s: s.update(extra={"a": {"tensor": "int32", "value": 10**30}}),
    "a tuple of a number": lambda m, s: s.update(extra={"a": {"tuple": 3}}),
    "a random state that is a text": lambda m, s: s.update(random="x"),
    "a random state of texts": lambda m, s: s.update(random={"base": "x", "count": "y"}),
    "no optimizer": lambda m, s: s.update(optimizer=None),
    "an optimizer that is a text": lambda m, s: s.update(optimizer="AdamW"),
    "another optimizer": lambda m, s: s["optimizer"].update(kind="SGD"),
    "groups that are numbers": lambda m, s: s["optimizer"].update(groups=[1]),
    "groups without parameters": lambda m, s: s["optimizer"]["groups"][0].update(params=[]),
    "settings that are a list": lambda m, s: s["optimizer"]["groups"][0].update(settings=[]),
    "state that is a list": lambda m, s: s["optimizer"].update(state=[]),
    "plain keys that are a number": lambda m, s: s["optimizer"].update(plain=3),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_a_typed_error_of_one_line(saved, tmp_path: Path, change: Change):
    path = _copy(saved, tmp_path)
    _rewritten(path, change)
    with pytest.raises(mw.InputError) as caught:
        _inspect(path)
    assert "\n" not in str(caught.value)


def _mutated(value: Any, chance: random.Random) -> Any:
    """``value`` with one thing in it changed."""
    junk: list[Any] = [None, True, -1, 1 << 70, 1.5, "", "../x", [], {}, [[]], {"tensor": "float32"}, "\0", float("nan")]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        i = chance.randrange(len(value))
        return [*value[:i], _mutated(value[i], chance), *value[i + 1 :]]
    return chance.choice(junk)


def test_random_changes_of_the_json_are_harmless_or_typed_errors(saved, tmp_path: Path):
    """Everything that is not a typed error of one line fails the test."""
    path, chance, refused = _copy(saved, tmp_path), random.Random(0), 0
    texts = {name: (path / name).read_text() for name in ("manifest.json", "state.json")}
    for _ in range(150):
        manifest, state = (json.loads(text) for text in texts.values())
        if chance.random() < 0.5:
            manifest = _mutated(manifest, chance)
        else:
            state = _mutated(state, chance)
        for name, text in texts.items():
            (path / name).write_text(text)
        if isinstance(manifest, dict):
            _rewritten(path, lambda m, s, new=(manifest, state): (m.clear(), m.update(new[0]), new[1])[-1])
        else:
            (path / "manifest.json").write_text(json.dumps(manifest))
        try:
            _inspect(path)
        except mw.InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


def test_flipped_bytes_and_cut_off_files_are_seen_wherever_they_are(saved, tmp_path: Path):
    path, chance = _copy(saved, tmp_path), random.Random(1)
    for file in sorted(p for p in path.iterdir()):
        whole = file.read_bytes()
        for _ in range(6):
            at = chance.randrange(len(whole))
            flipped = bytes([whole[at] ^ (1 << chance.randrange(8))])
            cut = whole[: chance.randrange(len(whole))]
            for text in (whole[:at] + flipped + whole[at + 1 :], cut):
                file.write_bytes(text)
                with pytest.raises(mw.InputError) as caught:
                    _inspect(path)
                assert "\n" not in str(caught.value)
        file.write_bytes(whole)
    _inspect(path)


class _Bomb:
    def __reduce__(self) -> Any:
        return (open, (str(Path("/tmp") / "meshwright-bomb"), "w"))


def test_nothing_in_a_checkpoint_is_unpickled(saved, tmp_path: Path):
    path, bomb = _copy(saved, tmp_path), Path("/tmp") / "meshwright-bomb"
    bomb.unlink(missing_ok=True)
    (path / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    _inspect(path)
    for file in ("manifest.json", "state.json", "rank-00000.safetensors"):
        again = _copy(saved, tmp_path / file)
        (again / file).write_bytes(pickle.dumps(_Bomb()))
        with pytest.raises(mw.FormatError):
            _inspect(again)
    assert not bomb.exists()


# --- on ranks -----------------------------------------------------------------------------------------------------


def _refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(mw.InputError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def _load_wrong(rank: int, folder: Path, damaged: Path) -> dict[str, tuple[str, str]]:
    pm = start(NAME, planned(NAME, (2,), "zero3"), model=ALL[NAME].model(seed=3))
    before = copy.deepcopy(pm.full_state_dict())
    optimizer = _adamw(pm)
    sgd = torch.optim.SGD(pm.parameters(), lr=0.1)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    found = {
        "nothing": _refused(lambda: pm.load_checkpoint(folder / "nowhere", optimizer)),
        "step": _refused(lambda: pm.load_checkpoint(folder, optimizer, step=3)),
        "kind": _refused(lambda: pm.load_checkpoint(folder, sgd)),
        "stranger": _refused(lambda: pm.load_checkpoint(folder, stranger)),
        "plain": _refused(lambda: pm.load_checkpoint(folder / "one", optimizer)),
        "extra": _refused(lambda: pm.save_checkpoint(folder / "new", extra={"f": print})),
        "one rank": _refused(lambda: pm.save_checkpoint(folder / "new", extra={"f": print} if rank else {})),
        "keep": _refused(lambda: pm.save_checkpoint(folder / "new", keep_last=0)),
        "file": _refused(lambda: pm.save_checkpoint(folder / "latest")),
        "again": _refused(lambda: pm.save_safetensors(folder / "one")),
    }
    assert pm.load_checkpoint(folder / "nowhere", optimizer, optional=True).path is None
    assert all(torch.equal(t, before[n]) for n, t in pm.full_state_dict().items()) and not optimizer.state
    assert not (folder / "new").exists()
    found["damaged"] = _refused(lambda: pm.load_checkpoint(damaged, optimizer))
    found["run"] = _refused(lambda: pm.step(ALL[NAME].batch()))
    pm.load_checkpoint(folder, optimizer)
    pm.step(ALL[NAME].batch())
    other = start(NAME, planned(NAME, (2,), "tp"), model=ALL[NAME].model(seed=3))  # reads parts of boxes: checked before
    found["parts"] = _refused(lambda: other.load_checkpoint(damaged))
    return found


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank_and_nothing_changes(saved, tmp_path: Path):
    folder, damaged = saved[0], _copy(saved, tmp_path)
    text = bytearray((damaged / "rank-00001.safetensors").read_bytes())
    text[-1] ^= 1
    with TensorFile(damaged / "rank-00001.safetensors") as file:
        for stored in file.tensors.values():
            text[stored.start] ^= 1
    (damaged / "rank-00001.safetensors").write_bytes(text)
    first, second = run_ranks(2, _load_wrong, folder, damaged)
    for rank in (first, second):
        kind, message = rank.pop("damaged")
        assert kind == "FormatError" and "rank-00001.safetensors is damaged" in message
    assert first == second
    assert all("\n" not in message for _, message in first.values())
    for name, text in {
        "nothing": "holds no checkpoint",
        "step": "no checkpoint of step 3; it has step-00000007",
        "kind": "is of AdamW, and this optimizer is SGD",
        "stranger": "not the module's",
        "plain": "holds no optimizer",
        "one rank": "cannot hold",
        "keep": "at least 1",
        "file": "cannot be written",
        "again": "there already",
        "run": "a damaged checkpoint was read",
        "parts": "rank-00001.safetensors is damaged",
    }.items():
        assert text in first[name][1]


def _disk_full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def _fail_to_save(rank: int, folder: Path) -> list[str]:
    pm = start(NAME, planned(NAME, (2,), "zero3"))
    pm.save_checkpoint(folder, step=1)
    found = []
    with patch.object(storage, "write_tensors", _disk_full if rank == 1 else storage.write_tensors):
        for asynchronous in (False, True):
            with pytest.raises(mw.CheckpointError) as caught:
                pm.save_checkpoint(folder, step=2, asynchronous=asynchronous).wait()
            found.append(str(caught.value))
        pm.save_checkpoint(folder, step=2, asynchronous=True)
        with pytest.raises(mw.CheckpointError) as caught:
            pm.wait_for_checkpoint()
        found.append(str(caught.value))
    pm.wait_for_checkpoint()
    dist.barrier()  # the first rank removes what is half-written
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "latest", "step-00000001"]
    assert pm.load_checkpoint(folder).step == 1
    pm.save_checkpoint(folder, step=2, asynchronous=True)
    assert pm.load_checkpoint(folder).step == 2  # waits for what is still being written
    return found


def test_a_full_disk_of_one_rank_is_an_error_on_all_and_older_checkpoints_stay(tmp_path: Path):
    first, second = run_ranks(2, _fail_to_save, tmp_path / "run")
    assert first == second and len(first) == 3
    assert all("rank 1 failed: OSError: [Errno 28] No space left on device" in text and "\n" not in text for text in first)


# --- plain safetensors --------------------------------------------------------------------------------------------


def test_one_device_reads_what_ranks_saved_as_plain_safetensors(saved, tmp_path: Path):
    folder, wanted = saved
    mw.to_safetensors(folder, tmp_path / "again")
    for path in (folder / "one", tmp_path / "again"):
        model = ALL[NAME].model(seed=4)
        assert load_model(model, path / "model.safetensors") == (set(), [])
        assert all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())
    index = json.loads((folder / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and len(index["weight_map"]) < len(wanted)  # tied ones once
    parts = {n: t for file in set(index["weight_map"].values()) for n, t in load_file(folder / "several" / file).items()}
    assert set(parts) == set(index["weight_map"]) and all(torch.equal(t, wanted[n]) for n, t in parts.items())


def _load_plain(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name in ("one", "several", "half/model.safetensors"):
        pm = start(NAME, planned(NAME, (2,), "zero3"), model=ALL[NAME].model(seed=3))
        loaded = pm.load_checkpoint(folder / name)
        found[name] = (loaded.step, loaded.cast, pm.full_state_dict())
    found["strict"] = _refused(lambda: pm.load_checkpoint(folder / "other"))
    loose = pm.load_checkpoint(folder / "other", strict=False)
    found["loose"] = (loose.missing, loose.unexpected)
    return found


def test_ranks_read_plain_safetensors_of_any_dtype_by_slices(saved, tmp_path: Path):
    folder, wanted = saved
    for name in ("one", "several"):
        shutil.copytree(folder / name, tmp_path / name)
    state = load_file(folder / "one" / "model.safetensors")
    (tmp_path / "half").mkdir()
    save_file({n: t.bfloat16() for n, t in state.items()}, tmp_path / "half" / "model.safetensors")
    first, *others = state
    (tmp_path / "other").mkdir()
    save_file({**{n: state[n] for n in others}, "stranger": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    for rank in run_ranks(2, _load_plain, tmp_path):
        for name in ("one", "several"):
            step, cast, found = rank[name]
            assert step is None and cast == () and all(torch.equal(t, wanted[n]) for n, t in found.items())
        _, cast, found = rank["half/model.safetensors"]
        assert len(cast) == len(state) and all(torch.equal(t, wanted[n].bfloat16().float()) for n, t in found.items())
        assert f"missing '{first}'; unexpected 'stranger'" in rank["strict"][1]
        assert rank["loose"] == ((first,), ("stranger",))
