"""Options and order of the whole test suite."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code gives now")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden"):
        os.environ["MESHWRIGHT_UPDATE_GOLDEN"] = "1"


GROUPS = {"multiproc/": "ranks", "test_examples.py": "examples"}
"""Part of a path to the xdist group that runs one after another: these tests start several processes each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, group in GROUPS.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.xdist_group(group))
