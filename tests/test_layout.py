"""What import-linter cannot see: private torch modules stay in a short list of files; importing the package is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PRIVATE_TORCH = {
    "planner/assemble.py",
    "planner/decompose.py",
    "planner/direct.py",
    "planner/faking.py",
    "planner/joint.py",
    "planner/record.py",
    "planner/remember.py",
    "planner/trace.py",
    "planner/walk.py",
    "runtime/compile.py",
    "runtime/export/check.py",
    "runtime/mesh.py",
    "runtime/tape.py",
    "tests/helpers/counting.py",
    "tests/helpers/live_bytes.py",
    "tests/helpers/threads.py",
    "tests/test_remember.py",
    "tests/test_script.py",
    "tests/test_trace.py",
}
"""Files that may import ``torch._x``: what breaks between releases of torch breaks here."""

STABLE = {"torch.utils._pytree"}
"""Private by name, used by all of torch's public exporters and unchanged for years."""


def _private_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}.{a.name}" for a in node.names)
    private = {n for n in found if n.startswith("torch.") and any(p.startswith("_") and p != "__version__" for p in n.split("."))}
    return {n for n in private if not any(n == s or n.startswith(s + ".") for s in STABLE)}


def test_private_torch_modules_are_imported_in_the_listed_files_only():
    folders = ("planner", "passes", "runtime", "meshwright", "tests", "examples", "benchmarks")
    files = {p for folder in folders for p in (ROOT / folder).rglob("*.py") if not p.is_relative_to(ROOT / "meshwright/planner")}
    using = {str(p.relative_to(ROOT)) for p in files if _private_imports(p)}
    assert {
        f for f in using if not f.startswith(("meshwright/passes/", "meshwright/runtime/", "meshwright/planner/"))
    } == PRIVATE_TORCH


def test_importing_the_package_imports_no_torch():
    code = "import sys, meshwright, meshwright.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_every_public_name_is_there_and_an_unknown_one_lists_them():
    import meshwright

    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    assert set(dir(meshwright)) == set(meshwright.__all__)
    try:
        meshwright.autoparalelize  # noqa: B018
    except AttributeError as e:
        assert "autoparallelize" in str(e)


def test_the_constraints_pin_what_the_project_needs():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {
        "torch",
        "ortools",
        "sympy",
        "numpy",
        "rich",
        "typer",
        "transformers",
        "pytest",
        "ruff",
        "mypy",
        "import-linter",
    } <= pinned
