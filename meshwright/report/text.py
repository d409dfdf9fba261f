"""A plan as text tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.ir.plan import Alternative, Collective, OpInfo, Plan
from meshwright.planner.ir.spec import format_placements, max_local_shape
from meshwright.report.fold import fold
from meshwright.report.meshes import meshes
from meshwright.report.stages import stages
from meshwright.report.tables import as_text, make_table
from meshwright.report.units import format_bytes, format_count, format_seconds

MAIN_OPS = {
    "aten.mm.default": "matmul",
    "aten.bmm.default": "batched matmul",
    "aten.addmm.default": "matmul",
    "aten.baddbmm.default": "batched matmul",
    "aten.convolution.default": "convolution",
    "aten.embedding.default": "embedding",
    "aten.nll_loss_forward.default": "loss",
    "aten.nll_loss2d_forward.default": "loss",
}
"""Overload to what people call it; the ``scaled_dot_product_*`` family is attention."""

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


def report(plan: Plan, *, width: int | None = None) -> str:
    """The plan as plain text, ``width`` columns wide (default: the terminal's, or 120 where there is none)."""
    return as_text(print_report, plan, width)


def print_report(plan: Plan, console: Console) -> None:
    """Print every section that has something to say."""
    sections: tuple[Callable[[Plan], RenderableType | None], ...] = (
        _header,
        _totals,
        stages,
        _parameters,
        _batch,
        _main_ops,
        _collectives,
        _alternatives,
        meshes,
        _fallbacks,
        _notes,
    )
    for section in sections:
        shown = section(plan)
        if shown is not None:
            console.print(shown)


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Group:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return Group(Text(title, style="bold"), grid, Text())


def _header(plan: Plan) -> RenderableType:
    inside = f" in each of {plan.pipeline.degree} pipeline ranks" if plan.pipeline is not None else ""
    axes = ", ".join(
        f"{name}={size} over {link}" for name, size, link in zip(plan.mesh.names, plan.mesh.sizes, plan.links, strict=False)
    )
    adds_up = f", {plan.accumulate} passes added up before a step of the optimizer" if plan.accumulate > 1 else ""
    purpose = f"training, {plan.optimizer}{adds_up}" if plan.training else "inference"
    return _pairs(
        f"Plan {plan.hash[:12]} for {plan.model}",
        (
            ("mesh", f"{plan.mesh} = {plan.mesh.num_devices} x {plan.device}{inside}  ({axes})"),
            ("strategy", f"{plan.strategy}, {plan.precision or 'precision as the model has it'}, {purpose}"),
            *([("recompute", str(plan.recompute))] if plan.training else []),
        ),
    )


def _totals(plan: Plan) -> RenderableType:
    p = plan.predicted
    time = (
        f"{format_seconds(p.step_time_s)}  (compute {format_seconds(p.compute_s)}, exposed communication "
        f"{format_seconds(p.exposed_s)}, communication that can hide {format_seconds(p.hidden_s)})"
    )
    share = p.peak_memory_bytes / plan.memory_limit_bytes if plan.memory_limit_bytes else math.inf
    parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in sorted(p.memory_bytes.items(), key=lambda kv: -kv[1]) if v)
    memory = f"{format_bytes(p.peak_memory_bytes)} of {format_bytes(plan.memory_limit_bytes)} per device ({share:.0%}): {parts}"
    return _pairs(
        "Predicted", (("step", time), ("memory", memory), ("optimality", _optimality(plan)), ("planned in", _solver(plan)))
    )


def _optimality(plan: Plan) -> str:
    if plan.gap <= 1e-6:
        return "proved optimal in the cost model"
    return f"within {plan.gap:.2%} of the proved bound {format_seconds(plan.bound_s)}"


def _solver(plan: Plan) -> str:
    times = {k.removesuffix("_s"): v for k, v in plan.solver.items() if k.endswith("_s") and isinstance(v, int | float)}
    sizes = {k: v for k, v in {**plan.solver, **plan.folded}.items() if isinstance(v, int) and not isinstance(v, bool)}
    shown = [f"{k} {format_seconds(v)}" for k, v in times.items()] + [f"{format_count(v)} {k}" for k, v in sizes.items()]
    return ", ".join(shown) or "not recorded"


def _parameters(plan: Plan) -> RenderableType | None:
    """Parameters and buffers, folded over layers."""
    kept = {n: i for n, i in plan.input_info.items() if i.role == "parameter" and n in plan.inputs}
    if not kept:
        return None
    table = make_table(
        "Parameters at rest", "name", "count", "shape", "dtype", "placement", "bytes/device", right=("count", "bytes/device")
    )
    keys = ((i.name, (i.shape, i.dtype, plan.inputs[n], i.aliases)) for n, i in kept.items())
    for group in fold(keys):
        shape, dtype, placements, aliases = group.key
        each = math.prod(max_local_shape(shape, placements, plan.mesh.sizes)) * _ITEM_BYTES.get(dtype, 1)
        name = group.name + (f" (tied: {', '.join(aliases)})" if aliases else "")
        count = len(group.members)
        table.add_row(name, str(count), _shape(shape), dtype, format_placements(placements), format_bytes(each * count))
    return table


