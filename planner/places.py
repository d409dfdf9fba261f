"""Where the forward ops of a program stand in the whole program, of which it holds two of each repeated block.

planned:   e | a b | a' b' | h         block 1 and its copy, which stand for four
whole:     e | a b | a b | a b | a' b' | h

What is found at an op of the planned program is *spread*: it stands wherever the whole program has it. The forward of block 1 stands
for all but the last, that of its copy for the last; in the backward block 1 stands for the first, its copy for the others. What
leads from block 1 to its copy leads from every block to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.graph import Op, OpGraph, Repeat


@dataclass(frozen=True)
class _Block:
    """A repeated block in the whole program.

    Attributes:
        first: places of block 1's forward ops, which may stand apart (casts of parameters come before everything), int64 [ops].
        start: place of the first op of its first copy; copies stand together, one behind the other.
        copies: how many of them.
    """

    first: np.ndarray
    start: int
    copies: int

    def places(self, numbers: np.ndarray, offset: int) -> np.ndarray:
        """Where op ``offset`` of copies ``numbers`` is; block 1 is copy 0."""
        behind = self.start + (numbers - 1) * len(self.first) + offset
        return np.where(numbers == 0, self.first[offset], behind)


@dataclass(frozen=True)
class Places:
    """Forward ops of the whole program, and where those of the planned one are among them.

    Attributes:
        names: of the forward ops of the whole program, in order.
        blocks: the repeated blocks.
        side: name of a node of the planned program to its block and 0 for block 1, 1 for its copy; others stand for themselves.
        at: index of a planned forward op to its block (-1: none), side, and place: in the block, or in the whole program.
    """

    names: tuple[str, ...]
    blocks: tuple[_Block, ...]
    side: Mapping[str, tuple[int, int]]
    at: tuple[tuple[int, int, int], ...]

    def spread(self, op: Op | None, place: int, node: str = "") -> np.ndarray:
        """Places in the whole program, int64 [copies of ``op`` that there are], of what is at planned ``place``, once for every copy of ``op``.

        Args:
            op: of the planned program; None for what is no op.
            place: index of a forward op of the planned program.
            node: name of the placeholder, where ``op`` is None.
        """
        block, side = self.side.get((op.recompute_of or op.name) if op is not None else node, (-1, 0))
        at_block, at_side, offset = self.at[place]
        copies = self._copies(op, block, side)
        if at_block < 0:
            return np.full(len(copies), offset)
        there = self.blocks[at_block]
        if at_block == block:
            numbers = np.clip(copies + (at_side - side), 0, there.copies)
        else:
            numbers = np.full(len(copies), there.copies if at_side else 0)
        return there.places(numbers, offset)

    def all_of(self, place: int, *, backward: bool = False) -> np.ndarray:
        """Every place at which the whole program has a planned forward op; ``backward``: at which it has its backward."""
        block, side, offset = self.at[place]
        if block < 0:
            return np.array([offset])
        there = self.blocks[block]
        return there.places(self._numbers(there, side, forward=not backward), offset)

    def stands_for_itself(self, op: Op | None, node: str = "") -> bool:
        """Whether there is one of it."""
        return ((op.recompute_of or op.name) if op is not None else node) not in self.side

    def _copies(self, op: Op | None, block: int, side: int) -> np.ndarray:
        if block < 0:
            return np.zeros(1, dtype=np.int64)
        forward = op is None or op.phase == "forward" or op.recompute_of is not None
        return self._numbers(self.blocks[block], side, forward=forward)

    @staticmethod
    def _numbers(block: _Block, side: int, *, forward: bool) -> np.ndarray:
        alone, many = ([block.copies], np.arange(block.copies)) if forward else ([0], np.arange(1, block.copies + 1))
        return many if (side == 0) == forward else np.array(alone)


def places_in_whole(graph: OpGraph, repeats: tuple[Repeat, ...]) -> Places | None:
    """The places of a program whose ``repeats`` stand for more; None where the forward ops of a copy do not stand together."""
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    side = {repeat.planned(name, s): (r, s) for r, repeat in enumerate(repeats) for name in repeat.names for s in (0, 1)}
    index = {name: i for i, name in enumerate(forward)}
    names, at, blocks = list[str](), [(-1, 0, 0)] * len(forward), list[_Block]()
    copies: dict[int, tuple[int, list[str]]] = {}
    for r, repeat in enumerate(repeats):
        mine = sorted((n for n in repeat.names if repeat.planned(n, 1) in index), key=lambda n: index[repeat.planned(n, 1)])
        start = min((index[repeat.planned(n, 1)] for n in mine), default=0)
        if not mine or [index[repeat.planned(n, 1)] for n in mine] != list(range(start, start + len(mine))):
            return None
        copies[start] = r, mine
    i, first = 0, {r: dict[str, int]() for r in range(len(repeats))}
    starts: dict[int, int] = {}
    while i < len(forward):
        if i in copies:
            r, mine = copies[i]
            starts[r] = len(names)
            names += [repeats[r].whole(n, k) for k in range(1, repeats[r].copies + 1) for n in mine]
            i += len(mine)
            continue
        r, _ = side.get(forward[i], (-1, 0))
        first.setdefault(r, {})[forward[i]] = len(names)
        at[i] = (-1, 0, len(names))
        names.append(forward[i])
        i += 1
    for r, repeat in enumerate(repeats):
        mine = next(found for number, found in copies.values() if number == r)
        if any(repeat.planned(n) not in first[r] for n in mine) or len(first[r]) != len(mine):
            return None
        places = np.array([first[r][repeat.planned(n)] for n in mine])
        for offset, n in enumerate(mine):
            names[places[offset]] = repeat.whole(n, 0)
            at[index[repeat.planned(n)]], at[index[repeat.planned(n, 1)]] = (r, 0, offset), (r, 1, offset)
        blocks.append(_Block(places, starts[r], repeat.copies))
    return Places(tuple(names), tuple(blocks), side, tuple(at))
