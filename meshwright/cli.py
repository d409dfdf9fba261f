"""The command line: the same words as the functions. Errors that a user can cause are one line and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import MeshwrightError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan and run PyTorch models across device meshes.",
)
_debug = False


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False) -> None:
    global _debug
    _debug = debug


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A Hugging Face config.json (or its directory), or package.module:factory.")],
    cluster: Annotated[str, typer.Option(help="NODESxDEVICESxKIND, for example 8x8xH100.")],
    batch: Annotated[int, typer.Option(min=1, help="Global batch size.")],
    seq: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 2048,
    strategy: Annotated[str, typer.Option(help="auto, ddp, zero1, zero2, zero3 (fsdp), hsdp, tp or zero1+tp.")] = "auto",
    memory: Annotated[str | None, typer.Option(help="Limit per device, for example 60GiB.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full; or leave it to the search.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16-mixed, or leave the model's own.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is counted.")] = "adamw",
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Pieces of the batch, one after the other.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes that are added up before a step of the optimizer.")] = 1,
    degrees: Annotated[str | None, typer.Option(help="Devices for what: dp=8,tp=8 (also cp); others are searched.")] = None,
    logical_mesh: Annotated[
        str | None, typer.Option(help="search, given (nodes x devices), or sizes as 8x8 or dp=8,tp=8.")
    ] = None,
    respect_axis_names: Annotated[
        bool, typer.Option("--respect-axis-names", help="Use axes of --logical-mesh named dp, fsdp, cp or tp only for that.")
    ] = False,
    alternatives: Annotated[bool, typer.Option(help="Solve the named strategies too, to compare.")] = True,
    inference: Annotated[bool, typer.Option("--inference", help="Plan without a backward.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of the report.")] = False,
) -> None:
    """Plan a model for a cluster and print the report. Needs no accelerator."""
    from meshwright.planner.ir.mesh import Cluster

    where = Cluster.parse(cluster)
    from meshwright.options import read_degrees, read_logical_mesh

    with _Phases(Console(stderr=True)) as phases, collector.paused():
        phases("load")
        from meshwright.api import plan as make_plan
        from meshwright.models import load_named

        named = load_named(model, batch, seq)
        if inference:
            named.model.eval()
        made = make_plan(
            named.model,
            where,
            named.example_inputs,
            strategy=strategy,
            memory_limit=memory,
            recompute=recompute,
            precision=precision,
            optimizer=optimizer,
            micro_batches=micro_batches,
            accumulate=accumulate,
            degrees=None if degrees is None else read_degrees(degrees),
            logical_mesh=None if logical_mesh is None else read_logical_mesh(logical_mesh),
            respect_axis_names=respect_axis_names,
            alternatives=alternatives,
            training=False if inference else None,
            progress=phases,
        )
    if out is not None:
        made.save(out)
    if json:
        typer.echo(made.to_json())
        return
    from meshwright.report import print_report
    from meshwright.report.tables import screen

    print_report(made, screen())


@app.command()
def memory(
    model: Annotated[str, typer.Argument(help="A Hugging Face config.json (or its directory), or package.module:factory.")],
    batch: Annotated[int, typer.Option(min=1, help="Global batch size.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 2048,
    precision: Annotated[str | None, typer.Option(help="bf16-mixed, or leave the model's own.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is counted.")] = "adamw",
    recompute: Annotated[str | None, typer.Option(help="none, selective or full; or all of them.")] = None,
    low_rank: Annotated[int | None, typer.Option(help="Train only low-rank adapters of this rank; the model is frozen.")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Count inference alone.")] = False,
    device: Annotated[list[str] | None, typer.Option(help="Kinds of devices to fit it on; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Count what a model needs: weights, training, inference, and the fewest devices that fit it. Needs no weights."""
    from json import dumps

    with _Phases(Console(stderr=True)) as phases:
        phases("count")
        from meshwright.calculator import memory as count
        from meshwright.models import load_named

        named = load_named(model, batch, seq)
        found = count(
            named.model,
            named.example_inputs,
            optimizer=optimizer,
            precision=precision,
            recompute=recompute,
            low_rank=low_rank,
            training=not inference,
            devices=device or ("H100",),
        )
    if json:
        typer.echo(dumps(found.to_json_dict(), indent=1))
        return
    from meshwright.report.memory import print_memory
    from meshwright.report.tables import screen

    print_memory(found, screen())


