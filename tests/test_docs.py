"""Examples in docstrings run; what the documents name exists."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.planner.ir import errors

ROOT = Path(__file__).parents[1]
PARTS = ("planner", "passes", "runtime", "meshwright/report")


def _modules_with_examples() -> list[str]:
    files = [p for part in PARTS for p in sorted((ROOT / part).rglob("*.py")) if ">>>" in p.read_text()]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files]
    return [n if n.startswith("meshwright.") else f"meshwright.{n}" for n in names]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_in_docstrings_give_what_they_show(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_every_error_is_documented():
    text = (ROOT / "docs" / "errors.md").read_text()
    kinds = [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, mw.MeshwrightError)]
    assert [n for n in kinds if f"`{n}`" not in text] == []


def test_every_field_of_a_plan_file_is_documented():
    from tests.helpers.plans import sample_plan

    text = (ROOT / "docs" / "plan-format.md").read_text()
    assert [f for f in sample_plan().to_json_dict() if f"`{f}`" not in text] == []


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
