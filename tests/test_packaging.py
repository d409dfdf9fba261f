"""The links inside ``meshwright/`` become real folders in what is shipped, and nothing else is shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("planner", "passes", "runtime")
BUILD = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"


def _build(source: Path, out: Path) -> tuple[set[str], Path]:
    """Build a wheel and an sdist of ``source``; the wheel's files and the sdist's path."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path, Path]:
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("meshwright", *PARTS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    files, sdist = _build(source, folder / "dist")
    return files, sdist, folder


def test_the_wheel_holds_every_module_once_under_meshwright(built):
    files, _, _ = built
    expected = {f"meshwright/{part}/{p.relative_to(ROOT / part)}" for part in PARTS for p in (ROOT / part).rglob("*.py")}
    assert expected <= files
    assert {"meshwright/py.typed", "meshwright/__main__.py"} <= files
    assert all(name.startswith("meshwright/") for name in files)


def test_a_wheel_built_from_the_sdist_is_the_same(built):
    files, sdist, folder = built
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive if m.issym() or m.islnk()]
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    again, _ = _build(source, folder / "again")
    assert again == files


@pytest.mark.parametrize("part", PARTS)
def test_a_part_refuses_to_be_imported_under_its_bare_name(part):
    tried = subprocess.run([sys.executable, "-c", f"import {part}"], cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode != 0 and f"import meshwright.{part}, not {part}" in tried.stderr
