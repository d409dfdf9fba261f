"""The one look of all tables in reports, and the ways to print them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns where there is no terminal."""

T = TypeVar("T")


def make_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table; ``right`` names the columns that are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in set(right) else "left", overflow="fold")
    return table


def as_text(show: Callable[[T, Console], None], what: T, width: int | None) -> str:
    """What ``show`` prints of ``what``, as plain text ``width`` columns wide (default: the terminal's)."""
    out = io.StringIO()
    columns = width or shutil.get_terminal_size((WIDTH, 24)).columns
    show(what, Console(file=out, width=columns, color_system=None, force_terminal=False, highlight=False, legacy_windows=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def screen() -> Console:
    """The terminal, or standard output in the width of reports."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=WIDTH)
