"""One run of a program and of its backward, recorded: see :mod:`~meshwright.planner.record`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.planner.faking import fake_like
from meshwright.planner.record import Recorder, watch_backward, watched_modules
from meshwright.planner.remember import Results
from meshwright.planner.schema import Unusual


@contextlib.contextmanager
def _as_exported() -> Iterator[None]:
    """While entered, a model that asks is told that it is exported, as it is where export runs it."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, f) for f in flags]
    for flag in flags:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """While entered, autocast cannot be switched on: it keeps what it has cast.

    Raises:
        Unusual: on the attempt.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Unusual("autocast is on")
    original = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        if self._enabled:
            raise Unusual("autocast is switched on")
        return original(self)

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]


def _held(value: Any) -> Iterator[int]:
    """``id`` of every tensor in a value."""
    if isinstance(value, torch.Tensor):
        yield id(value)
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _held(inner)


@contextlib.contextmanager
def _nothing_assigned(program: nn.Module) -> Iterator[None]:
    """Checks that no module holds a tensor that it did not hold before.

    Raises:
        Unusual: one does.
    """
    before = [(module, set(_held(vars(module)))) for module in program.modules()]
    yield
    if any(not known.issuperset(_held(vars(module))) for module, known in before):
        raise Unusual("forward assigns a tensor to a module")


def record(
    program: nn.Module,
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
    training: bool,
    known: Results | None = None,
) -> Recorder:
    """The joint graph of one call of ``program``, whose state is fake, in the same form as AOTAutograd gives it.

    Args:
        program: flat tensors in and out.
        inputs: fake tensors of ``mode``.
        mode: of all fake tensors.
        decompositions: overload to what is done in its place.
        training: whether to record a backward.
        known: what ops give, as far as that is known; what is learnt is added.

    Raises:
        Exception: whatever the program raises; ``Unusual``, where a recorder cannot follow what it does.
    """
    recorder = Recorder(mode, decompositions, type(program).forward.__code__, known)
    state: list[tuple[torch.Tensor, Any]] = [(p, ParamAOTInput(n)) for n, p in program.named_parameters()]
    buffers = [(b, BufferAOTInput(n)) for n, b in program.named_buffers()]
    state += [*buffers, *((x, PlainAOTInput(i)) for i, x in enumerate(inputs))]
    before = {id(t): recorder.placeholder(t, desc, not isinstance(desc, BufferAOTInput)) for t, desc in state}
    with contextlib.ExitStack() as stack:
        for context in (
            _as_exported(),
            _no_autocast(),
            _nothing_assigned(program),
            watched_modules(program, recorder),
        ):
            stack.enter_context(context)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(recorder)
        outputs = program(*inputs)
        recorder.check()
        gradients = _backward(recorder, outputs, [t for t, _ in state if t.requires_grad], mode) if training else {}
    results: list[torch.Tensor | None] = [b for b, _ in buffers if recorder.node_of(b) is not before[id(b)]]
    descs: list[Any] = [InputMutationAOTOutput(desc) for b, desc in buffers if recorder.node_of(b) is not before[id(b)]]
    descs += [PlainAOTOutput(i) for i in range(len(outputs))]
    descs += [GradAOTOutput(desc) for t, desc in state if t.requires_grad and training]
    results += [*outputs, *gradients.values()]
    recorder.finish(results, descs)
    return recorder


def _backward(
    recorder: Recorder, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], mode: FakeTensorMode
) -> dict[int, torch.Tensor | None]:
    """Gradients of ``inputs``, by their ``id``, with a tangent for each output that has one."""
    recorder.in_backward = True
    ends = [(i, x) for i, x in enumerate(outputs) if x.requires_grad]
    tangents = [fake_like(x, mode) for _, x in ends]
    for (i, _), tangent in zip(ends, tangents, strict=True):
        recorder.placeholder(tangent, TangentAOTInput(PlainAOTOutput(i)), fixed=True)
    watch_backward([x for _, x in ends], recorder)
    found = torch.autograd.grad([x for _, x in ends], inputs, tangents, allow_unused=True) if inputs else ()
    return {id(x): g for x, g in zip(inputs, found, strict=True)}
