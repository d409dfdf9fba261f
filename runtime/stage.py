"""One stage of one rank: runs its programs for one micro-batch after the other and adds up what they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.passes.lower_stages import StageProgram
from meshwright.passes.stage_graphs import ONCE, SUM, Finish
from meshwright.passes.weights_apart import split_backward
from meshwright.runtime.boxed import Boxed, boxed, in_a_list
from meshwright.runtime.compile import compile_module, compile_program, compiled_later
from meshwright.runtime.device import use_device_kernels
from meshwright.runtime.direct_calls import call_directly
from meshwright.runtime.fused_bias import fuse_biases
from meshwright.runtime.inplace import reduce_in, reduce_in_place

_SHORT = (torch.bfloat16, torch.float16)

Runner = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class BoundFinish:
    """What is done once per step, made callable.

    Attributes:
        finish: what.
        run: its program; takes its arguments in a list and frees each once it is read.
        given_away: names of the sums that nothing else reads: they are reduced where they are.
    """

    finish: Finish
    run: Boxed
    given_away: frozenset[str]


@dataclass(frozen=True)
class BoundStage:
    """A stage's program made callable.

    Attributes:
        program: the stage.
        forward: as ``program.local.forward``.
        backward: as ``program.local.backward``; where the schedule splits it, the first half: gradients to send, then what
            ``later`` takes. Both take their arguments in a list, which they empty: what was saved is freed on the way.
        later: the second half, or None.
        again: as ``program.local.again``.
        finishes: as ``program.finishes``.
    """

    program: StageProgram
    forward: Runner
    backward: Boxed | None
    later: Boxed | None
    again: Runner | None
    finishes: tuple[BoundFinish, ...]


def bind_stage(program: StageProgram, fake_mode: Any, device: torch.device, *, splits: bool, compile: bool) -> BoundStage:
    """Make a stage callable on ``device``.

    Args:
        program: the stage; rewritten in place for the device.
        fake_mode: that its graphs' fake values belong to.
        device: where it runs.
        splits: whether the backward runs in two halves.
        compile: whether graphs go through Inductor.
    """
    local = use_device_kernels(program.local, device)
    if not compile:
        local = reduce_in_place(fuse_biases(local))
        call_directly(g for g in (local.again,) if g is not None)
    again = None if local.again is None else compiled_later(local.again, fake_mode) if compile else local.again.forward
    finishes = _bind_finishes(program.finishes)
    if local.backward is None or not splits:
        if compile:
            forward, one_by_one = compile_program(local, fake_mode)
            return BoundStage(program, forward, None if one_by_one is None else in_a_list(one_by_one), None, again, finishes)
        call_directly(local.graphs)
        backward = None if local.backward is None else boxed(local.backward)
        return BoundStage(program, local.forward.forward, backward, None, again, finishes)
    count = len(local.gradients)
    halves = split_backward(local.backward, range(count - len(program.upstream), count))
    graphs = (local.forward, halves.first, halves.later)
    if not compile:
        call_directly(graphs)
    forward = compile_module(local.forward, fake_mode) if compile else local.forward.forward
    first, later = (in_a_list(compile_module(g, fake_mode)) if compile else boxed(g) for g in graphs[1:])
    return BoundStage(program, forward, first, later, again, finishes)


def _bind_finishes(finishes: Sequence[Finish]) -> tuple[BoundFinish, ...]:
    reads = Counter(name for f in finishes for role, name in f.inputs if role == "sum")
    bound = []
    for f in finishes:
        names = dict(zip((n for n in f.program.graph.nodes if n.op == "placeholder"), f.inputs, strict=True))
        away = {node: name for node, (role, name) in names.items() if role == "sum" and reads[name] == 1}
        reduce_in(f.program, away)
        bound.append(BoundFinish(f, boxed(f.program), frozenset(away.values())))
    return tuple(bound)


class StageRun:
    """A stage during steps.

    Attributes:
        program: the stage as the first micro-batch runs it.
        sums: results added up over micro-batches, by name; the last stage's outputs and gradients.
        mutations: new values of buffers.
    """

    def __init__(self, bound: Sequence[BoundStage]):
        self._bound = tuple(bound)
        self.program = bound[0].program
        self.sums: dict[str, torch.Tensor] = {}
        self.mutations: dict[str, torch.Tensor] = {}
        self._own: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._given: Sequence[Mapping[str, torch.Tensor]] = ()
        self._tangents: Mapping[str, torch.Tensor] = {}
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._copies: list[torch.Tensor] | None = None
        self._later: dict[int, tuple[torch.Tensor, ...]] = {}

    def begin(self, given: Sequence[Mapping[str, torch.Tensor]], tangents: Mapping[str, torch.Tensor]) -> None:
        """Start a step.

        Args:
            given: per micro-batch, the forward's inputs by value name, but for what is received.
            tangents: of the model's outputs.
        """
        self._given, self._tangents = given, tangents
        self.forget()

    def forget(self) -> None:
        """Drop everything of a step."""
        self.sums, self.mutations, self._own, self._copies = {}, {}, set(), None
        self._kept.clear()
        self._later.clear()

    def held_bytes(self) -> int:
        """Bytes of activations, gradients and received values that wait for a backward; parameters and inputs not counted."""
        shared = {t.untyped_storage().data_ptr() for given in self._given for t in given.values()}
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for kept in (*self._kept.values(), *self._later.values())
            for t in kept
        }
        return sum(size for at, size in found.items() if at not in shared)

    def _at(self, i: int) -> BoundStage:
        return self._bound[i if len(self._bound) > 1 else 0]

    def forward(self, i: int, received: Sequence[torch.Tensor], *, keep: bool) -> tuple[torch.Tensor, ...]:
        """Micro-batch ``i`` forth; what the next stage gets. ``keep``: whether its backward will follow."""
        bound = self._at(i)
        local = bound.program.local
        given = {**self._given[i], **{s.name: t for s, t in zip(bound.program.receives, received, strict=True)}}
        with torch.no_grad():
            made = self._run(bound, [given[name] for name in local.inputs])
        self.mutations.update(zip(local.mutations, made, strict=False))
        at = len(local.mutations)
        for name in bound.program.outputs:
            if not self._is_there(name):
                self._add(name, made[at])
            at += 1
        sends = made[at : at + len(bound.program.sends)]
        if keep and local.backward is not None:
            self._kept[i] = [*made[len(made) - len(local.saved) :], *(given[name] for name in local.saved_inputs)]
        return tuple(t.contiguous() for t in sends)

    def _run(self, bound: BoundStage, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward's results; parameters that are kept gathered for the step are gathered by its first micro-batch."""
        if bound.again is not None and self._copies is not None:
            return list(bound.again(*inputs, *self._copies))
        local, made = bound.program.local, list(bound.forward(*inputs))
        end = len(made) - len(local.saved)
        start = end - len(local.kept)
        if local.kept:
            self._copies = made[start:end]
        return made[:start] + made[end:]

    def backward(self, i: int, given: Sequence[torch.Tensor], *, whole: bool) -> tuple[torch.Tensor, ...]:
        """Micro-batch ``i`` back; what the stage before gets. Unless ``whole``, :meth:`weights` must follow."""
        bound = self._at(i)
        program, run = bound.program, bound.backward
        assert run is not None
        there = {**self._tangents, **{s.name: t for s, t in zip(program.downstream, given, strict=True)}}
        arguments = [*self._kept.pop(i), *(there[name] for name in program.local.tangents)]
        del there, given
        with torch.no_grad():
            made = tuple(run(arguments))
        count = len(program.upstream)
        if bound.later is None:
            self._add_gradients(program, made[: len(made) - count])
            return tuple(t.contiguous() for t in made[len(made) - count :])
        self._later[i] = made[count:]
        if whole:
            self.weights(i)
        return tuple(t.contiguous() for t in made[:count])

    def weights(self, i: int) -> None:
        """The gradients of parameters for micro-batch ``i``."""
        bound = self._at(i)
        if bound.later is None:
            return
        with torch.no_grad():
            self._add_gradients(bound.program, tuple(bound.later(list(self._later.pop(i)))))

    def _add_gradients(self, program: StageProgram, made: Sequence[torch.Tensor]) -> None:
        named = [(n, t) for n, t in zip(program.local.gradients, made, strict=False) if not self._is_there(n)]
        names = [name for name, _ in named]
        if names and self._own.issuperset(names) and not any(name in self._dtypes for name in names):
            torch._foreach_add_([self.sums[name] for name in names], [grad for _, grad in named])
            return
        for name, grad in named:
            self._add(name, grad)

    def _is_there(self, name: str) -> bool:
        """Whether an earlier micro-batch has made this result, which is the same in all of them."""
        return name.startswith(ONCE) and name in self.sums

    def _add(self, name: str, value: torch.Tensor) -> None:
        """The first value is kept as it is: it may share memory with what is still being sent. The sum is this object's own.

        Addends of less than 32 bits are summed in float32: in bfloat16 each of many micro-batches would lose bits.
        """
        if name.startswith(SUM) and value.dtype in _SHORT:
            self._dtypes[name], value = value.dtype, value.float()
        if name not in self.sums:
            self.sums[name] = value
        elif name not in self._own:
            self.sums[name] = self.sums[name] + value
            self._own.add(name)
        else:
            self.sums[name].add_(value)

    def finish(
        self, known: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], *, training: bool
    ) -> dict[str, torch.Tensor]:
        """The step's results by name: sums, or what follows from them; without gradients unless ``training``."""
        found = {name.removeprefix(ONCE): t for name, t in self.sums.items() if not name.startswith(SUM)}
        for bound in self._bound[0].finishes:
            if bound.finish.role == "gradient" and not training:
                continue
            given = {"known": known, "input": inputs}
            arguments = [self._sum(name, bound) if role == "sum" else given[role][name] for role, name in bound.finish.inputs]
            with torch.no_grad():
                found.update(zip(bound.finish.results, bound.run(arguments), strict=True))
        return found

    def _sum(self, name: str, reader: BoundFinish) -> torch.Tensor:
        """A complete sum, in the element type of its addends."""
        total = self.sums.pop(name) if name in reader.given_away else self.sums[name]
        return total.to(self._dtypes.get(name, total.dtype))
