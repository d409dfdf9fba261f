"""What a pass is, and the pipeline that verifies, prints and times each.

A pass is a frozen dataclass: its fields are its options, calling it takes a graph module and returns one. The graph is
valid before and valid after (see :func:`check_graph`); the pass may change the one it got.

With ``MESHWRIGHT_DUMP=dir`` every pass leaves a numbered readable file; ``MESHWRIGHT_DEBUG=4`` prints the graphs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.spec import format_placements


class Pass(Protocol):
    """One step of lowering."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``gm``; valid before, valid after."""
        ...


def pass_name(rewrite: Pass) -> str:
    """``BucketAllReduces`` -> ``bucket_all_reduces``."""
    name = type(rewrite).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def run_passes(passes: Iterable[Pass], gm: fx.GraphModule, label: str, times_s: dict[str, float] | None = None) -> fx.GraphModule:
    """Run ``passes`` in order, checking the graph after each.

    Args:
        passes: in order.
        gm: the graph to start from.
        label: name of the folder for dumps, such as ``"rank-0-1"``.
        times_s: filled with seconds by pass name.

    Raises:
        VerifyError: a pass returned an invalid graph; names the pass and the node.
    """
    for number, rewrite in enumerate(passes):
        began = time.perf_counter()
        name = pass_name(rewrite)
        gm = rewrite(gm)
        if times_s is not None:
            times_s[name] = time.perf_counter() - began
        try:
            check_graph(gm)
        except VerifyError as error:
            error.add_note(f"after pass {name} ({label})")
            raise
        dump(gm, label, f"{number:02d}_{name}")
    return gm


def check_graph(gm: fx.GraphModule) -> None:
    """Check what every graph between passes must be.

    Operands are defined before they are used, every node knows its fake value and its phase, and no forward node reads a
    backward one.

    Raises:
        VerifyError: it is not so; names the node.
    """
    seen: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        phase = node.meta.get("phase")
        if node.op != "output" and ("val" not in node.meta or phase not in ("forward", "backward")):
            raise VerifyError(f"node {node.format_node()} has no fake value or no phase")
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise VerifyError(f"node {node.name} reads {operand.name} before it is made")
            if phase == "forward" and seen[operand] == "backward":
                raise VerifyError(f"forward node {node.name} reads {operand.name}, which the backward makes")
        seen[node] = phase


def dump(gm: fx.GraphModule, label: str, name: str) -> None:
    """Write or print the graph where the environment asks for it."""
    folder = os.environ.get("MESHWRIGHT_DUMP")
    debug = os.environ.get("MESHWRIGHT_DEBUG", "0")
    if folder:
        path = Path(folder) / label
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.txt").write_text(text_of(gm))
    if debug.isdigit() and int(debug) >= 4:
        print(f"# {label} {name}\n{text_of(gm)}")


def text_of(gm: fx.GraphModule) -> str:
    """The graph as text, one node a line: ``name: float32[4, 8] S(0)R = op(operands)``, phases as headings."""
    lines, phase = [], None
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and node.meta.get("phase") != phase:
            phase = node.meta.get("phase")
            lines.append(f"# {phase}")
        lines.append(_line(node))
    return "\n".join(lines) + "\n"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    made = _type_text(node.meta.get("val"))
    if placements := node.meta.get("placements"):
        made += f" {format_placements(placements)}"
    if node.op == "placeholder":
        return f"input {node.name}: {made}"
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    target = getattr(node.target, "__name__", node.target) if not isinstance(node.target, torch._ops.OpOverload) else node.target
    return f"{node.name}: {made} = {target}({args})"


def _type_text(val: object) -> str:
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    if isinstance(val, list | tuple):
        return f"({', '.join(map(_type_text, val))})"
    return "-"
