"""A captured graph with copies of one block between it and the next: three layers become as many as the model has.

    before   x1 = block_1(x0, w1);   x2 = block_2(x1, w2)
    after    x1 = block_1(x0, w1);   x1__1 = block_1(x1, w1__1);   x1__2 = ...;   x2 = block_2(x1__2, w2)

Copy ``k`` of node ``name`` is ``name__k``; its parameters are those of child ``first + k`` of the list. In the backward
the copies run in falling order, before block 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from meshwright.planner.correspond import RANDOM, Match, child_of
from meshwright.planner.ir.graph import GraphInput, GraphOutput, OpGraph, fx_value
from meshwright.planner.joint import written

_ROLES = ("parameter", "buffer", "input", "constant", "seed", "tangent")
_RESULTS = {"mutation": "buffer", "output": "", "gradient": "parameter"}
"""Roles of results, in order, and of the state that they are results of."""

Order = Mapping[tuple[str, str], int]
"""(role, first name) of every parameter and buffer of the whole model to its position."""


def input_place(entry: GraphInput, order: Order) -> tuple[int, int]:
    """What inputs are sorted by."""
    return _ROLES.index(entry.role), order.get((entry.role, entry.name), 0)


def result_place(result: GraphOutput, order: Order) -> tuple[int, int]:
    """What results are sorted by."""
    return [*_RESULTS].index(result.role), order.get((_RESULTS[result.role], result.name), len(order))


def copy_name(name: str, k: int) -> str:
    """Name of copy ``k`` of a node; the node's own name for 0."""
    return f"{name}__{k}" if k else name


def renamed(name: str, match: Match, k: int = 0) -> str:
    """A dotted name of the captured model as the whole model has it, for copy ``k`` of block 1."""
    child = child_of(name + ".", match.stack.path)
    if child is None:
        return name
    index = match.stack.kept[child[0]] + (k if child[0] == match.stack.first else 0)
    return f"{match.stack.path}.{index}.{child[1]}".rstrip(".")


class _Splicer:
    """Writes one graph with ``copies`` copies of block 1."""

    def __init__(self, graph: fx.Graph, match: Match, copies: int):
        self.old, self.match, self.copies = graph, match, copies
        self.new = fx.Graph()
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        self._renamed: dict[tuple[str, int], str] = {}
        self._first, self._next = match.stack.first, match.stack.first + 1
        self._own = dict.fromkeys(match.own)
        ops = [n for n in self._own if n.op != "placeholder"]
        self.forward = [n for n in ops if n.meta["phase"] == "forward"]
        self.backward = [n for n in ops if n.meta["phase"] == "backward"]
        randoms = [n for n in ops if n.target is RANDOM]
        self._salt = max((n.args[1] for n in randoms), default=None)  # type: ignore[type-var]

    def ops(self) -> None:
        """Every op, in order, copies in their places."""
        after = self.forward[-1]
        later = self.match.later
        before = next((n for n in self.backward if any(x in later for x in n.all_input_nodes)), None)
        before = before or next(iter(self.backward), None)
        for node in self.old.nodes:
            if node.op != "call_function":
                continue
            if node is before:
                for k in range(self.copies, 0, -1):
                    self._block(self.backward, k)
            self._emit(node, 0)
            if node is after:
                for k in range(1, self.copies + 1):
                    self._block(self.forward, k)

    def _block(self, nodes: Sequence[fx.Node], k: int) -> None:
        for node in nodes:
            self._emit(node, k)

    def placeholder(self, node: fx.Node, k: int) -> None:
        copy = self.new.placeholder(copy_name(node.name, k))
        copy.meta = dict(node.meta)
        self.made[node, k] = copy

    def _emit(self, node: fx.Node, k: int) -> None:
        """Write copy ``k`` of a node, after whatever it reads that stands later in the captured order."""
        pending = [(node, k)]
        while pending:
            top = pending[-1]
            missing = [key for n in top[0].all_input_nodes if (key := self._read(top[0], n, top[1])) not in self.made]
            pending += missing
            if not missing:
                pending.pop()
                if top not in self.made:
                    self._write(*top)

    def _write(self, node: fx.Node, k: int) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.made[self._read(node, n, k)])
        if node.target is RANDOM:
            args = (args[0], self._numbered(node, k), *args[2:])
        self.made[node, k] = written(self.new, node.target, args, kwargs, copy_name(node.name, k), self._meta(node, k))

    def _read(self, reader: fx.Node, value: fx.Node, k: int) -> tuple[fx.Node, int]:
        """What copy ``k`` of ``reader`` (or, for 0, the node itself) reads for ``value``: a node and its copy."""
        position = self.match.owner.get(value)
        if reader in self._own:
            if position == self._first:
                return value, k
            if position == self._next and value in self.match.later:
                return (value, 0) if k == self.copies else (self.match.later[value], k + 1)
            before = self.match.earlier.get((reader, value)) if k else None
            return (value, 0) if before is None else (before, k - 1)
        if position == self._first and self.match.owner.get(reader) == self._next:
            return value, self.copies
        return value, 0

    def _numbered(self, node: fx.Node, k: int) -> int:
        """The number of a random call: those of later blocks move on."""
        salt: Any = node.args[1]
        late = node not in self._own and self._salt is not None and salt > self._salt
        return salt + self.match.salts * (self.copies if late else k)

    def _meta(self, node: fx.Node, k: int) -> dict[str, Any]:
        meta = dict(node.meta)
        if path := meta.get("module_path"):
            if (path, k) not in self._renamed:
                self._renamed[path, k] = renamed(path, self.match, k)
            meta["module_path"] = self._renamed[path, k]
        if k and meta.get("forward_op") in self._names:
            meta["forward_op"] = copy_name(meta["forward_op"], k)
        return meta

    @property
    def _names(self) -> set[str]:
        if not hasattr(self, "_own_names"):
            self._own_names = {n.name for n in self._own}
        return self._own_names


