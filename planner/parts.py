"""The parts of a program that are recomputed as a whole: its repeated blocks, else pieces of it between narrow places.

layers: ModuleList of 32 decoder layers    ->  BlockList("model.layers", 32): parts 0 .. 31
a model without such lists                 ->  about sqrt(n) pieces of its forward, cut where few bytes cross
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from meshwright.planner.alike import LISTS, Stack, alike
from meshwright.planner.correspond import child_of
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.kinds import kind_of

MIN_BLOCKS = 2
"""Fewest alike children that make a list of blocks."""

_WINDOW = 0.25
"""A cut may move by this part of a piece to where fewer bytes cross."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """A list of modules whose children are blocks.

    Attributes:
        path: its dotted path.
        total: number of children.
    """

    path: str
    total: int


def find_lists(model: nn.Module, stacks: Sequence[Stack] = ()) -> tuple[BlockList, ...]:
    """Lists with at least ``MIN_BLOCKS`` alike children at their end, outermost first, in the model's order.

    Args:
        model: the module.
        stacks: lists that are captured in few of their children: these are lists of blocks whatever is around them.
    """
    found = {s.path: BlockList(s.path, s.total) for s in stacks}
    for path, module in model.named_modules():
        children = list(module.children()) if isinstance(module, LISTS) else []
        near = any(_contains(path, p) or _contains(p, path) for p in found)
        if len(children) < MIN_BLOCKS or len(module._modules) != len(children) or near or not _holds_work(children[-1]):
            continue
        if alike(children[-1], children[-2], len(children) - 1, len(children) - 2):
            found[path] = BlockList(path, len(children))
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    return tuple(sorted(found.values(), key=lambda entry: order[entry.path]))


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or inner.startswith(outer + ".") or not outer


def _holds_work(module: nn.Module) -> bool:
    """Whether a child is more than one layer: it has several modules with parameters of their own."""
    return sum(bool(m._parameters) for m in module.modules()) > 1


def parts_of(graph: OpGraph, lists: Sequence[BlockList], numbers: Mapping[tuple[str, int], int] | None = None) -> dict[str, int]:
    """Forward op to the number of its part, in the order in which parts run; ops outside of all parts are not listed.

    Args:
        graph: the program.
        lists: the model's lists of blocks; without any, the forward is cut into pieces.
        numbers: for a program in which few blocks stand for many, (path, child's index in it) to the child's index in the whole
            model; None for a whole one, which is cut into pieces also where most of what it saves is made outside of blocks.
    """
    offsets: dict[str, int] = {}
    for entry in lists:
        offsets[entry.path] = sum(other.total for other in lists[: len(offsets)])
    found: dict[str, int] = {}
    for op in graph.ops if lists else ():
        if op.phase != "forward":
            continue
        for entry in lists:
            child = child_of(op.module_path + ".", entry.path)
            if child is not None:
                found[op.name] = offsets[entry.path] + (numbers or {}).get((entry.path, child[0]), child[0])
    return found if numbers is not None or _share(graph, found) > 0.5 else _pieces(graph)


def _share(graph: OpGraph, parts: Mapping[str, int]) -> float:
    """The part of the saved bytes that is made in parts."""
    inside = sum(v.size_bytes for v in graph.saved if v.name.partition("#")[0] in parts)
    return inside / max(1, sum(v.size_bytes for v in graph.saved))


# --- programs without blocks ---------------------------------------------------------------------------------------


def roots_of(graph: OpGraph) -> dict[str, str]:
    """Value to the value whose memory it shares: itself, or what it is a view of."""
    root: dict[str, str] = {i.value.name: i.value.name for i in graph.inputs}
    for op in graph.ops:
        for v in op.outs:
            if v is not None:
                root[v.name] = root[op.ins[0].name] if kind_of(op) == "view" and op.ins else v.name
    return root


def _pieces(graph: OpGraph) -> dict[str, int]:
    """Pieces of equal weight in saved bytes, cut where few bytes cross."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    crossing, weight = _profile(graph, ops)
    total = weight[-1] if weight else 0
    if not total:
        return {}
    cuts = min((_cuts(crossing, weight, n) for n in (2, 3, 4, 6, 8, 12, 16, 24, 32)), key=lambda c: _peak(c, crossing, weight))
    found, piece = {}, 0
    for i, op in enumerate(ops):
        piece += piece < len(cuts) and i > cuts[piece]
        found[op.name] = piece
    return found


def _profile(graph: OpGraph, ops: Sequence[Op]) -> tuple[list[int], list[int]]:
    """Bytes that cross from op ``i`` to the ops behind it, and saved bytes made up to it."""
    at = {op.name: i for i, op in enumerate(ops)}
    root, saved = roots_of(graph), {v.name for v in graph.saved}
    size = {v.name: v.size_bytes for op in ops for v in op.outs if v is not None}
    kept = {root[name] for name in saved if root[name] in size}
    last: dict[str, int] = {}
    for op in ops:
        last.update((root[v.name], at[op.name]) for v in op.ins if root[v.name] in size)
    alive, made, crossing, weight = 0, 0, [], []
    ends: dict[int, int] = {}
    for i, op in enumerate(ops):
        for v in op.outs:
            if v is None or root[v.name] != v.name:
                continue
            made += v.size_bytes if v.name in kept else 0
            if last.get(v.name, i) > i:
                alive += v.size_bytes
                ends[last[v.name]] = ends.get(last[v.name], 0) + v.size_bytes
        alive -= ends.get(i, 0)
        crossing.append(alive)
        weight.append(made)
    return crossing, weight


def _cuts(crossing: Sequence[int], weight: Sequence[int], pieces: int) -> list[int]:
    """Positions after which to cut for about ``pieces`` pieces of equal weight."""
    step = weight[-1] / pieces
    cuts: list[int] = []
    for k in range(1, pieces):
        near = [i for i, w in enumerate(weight) if abs(w - k * step) <= _WINDOW * step and (not cuts or i > cuts[-1])]
        if near:
            cuts.append(min(near, key=lambda i: (crossing[i], abs(weight[i] - k * step))))
    return cuts


def _peak(cuts: Sequence[int], crossing: Sequence[int], weight: Sequence[int]) -> int:
    """Bytes kept between pieces plus those of the largest piece."""
    ends = [0, *(weight[i] for i in cuts), weight[-1]]
    return sum(crossing[i] for i in cuts) + max(b - a for a, b in pairwise(ends))
