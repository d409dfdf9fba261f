"""Forward and backward graphs through Inductor; the only file that touches its entry point.

``torch._inductor.standalone_compile`` is private API of torch 2.13 and is used because it is the one entry that takes a
functional graph with ``_c10d_functional`` collectives and decomposes it itself (``compile_fx_inner`` refuses).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import aoti_compile_and_package, standalone_compile

from meshwright.passes.program import LocalProgram

Runner = Callable[..., Sequence[torch.Tensor]]


def compile_program(program: LocalProgram, fake_mode: Any) -> tuple[Runner, Runner | None]:
    """Compile a rank's graphs; gives what ``program.forward`` and ``program.backward`` give.

    Args:
        program: on its device.
        fake_mode: that the graphs' ``meta["val"]`` belong to.
    """
    forward = compile_module(program.forward, fake_mode)
    return forward, None if program.backward is None else compile_module(program.backward, fake_mode)


def compiled_later(module: fx.GraphModule, fake_mode: Any) -> Runner:
    """As :func:`compile_module`, at the first call: many training loops never make it."""
    compiled: list[Runner] = []

    def run(*args: Any) -> Sequence[torch.Tensor]:
        if not compiled:
            compiled.append(compile_module(module, fake_mode))
        return compiled[0](*args)

    return run


def compile_module(module: fx.GraphModule, fake_mode: Any) -> Runner:
    """Compile one graph of a program; it is left as it is."""
    module = copy.deepcopy(module)  # Inductor rewrites what it is given
    _convert_bools(module)
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(fake_mode)):
        return standalone_compile(module, examples, dynamic_shapes="from_example_inputs")


def _convert_bools(module: fx.GraphModule) -> None:
    """Convert bools to bytes and back by value: what travels between ranks is reinterpreted (``view``), and for that Inductor writes
    C++ that does not compile (torch 2.13, vectorised kernels)."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        x, wanted = node.args
        types = x.meta["val"].dtype, wanted
        if types == (torch.uint8, torch.bool):
            node.target, node.args = torch.ops.aten.ne.Scalar, (x, 0)
        elif types == (torch.bool, torch.uint8):
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (x,), {"dtype": torch.uint8}
    module.recompile()


def package(exported: Any, path: Path) -> None:
    """Compile what ``torch.export`` made to an AOTInductor package."""
    aoti_compile_and_package(exported, package_path=str(path))
