"""One forward of the whole model on fake tensors, op by op: do the blocks that are left out do what the traced ones do?

The module tree does not show what forward does with it: ``for i, layer in enumerate(layers): if i % 4 == 3: ...`` or
``x / len(layers)``. So the forward is run twice without autograd, whole and shortened, and written down: which op, with
which arguments, on which result of which op before. Both must tell the same story, child by child and outside of them.
It costs a small part of a capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.planner.alike import Stack
from meshwright.planner.correspond import Unlike, child_of
from meshwright.planner.faking import fake_like, faked
from meshwright.planner.remember import Remembering, Results

# Where an op ran: ("", 0) outside of the stacks, else (path of the stack, number of the child).
Place = tuple[str, int]
Record = tuple[Any, ...]
Story = Mapping[Place, list[Record]]

_DEVICE_OF = torch.ops.prim.device.default
_OUTSIDE: Place = ("", 0)


class _Recorder(TorchDispatchMode):
    """Writes every op down, by place.

    Args:
        mode: of the fake tensors.
        known: ``id`` of the tensors that exist before, to who they are.
        counts: path of every stack to the number of its children and the first one that stands for others.
        results: what ops give, as far as that is known.
    """

    def __init__(
        self, mode: FakeTensorMode, known: Mapping[int, Record], counts: Mapping[str, tuple[int, int]], results: Results | None
    ):
        super().__init__()
        self._run = Remembering(mode, results=results)
        self.story: dict[Place, list[Record]] = {}
        self.place = _OUTSIDE
        self._known = dict(known)
        self._counts = counts
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return func(*args) if type(args[0]) is not FakeTensor else args[0].fake_device
        lines = self.story.setdefault(self.place, [])
        lines.append((func, self._told(args), tuple((k, self._told(v)) for k, v in kwargs.items())))
        result = self._run(func, args, kwargs)
        for i, made in enumerate(result if isinstance(result, list | tuple) else (result,)):
            if isinstance(made, torch.Tensor):
                self._known[id(made)] = ("made", *self.place, len(lines), i)
                self._alive.append(made)
        return result

    def _told(self, argument: Any) -> Record:
        if isinstance(argument, torch.Tensor):
            kind, path, number, *rest = self._known.get(id(argument), ("unknown", "", 0))
            return (tuple(argument.shape), argument.dtype, kind, path, self._relative(path, number), *rest)
        if isinstance(argument, list | tuple):
            return tuple(map(self._told, argument))
        return (type(argument), argument)

    def _relative(self, path: str, number: int) -> Any:
        """A child as this one, the one before, one of the first, or one counted from the end."""
        if path == self.place[0] and self.place[1] - number in (0, 1):
            return "this" if self.place[1] == number else "previous"
        count, first = self._counts.get(path, (0, 0))
        return number if number <= first else number - count


def _known(model: nn.Module, stacks: Sequence[Stack], inputs: Sequence[Any]) -> dict[int, Record]:
    """``id`` of every input, parameter and buffer to who it is; those of a stack's child by number and rest."""
    found: dict[int, Record] = {id(x): ("input", "", 0, i) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[id(tensor)] = ("state", "", 0, name)
        for stack in stacks:
            child = child_of(name, stack.path)
            if child is not None:
                found[id(tensor)] = ("state", stack.path, *child)
    return found


@contextmanager
def _watched(model: nn.Module, recorder: _Recorder, stacks: Sequence[Stack]) -> Iterator[None]:
    """While entered, the recorder knows which child runs."""

    def move(place: Place, *_: Any) -> None:
        recorder.place = place

    handles = []
    for stack in stacks:
        for i, child in enumerate(model.get_submodule(stack.path).children()):
            handles.append(child.register_forward_pre_hook(partial(move, (stack.path, i))))
            handles.append(child.register_forward_hook(partial(move, _OUTSIDE), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast(tensor: torch.Tensor, low: torch.dtype | None) -> torch.Tensor:
    return tensor if low is None or not tensor.is_floating_point() else tensor.to(low)


def story(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    stacks: Sequence[Stack],
    low: torch.dtype | None = None,
    results: Results | None = None,
) -> Story:
    """What the model's forward does, as it is now: whole, or shortened.

    Args:
        model, args, kwargs: the model and its call.
        stacks: its repeated blocks.
        low: what floats are cast to.
        results: what ops give, as far as that is known; what is learnt is added.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    fakes = [_cast(fake_like(x, mode), low) if isinstance(x, torch.Tensor) else x for x in leaves]
    counts = {s.path: (len(list(model.get_submodule(s.path).children())), s.first) for s in stacks}
    with ExitStack() as stack:
        stack.enter_context(faked(model, mode, False, low))
        recorder = _Recorder(mode, _known(model, stacks, fakes), counts, results)
        stack.enter_context(_watched(model, recorder, stacks))
        for context in (mode, torch.no_grad(), recorder):
            stack.enter_context(context)
        positional, named = pytree.tree_unflatten(fakes, spec)
        model(*positional, **named)
    return recorder.story


def check_stories(whole: Story, short: Story, stacks: Sequence[Stack]) -> None:
    """Compare what the whole forward does with what the shortened one does.

    Raises:
        Unlike: a child that is left out does something else, or the rest depends on how many there are.
    """
    if whole.get(_OUTSIDE) != short.get(_OUTSIDE):
        raise Unlike("forward depends on how many blocks there are")
    for stack in stacks:
        for number, index in enumerate(stack.kept):
            if whole.get((stack.path, index)) != short.get((stack.path, number)):
                raise Unlike(f"forward treats {stack.path}.{index} by its position")
        pattern = whole.get((stack.path, stack.first + 1))
        for index in range(stack.first + 2, stack.total - stack.tail + 1):
            if whole.get((stack.path, index)) != pattern:
                raise Unlike(f"forward treats {stack.path}.{index} otherwise than {stack.path}.{stack.first + 1}")
