"""Capture: a model and a batch become one joint forward+backward graph of the whole batch on one device.

    capture(model, kwargs={"input_ids": ids, "labels": labels})

runs the model once on fake tensors (no memory, no arithmetic), with the loss computed inside ``forward``, and puts the result
into normal form (:mod:`~meshwright.planner.normalise`). The ops of that run and of its backward are written down as they
come (:mod:`~meshwright.planner.record`); a model that does what is not followed so (memory written to and read by other names,
custom ``autograd.Function``, autocast) goes through ``torch.export`` and AOTAutograd, three to four times slower.

Shapes and dtypes of ``meta["val"]`` are exact; strides are not, for copies that only changed the memory layout are
dropped: whoever runs the ops makes inputs dense for the kernels that need it (``passes.local`` does).

Source: PyTorch's ``aot_export_joint_with_descriptors``, whose descriptors name every input, output and gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.planner import decompose, direct, masks
from meshwright.planner.assemble import Assembly, Traced
from meshwright.planner.explain import explained, kept_back
from meshwright.planner.faking import buffer_names, cast_parameters, fake_like, faked, low_precision, parameter_names
from meshwright.planner.ir.errors import InputError, TraceError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.joint import joint_module
from meshwright.planner.remember import Results
from meshwright.planner.schema import Unusual
from meshwright.planner.structure import Call, flatten

PRECISIONS = (None, "bf16-mixed")


class _Program(nn.Module):
    """The user's model with flat tensors in and out, differentiable results chosen, precision applied."""

    def __init__(self, model: nn.Module, call: Call, training: bool, precision: str | None):
        super().__init__()
        self.model = model
        self._call = call
        self._training_graph = training
        self._low = low_precision(precision)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._low is not None:
            tensors = tuple(t.to(self._low) if t.is_floating_point() else t for t in tensors)
        args, kwargs = self._call.arguments(tensors)
        with cast_parameters(self.model, self._low), _written_back(self.model):
            output = self.model(*args, **kwargs)
        return self._results(output)

    def _results(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Output tensors, each a tensor of its own; only the losses differentiable, if there are any."""
        call = self._call
        call.out_leaves, call.out_spec = flatten(output, "the model's output")
        chosen = _differentiable(call.out_leaves) if self._training_graph else set()
        call.differentiable = [i in chosen for i in range(len(call.out_leaves))]
        tensors = [(i, leaf) for i, leaf in enumerate(call.out_leaves) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise TraceError(
                f"the model returns no tensor (it returned {type(output).__name__}): forward must return its results"
            )
        if self._training_graph and not chosen:
            raise TraceError(
                "no output of the model depends on a parameter that requires a gradient, so there is nothing to train: "
                "check requires_grad and detach() in forward, or capture with training=False for inference"
            )
        return tuple((leaf if i in chosen else leaf.detach()).clone() for i, leaf in tensors)


def _differentiable(leaves: Sequence[Any]) -> set[int]:
    """Output leaves that a backward starts from: the 0-dim ones with a gradient if there are any, else all with one."""
    grads = {i: t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad}
    losses = {i for i, t in grads.items() if t.dim() == 0}
    return losses or set(grads)


@contextlib.contextmanager
def _written_back(model: nn.Module) -> Iterator[None]:
    """A buffer that forward *assigns* (``self.mean = new``) is changed in place instead, so that capture sees it."""
    before = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    yield
    for module, name, buffer in before:
        new = module._buffers.get(name)
        if new is not buffer and isinstance(new, torch.Tensor):
            with torch.no_grad():
                buffer.copy_(new)
            module._buffers[name] = buffer


# --- the joint trace ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _custom_functions(*, refused: bool = False) -> Iterator[set[type]]:
    """Collects the ``torch.autograd.Function`` classes that are applied while it is entered.

    Raises:
        Unusual: on the first, where they are ``refused``.
    """
    used: set[type] = set()
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        used.add(cls)
        if refused:
            raise Unusual("a custom autograd.Function")
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield used
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _exported(program: _Program, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The program as a graph of forward ops that know their source line and module.

    Export forgets the backward of a custom ``autograd.Function``: a program that applies one is returned as it is (its
    ops then know neither line nor module).
    """
    with _custom_functions() as used:
        module = torch.export.export(program, inputs, strict=False).module(check_guards=False)
    return program if used else module


@contextlib.contextmanager
def _no_fused_modules() -> Iterator[None]:
    """Recurrent layers (oneDNN, on CPUs only) and encoder layers (inference) are traced as what they compute."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    enabled, *_ = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=enabled, _fp32_precision=None)
        torch.backends.mha.set_fastpath_enabled(before)


def _gives_positions(call: Call) -> bool:
    """Whether the call passes position ids, as far as names tell: several positional tensors might be some."""
    names = [call.names[i] for i in call.tensor_at]
    return any("position" in name for name in names) or sum(name.startswith("args[") for name in names) > 1


@contextlib.contextmanager
def as_captured(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While entered, a model called with these inputs takes the paths that a capture takes."""
    with _no_fused_modules(), masks.as_in_eager(_gives_positions(Call.of(args, dict(kwargs)))):
        yield


@contextlib.contextmanager
def _capturing(call: Call, mode: FakeTensorMode, training: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """While entered, the model runs on fake tensors, with these inputs."""
    leaves = [call.leaves[i] for i in call.tensor_at]
    inputs = tuple(fake_like(x, mode, requires_grad=training and x.requires_grad) for x in leaves)
    with mode, torch.set_grad_enabled(training), _no_fused_modules(), masks.as_in_eager(_gives_positions(call)):
        yield inputs


def _exported_joint(program: _Program, call: Call, mode: FakeTensorMode, training: bool) -> Traced:
    """The joint graph by way of export and AOTAutograd."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # half a second

    with contextlib.ExitStack() as stack:
        inputs = stack.enter_context(_capturing(call, mode, training))
        exported = _exported(program, inputs)
        joint = aot_export_joint_with_descriptors(stack, exported, inputs, decompositions=decompose.table()).graph_module
        return Traced(joint.graph, joint, exported, mode)


def _recorded_joint(program: _Program, call: Call, mode: FakeTensorMode, training: bool, results: Results | None) -> Traced:
    """The joint graph in one pass.

    Raises:
        Exception: whatever the model raises; ``Unusual``, where one pass does not follow what it does.
    """
    with _capturing(call, mode, training) as inputs, _custom_functions(refused=True) as used:
        recorder = direct.record(program, inputs, mode, decompose.table(), training, results)
    if used:
        raise Unusual("a custom autograd.Function")
    return Traced(recorder.graph, recorder.holder, program, mode)


def _trace(model: nn.Module, call: Call, training: bool, precision: str | None, results: Results | None) -> Traced:
    program = _Program(model, call, training, precision)
    program.training = model.training
    with explained(model):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with kept_back(), faked(model, mode, training):
                return _recorded_joint(program, call, mode, training, results)
        except Exception:  # whatever it is: the other way may follow it, or says it better
            mode = FakeTensorMode(allow_non_fake_inputs=True)
        with faked(model, mode, training):
            return _exported_joint(program, call, mode, training)


# --- the entry ----------------------------------------------------------------------------------------------------


def _check(model: Any, args: Any, kwargs: Any, precision: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: a torch.nn.Module is needed")
    if not isinstance(args, tuple):
        raise InputError(
            f"args is a {type(args).__name__}: positional inputs come as a tuple, keyword inputs as a dict in kwargs"
        )
    if not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs is a {type(kwargs).__name__}: a dict of keyword inputs is needed")
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown: use one of {', '.join(map(repr, PRECISIONS))}")


def _wants_backward(model: nn.Module, call: Call, training: bool | None) -> bool:
    if training is not None:
        return training
    tensors = [*model.parameters(), *(call.leaves[i] for i in call.tensor_at)]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    training: bool | None = None,
    results: Results | None = None,
) -> Capture:
    """Captures ``model(*args, **kwargs)`` as one graph, with the backward if it is to be trained.

    The model keeps its weights, buffers and mode; nothing is computed and no weight is copied or moved. Modules run in
    the mode (``train()`` or ``eval()``) that they are in.

    Args:
        model: parameters real, fake or on the meta device; tied parameters stay tied.
        args: positional inputs of one call, global shapes; tensors real, fake or meta; other leaves are baked in.
        kwargs: keyword inputs, likewise.
        precision: None, or ``"bf16-mixed"``: floating parameters and inputs are cast to bfloat16 at the start of the
            forward, gradients come out in the parameters' own type.
        training: whether to capture a backward; None: if gradients are enabled and a parameter or an input requires one.
        results: what ops give on fake tensors, as far as that is known; what is learnt is added.

    Raises:
        InputError: an argument of the wrong kind.
        TraceError: the model cannot be captured; names the source line and what to change.
    """
    kwargs = {} if kwargs is None else kwargs
    _check(model, args, kwargs, precision)
    call = Call.of(args, dict(kwargs))
    backward = _wants_backward(model, call, training)
    traced = _trace(model, call, backward, precision, results)
    done = Assembly(traced, parameter_names(model), buffer_names(model), call)
    graph, view = done.run()
    return Capture(
        gm=joint_module(graph),
        graph=view,
        in_spec=call.spec,
        out_spec=call.out_spec,
        baked_inputs={i: leaf for i, leaf in enumerate(call.leaves) if not isinstance(leaf, torch.Tensor)},
        training=backward,
        precision=precision,
        constants=done.constants,
        fake_mode=traced.mode,
    )
