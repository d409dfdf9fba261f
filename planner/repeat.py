"""Capture that does not cost depth: few of the repeated blocks are traced, the others are copies.

    32 layers  ->  layers 0, 1 and 31 are traced  ->  layers 0, 1, 1', 31 are planned    (1 and 1' stand for 30)
                                                  ->  0, 1, 1', 1'', ..., 31 are run

The lists come from the module tree (:mod:`~meshwright.planner.alike`); that the traced blocks do the same is checked op
by op (:mod:`~meshwright.planner.correspond`). Where a check fails the model is traced whole, and a note says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx, nn

from meshwright.planner import remat, trace, walk
from meshwright.planner.alike import Stack, find_stacks, shortened
from meshwright.planner.correspond import Match, Unlike, correspond
from meshwright.planner.faking import buffer_names, parameter_names
from meshwright.planner.ir.errors import TraceError
from meshwright.planner.ir.graph import Capture, OpGraph, Repeat, ops_of
from meshwright.planner.splice import copy_name, splice

Order = Mapping[tuple[str, str], int]


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


def _splice_all(small: Capture, stacks: tuple[Stack, ...], order: Order, copies: Callable[[Stack], int]) -> _Spliced:
    """Copies in every stack, one stack after the other.

    Raises:
        Unlike: two blocks that should correspond do not.
    """
    graph, view, matches = small.gm.graph, small.graph, []
    for stack in stacks:
        match = correspond(graph, view, stack)
        matches.append(match)
        graph, view = splice(graph, view, match, copies(stack), order)
    return _Spliced(graph, view, tuple(matches))


def _repeat(match: Match) -> Repeat:
    stack = match.stack
    instance = {n.name: p + (p > stack.first) for n, p in match.owner.items()}
    instance.update((copy_name(n.name, 1), stack.first + 1) for n in match.own)
    summed = [v for op in match.sums for v in op.all_input_nodes if v in match.later]
    apart = {n for v in summed for n in (v.name, match.later[v].name, copy_name(match.later[v].name, 1))}
    through = {n for (_, x), y in match.earlier.items() for n in (x.name, y.name, copy_name(y.name, 1))}
    again = frozenset(f"{n}_r" for n in through)
    return Repeat(stack.path, stack.first, stack.total, stack.copies, instance, frozenset(apart), again)


@dataclass(frozen=True)
class Folded:
    """A model captured in few of its blocks.

    Attributes:
        plannable: what is planned; the same size at any depth. ``plannable.repeats`` says what stands for more. Equal to
            ``whole`` where nothing is repeated.
        notes: why something that looked repeated is not folded.
    """

    plannable: Capture
    notes: tuple[str, ...] = ()
    _small: Capture | None = None
    _stacks: tuple[Stack, ...] = ()
    _order: Order = dataclasses.field(default_factory=dict)
    _kept: frozenset[str] = frozenset()

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        """What stands for more in ``plannable``."""
        return self.plannable.repeats

    @cached_property
    def _whole_graph(self) -> tuple[fx.Graph, OpGraph]:
        assert self._small is not None
        spliced = _splice_all(self._small, self._stacks, self._order, lambda s: s.copies)
        if not self.plannable.training:
            return spliced.graph, spliced.view()
        return remat.rewritten(spliced.graph, spliced.ends, map_kept(self._kept, self.repeats))

    @property
    def whole_view(self) -> OpGraph:
        """The program of the whole model, every block in it."""
        return self._whole_graph[1] if self.repeats else self.plannable.graph

    @cached_property
    def whole(self) -> Capture:
        """The capture of the whole model."""
        return _with_graph(self.plannable, *self._whole_graph) if self.repeats else self.plannable

    def summary(self) -> list[dict[str, Any]]:
        """Which children of which lists were traced, for :attr:`Plan.folded`."""
        return [{"list": s.path, "captured": list(s.kept), "of": s.total} for s in self._stacks]


def _with_graph(capture: Capture, graph: fx.Graph, view: OpGraph, repeats: tuple[Repeat, ...] = ()) -> Capture:
    module = fx.GraphModule(nn.Module(), graph, class_name="JointGraph")
    return dataclasses.replace(capture, gm=module, graph=view, repeats=repeats)


def map_kept(kept: frozenset[str], repeats: tuple[Repeat, ...]) -> frozenset[str]:
    """Values kept for the backward in the whole model, from those kept in the planned one."""
    found: set[str] = set()
    for name in kept:
        node, hash_, slot = name.partition("#")
        repeat = next((r for r in repeats if r.instance.get(node) in (r.first, r.first + 1)), None)
        if repeat is None:
            found.add(name)
        elif repeat.instance[node] == repeat.first:
            found.update(copy_name(node, k) + hash_ + slot for k in range(repeat.copies))
        else:
            found.add(copy_name(node.removesuffix("__1"), repeat.copies) + hash_ + slot)
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

    def captured() -> Capture:
        progress("capture")
        return trace.capture(model, args, kwargs, precision=precision, training=training)

    stacks = find_stacks(model) if fold and isinstance(model, nn.Module) and isinstance(args, tuple) else ()
    for tail in (1, 2) if stacks else ():
        tried = tuple(s for s in (dataclasses.replace(s, tail=tail) for s in stacks) if s.copies > 1)
        if not tried:
            break
        try:
            progress("capture")
            _check_forward(model, args, kwargs or {}, tried)
            return _folded(model, tried, captured, progress)
        except (Unlike, TraceError) as e:
            notes = [f"{', '.join(s.path for s in tried)}: captured whole, because {e}"]
    whole = captured()
    progress("recompute")
    return Folded(remat.save_few(whole), tuple(notes))


def _check_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], stacks: tuple[Stack, ...]) -> None:
    """See :mod:`~meshwright.planner.walk`.

    Raises:
        Unlike: forward does not treat the blocks alike, or cannot be followed outside of a capture.
    """
    try:
        with trace.as_captured(args, kwargs):
            whole = walk.story(model, args, kwargs, stacks)
            with shortened(model, stacks):
                short = walk.story(model, args, kwargs, stacks)
    except Exception as e:  # whatever the model raises: its capture says it better
        raise Unlike(f"its forward on fake tensors raises {type(e).__name__}: {e}") from e
    walk.check_stories(whole, short, stacks)


def _folded(
    model: nn.Module, stacks: tuple[Stack, ...], captured: Callable[[], Capture], progress: Callable[[str], None]
) -> Folded:
    with shortened(model, stacks):
        small = captured()
    order = state_order(model)
    spliced = _splice_all(small, stacks, order, lambda s: 1)
    repeats = tuple(map(_repeat, spliced.matches))
    names = [name for r in repeats for name in r.instance]
    if len(set(names)) != len(names):
        raise Unlike("an op belongs to two lists of blocks")
    capture = _with_graph(small, spliced.graph, spliced.view(), repeats)
    progress("recompute")
    kept = remat.choose_kept(capture.graph) if capture.training else set()
    return Folded(remat.save_few(capture, kept), (), small, stacks, order, frozenset(kept))
