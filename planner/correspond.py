"""Two neighbouring blocks of a captured graph, op by op: what a further block between them would read.

    block 1:  c = norm(x0, w1);  y1 = add(x0, mlp(c))        x0 from block 0
    block 2:  d = norm(y1, w2);  y2 = add(y1, mlp(d))        c ~ d, w1 ~ w2, y1 ~ y2

Where block 1 reads ``x0`` and block 2 reads ``y1``, a copy of block 1 reads the ``y1`` of the block before it. In the
backward the blocks run the other way: where block 1 reads ``g2`` of block 2, and ``g1 ~ g2``, a copy reads the ``g1`` of
the block after it. A value that both read is shared. A sum over blocks (the gradient of a shared value) is an ``add``
that the last block has not: it stands for what the last block has of its own.

Anything else is refused (:class:`Unlike`), and the model is captured whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.planner.alike import Stack
from meshwright.planner.ir import random_ops  # noqa: F401  (registers meshwright::uniform)
from meshwright.planner.ir.graph import GraphInput, GraphOutput, OpGraph

aten = torch.ops.aten

RANDOM = torch.ops.meshwright.uniform.default
"""The op whose second argument numbers the call."""

_FROM_OPERANDS = (aten.add.Tensor, aten._to_copy.default)
"""Backward ops of no module that belong to the block whose gradients they sum or cast."""


class Unlike(Exception):
    """The blocks do not correspond; the text says where."""


@dataclass(frozen=True)
class Match:
    """How block ``stack.first`` and the last block of a stack correspond.

    Attributes:
        stack: the stack; the capture holds ``stack.kept``.
        owner: node to the position of its block among the captured ones, for nodes that belong to one.
        alike: node of block 1 (op or placeholder) to that of the last block. A sum over blocks maps to what the last
            block has of its own.
        earlier: (op of block 1, value that it reads) to the value of block 1 that a copy reads from the block before.
        later: value of the last block that block 1 reads, to the value of block 1 that takes its place in a copy.
        sums: ops of block 1 that add a value of the last block to one of their own.
        salts: the difference of the random call numbers between neighbouring blocks.
    """

    stack: Stack
    owner: Mapping[fx.Node, int]
    alike: Mapping[fx.Node, fx.Node]
    earlier: Mapping[tuple[fx.Node, fx.Node], fx.Node]
    later: Mapping[fx.Node, fx.Node]
    sums: tuple[fx.Node, ...] = ()
    salts: int = 0

    @property
    def own(self) -> list[fx.Node]:
        """Nodes of block 1, in order."""
        return [n for n, position in self.owner.items() if position == self.stack.first]


def child_of(name: str, path: str) -> tuple[int, str] | None:
    """Index and rest of a dotted name under a list: ``"h.3.mlp.bias"`` under ``"h"`` is (3, ``"mlp.bias"``)."""
    if not name.startswith(path + "."):
        return None
    index, _, rest = name[len(path) + 1 :].partition(".")
    return (int(index), rest) if index.isdigit() else None


def slots_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in order of appearance; one that stands twice is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


# --- who belongs where --------------------------------------------------------------------------------------------


class _Owners:
    """Assigns nodes to the captured blocks of one stack."""

    def __init__(self, view: OpGraph, stack: Stack):
        self.stack = stack
        self.owner: dict[fx.Node, int] = {}
        self._entries = {i.value.name: i for i in view.inputs}
        self._touched: set[fx.Node] = set()  # depends on something of a block

    def run(self, graph: fx.Graph) -> dict[fx.Node, int]:
        for node in graph.nodes:
            if node.op == "output":
                continue
            position = self._of_placeholder(self._entries[node.name]) if node.op == "placeholder" else self._of_op(node)
            if position is not None:
                self.owner[node] = position
            if position is not None or any(n in self._touched for n in node.all_input_nodes):
                self._touched.add(node)
        return self.owner

    def _of_placeholder(self, entry: GraphInput) -> int | None:
        if entry.role not in ("parameter", "buffer"):
            return None
        at = {child and child[0] for name in (entry.name, *entry.aliases) for child in [child_of(name, self.stack.path)]}
        if len(at) > 1:
            raise Unlike(f"{entry.name} is tied to a parameter elsewhere ({', '.join(entry.aliases)})")
        return at.pop()

    def _of_op(self, node: fx.Node) -> int | None:
        inputs = node.all_input_nodes
        if not isinstance(node.target, torch._ops.OpOverload):  # getitem
            return self.owner.get(inputs[0])
        path = node.meta.get("module_path", "")
        child = child_of(path + ".", self.stack.path)
        if child is not None:
            # What reads nothing of any block is computed once for all of them.
            return child[0] if node.target is RANDOM or any(n in self._touched for n in inputs) else None
        if path:
            return None
        if node.meta["phase"] == "forward":  # a cast of a parameter before the model's forward
            owned = {self.owner[n] for n in inputs if n.op == "placeholder" and n in self.owner}
            return owned.pop() if len(owned) == 1 else None
        owned = {self.owner[n] for n in inputs if n in self.owner}
        is_inside = len(owned) == 1 and all(n in self.owner for n in inputs)  # the backward of an op that works in place
        return min(owned) if owned and (is_inside or node.target in _FROM_OPERANDS) else None


# --- what corresponds ---------------------------------------------------------------------------------------------


def _form(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _static(node: fx.Node) -> tuple[Any, ...]:
    """All of an op but which values it reads and which random call it is."""
    args = node.args if node.target is not RANDOM else (node.args[0], None, *node.args[2:])
    blank = fx.map_arg((args, node.kwargs), lambda n: _form(n.meta["val"]))
    return (node.target, node.meta.get("phase"), repr(blank), _form(node.meta["val"]))


@dataclass
class _Matcher:
    graph: fx.Graph
    view: OpGraph
    stack: Stack
    owner: dict[fx.Node, int]
    alike: dict[fx.Node, fx.Node] = field(default_factory=dict)
    earlier: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    _sums: list[fx.Node] = field(default_factory=list)
    _crossing: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first, self.last = self.stack.first, self.stack.first + 1

    def run(self) -> Match:
        self._placeholders()
        mine, theirs = self._ops(self.first), self._ops(self.last)
        if not mine:
            raise Unlike("no op of it knows its module")
        while mine or theirs:
            self._step(mine, theirs)
        later = {v: self._counterpart(v) for v in self._crossing}
        match = Match(self.stack, self.owner, self.alike, self.earlier, later, tuple(self._sums), self._salts())
        self._check_outside(match)
        self._check_results()
        return match

    def _ops(self, position: int) -> list[fx.Node]:
        return [n for n, p in self.owner.items() if p == position and n.op != "placeholder"][::-1]

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.owner if n.op == "placeholder"}
        found: dict[tuple[int, str, str], GraphInput] = {}
        for entry in self.view.inputs:
            child = child_of(entry.name, self.stack.path) if entry.value.name in nodes else None
            if child is not None:
                found[child[0], entry.role, child[1]] = entry
        for (position, role, rest), a in found.items():
            b = found.get((self.last, role, rest))
            if position != self.first:
                continue
            if b is None or (a.value.shape, a.value.dtype, a.trainable) != (b.value.shape, b.value.dtype, b.trainable):
                raise Unlike(f"{a.name} has no equal in the last block")
            self.alike[nodes[a.value.name]] = nodes[b.value.name]

    def _step(self, mine: list[fx.Node], theirs: list[fx.Node]) -> None:
        """Match the next op of each block, or find that one of them stands alone."""
        a, b = mine[-1] if mine else None, theirs[-1] if theirs else None
        if a is not None and b is not None and self._match(a, b):
            mine.pop(), theirs.pop()
        elif a is not None and self._is_sum(a):
            self._sums.append(mine.pop())
        elif b is not None and self._is_shared(b):
            del self.owner[theirs.pop()]
        else:
            raise Unlike(f"{_words(a)} stands in one block where {_words(b)} stands in the next")

    def _match(self, a: fx.Node, b: fx.Node) -> bool:
        if _static(a) != _static(b):
            return False
        pairs = list(zip(slots_of(a), slots_of(b), strict=True))
        earlier: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        crossing: list[fx.Node] = []
        for x, y in pairs:
            if self.owner.get(x) == self.first:
                if self.alike.get(x) is not y:
                    return False
            elif x is y:
                continue
            elif self.owner.get(y) == self.first and self.owner.get(x) != self.last:
                if earlier.setdefault((a, x), y) is not y:
                    return False
            elif self.owner.get(x) == self.last and self.owner.get(y) not in (self.first, self.last):
                crossing.append(x)
            else:
                return False
        self.alike[a] = b
        self.earlier.update(earlier)
        self._crossing += crossing
        return True

    def _is_sum(self, a: fx.Node) -> bool:
        """An ``add`` of a gradient of the last block and one of this: alike to what the last block has of its own."""
        if a.target is not aten.add.Tensor or a.meta["phase"] != "backward" or len(a.args) != 2 or a.kwargs:
            return False
        x, y = a.args
        for theirs, own in ((x, y), (y, x)):
            if self.owner.get(theirs) == self.last and self.owner.get(own) == self.first and own in self.alike:  # type: ignore[arg-type]
                self.alike[a] = self.alike[own]  # type: ignore[index]
                self._crossing.append(theirs)  # type: ignore[arg-type]
                return True
        return False

    def _is_shared(self, b: fx.Node) -> bool:
        """An op of the last block that reads nothing of these blocks, and whose result both read: made once for all."""
        near = (self.first, self.last)
        return not any(self.owner.get(n) in near for n in b.all_input_nodes) and any(
            self.owner.get(n) == self.first for n in b.users
        )

    def _counterpart(self, value: fx.Node) -> fx.Node:
        """The value of block 1 that is alike to one of the last block; of several, the sum that holds the others."""
        found = [a for a, b in self.alike.items() if b is value]
        if not found:
            raise Unlike(f"{_words(value)} of the last block has no equal in the block before")
        if len(found) > 1 and found[-1] not in self._sums:
            raise Unlike(f"{_words(value)} of the last block has several equals in the block before")
        return found[-1]

    def _salts(self) -> int:
        steps: set[Any] = {b.args[1] - a.args[1] for a, b in self.alike.items() if a.target is RANDOM}  # type: ignore[operator]
        if len(steps) > 1:
            raise Unlike("its random calls are numbered unevenly")
        return steps.pop() if steps else 0

    # --- what else reads the blocks ---

    def _check_outside(self, match: Match) -> None:
        """Only the next block may read block 1's forward; in the backward only the block before."""
        for node in match.own:
            for reader in node.users:
                position = self.owner.get(reader)
                if position in (self.first, self.last) or reader.op == "output":
                    continue
                chained = node in match.later.values()
                if node.op == "placeholder" or node.meta["phase"] == "forward" or not chained:
                    raise Unlike(f"{_words(reader)}, outside of the blocks, reads {_words(node)} inside")

    def _check_results(self) -> None:
        (returned,) = (n for n in self.graph.nodes if n.op == "output")
        values = dict(zip(map(_result_key, self.view.outputs), returned.args[0], strict=True))
        for (role, name), value in values.items():
            child = child_of(name, self.stack.path) if role != "output" else None
            if value is not None and self.owner.get(value) == self.first and (child is None or child[0] != self.first):
                raise Unlike(f"result {name} is computed inside the blocks")
            if child is None or child[0] != self.first or value is None:
                continue
            other = values.get((role, f"{self.stack.path}.{self.last}.{child[1]}"))
            if other is not self.alike.get(value, value):
                raise Unlike(f"{role} of {name} is computed in another way than that of the last block")


def _result_key(result: GraphOutput) -> tuple[str, str]:
    return result.role, result.name


def _words(node: fx.Node | None) -> str:
    if node is None:
        return "nothing"
    return f"{node.name} ({node.meta.get('source') or node.meta.get('module_path') or node.target})"


def correspond(graph: fx.Graph, view: OpGraph, stack: Stack) -> Match:
    """Match block ``stack.first`` of a captured graph and the block after it.

    Raises:
        Unlike: they are not alike, or something else reads what is inside.
    """
    return _Matcher(graph, view, stack, _Owners(view, stack).run(graph)).run()
