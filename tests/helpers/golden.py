"""Golden files: ``MESHWRIGHT_UPDATE_GOLDEN=1`` or ``pytest --update-golden`` rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Assert that ``text`` equals ``tests/golden/<name>``."""
    path = FOLDER / name
    if os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"{path} is missing: run with --update-golden"
    assert text == path.read_text(), f"{path} differs: if the change is meant, run with --update-golden"
