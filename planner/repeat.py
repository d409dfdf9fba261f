"""Capture that does not cost depth: few of the repeated blocks are traced, the others are copies.

    32 layers  ->  layers 0, 1 and 31 are traced  ->  layers 0, 1, 1', 31 are planned    (1 and 1' stand for 30)
                                                  ->  0, 1, 1', 1'', ..., 31 are run

The lists come from the module tree (:mod:`~meshwright.planner.alike`); that the traced blocks do the same is checked op
by op (:mod:`~meshwright.planner.correspond`). Where a check fails the model is traced whole, and a note says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from meshwright.planner import remat, trace, walk
from meshwright.planner.alike import Stack, find_stacks, shortened
from meshwright.planner.correspond import Match, Unlike, correspond
from meshwright.planner.faking import buffer_names, low_precision, parameter_names
from meshwright.planner.ir.errors import TraceError
from meshwright.planner.ir.graph import Capture, OpGraph, Repeat, ops_of
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.joint import joint_module
from meshwright.planner.parts import BlockList, find_lists, parts_of
from meshwright.planner.remember import Results
from meshwright.planner.splice import Order, copy_name, splice
from meshwright.planner.stretch import FEW, Stretch, stretched

NONE = Recompute()


def state_order(model: nn.Module) -> Order:
    """(role, first name) of every parameter and buffer to its position in the model."""
    parameters, buffers = parameter_names(model), buffer_names(model)
    keys = [*(("parameter", n) for n in parameters.groups), *(("buffer", n) for n in buffers.groups)]
    return {key: i for i, key in enumerate(keys)}


@dataclass(frozen=True)
class _Spliced:
    """A graph with copies, its view without ops, and the matches it was made by."""

    graph: fx.Graph
    ends: OpGraph
    matches: tuple[Match, ...]

    def view(self) -> OpGraph:
        return OpGraph(self.ends.inputs, ops_of(self.graph), self.ends.outputs)


@dataclass(frozen=True)
class _Traced:
    """What was traced, and what of the model is needed to make the rest of it.

    Attributes:
        capture: as traced, nothing computed again yet.
        lists: the model's lists of blocks.
        stacks: those of them that are captured in few of their blocks.
        order: positions of parameters and buffers in the model.
        notes: why something that looked repeated is not folded.
    """

    capture: Capture
    lists: tuple[BlockList, ...]
    stacks: tuple[Stack, ...] = ()
    order: Order = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def offset(self, stack: Stack) -> int:
        """How many blocks run before those of a stack."""
        paths = [entry.path for entry in self.lists]
        return sum(entry.total for entry in self.lists[: paths.index(stack.path)])

    def first_group(self, stack: Stack, recompute: Recompute) -> int:
        """How many of a stack's alike blocks (block 1 and its copies) are in the first of two groups; 0 for one group."""
        inside = 0 if recompute.blocks is None else recompute.blocks - self.offset(stack) - stack.first
        return inside if 0 < inside <= stack.copies else 0

    def spliced(self, copies: Callable[[Stack], int]) -> _Spliced:
        """Copies in every stack, one stack after the other.

        Raises:
            Unlike: two blocks that should correspond do not.
        """
        graph, view, matches = self.capture.gm.graph, self.capture.graph, []
        for stack in self.stacks:
            match = correspond(graph, view, stack)
            matches.append(match)
            graph, view = splice(graph, view, match, copies(stack), self.order)
        return _Spliced(graph, view, tuple(matches))


def _repeats(match: Match, group: int) -> list[Repeat]:
    """The records of a stack, of whose alike blocks the first ``group`` are a group of their own (0: all are one)."""
    stack, copies = match.stack, 3 if group else 1
    instance = {n.name: p + copies * (p > stack.first) for n, p in match.owner.items()}
    for k in range(1, copies + 1):
        instance.update((copy_name(n.name, k), stack.first + k) for n in match.own)
    numbers = range(copies + 1)
    summed = [v for op in match.sums for v in op.all_input_nodes if v in match.later]
    apart = {n for v in summed for n in (v.name, *(copy_name(match.later[v].name, k) for k in numbers))}
    through = {n for (_, x), y in match.earlier.items() for n in (x.name, *(copy_name(y.name, k) for k in numbers))}
    common = (instance, frozenset(apart), frozenset(f"{n}_r" for n in through))
    first = Repeat(stack.path, stack.first, stack.total, group - 1 if group else stack.copies, *common)
    second = dataclasses.replace(first, copies=stack.copies - group, planned_at=2, whole_at=group)
    return [first, second] if group else [first]


