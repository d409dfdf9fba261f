"""Exports that are damaged, meant for something else or meant to do harm: one line of our own error, nothing run, nothing written."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.planner.ir.errors import InputError, MeshwrightError, RuntimeMismatchError
from tests.helpers.exports import copied, edit, edit_manifest, made, sign_again
from tests.helpers.prepared import trial
from tests.helpers.ranks import run_ranks

GRAPHS, PROGRAM = "programs/0/graphs-0.json", "programs/0/program.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a small model for one rank."""
    folder = tmp_path_factory.mktemp("export")

    def write(rank: int) -> None:
        pm = made(trial("tied", (1,), "ddp"))
        pm.export(folder / "export", optimizer=torch.optim.AdamW(pm.parameters()))

    run_ranks(1, write)
    return folder / "export"


Change = Callable[[Path], None]


def in_json(name: str, **fields: Any) -> Change:
    return lambda export: edit(export, name, lambda data: {**data, **fields})


def in_manifest(**fields: Any) -> Change:
    return lambda export: edit_manifest(export, lambda data: {**data, **fields})


def in_first_file(**fields: Any) -> Change:
    return lambda export: edit_manifest(export, lambda d: {**d, "files": [{**d["files"][0], **fields}, *d["files"][1:]]})


def in_forward(change: Callable[[Any], Any]) -> Change:
    return lambda export: edit(export, GRAPHS, lambda d: {**d, "forward": change(d["forward"])})


def first_node(node: list[Any]) -> Change:
    return in_forward(lambda g: {**g, "nodes": [node, *g["nodes"]]})


def raw(name: str, change: Callable[[bytes], bytes], *, sign: bool = False) -> Change:
    def apply(export: Path) -> None:
        (export / name).write_bytes(change((export / name).read_bytes()))
        if sign:
            sign_again(export)

    return apply


