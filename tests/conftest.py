"""Options and order of the whole test suite."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code gives now")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden"):
        os.environ["MESHWRIGHT_UPDATE_GOLDEN"] = "1"


RANKS = "multiproc/"
"""Part of the path of tests that start several processes each: they run one after another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together, so that what it prepares (captures, plans) is made once."""
    for item in items:
        group = "ranks" if RANKS in item.nodeid else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
