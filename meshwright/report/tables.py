"""The one look of all tables in reports."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table


def make_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table; ``right`` names the columns that are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in set(right) else "left", overflow="fold")
    return table