def flipped(data: bytes) -> bytes:
    """One bit in the middle is another."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def parameter(**fields: Any) -> Change:
    return lambda e: edit(
        e, "model.json", lambda d: {**d, "parameters": [{**d["parameters"][0], **fields}, *d["parameters"][1:]]}
    )


def interface(**fields: Any) -> Change:
    return lambda e: edit(e, PROGRAM, lambda d: {**d, "interface": {**d["interface"], **fields}})


def first_input(**fields: Any) -> Change:
    def change(d: Any) -> Any:
        first, *others = d["interface"]["inputs"]
        return {**d, "interface": {**d["interface"], "inputs": [{**first, **fields}, *others]}}

    return lambda e: edit(e, PROGRAM, change)


def shard(export: Path) -> str:
    """A safetensors file of the state."""
    return str(next((export / "state").rglob("*.safetensors")).relative_to(export))


def link(export: Path) -> None:
    (export / "plan.json").rename(export.parent / "elsewhere.json")
    (export / "plan.json").symlink_to(export.parent / "elsewhere.json")


HOSTILE: dict[str, tuple[Change, str]] = {
    # damaged
    "manifest missing": (lambda e: (e / "manifest.json").unlink(), "is missing"),
    "manifest empty": (raw("manifest.json", lambda b: b""), "not JSON"),
    "manifest cut off": (raw("manifest.json", lambda b: b[:200]), "not JSON"),
    "manifest with a flipped bit": (
        raw("manifest.json", lambda b: b.replace(b'"model": "T', b'"model": "U')),
        "damaged or was edited",
    ),
    "manifest that is binary": (raw("manifest.json", lambda b: b"\xff\xfe\x00" * 9), "not JSON"),
    "manifest nested without end": (raw("manifest.json", lambda b: b'{"a":' + b"[" * 100_000), "not JSON"),
    "manifest that is a list": (raw("manifest.json", lambda b: b"[]"), "a JSON object is needed"),
    "graphs missing": (lambda e: (e / GRAPHS).unlink(), "is missing"),
    "graphs cut off": (raw(GRAPHS, lambda b: b[:-100]), "bytes, its manifest says"),
    "graphs with a flipped bit": (raw(GRAPHS, flipped), "does not have the SHA-256"),
    "plan with a flipped bit": (raw("plan.json", flipped), "does not have the SHA-256"),
    "weights missing": (lambda e: (e / shard(e)).unlink(), "is missing"),
    "weights cut off": (lambda e: raw(shard(e), lambda b: b[:-8])(e), "bytes, its manifest says"),
    "weights with a flipped bit": (lambda e: raw(shard(e), flipped)(e), "does not have the SHA-256"),
    "weights cut off and signed": (lambda e: raw(shard(e), lambda b: b[:-8], sign=True)(e), "bytes"),
    "weights' header made of nothing, signed": (
        lambda e: raw(shard(e), lambda b: b"\xff" * len(b), sign=True)(e),
        "cut off or no safetensors",
    ),
    "constants that are no safetensors": (
        raw("constants.safetensors", lambda b: b"\xff" * 64, sign=True),
        "cut off or no safetensors",
    ),
    "weights that are elsewhere, signed": (raw("state/latest", lambda b: b"../../../../etc", sign=True), "."),
    "weights' index with a path upwards, signed": (
        lambda e: edit(e, "state/step-00000000/manifest.json", lambda d: {**d, "files": {"../x": [1, "00"]}}),
        ".",
    ),
    "weights beside the others": (
        lambda e: shutil.copy(e / shard(e), (e / shard(e)).with_name("more.safetensors")),
        "is not in the manifest",
    ),
    "state's index gone": (lambda e: shutil.rmtree(e / "state"), "is missing"),
    # another version, world or torch
    "another format": (in_manifest(format="pickle"), "is of format 'pickle'"),
    "another format version": (in_manifest(version=2), "version 2"),
    "another torch": (in_manifest(torch="1.0"), "exported with torch 1.0"),
    "another number of ranks": (in_manifest(mesh={"sizes": [4], "names": ["axis0"]}), "the world has 1 ranks"),
    "a mesh of nothing": (in_manifest(mesh={"sizes": [], "names": []}), "mesh of sizes"),
    "a mesh of negative size": (in_manifest(mesh={"sizes": [-1], "names": ["a"]}), "mesh of sizes"),
    "a mesh of everything": (in_manifest(mesh={"sizes": [2**62], "names": ["a"]}), "mesh of sizes"),
    "stages that are none": (in_manifest(stages=1), "for another mesh than the manifest says"),
    "operators of other libraries": (in_manifest(operators=["aten.from_file.default"]), "if you trust them"),
    "no program": (in_manifest(programs=[]), "mesh of sizes"),
    # paths
    "a path upwards": (in_first_file(path="../../etc/passwd"), "plain file name"),
    "an absolute path": (in_first_file(path="/etc/passwd"), "plain file name"),
    "a path with NUL": (in_first_file(path="a\x00b"), "plain file name"),
    "a hidden file": (in_first_file(path=".ssh"), "plain file name"),
    "a path of ten folders": (in_first_file(path="a/b/c/d/e/f"), "too many folders"),
    "a program folder upwards": (
        lambda e: edit_manifest(e, lambda d: {**d, "programs": [{**d["programs"][0], "folder": "../0"}]}),
        "plain file name",
    ),
    "a symbolic link": (link, "symbolic link"),
    "a file that is not listed": (in_first_file(path="state/other.json"), "is missing"),
    "a size beyond 64 bits": (in_first_file(bytes=2**80), "64 bits"),
    "a digest that is a number": (in_first_file(sha256=7), "type str"),
    # graphs
    "an operator that reads files": (
        first_node(["f", "aten.from_file.default", [{"text": "/etc/passwd"}]]),
        "operator of the list",
    ),
    "a function of Python": (first_node(["f", "os.system", [{"text": "true"}]]), "operator of the list"),
    "a name with code": (
        in_forward(lambda g: {**g, "inputs": [["x=print(1)", *g["inputs"][0][1:]], *g["inputs"][1:]]}),
        "name of a node",
    ),
    "a keyword with code": (first_node(["f", "aten.full.default", [[1], 1], {"x=print(1)": 1}]), "keyword arguments by name"),
    "integers of more ranks": (first_node(["f", "aten.full.default", [[1], {"by_rank": [1, 2]}]]), "1 integers, one per rank"),
    "integers by rank that are texts": (
        first_node(["f", "aten.full.default", [[1], {"by_rank": ["a"]}]]),
        "1 integers, one per rank",
    ),
    "a tensor of an exabyte": (first_node(["f", "aten.full.default", [[2**59], 1]]), "a device can hold|does not work"),
    "another shape of an input": (
        in_forward(lambda g: {**g, "inputs": [[*g["inputs"][0][:2], [3]], *g["inputs"][1:]]}),
        "what the interface says",
    ),
    "outputs dropped": (in_forward(lambda g: {**g, "outputs": g["outputs"][:1]}), "fewer results|index of an output|gets"),
    "gradients exchanged": (
        lambda e: edit(e, GRAPHS, lambda d: {**d, "gradients": d["gradients"][::-1]}),
        "the parameter's shape",
    ),
    "a gradient too many": (lambda e: edit(e, GRAPHS, lambda d: {**d, "gradients": [*d["gradients"], "x"]}), "makes"),
    "no backward": (in_json(GRAPHS, backward=None), "another backward"),
    "inputs of another order": (
        lambda e: edit(e, GRAPHS, lambda d: {**d, "inputs": d["inputs"][::-1]}),
        "what the interface says",
    ),
    "an input that nobody knows": (
        lambda e: edit(e, GRAPHS, lambda d: {**d, "inputs": ["x", *d["inputs"][1:]]}),
        "the interface knows",
    ),
    "a field too many": (in_json(GRAPHS, code="import os"), "exactly the fields"),
    # model and interface
    "a parameter of another shape": (parameter(shape=[1, 1]), "a parameter of the model with the shape"),
    "a parameter of negative size": (parameter(shape=[-1]), "the shape of a tensor"),
    "a parameter of 2^62 elements": (parameter(shape=[2**31, 2**31]), "the shape of a tensor"),
    "a parameter of integers": (parameter(dtype="int64"), "cannot be a parameter"),
    "a parameter without a module": (parameter(name="no.such.module"), "a module that was listed before"),
    "a parameter that is itself another": (parameter(same_as="later"), "a tensor that was listed before"),
    "a module in itself": (
        lambda e: edit(
            e, "model.json", lambda d: {**d, "modules": [{"path": "a", "kind": "A", "training": True, "same_as": ""}]}
        ),
        "does not contain itself",
    ),
    "an argument with code": (
        lambda e: edit(e, "model.json", lambda d: {**d, "arguments": [{**d["arguments"][0], "name": "x=1"}]}),
        "an argument's name and kind",
    ),
    "arguments of an impossible order": (
        lambda e: edit(e, "model.json", lambda d: {**d, "arguments": [d["arguments"][0], d["arguments"][0]]}),
        "arguments of forward are impossible",
    ),
    "a role that is none": (first_input(role="code"), "a known role"),
    "placements of another mesh": (first_input(placements="RR"), "one placement per mesh axis"),
    "placements that are none": (first_input(placements="S(0"), "placements as"),
    "a shard of a dim that is not there": (first_input(placements="S(9)"), "placements that its shape allows"),
    "modes of other modules": (interface(modes=[True]), "training modes of"),
    "a loss that is not there": (interface(loss=99), "index of an output"),
    "a call of other inputs": (interface(call={"['x']": "nothing"}), "the path of an input"),
    "an output structure without keys": (
        in_json(
            PROGRAM,
            structure={
                "kind": "dict",
                "name": "",
                "keys": [],
                "children": [{"kind": "leaf", "name": "", "keys": [], "children": []}],
            },
        ),
        "keys and",
    ),
    "an output structure of another size": (
        in_json(PROGRAM, structure={"kind": "tuple", "name": "", "keys": [], "children": []}),
        "as many outputs",
    ),
    "a plan for another mesh": (
        lambda e: edit(e, "plan.json", lambda d: {**d, "mesh": {"sizes": [2], "names": ["a"]}}),
        "plan hash is|another mesh",
    ),
    "a plan that is none": (in_json("plan.json", ops=3), "plan is malformed"),
}


def outcome(export: Path, *, silent: bool) -> str:
    """What loading says: the error's type and message, or what else happened."""
    found: list[str] = []
    patches = [("os", "system"), ("os", "popen"), ("subprocess", "Popen"), ("pickle", "loads"), ("torch", "load")]
    names = ("all_gather_object", "broadcast_object_list", "broadcast", "all_reduce", "barrier", "new_group")
    patches += [("torch.distributed", name) for name in names if silent]
    before = sorted((p.relative_to(export), p.lstat().st_mtime_ns) for p in export.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in patches:
            patch.setattr(f"{module}.{name}", lambda *a, f=name, **k: found.append(f"{f} was called") or 1 / 0)
        try:
            mw.load(export)
            found.append("loaded")
        except MeshwrightError as error:
            found.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"raised {type(error).__name__}: {error}")
    if before != sorted((p.relative_to(export), p.lstat().st_mtime_ns) for p in export.rglob("*")):
        found.append("wrote")
    return "; ".join(found)


