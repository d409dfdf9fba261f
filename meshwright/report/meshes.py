"""The logical meshes that were considered: the best few, and why the others are not the plan's."""

from __future__ import annotations

from rich.console import RenderableType

from meshwright.planner.ir.plan import MeshTried, Plan
from meshwright.report.tables import make_table
from meshwright.report.units import format_seconds

_SHOWN = 6


def meshes(plan: Plan) -> RenderableType | None:
    """A table; None where there was only one mesh."""
    if len(plan.meshes) < 2:
        return None
    table = make_table("Logical meshes considered", "mesh", "links", "step", "verdict", right=("step",))
    for tried in plan.meshes[:_SHOWN]:
        links = ", ".join(f"{name}={n}: {link}" for name, n, link in zip(tried.names, tried.sizes, tried.links, strict=True))
        style = "bold" if tried.verdict == "chosen" else None
        table.add_row("x".join(map(str, tried.sizes)), links, _step(tried), _verdict(tried), style=style)
    rest = plan.meshes[_SHOWN:]
    if rest:
        excluded = sum(t.verdict == "excluded" for t in rest)
        table.add_row(
            f"{len(rest)} more", "", "", f"{excluded} excluded by bounds, {len(rest) - excluded} slower or not possible"
        )
    return table


def _step(tried: MeshTried) -> str:
    if tried.step_time_s is not None:
        return format_seconds(tried.step_time_s)
    return "-" if tried.bound_s is None else f">= {format_seconds(tried.bound_s)}"


def _verdict(tried: MeshTried) -> str:
    return f"{tried.verdict}: {tried.reason}" if tried.reason else tried.verdict
