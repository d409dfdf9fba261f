"""Export a module on ranks, run what was exported, and compare: every number must be the very same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.runtime.export.manifest import NAME, Manifest
from meshwright.runtime.export.plain import from_plain, pretty
from meshwright.runtime.module import build
from tests.helpers import bare_rank
from tests.helpers.equality import Trial
from tests.helpers.pipelines import start

BEFORE, AFTER = 2, 5
"""Steps before the export and after it."""

ROOT = Path(__file__).parents[2]


def made(trial: Trial, **options: Any) -> Any:
    """The trial's module on this rank."""
    if trial.plan.pipeline is not None:
        return start(trial)
    mesh = init_device_mesh("cpu", trial.plan.mesh.sizes, mesh_dim_names=trial.plan.mesh.names)
    return build(trial.model, trial.capture, trial.plan, mesh, **options)


def export_and_train_on(rank: int, trial: Trial, folder: Path) -> None:
    """Train, export, train on; leaves the export, the batches and the numbers that must come out again."""
    pm = made(trial)
    optimizer = bare_rank.adamw(pm)
    bare_rank.take_steps(pm, optimizer, [trial.case.batch(i) for i in range(BEFORE)])
    pm.export(folder / "export", optimizer=optimizer)
    batches = [trial.case.batch(BEFORE + i) for i in range(AFTER)]
    if rank == 0:
        torch.save(batches, folder / "batches.pt")
    losses = bare_rank.take_steps(pm, optimizer, batches)
    torch.save(bare_rank.numbers(pm, losses), folder / f"numbers-{rank}.pt")


def run_bare(ranks: int, folder: Path, **options: Any) -> list[list[str]]:
    """Load the export and train on in fresh processes without planner and model; what differs, by rank."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(ROOT / "tests" / "helpers" / "bare_rank.py")]
    started = [
        subprocess.Popen(
            [*script, str(rank), str(ranks), str(folder), json.dumps(options)],
            env=env,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(said)
    return [json.loads((folder / f"wrong-{rank}.json").read_text()) for rank in range(ranks)]


# --- tampering ----------------------------------------------------------------------------------------------------


def copied(export: Path, folder: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(export, folder / "copy"))


def sign_again(export: Path) -> None:
    """Bring lengths, hashes and the check of the manifest up to date, as somebody would do who means harm."""
    data = json.loads((export / NAME).read_text())
    for head in data["files"]:
        raw = (export / head["path"]).read_bytes()
        head.update(bytes=len(raw), sha256=sha256(raw).hexdigest())
    (export / NAME).write_text(pretty(data))
    edit_manifest(export, lambda d: d)


def edit_manifest(export: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest, and give it the check that it should have where it can be read at all."""
    data = change(json.loads((export / NAME).read_text()))
    try:
        data["check"] = from_plain(Manifest, data, "it").digest
    except Exception:
        data = data if not isinstance(data, dict) else {**data, "check": ""}
    (export / NAME).write_text(json.dumps(data))


def edit(export: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a file, and sign again."""
    path = export / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    sign_again(export)
