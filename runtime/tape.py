"""What a constructor does to its tensors, recorded without memory and replayed with the memory of a parameter or two.

    torch.manual_seed(0); Model()                 one process, whole
    tape = record(Model); tape.replay(keep)        the same numbers, one storage after the other, cut as soon as it is final

Recording runs the constructor on fake tensors of the CPU: not on the meta device, where libraries skip initialisations. The replay runs
every op in order with real memory, so that the random generator goes through the same states; a storage is freed after its last use,
and wherever the next use overwrites all of it (constructors initialise twice: layer by layer, then the whole model).

This file imports private modules of torch (fake tensors, dispatch modes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright.planner.ir.errors import InputError

OVERWRITING = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "bernoulli_", "log_normal_"}
)
"""In-place ops whose result does not depend on what was there."""

_ALIVE: list[Any] = []
"""Recorded models: destroying some of them crashes the interpreter (torch 2.13), so they live as long as the process. No memory."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as it was when an op saw it: a view of a storage."""

    storage: int
    bytes: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_all(self) -> bool:
        """Whether it is all of its storage."""
        numel = torch.Size(self.shape).numel()
        return self.offset == 0 and numel * self.dtype.itemsize == self.bytes


@dataclass(frozen=True, slots=True)
class Composite:
    """A function recorded as one op, since what it does depends on values: rejection sampling draws until all numbers fit."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Step:
    """One op: what it reads and what it made. Tensors in ``args`` and ``kwargs`` are :class:`Ref`; constants stay as they are."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Ref, ...]

    @property
    def name(self) -> str:
        return self.op.name if isinstance(self.op, Composite) else self.op._schema.name.partition("::")[2]

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The tensors that it is given."""
        return tuple(x for x in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Ref))

    @property
    def overwritten(self) -> int | None:
        """The storage of which it overwrites everything, whatever was there."""
        first = self.args[0] if self.args else None
        if self.name not in OVERWRITING or not isinstance(first, Ref) or not first.is_all:
            return None
        return None if any(r.storage == first.storage for r in self.refs[1:]) else first.storage

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        return isinstance(self.op, Composite) or torch.Tag.nondeterministic_seeded in self.op.tags


@dataclass(frozen=True)
class Tape:
    """A constructor's ops, and where its parameters and buffers are in the end.

    Attributes:
        steps: the ops in order.
        finals: parameters and buffers by every name.
    """

    steps: tuple[Step, ...]
    finals: Mapping[str, Ref]

    def replay(self, keep: Callable[[str, torch.Tensor], None], only: frozenset[int] | None = None) -> int:
        """Run the ops, or some of them, with real memory.

        Args:
            keep: called once for each name with its final tensor, whole; what it keeps it must copy.
            only: numbers of the steps to run; None: all.

        Returns:
            The most bytes that were held at once, what single ops take besides not counted.
        """
        steps = [(i, s) for i, s in enumerate(self.steps) if only is None or i in only]
        ends, names = self._ends(steps), self._names()
        memory: dict[int, torch.UntypedStorage] = {}
        most = 0
        for i, step in steps:
            _run(step, memory)
            most = max(most, sum(s.nbytes() for s in memory.values()))
            for storage, final in ends.get(i, ()):
                for name in names.get(storage, ()) if final else ():
                    keep(name, _tensor(self.finals[name], memory[storage]))
                memory.pop(storage, None)
        return most

    def _names(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, ref in self.finals.items():
            found.setdefault(ref.storage, []).append(name)
        return found

    def _ends(self, steps: list[tuple[int, Step]]) -> dict[int, list[tuple[int, bool]]]:
        """Per step, the storages whose contents nobody needs behind it, and whether they are final then."""
        found: dict[int, list[tuple[int, bool]]] = {}
        later: dict[int, str] = {}
        for i, step in reversed(steps):
            for storage in {r.storage for r in (*step.refs, *step.outs)}:
                if later.get(storage) != "needed":
                    found.setdefault(i, []).append((storage, storage not in later))
                later[storage] = "overwritten" if storage == step.overwritten else "needed"
        return found

    def needed(self, names: set[str]) -> frozenset[int]:
        """The steps that the final values of ``names`` depend on."""
        wanted, found = {self.finals[n].storage for n in names}, set()
        for i in reversed(range(len(self.steps))):
            step = self.steps[i]
            touched = {r.storage for r in (*step.refs, *step.outs)}
            if not touched & wanted:
                continue
            found.add(i)
            if step.overwritten is not None:
                wanted.discard(step.overwritten)
            wanted |= {r.storage for r in step.refs} - {step.overwritten}
        return frozenset(found)

    def own_steps(self, name: str) -> Iterator[Step]:
        """The steps that touch a parameter's storage, from the last one on that overwrites all of it."""
        storage = self.finals[name].storage
        mine = [s for s in self.steps if any(r.storage == storage for r in (*s.refs, *s.outs))]
        last = max((i for i, s in enumerate(mine) if s.overwritten == storage), default=0)
        return iter(mine[last:])


