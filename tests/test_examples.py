"""Every example, the README's program and the demo run and end well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

RUNS = {
    "01_train_by_hand.py": (2, "step 9: loss"),
    "02_plan_llama3_8b.py": (0, "Named strategies beside it"),
    "03_resnet.py": (2, "step 4: loss"),
    "04_tensor_parallel_inference.py": (2, "largest difference"),
    "05_custom_rule.py": (0, "equal to one device"),
}
"""Example: number of ranks (0: without ranks), and what it prints."""

ELSEWHERE = {"06_elastic.py"}
"""Run by tests/multiproc/test_elastic.py."""

ARGUMENTS = {"02_plan_llama3_8b.py": ("2",)}


def run(script: Path, ranks: int, *arguments: str) -> str:
    launcher = ["-m", "meshwright", "run", "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name: str):
    ranks, expected = RUNS[name]
    assert expected in run(EXAMPLES / name, ranks, *ARGUMENTS.get(name, ()))


def test_every_example_is_short_and_run_here():
    found = {p.name: len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")}
    assert found.keys() == RUNS.keys() | ELSEWHERE
    assert max(found.values()) < 60


def test_the_program_in_the_readme_runs(tmp_path: Path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    assert "loss " in run(tmp_path / "train.py", 2)


@pytest.mark.slow
def test_the_demo_ends_with_equal_losses():
    done = subprocess.run([sys.executable, "-m", "meshwright.demo"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": equal" in done.stdout
