"""What the memory calculator found, as text tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from meshwright.report.tables import as_text, make_table
from meshwright.report.units import format_bytes, format_count

if TYPE_CHECKING:
    from meshwright.calculator import Memory


def report(found: Memory, *, width: int | None = None) -> str:
    """Plain text, ``width`` columns wide (default: the terminal's, or 120 where there is none)."""
    return as_text(print_memory, found, width)


def print_memory(found: Memory, console: Console) -> None:
    """Print every table."""
    for section in (_header(found), _weights(found), _uses(found), _fits(found)):
        if section is not None:
            console.print(section)


def _header(found: Memory) -> RenderableType:
    largest = found.largest
    lines = [
        f"{found.model}: {format_count(found.parameters)} parameters, {format_count(found.trainable)} of them trained",
        f"largest layer: {largest.name} ({largest.kind}), {format_bytes(largest.bytes)}",
    ]
    if found.cache_bytes is not None:
        lines.append(f"keys and values of the whole batch, if it generates: {format_bytes(found.cache_bytes)}")
    return Group(*map(Text, lines), Text(f"assumed: {'; '.join(found.assumed)}"))


def _weights(found: Memory) -> RenderableType:
    table = make_table("Weights alone", *found.weight_bytes, right=found.weight_bytes)
    table.add_row(*map(format_bytes, found.weight_bytes.values()))
    return table


def _uses(found: Memory) -> RenderableType:
    categories = list(dict.fromkeys(c for use in found.uses for c, size in use.memory_bytes.items() if size))
    table = make_table("All on one device", "", "recomputed", *categories, "peak", right=(*categories, "peak"))
    for use in found.uses:
        sizes = [format_bytes(use.memory_bytes.get(c, 0)) for c in categories]
        table.add_row(use.mode, use.recompute if use.mode == "training" else "", *sizes, format_bytes(use.total_bytes))
    return table


def _fits(found: Memory) -> RenderableType | None:
    if not found.fits:
        return None
    table = make_table("Fewest devices", "device", "strategy", "devices", "each", "recomputed", "", right=("devices", "each"))
    for fit in found.fits:
        each = "" if fit.memory_bytes is None else format_bytes(fit.memory_bytes)
        count = "none" if fit.devices is None else str(fit.devices)
        table.add_row(fit.device, fit.strategy, count, each, fit.recompute, fit.reason)
    return table
