"""Compute the shapes of a graph that was read, without running it: an impossible graph is refused before any rank starts.

Every operator runs on fake tensors, which have shapes and no data. What lies on generated code (which values are views, what Inductor is
told about its arguments) is found here too, as lowering finds it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from meshwright.passes.emit import Emitter, share_values
from meshwright.passes.micro_batches import OVER_TIME
from meshwright.planner.ir.errors import FormatError
from meshwright.runtime.export.plain import fail

MAX_TENSOR_BYTES = 1 << 46
"""No tensor of one device is larger: it would exhaust every memory there is."""


def fake_mode() -> Any:
    """Inside it, tensors have shapes and no data."""
    return FakeTensorMode()


def declared(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Contiguous fake values for the placeholders, as the file declares them; to be called under a fake mode.

    Raises:
        FormatError: a shape is negative or too large.
    """
    found = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            dtype, shape = node.meta["declared"]
            if any(n < 0 for n in shape) or _numel(shape) * dtype.itemsize > MAX_TENSOR_BYTES:
                fail(f"input {node.name}", list(shape), "the shape of a tensor that a device can hold")
            found.append(torch.empty(shape, dtype=dtype))
    return found


def propagate(
    gm: fx.GraphModule,
    given: Sequence[torch.Tensor],
    where: str,
    *,
    like: fx.GraphModule | None = None,
    micro_batches: int = 1,
) -> list[Any]:
    """Give every node its fake value; to be called under a fake mode.

    Args:
        gm: a graph that was read.
        given: values of its placeholders.
        where: which graph, for the message.
        like: a graph that was propagated before, with which values are shared.
        micro_batches: how many pieces a function of ``OVER_TIME`` combines.

    Returns:
        What it returns.

    Raises:
        FormatError: an argument has another shape or type than is declared, or an operator does not take what it gets.
    """
    if like is not None:
        share_values(like, gm)
    emitter, left = Emitter(gm.graph, gm), iter(given)
    with _quiet():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta.update(val=_placed(node, next(left, None), where), alias=None)
            elif node.op == "call_function":
                val, alias = _value(emitter, node, where, micro_batches)
                node.meta.update(val=val, alias=alias)
    if next(left, None) is not None:
        raise FormatError(f"{where} has fewer inputs than it is given: export again")
    returned = next(reversed(gm.graph.nodes)).args[0]
    assert isinstance(returned, list | tuple)
    return [None if r is None else _tensor(r, where) for r in returned]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own report of operators that fail on fake tensors: pages of it, before our one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _placed(node: fx.Node, val: torch.Tensor | None, where: str) -> torch.Tensor:
    dtype, shape = node.meta["declared"]
    if val is None or val.dtype != dtype or tuple(val.shape) != tuple(shape):
        given = "nothing" if val is None else f"{val.dtype} {list(val.shape)}"
        raise FormatError(f"{where}: input {node.name} is declared {dtype} {list(shape)} and gets {given}: export again")
    return val


def _value(emitter: Emitter, node: fx.Node, where: str, micro_batches: int) -> tuple[Any, int | None]:
    try:
        if node.target is operator.getitem:
            _check_getitem(node)
        if node.target in OVER_TIME.values():
            val, alias = node.target([node.args[0].meta["val"]] * micro_batches), None  # type: ignore
        else:
            on_cpu = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
            val, alias = emitter.value(node.target, tuple(node.args), on_cpu)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FormatError(
            f"{where}: node {node.name} = {node.target} does not work on its arguments: {reason}: export again"
        ) from None
    for result in val if isinstance(val, list | tuple) else (val,):
        if isinstance(result, torch.Tensor) and _numel(result.shape) * result.dtype.itemsize > MAX_TENSOR_BYTES:
            fail(f"{where}: node {node.name}", list(result.shape), "the shape of a tensor that a device can hold")
    return val, alias


def _check_getitem(node: fx.Node) -> None:
    source, index = node.args
    val = source.meta["val"] if isinstance(source, fx.Node) else None
    if not isinstance(val, list | tuple) or type(index) is not int or not 0 <= index < len(val) or node.kwargs:
        raise ValueError("it takes one result of an operator with several, by number")


def _tensor(node: Any, where: str) -> torch.Tensor:
    val = node.meta["val"] if isinstance(node, fx.Node) else None
    if not isinstance(val, torch.Tensor):
        fail(f"{where}.outputs", node, "a node with one tensor")
    return val


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= int(n)
    return count