def _run(step: Step, memory: dict[int, torch.UntypedStorage]) -> None:
    for ref in step.refs:
        if ref.storage not in memory:  # overwritten by this op: freed when its former contents were of no more use
            memory[ref.storage] = torch.UntypedStorage(ref.bytes, device=ref.device)

    def real(x: Any) -> Any:
        if isinstance(x, Ref):
            return _tensor(x, memory[x.storage])
        return x.clone() if isinstance(x, torch.Tensor) else x

    args, kwargs = pytree.tree_map(real, (step.args, dict(step.kwargs)))
    made = [t for t in pytree.tree_leaves(step.op(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    for ref, tensor in zip(step.outs, made, strict=True):
        memory.setdefault(ref.storage, tensor.untyped_storage())


def _tensor(ref: Ref, storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=ref.dtype, device=ref.device).set_(storage, ref.offset, ref.shape, ref.stride)


# --- recording ----------------------------------------------------------------------------------------------------

_TRUNCATED = Composite("trunc_normal_", torch.nn.init._no_grad_trunc_normal_)


@dataclass
class _Recorder(TorchDispatchMode):
    steps: list[Step] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = pytree.tree_map(self.ref, (args, kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(before[0][0], Ref):
            return self.value(before[0][0])
        result = func(*args, **(kwargs or {}))
        outs = tuple(self.ref(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        if all(isinstance(out, Ref) for out in outs):
            self.steps.append(Step(func, tuple(before[0]), before[1], outs))
        return result

    def value(self, ref: Ref) -> Any:
        """A number that the constructor asks for, where nothing random is in it: computed from the ops so far."""
        tape, found = Tape(tuple(self.steps), {"": ref}), []
        only = tape.needed({""})
        if any(tape.steps[i].draws for i in only):
            raise InputError("a number that was drawn decides what is made")
        with _disable_current_modes():
            tape.replay(lambda _, whole: found.append(whole.item()), only)
        return found[0]

    def truncated(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.nn.init.trunc_normal_`` as one op."""
        ref = self.ref(tensor)
        self.steps.append(Step(_TRUNCATED, (ref, *args), kwargs, (ref,)))
        return tensor

    def ref(self, value: Any) -> Any:
        """A fake tensor as a reference; a real one (a constant) as a copy; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, FakeTensor):
            with _disable_current_modes():
                return value.detach().clone()
        self.alive.append(value)  # else its storage's address is used again
        storage = value.untyped_storage()
        return Ref(
            storage._cdata,
            storage.nbytes(),
            value.dtype,
            value.device,
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
        )


def record(make: Callable[[], nn.Module]) -> Tape:
    """Record what ``make`` does to tensors.

    Raises:
        InputError: it needs the values of its tensors, or gives no module.
    """
    recorder, generator = _Recorder(), torch.get_rng_state()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model: Any = None
    try:
        with fake, recorder, patch.object(torch.nn.init, "_no_grad_trunc_normal_", recorder.truncated):
            model = make()
    except Exception as error:
        _ALIVE.append((fake, recorder, model))
        raise InputError(
            f"the model's constructor cannot be replayed ({type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}): "
            "it needs values of its tensors; pass the module itself with real values on every rank, or init='none' and load a checkpoint "
            "with pm.load_checkpoint"
        ) from error
    finally:
        torch.set_rng_state(generator)
    _ALIVE.append((fake, recorder, model))
    if not isinstance(model, nn.Module):
        raise InputError(f"the model's constructor gives a {type(model).__name__}, which is no nn.Module")
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    finals = {name: recorder.ref(t.detach()) for name, t in named.items()}
    constants = [name for name, ref in finals.items() if not isinstance(ref, Ref)]
    if constants:
        raise InputError(
            f"the model's constructor cannot be replayed: {constants[0]} was made outside of it; make all tensors in the constructor, or "
            "pass the module itself with real values on every rank"
        )
    return Tape(tuple(recorder.steps), finals)
