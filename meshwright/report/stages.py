"""The pipeline stages of a plan as a text table."""

from __future__ import annotations

from rich.console import RenderableType

from meshwright.planner.ir.plan import Plan
from meshwright.report.tables import make_table


def stages(plan: Plan) -> RenderableType | None:
    """Which rank runs which stage, and where each ends; None for a plan without stages."""
    pipeline = plan.pipeline
    if pipeline is None:
        return None
    title = f"Pipeline: {pipeline.num_stages} stages on {pipeline.degree} ranks, {pipeline.schedule}, {pipeline.micro_batches} micro-batches"
    table = make_table(title, "stage", "rank", "ends behind", "module", "result", right=("stage", "rank"))
    for stage, cut in enumerate(pipeline.cuts):
        info = plan.op_info.get(cut)
        shown = ("", "") if info is None else (info.module_path, f"[{', '.join(map(str, info.shape))}]")
        table.add_row(str(stage), str(pipeline.rank_of(stage)), cut, *shown)
    table.add_row(str(len(pipeline.cuts)), str(pipeline.rank_of(len(pipeline.cuts))), "the loss", "", "")
    return table