@app.command()
def advise(
    model: Annotated[str, typer.Argument(help="A Hugging Face config.json (or its directory), or package.module:factory.")],
    cluster: Annotated[str, typer.Option(help="NODESxDEVICESxKIND, for example 8x8xH100, or 4x8xA100-80@25Gbit.")],
    batch: Annotated[int, typer.Option(min=1, help="Global batch size.")],
    seq: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 2048,
    precision: Annotated[str | None, typer.Option(help="bf16-mixed, or leave the model's own.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is counted.")] = "adamw",
    memory: Annotated[str | None, typer.Option(help="Limit per device, for example 60GiB.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full; or leave it to the search.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Plan every named strategy and say which to use, and why."""
    from json import dumps

    with _Phases(Console(stderr=True)) as phases:
        phases("load")
        from meshwright.advice import advise as find
        from meshwright.models import load_named

        named = load_named(model, batch, seq)
        found = find(
            named.model,
            cluster,
            named.example_inputs,
            optimizer=optimizer,
            precision=precision,
            memory_limit=memory,
            recompute=recompute,
            progress=phases,
        )
    if json:
        typer.echo(dumps(found.to_json_dict(), indent=1))
        return
    from meshwright.report.advice import print_advice
    from meshwright.report.tables import screen

    print_advice(found, screen())


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="A plan file, as plan --out writes it.")],
    model: Annotated[str, typer.Argument(help="A Hugging Face config.json (or its directory), or package.module:factory.")],
    out: Annotated[Path, typer.Option(help="A directory that is not there yet.")],
    batch: Annotated[int, typer.Option(min=1, help="Global batch size that the plan is for.")],
    seq: Annotated[int, typer.Option(min=1, help="Sequence length that the plan is for.")] = 2048,
    weights: Annotated[Path | None, typer.Option(help="Safetensors to pack: a file, or a directory of Hugging Face's.")] = None,
    seed: Annotated[int, typer.Option(help="torch.manual_seed before the model is made: its initial weights.")] = 0,
    format: Annotated[str, typer.Option(help="json; pt2 writes torch.export programs too, for other tools.")] = "json",
) -> None:
    """Write a planned model for mw.load, which needs no planner and no model source. Needs no ranks; holds the model in memory."""
    from meshwright.planner.ir.plan import Plan

    with _Phases(Console(stderr=True)) as phases, collector.paused():
        phases("load")
        import torch

        from meshwright.exporting import export_plan
        from meshwright.inputs import call_of
        from meshwright.models import load_named

        wanted = Plan.load(plan)
        torch.manual_seed(seed)
        named = load_named(model, batch, seq, device="cpu")
        named.model.train(wanted.training)
        export_plan(named.model, call_of(named.example_inputs), wanted, out, weights, format=format, progress=phases)
    typer.echo(
        f"{out}: {wanted.model or model} for {wanted.mesh.num_devices * (wanted.pipeline.degree if wanted.pipeline else 1)} ranks"
    )


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(help="A plan file, as plan --out writes it.")],
    model: Annotated[str, typer.Argument(help="A Hugging Face config.json (or its directory), or package.module:factory.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch size; as in the plan.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Sequence length; as in the plan.")] = None,
) -> None:
    """Check a plan without its cluster: run on small pieces what it shards. Exit code 1: the plan is wrong, and why."""
    from meshwright.planner.ir.errors import VerifyError
    from meshwright.planner.ir.plan import Plan

    with _Phases(Console(stderr=True)) as phases, collector.paused():
        phases("load")
        from meshwright.models import load_named
        from meshwright.verifying import batch_of, verify as check

        wanted = Plan.load(plan)
        planned = batch_of(wanted)
        named = load_named(model, batch or planned[0], seq or planned[1])
        try:
            found = check(wanted, named.model, named.example_inputs, progress=phases)
        except VerifyError as e:
            print(f"meshwright: {_one_line(e)}", file=sys.stderr)
            raise typer.Exit(1) from None
    typer.echo(found)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The script that every rank runs.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of local ranks.")] = 1,
    elastic: Annotated[bool, typer.Option("--elastic", help="Start it again, without the ranks that were killed.")] = False,
    allowed: Annotated[str | None, typer.Option(help="With --elastic: numbers of ranks it can run on, as 8,4,2.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="With --elastic: how often it is started again.")] = 10,
) -> None:
    """Run a script on local ranks, through torchrun's own machinery."""
    if not Path(script).is_file():
        from meshwright.planner.ir.errors import InputError

        raise InputError(f"script {script!r} does not exist")
    if elastic:
        from meshwright.options import read_counts
        from meshwright.runtime.elastic import run_elastic

        counts = None if allowed is None else read_counts(allowed)
        raise typer.Exit(run_elastic(script, args or [], ranks, allowed=counts, max_restarts=max_restarts))
    from meshwright.runtime.launch import run_script

    raise typer.Exit(run_script(script, args or [], ranks))


@app.command()
def devices() -> None:
    """List the devices that plans can be made for, and this machine's own."""
    import torch
    from rich.table import Table

    from meshwright.planner.cost import DEVICES
    from meshwright.report.units import format_bytes

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("device", "memory", "bandwidth", "bf16 peak", "source"):
        table.add_column(column)
    for name, device in DEVICES.items():
        peak = device.peak_flops_per_s.get("bfloat16", 0.0)
        rates = (f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s", f"{peak / 1e12:,.1f} TFLOP/s")
        table.add_row(name, format_bytes(device.memory_bytes), *rates, device.source)
    console = Console(highlight=False)
    console.print(table)
    here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"\nthis machine: {', '.join(here) or 'no CUDA device'}; torch {torch.__version__}")


class _Phases:
    """Names the running phase on a terminal's error stream; silent where there is no terminal."""

    def __init__(self, console: Console):
        self._status = console.status("start") if console.is_terminal else None

    def __call__(self, phase: str) -> None:
        if self._status is not None:
            self._status.update(phase)

    def __enter__(self) -> _Phases:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()


def main() -> None:
    """Entry point of ``meshwright`` and ``python -m meshwright``."""
    try:
        app()
    except MeshwrightError as e:
        if _debug:
            raise
        print(f"meshwright: {_one_line(e)}", file=sys.stderr)
        sys.exit(2)


def _one_line(e: Exception) -> str:
    return "; ".join(" ".join(line.split()) for line in (str(e), *getattr(e, "__notes__", [])))
