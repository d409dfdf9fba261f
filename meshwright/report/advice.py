"""Advice as a text table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from meshwright.report.tables import as_text, make_table
from meshwright.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.advice import Advice, Option


def report(advice: Advice, *, width: int | None = None) -> str:
    """Plain text, ``width`` columns wide (default: the terminal's, or 120 where there is none)."""
    return as_text(print_advice, advice, width)


def print_advice(advice: Advice, console: Console) -> None:
    """Print the verdict and the table of strategies."""
    console.print(Text(f"{advice.model} on {advice.cluster}", style="bold"))
    console.print(Text(advice.verdict))
    right = ("step", "memory", "moved")
    title = f"Strategies, the best first ({format_bytes(advice.limit_bytes)} per device)"
    table = make_table(title, "strategy", "fits", "step", "memory", "moved", "mesh", "why", right=right)
    for option in advice.options:
        table.add_row(*_row(option))
    console.print(table)


def _row(option: Option) -> tuple[str, ...]:
    return (
        option.strategy,
        "yes" if option.fits else "no",
        "" if option.step_time_s is None else format_seconds(option.step_time_s),
        "" if option.memory_bytes is None else format_bytes(option.memory_bytes),
        "" if option.communication_bytes is None else format_bytes(option.communication_bytes),
        "x".join(map(str, option.mesh)),
        option.reason,
    )
