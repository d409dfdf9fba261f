"""A program of all ranks as files, and one rank's program out of them, checked before anything runs.

What is checked, on fake tensors: every operator takes what it gets; a graph's inputs have the shapes that the interface says of parameters,
buffers and batches; what goes from the forward into the backward fits; a gradient has the shape of its parameter. So code that is
generated or compiled from a file can rely on its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from meshwright.passes.lower_stages import PipelineProgram, StageProgram
from meshwright.passes.program import LocalProgram
from meshwright.passes.stage_graphs import ONCE
from meshwright.planner.ir.errors import FormatError
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.ir.spec import Placements, local_shape
from meshwright.runtime.export.check import declared, propagate
from meshwright.runtime.export.graphs import GraphReader, group_markers
from meshwright.runtime.export.plain import fail, read_record
from meshwright.runtime.export.records import hooks
from meshwright.runtime.interface import Interface

T = TypeVar("T", LocalProgram, PipelineProgram)


@dataclass(frozen=True)
class Place:
    """Which rank reads.

    Attributes:
        sizes: of the mesh (inside a stage, where there are stages).
        coordinate: on it.
        device: of the rank.
    """

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    device: torch.device

    @property
    def index(self) -> int:
        """Row-major number of the coordinate."""
        found = 0
        for n, i in zip(self.sizes, self.coordinate, strict=True):
            found = found * n + i
        return found


def read_program(
    kind: type[T], data: Any, interface: Interface, place: Place, pipeline: Pipeline | None, reader: GraphReader, where: str
) -> T:
    """A rank's program from the JSON data of one rank, checked; to be called under a fake mode.

    Raises:
        FormatError: it is not what a program is.
    """
    program = read_record(kind, data, where, hooks(reader))
    checker = _Checker(interface, place, pipeline, where)
    try:
        if isinstance(program, LocalProgram):
            checker.check_whole(program)
        else:
            checker.check_stages(program)
    except FormatError:
        raise
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise FormatError(f"{where} contradicts itself: {type(error).__name__}: {str(error)[:120]}: export again") from None
    return program


def over_groups(program: T, groups: Sequence[str]) -> T:
    """A copy of a program that was read, over the process groups of the given names."""
    bind = partial(_bound, names=dict(zip(group_markers(len(groups)), groups, strict=True)))
    if isinstance(program, LocalProgram):
        return _with_graphs(program, bind)
    stages = tuple({k: _stage_with(stage, bind) for k, stage in variants.items()} for variants in program.stages)
    before = program.before
    return replace(program, stages=stages, before=None if before is None else replace(before, program=bind(before.program)))


def _stage_with(stage: StageProgram, bind: Callable[[fx.GraphModule], fx.GraphModule]) -> StageProgram:
    finishes = tuple(replace(f, program=bind(f.program)) for f in stage.finishes)
    return replace(stage, local=_with_graphs(stage.local, bind), finishes=finishes)


def _with_graphs(local: LocalProgram, bind: Callable[[fx.GraphModule], fx.GraphModule]) -> LocalProgram:
    again = None if local.again is None else bind(local.again)
    backward = None if local.backward is None else bind(local.backward)
    return replace(local, forward=bind(local.forward), again=again, backward=backward)


def _bound(gm: fx.GraphModule, names: Mapping[str, str]) -> fx.GraphModule:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], new.__getitem__))
            continue
        new[node] = graph.node_copy(node, new.__getitem__)
        if str(node.target).startswith("_c10d_functional."):
            new[node].args = tuple(names.get(a, a) if isinstance(a, str) else a for a in new[node].args)
    return fx.GraphModule(nn.Module(), graph)


# --- checks -------------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class _Checker:
    """Checks a program against its interface."""

    def __init__(self, interface: Interface, place: Place, pipeline: Pipeline | None, where: str):
        self.interface, self.place, self.pipeline, self.where = interface, place, pipeline, where
        self.parameters = {i.name: self._local(i.shape, i.placements) for i in interface.of("parameter")}
        self.buffers = {i.name: i.shape for i in interface.of("buffer")}

    def _local(self, shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
        return local_shape(shape, placements, self.place.sizes, self.place.coordinate)

    def shapes(self, micro_batch: int) -> Shapes:
        """Element type and shape of every input that the interface knows, as this rank passes it."""
        found: Shapes = {}
        for i in self.interface.inputs:
            shape = i.shape
            cut = None if self.pipeline is None else self.pipeline.inputs.get(i.value)
            if cut is not None and i.role == "input":
                assert self.pipeline is not None
                shape = local_shape(shape, (cut,), (self.pipeline.micro_batches,), (micro_batch,))
            found[i.value] = (i.dtype, self._local(shape, i.placements))
        return found

    def check_whole(self, local: LocalProgram) -> None:
        count = len(self.interface.outputs)
        if (
            len(local.outputs) != count
            or (local.backward is not None) != self.interface.training
            or not self._same_buffers(local)
        ):
            raise FormatError(
                f"{self.where} has other outputs, buffers or another backward than its interface says: export again"
            )
        made = self.check_local(local, self.shapes(0), {}, self.where)
        for out, index in zip(self.interface.outputs, local.outputs, strict=True):
            if (index is None) != (out.shape is None) or (index is not None and not 0 <= index < len(made)):
                fail(self.where, index, "the index of an output")
        tangents = [
            made[i] for o, i in zip(self.interface.outputs, local.outputs, strict=True) if o.differentiable and i is not None
        ]
        if local.backward is not None:
            shapes = self.shapes(0)
            wanted = [(t.dtype, tuple(t.shape)) for t in tangents]
            if [shapes[name] for name in local.tangents] != wanted:
                raise FormatError(f"{self.where} has tangents of other shapes than its outputs: export again")

    def _same_buffers(self, local: LocalProgram) -> bool:
        return local.mutations == self.interface.mutations

    def check_local(self, local: LocalProgram, known: Shapes, also: Shapes, where: str) -> list[torch.Tensor]:
        """One forward and backward; the fake results of the forward, but for what is saved and kept."""
        self._check_names(local.inputs, {**known, **also}, local.forward, f"{where}.forward")
        given = declared(local.forward)
        made = propagate(local.forward, given, f"{where}.forward")
        end = len(made) - len(local.saved)
        start = end - len(local.kept)
        if start < len(local.mutations) or any(m is None for m in made):
            raise FormatError(f"{where}.forward has fewer results than are named: export again")
        for name, new in zip(local.mutations, made, strict=False):
            if self.buffers.get(name) != tuple(new.shape):
                fail(where, list(new.shape), f"the shape of buffer {name}")
        if local.again is not None:
            self._check_again(local, given, made[start:end], made[:start] + made[end:], where)
        elif local.kept:
            raise FormatError(f"{where} keeps copies and has no forward that takes them: export again")
        if local.backward is not None:
            self._check_backward(local, dict(zip(local.inputs, given, strict=True)), made[end:], {**known, **also}, where)
        return made[:start]

    def _check_again(
        self, local: LocalProgram, given: list[torch.Tensor], kept: list[torch.Tensor], wanted: list[torch.Tensor], where: str
    ) -> None:
        assert local.again is not None
        found = propagate(local.again, [*given, *kept], f"{where}.again", like=local.forward)
        if [_shape(t) for t in found] != [_shape(t) for t in wanted]:
            raise FormatError(f"{where}.again has other results than the forward: export again")

    def _check_backward(
        self, local: LocalProgram, given: Mapping[str, torch.Tensor], saved: list[torch.Tensor], known: Shapes, where: str
    ) -> None:
        assert local.backward is not None
        before = len(saved) + len(local.saved_inputs)
        own = declared(local.backward)[before:]
        placeholders = [n for n in local.backward.graph.nodes if n.op == "placeholder"][before:]
        self._check_declared(local.tangents, known, placeholders, f"{where}.backward")
        again = [given[name] for name in local.saved_inputs]
        made = propagate(local.backward, [*saved, *again, *own], f"{where}.backward", like=local.forward)
        self._check_gradients(local.gradients, made, f"{where}.backward")

    def _check_gradients(self, names: Sequence[str], made: Sequence[torch.Tensor], where: str) -> None:
        if len(names) != len(made):
            raise FormatError(f"{where} makes {len(made)} gradients and names {len(names)}: export again")
        for name, grad in zip(names, made, strict=True):
            shape = self.parameters.get(name.removeprefix(ONCE))
            if grad is not None and shape is not None and tuple(grad.shape) != shape:
                fail(f"{where} gradient {name}", list(grad.shape), f"the parameter's shape {list(shape)}")

    def _check_names(self, names: Sequence[str], known: Shapes, gm: fx.GraphModule, where: str) -> None:
        self._check_declared(names, known, [n for n in gm.graph.nodes if n.op == "placeholder"], where)

    def _check_declared(self, names: Sequence[str], known: Shapes, nodes: Sequence[fx.Node], where: str) -> None:
        if len(names) != len(nodes):
            raise FormatError(f"{where} has {len(nodes)} inputs and names {len(names)}: export again")
        for name, node in zip(names, nodes, strict=True):
            dtype, shape = node.meta["declared"]
            if name not in known:
                fail(f"{where} input {node.name}", name, "a value that the interface knows")
            if known[name] != (dtype, tuple(shape)):
                fail(f"{where} input {node.name}", (str(dtype), list(shape)), f"what the interface says of {name}: {known[name]}")

    # --- stages ---------------------------------------------------------------------------------------------------

    def check_stages(self, program: PipelineProgram) -> None:
        assert self.pipeline is not None
        count = self.pipeline.micro_batches
        if len(program.stages) not in (1, count) or not any(o.name == program.loss for o in self.interface.outputs):
            raise FormatError(
                f"{self.where} has {len(program.stages)} variants for {count} micro-batches, or no loss: export again"
            )
        for name, stages in program.holders.items():
            if name not in self.parameters or any(not 0 <= k < self.pipeline.num_stages for k in stages):
                fail(f"{self.where}.holders", name, "a parameter and the stages that hold it")
        for name, rank in program.mutated_on.items():
            if name not in self.buffers or not 0 <= rank < self.pipeline.degree:
                fail(f"{self.where}.mutated_on", name, "a buffer and a pipeline rank")
        known = self._check_before(program)
        for i, variants in enumerate(program.stages):
            if set(variants) != set(program.stages[0]):
                raise FormatError(f"{self.where} runs other stages in micro-batch {i}: export again")
            for k, stage in variants.items():
                if stage.index != k:
                    fail(self.where, stage.index, f"stage {k}")
                self._check_stage(stage, {**self.shapes(i), **known}, f"{self.where}.stage{k}")

    def _check_before(self, program: PipelineProgram) -> Shapes:
        before = program.before
        if before is None:
            return {}
        assert self.pipeline is not None
        where = f"{self.where}.before"
        self._check_names(before.inputs, self.shapes(0), before.program, where)
        made = propagate(before.program, declared(before.program), where, micro_batches=self.pipeline.micro_batches)
        if len(made) != len(before.results):
            raise FormatError(f"{where} has {len(made)} results and names {len(before.results)}: export again")
        return {name: _shape(t) for name, t in zip(before.results, made, strict=True)}

    def _check_stage(self, stage: StageProgram, known: Shapes, where: str) -> None:
        crossing = {s.name: (s.dtype, s.shape) for s in (*stage.receives, *stage.downstream)}
        made = self.check_local(stage.local, known, crossing, where)
        sums = dict(zip(stage.outputs, made[len(stage.local.mutations) :], strict=False))
        self._check_slots(stage.sends, made[len(made) - len(stage.sends) :], where)
        if len(made) != len(stage.local.mutations) + len(stage.outputs) + len(stage.sends):
            raise FormatError(
                f"{where} has {len(made)} results, which are not its mutations, outputs and values to send: export again"
            )
        if stage.local.backward is not None:
            gradients = _results(stage.local.backward)
            mine = len(gradients) - len(stage.upstream)
            self._check_slots(stage.upstream, gradients[mine:], where)
            sums.update(zip(stage.local.gradients[:mine], gradients, strict=False))
        for finish in stage.finishes:
            self._check_finish(finish, {name: _shape(t) for name, t in sums.items()}, known, where)

    def _check_slots(self, slots: Iterable[Any], made: Sequence[torch.Tensor], where: str) -> None:
        for slot, t in zip(slots, made, strict=True):
            if _shape(t) != (slot.dtype, slot.shape):
                fail(f"{where} sends {slot.name}", list(t.shape), f"{list(slot.shape)}")

    def _check_finish(self, finish: Any, sums: Shapes, known: Shapes, where: str) -> None:
        names = [name for _, name in finish.inputs]
        if any(role not in ("sum", "known", "input") for role, _ in finish.inputs):
            fail(where, finish.inputs, "inputs of the roles sum, known and input")
        self._check_names(names, {**known, **sums}, finish.program, f"{where}.finish")
        made = propagate(finish.program, declared(finish.program), f"{where}.finish")
        self._check_gradients(finish.results, made, f"{where}.finish")


def _results(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Fake values of what a checked graph returns."""
    returned = next(reversed(gm.graph.nodes)).args[0]
    return [n.meta["val"] for n in returned]  # type: ignore[union-attr]


def _shape(t: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return t.dtype, tuple(t.shape)