class Folded:
    """A model captured in few of its blocks, with one choice of what the backward computes again.

    Attributes:
        recompute: the choice; :meth:`at` gives the same capture with another.
    """

    def __init__(self, traced: _Traced, recompute: Recompute = NONE, others: dict[Recompute, Folded] | None = None):
        self._traced, self.recompute = traced, recompute
        self._others = {} if others is None else others
        self._others[recompute] = self

    def at(self, recompute: Recompute) -> Folded:
        """The same capture with another choice; made once.

        Raises:
            Unlike: the capture cannot be folded so.
        """
        return self._others.get(recompute) or Folded(self._traced, recompute, self._others)

    def capture_at(self, recompute: Recompute) -> Capture:
        """What is planned with another choice."""
        return self.at(recompute).plannable

    @property
    def unfolded(self) -> _Unfolded:
        """The same for planning every block by itself."""
        return _Unfolded(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why something that looked repeated is not folded."""
        return self._traced.notes

    @property
    def plannable(self) -> Capture:
        """What is planned; the same size at any depth. ``plannable.repeats`` says what stands for more."""
        return self._planned[0]

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        """What stands for more in ``plannable``."""
        return self.plannable.repeats

    @cached_property
    def num_parts(self) -> int:
        """How many parts of the program can be recomputed as a whole."""
        if self._traced.stacks:
            return sum(entry.total for entry in self._traced.lists)
        return max(self._parts.values(), default=-1) + 1

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many of the parts, the first ones, may have another level than the rest: each group of a stack has two blocks."""
        barred: set[int] = set()
        for stack in self._traced.stacks:
            start = self._traced.offset(stack) + stack.first
            barred.update((start + 1, start + stack.copies))
        return tuple(n for n in range(1, self.num_parts) if n not in barred)

    @cached_property
    def _parts(self) -> dict[str, int]:
        return parts_of(self._traced.capture.graph, self._traced.lists)

    @cached_property
    def _planned(self) -> tuple[Capture, frozenset[str]]:
        """What is planned, and the values that it keeps for the backward."""
        traced = self._traced
        if not traced.stacks:
            kept = self._kept(traced.capture, self._parts)
            return remat.save_few(traced.capture, kept), kept
        groups = {s: traced.first_group(s, self.recompute) for s in traced.stacks}
        if any(n == 1 or n == s.copies for s, n in groups.items()):
            raise Unlike("a group of repeated blocks holds a single one")
        spliced = traced.spliced(lambda s: 3 if groups[s] else 1)
        repeats = tuple(r for m in spliced.matches for r in _repeats(m, groups[m.stack]))
        names = [name for m in spliced.matches for name in _repeats(m, groups[m.stack])[0].instance]
        if len(set(names)) != len(names):
            raise Unlike("an op belongs to two lists of blocks")
        capture = _with_graph(traced.capture, spliced.graph, spliced.view(), repeats)
        kept = self._kept(capture, parts_of(capture.graph, traced.lists, _numbers(repeats)))
        if not capture.training:
            return capture, kept
        return _with_graph(capture, *remat.rewritten(spliced.graph, capture.graph, kept), repeats), kept

    def _kept(self, capture: Capture, parts: Mapping[str, int]) -> frozenset[str]:
        """The values that the backward reads and does not compute again."""
        return frozenset(remat.choose_kept(capture.graph, remat.policy_of(self.recompute, parts)) if capture.training else ())

    @cached_property
    def _whole_graph(self) -> tuple[fx.Graph, OpGraph]:
        return self._recomputing(self._traced.spliced(lambda s: s.copies), self.repeats)

    def _recomputing(self, spliced: _Spliced, repeats: tuple[Repeat, ...]) -> tuple[fx.Graph, OpGraph]:
        """A program with more copies than the planned one, which ``repeats`` says, with what its backward computes again."""
        if not self.plannable.training:
            return spliced.graph, spliced.view()
        return remat.rewritten(spliced.graph, spliced.ends, map_kept(self._planned[1], repeats))

    @cached_property
    def whole_view(self) -> OpGraph:
        """The program of the whole model, every block in it."""
        if not self.repeats:
            return self.plannable.graph
        if "_whole_graph" not in vars(self):
            try:
                return self._stretched_view()
            except Unlike:  # its blocks are not evenly ordered
                pass
        return self._whole_graph[1]

    def _stretched_view(self) -> OpGraph:
        """As :attr:`whole_view`, from a program with few instances of every block.

        Raises:
            Unlike: it does not tell what the whole one is.
        """
        few = [_Few.of(self.repeats, stack) for stack in self._traced.stacks]
        spliced = self._traced.spliced(lambda s: next(f.instances for f in few if f.stack == s) - 1)
        view = self._recomputing(spliced, tuple(r for f in few for r in f.repeats))[1]
        for f in few:
            for stretch in f.stretches:
                view = stretched(view, stretch, self._traced.order)
        return view

    @cached_property
    def whole(self) -> Capture:
        """The capture of the whole model."""
        return _with_graph(self.plannable, *self._whole_graph) if self.repeats else self.plannable

    def summary(self) -> list[dict[str, Any]]:
        """Which children of which lists were traced, for :attr:`Plan.folded`."""
        return [{"list": s.path, "captured": list(s.kept), "of": s.total} for s in self._traced.stacks]


@dataclass(frozen=True)
class _Few:
    """A program with few instances of a stack's alike blocks.

    Attributes:
        stack: the stack.
        repeats: how the planned program belongs to this one: one or two groups of blocks.
        whole: how it belongs to the whole one.
    """

    stack: Stack
    repeats: tuple[Repeat, ...]
    whole: tuple[Repeat, ...]

    @classmethod
    def of(cls, repeats: Sequence[Repeat], stack: Stack) -> _Few:
        mine, found, start = tuple(r for r in repeats if r.path == stack.path), list[Repeat](), 0
        for repeat in mine:
            found.append(dataclasses.replace(repeat, copies=min(repeat.copies, FEW - 1), whole_at=start))
            start += found[-1].copies + 1
        return cls(stack, tuple(found), mine)

    @property
    def instances(self) -> int:
        return sum(r.copies + 1 for r in self.repeats)

    @property
    def stretches(self) -> Iterator[Stretch]:
        """What makes the whole of it, from the last group on."""
        instances = self.instances
        for few, whole in reversed([*zip(self.repeats, self.whole, strict=True)]):
            if extra := whole.copies - few.copies:
                names = self.repeats[0].names
                yield Stretch(self.stack.path, self.stack.first, names, instances, few.whole_at, extra)
                instances += extra


@dataclass(frozen=True)
class _Unfolded:
    """Whole captures of what was captured folded."""

    folded: Folded

    @property
    def counts(self) -> tuple[int, ...]:
        return self.folded.counts

    @property
    def num_parts(self) -> int:
        return self.folded.num_parts

    def capture_at(self, recompute: Recompute) -> Capture:
        return self.folded.at(recompute).whole


def _numbers(repeats: tuple[Repeat, ...]) -> dict[tuple[str, int], int]:
    """Index of a block of a folded program to that of a block of the whole model that it stands for, where they differ."""
    return {(r.path, r.position + k): r.first + r.whole_at + k * r.copies for r in repeats for k in (0, 1)}


def _with_graph(capture: Capture, graph: fx.Graph, view: OpGraph, repeats: tuple[Repeat, ...] = ()) -> Capture:
    module = joint_module(graph)
    return dataclasses.replace(capture, gm=module, graph=view, repeats=repeats)


def map_kept(kept: frozenset[str], repeats: tuple[Repeat, ...]) -> frozenset[str]:
    """Values kept for the backward in the whole model, from those kept in the planned one."""
    sources: dict[str, list[str]] = {}
    for repeat in repeats:
        for name in repeat.names:
            sources[repeat.planned(name)] = [repeat.whole(name, k) for k in range(repeat.copies)]
            sources[repeat.planned(name, 1)] = [repeat.whole(name, repeat.copies)]
    found: set[str] = set()
    for name in kept:
        node, hash_, slot = name.partition("#")
        found.update(n + hash_ + slot for n in sources.get(node, [node]))
    return frozenset(found)


# --- the entry ----------------------------------------------------------------------------------------------------


def capture_folded(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    training: bool | None = None,
    fold: bool = True,
    progress: Callable[[str], None] = lambda phase: None,
) -> Folded:
    """Captures one call with few of the model's repeated blocks, and chooses what the backward computes again.

    Arguments and errors are those of :func:`~meshwright.planner.trace.capture`; with ``fold`` False the model is traced
    whole. ``progress`` is called with ``"capture"`` and ``"recompute"`` as these phases begin.
    """
    notes: list[str] = []
    results: Results = {}

    def captured() -> Capture:
        progress("capture")
        return trace.capture(model, args, kwargs, precision=precision, training=training, results=results)

    is_call = isinstance(model, nn.Module) and isinstance(args, tuple)
    stacks = find_stacks(model) if fold and is_call else ()
    for tail in (1, 2) if stacks else ():
        tried = tuple(s for s in (dataclasses.replace(s, tail=tail) for s in stacks) if s.copies > 1)
        if not tried:
            break
        try:
            progress("capture")
            _check_forward(model, args, kwargs or {}, tried, low_precision(precision), results)
            with shortened(model, tried):
                small = captured()
            traced = _Traced(small, find_lists(model, tried), tried, state_order(model))
            progress("recompute")
            return _planned(Folded(traced))
        except (Unlike, TraceError) as e:
            notes = [f"{', '.join(s.path for s in tried)}: captured whole, because {e}"]
    traced = _Traced(captured(), find_lists(model), notes=tuple(notes))
    progress("recompute")
    return _planned(Folded(traced))


def _planned(folded: Folded) -> Folded:
    """``folded``, once its program is made.

    Raises:
        Unlike: it cannot be folded.
    """
    assert folded.plannable is not None
    return folded


def _check_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stacks: tuple[Stack, ...],
    low: torch.dtype | None,
    results: Results,
) -> None:
    """See :mod:`~meshwright.planner.walk`.

    Raises:
        Unlike: forward does not treat the blocks alike, or cannot be followed outside of a capture.
    """
    try:
        with trace.as_captured(args, kwargs):
            whole = walk.story(model, args, kwargs, stacks, low, results)
            with shortened(model, stacks):
                short = walk.story(model, args, kwargs, stacks, low, results)
    except Exception as e:  # whatever the model raises: its capture says it better
        raise Unlike(f"its forward on fake tensors raises {type(e).__name__}: {e}") from e
    walk.check_stories(whole, short, stacks)