def _try_all(rank: int, folder: Path, scratch: Path) -> dict[str, str]:
    """The outcome of every hostile export, of an untouched one, and of many with a byte changed."""
    said = {}
    for name, (change, _) in HOSTILE.items():
        export = copied(folder, scratch)
        change(export)
        # the structure of the weights is read after the ranks have agreed that they have the same export
        said[name] = outcome(export, silent="weights" not in name)
        shutil.rmtree(export)
    export = copied(folder, scratch)
    sign_again(export)
    said["untouched"] = outcome(export, silent=False)
    shutil.rmtree(export)
    chance = random.Random(0)
    for i in range(BYTES):
        export = copied(folder, scratch)
        path = chance.choice(sorted(p for p in export.rglob("*") if p.is_file()))
        content = bytearray(path.read_bytes())
        at, new = chance.randrange(len(content)), chance.randrange(256)
        if content[at] != new:
            content[at] = new
            path.write_bytes(content)
            said[f"byte {i}"] = outcome(export, silent=True)
        shutil.rmtree(export)
    return said


BYTES = 60


@pytest.fixture(scope="module")
def said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What loading says, by the name of what was changed."""
    (found,) = run_ranks(1, _try_all, folder, tmp_path_factory.mktemp("hostile"))
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_export_is_refused_with_one_line(name, said):
    assert re.match(f"(FormatError|PlanFormatError|InputError|RuntimeMismatchError): .*({HOSTILE[name][1]})", said[name]), said[
        name
    ]
    assert "\n" not in said[name] and "was called" not in said[name] and "wrote" not in said[name] and len(said[name]) < 900


def test_what_the_hostile_ones_are_made_of_is_fine(said):
    assert said["untouched"] == "loaded"


def test_an_export_with_any_byte_changed_is_refused(said):
    """Unsigned: whatever is changed in whichever file, the manifest shows it (but for white space in the manifest itself)."""
    changed = [text for name, text in said.items() if name.startswith("byte ")]
    assert len(changed) > BYTES * 0.9
    assert not [t for t in changed if "\n" in t or not re.match("(FormatError|InputError|RuntimeMismatchError): ", t)]


# --- the wrong place ----------------------------------------------------------------------------------------------


def _misuse(rank: int, folder: Path) -> list[str]:
    said = []
    for path, options in ((folder / "nothing", {}), (folder, {"batch": "mine"})):
        with pytest.raises(InputError) as caught:
            mw.load(path, **options)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_meant_is_refused(folder):
    ((nothing, option),) = run_ranks(1, _misuse, folder)
    assert "is no directory: load what a module's export() wrote" in nothing and "batch is 'mine'" in option


def _elsewhere(rank: int, export: Path) -> list[str]:
    said = []
    for mesh in (None, init_device_mesh("cpu", (2,), mesh_dim_names=("axis0",))):
        with pytest.raises(RuntimeMismatchError) as caught:
            mw.load(export, mesh)
        said.append(str(caught.value))
    return said


def test_another_world_or_mesh_is_refused_on_every_rank(folder):
    for whole, mesh in run_ranks(2, _elsewhere, folder):
        assert "the export is for 1 devices (axis0=1), the world has 2 ranks: start 1" in whole
        assert "the export is for a mesh of axis0=1, found one of axis0=2" in mesh


def _other_names(rank: int, folder: Path) -> str:
    pm = made(trial("tied", (2,), "ddp"))
    pm.export(folder / "two")
    with pytest.raises(RuntimeMismatchError) as caught:
        mw.load(folder / "two", init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return str(caught.value)


def test_other_axis_names_are_refused(tmp_path):
    for said in run_ranks(2, _other_names, tmp_path):
        assert "found one of tp=2: make a mesh of these sizes and names" in said


def test_no_process_group_is_said_so(folder):
    with pytest.raises(InputError, match="there is no process group, and the export is for 1 devices"):
        mw.load(folder)