def splice(graph: fx.Graph, view: OpGraph, match: Match, copies: int, order: Order) -> tuple[fx.Graph, OpGraph]:
    """The graph with ``copies`` copies of block 1.

    Args:
        graph: the captured graph.
        view: its view.
        match: how block 1 and the next correspond.
        copies: how many; ``match.stack.copies`` for the whole model.
        order: (role, first name) of the whole model's parameters and buffers to their position.

    Returns:
        The new graph, and its view *without ops* (``ops_of`` lists them). Inputs and outputs are in the order of the whole
        model.
    """
    work = _Splicer(graph, match, copies)
    holders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    inputs: list[tuple[fx.Node, int, GraphInput]] = []
    for entry in view.inputs:
        node = holders[entry.value.name]
        many = copies if node in work._own else 0
        inputs += [(node, k, _input(entry, match, k)) for k in range(many + 1)]
    inputs.sort(key=lambda item: input_place(item[2], order))
    for node, k, _ in inputs:
        work.placeholder(node, k)
    work.ops()
    results = _results(graph, view, match, copies, order)
    work.new.output(tuple(None if node is None else work.made[node, k] for node, k, _ in results))
    entries = tuple(dataclasses.replace(e, value=fx_value(work.made[node, k])) for node, k, e in inputs)
    outputs = tuple(
        dataclasses.replace(o, value=None if node is None else fx_value(work.made[node, k])) for node, k, o in results
    )
    return work.new, OpGraph(entries, (), outputs)


def _input(entry: GraphInput, match: Match, k: int) -> GraphInput:
    if entry.role not in ("parameter", "buffer"):
        return entry
    aliases = tuple(renamed(name, match, k) for name in entry.aliases)
    return dataclasses.replace(entry, name=renamed(entry.name, match, k), aliases=aliases)


def _results(
    graph: fx.Graph, view: OpGraph, match: Match, copies: int, order: Order
) -> list[tuple[fx.Node | None, int, GraphOutput]]:
    """Node, copy and entry of every result; those of parameters and buffers in the whole model's order."""
    (returned,) = (n for n in graph.nodes if n.op == "output")
    found: list[tuple[fx.Node | None, int, GraphOutput]] = []
    for node, entry in zip(returned.args[0], view.outputs, strict=True):
        child = child_of(entry.name, match.stack.path) if entry.role != "output" else None
        mine = child is not None and child[0] == match.stack.first
        for k in range(copies + 1 if mine else 1):
            name = entry.name if entry.role == "output" else renamed(entry.name, match, k)
            own = k if node is not None and match.owner.get(node) == match.stack.first else 0
            found.append((node, own, dataclasses.replace(entry, name=name)))
    found.sort(key=lambda item: result_place(item[2], order))
    return found