def _batch(plan: Plan) -> RenderableType | None:
    kept = {n: i for n, i in plan.input_info.items() if i.role == "input" and n in plan.inputs}
    if not kept:
        return None
    table = make_table("Batch inputs", "name", "shape", "dtype", "placement")
    for n, i in kept.items():
        table.add_row(i.name, _shape(i.shape), i.dtype, format_placements(plan.inputs[n]))
    return table


def main_op_kind(info: OpInfo) -> str | None:
    """``"matmul"``, ``"attention"``, ... for the ops that the report shows; None for the others."""
    if "scaled_dot_product" in info.target and "backward" not in info.target:
        return "attention"
    return MAIN_OPS.get(info.target)


def _main_ops(plan: Plan) -> RenderableType | None:
    items: list[tuple[str, tuple[str, str, tuple[int, ...], str]]] = []
    for name, info in plan.op_info.items():
        kind = main_op_kind(info)
        if kind is not None and info.phase == "forward" and name in plan.ops:
            items.append((info.module_path or name, (kind, info.target, info.shape, str(plan.ops[name]))))
    if not items:
        return None
    table = make_table("Main ops, forward", "module", "count", "op", "result", "reads -> makes", right=("count",))
    for group in fold(items):
        kind, _, shape, spec = group.key
        table.add_row(group.name, str(len(group.members)), kind, _shape(shape), spec.replace("->", " -> ").replace(",", ", "))
    return table


def _collectives(plan: Plan) -> RenderableType | None:
    if plan.pipeline is not None:
        return None
    if not plan.collectives:
        return Text("No communication.\n") if plan.mesh.num_devices > 1 else None
    grouped: dict[tuple[str, int, bool], list[Collective]] = {}
    for c in plan.collectives:
        grouped.setdefault((c.kind, c.axis, c.hidden), []).append(c)
    right = ("count", "bytes", "time")
    table = make_table("Collectives per step and device", "kind", "axis", "can hide", *right, right=right)
    for (kind, axis, hidden), members in sorted(grouped.items()):
        table.add_row(
            kind,
            f"{plan.mesh.names[axis]}={plan.mesh.sizes[axis]}",
            "yes" if hidden else "no",
            format_count(sum(c.count for c in members)),
            format_bytes(sum(c.bytes * c.count for c in members)),
            format_seconds(sum(c.time_s * c.count for c in members)),
        )
    return table


def _alternatives(plan: Plan) -> RenderableType | None:
    if not plan.alternatives:
        return None
    right = ("step", "slower by", "memory/device")
    table = make_table("Named strategies beside it", "strategy", "mesh", *right, "verdict", right=right)
    p = plan.predicted
    table.add_row(
        f"{plan.strategy} (this plan)",
        str(plan.mesh),
        format_seconds(p.step_time_s),
        "",
        format_bytes(p.peak_memory_bytes),
        "chosen",
        style="bold",
    )
    for other in plan.alternatives:
        slower = "" if other.step_time_s is None else f"{other.step_time_s / p.step_time_s - 1:+.1%}" if p.step_time_s else ""
        table.add_row(
            other.strategy,
            "x".join(map(str, other.mesh)) or "-",
            "-" if other.step_time_s is None else format_seconds(other.step_time_s),
            slower,
            "-" if other.peak_memory_bytes is None else format_bytes(other.peak_memory_bytes),
            _verdict(other, plan.memory_limit_bytes),
        )
    return table


def _verdict(other: Alternative, limit_bytes: int) -> str:
    if other.fits:
        return "fits"
    over = (other.peak_memory_bytes or 0) - limit_bytes
    if other.peak_memory_bytes is not None and over > 0:
        return f"does not fit: {format_bytes(over)} over the limit"
    return f"not possible: {other.reason.partition(': ')[0]}" if other.reason else "does not fit"


def _fallbacks(plan: Plan) -> RenderableType | None:
    if not plan.fallbacks:
        return None
    right = ("count", "time/step", "bytes")
    table = make_table("Ops without a rule: they run replicated", "op", *right, right=right)
    for f in plan.fallbacks:
        table.add_row(f.target, format_count(f.count), format_seconds(f.time_s), format_bytes(f.bytes))
    return table


def _notes(plan: Plan) -> RenderableType | None:
    if not plan.notes:
        return None
    return Group(Text("Notes", style="bold"), *(Text(f"- {note}") for note in plan.notes))


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
