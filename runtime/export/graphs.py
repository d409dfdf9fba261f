"""Generated graphs as JSON that people can read, and back.

```
{"inputs": [["w", "float32", [4, 8]], ["x", "float32", [2, 8]]],
 "nodes": [["t", "aten.permute.default", ["%w", [1, 0]]], ["mm", "aten.mm.default", ["%x", "%t"]]],
 "outputs": ["%mm", null]}
```

A node is its name, operator, arguments and, where it has any, keyword arguments. ``"%name"`` is the result of a node; numbers, true,
false, null and lists are themselves; everything else is an object with one key, see :data:`_SPECIAL`. Process groups are written as
the mesh axis that they run along and devices as ``"here"``: both are bound again when a graph is read.

Reading runs nothing: an operator must be in the list, names must be names and nothing else, for torch pastes them into the code that it
generates.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.export.operators import Operators, name_of, operators
from meshwright.runtime.export.plain import MAX_INT, Hook, fail, from_plain, to_plain
from meshwright.runtime.export.schemas import wrong_argument

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}", re.ASCII)
_RESERVED = frozenset({"self", "arguments", "torch", "device", "inf", "nan"})
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_SPECIAL = ("text", "group", "dtype", "device", "layout", "memory_format", "float")

GROUPS = "axis {}"
"""Name of a mesh axis' process group in a program that is made to be written."""


def group_markers(num_axes: int) -> tuple[str, ...]:
    """The names of process groups that :func:`write_graph` knows, one per mesh axis."""
    return tuple(GROUPS.format(i) for i in range(num_axes))


# --- writing ------------------------------------------------------------------------------------------------------


def write_graph(gm: fx.GraphModule, extra: Sequence[str] = ()) -> dict[str, Any]:
    """A graph as JSON data.

    Args:
        gm: its placeholders have fake values, or it was read; its process groups are called as :func:`group_markers` says.
        extra: operators besides those of the list that may be written.

    Raises:
        InputError: an operator or an argument cannot be written; names the node.
    """
    known = operators(tuple(extra))
    inputs, nodes = [], []
    outputs: Any = ()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            dtype, shape = node.meta.get("declared") or (node.meta["val"].dtype, node.meta["val"].shape)
            inputs.append([node.name, to_plain(torch.dtype, dtype), list(shape)])
        elif node.op == "output":
            outputs = node.args[0]
        else:
            nodes.append(_write_node(node, known))
    return {"inputs": inputs, "nodes": nodes, "outputs": [_write(n) for n in outputs]}


def _write_node(node: fx.Node, known: Operators) -> list[Any]:
    name = name_of(node.target)
    if node.op != "call_function" or name not in known:
        raise InputError(
            f"node {node.name} calls {name}, which is not in the list of operators that exports may call: pass "
            f"operators=({name!r},) to export and to load, if its library may be used there"
        )
    try:
        written = [node.name, name, [_write(a) for a in node.args]]
        return [*written, {k: _write(v) for k, v in node.kwargs.items()}] if node.kwargs else written
    except InputError as error:
        error.add_note(f"in node {node.name} = {name}")
        raise


def _write(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, list | tuple):
        return [_write(a) for a in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or type(arg) in (bool, int, float):
        return arg
    if isinstance(arg, str):
        axis = re.fullmatch(GROUPS.format(r"(\d+)"), arg)
        return {"text": arg} if axis is None else {"group": int(axis[1])}
    if isinstance(arg, torch.device):
        return {"device": "here"}
    for kind, tag in ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")):
        if isinstance(arg, kind):
            return {tag: str(arg).removeprefix("torch.")}
    raise InputError(f"argument {arg!r} of type {type(arg).__name__} cannot be written: exports hold tensors, numbers and texts")


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphReader:
    """Reads graphs for one rank.

    Attributes:
        groups: names of its process groups, one per mesh axis.
        device: where it runs.
        operators: what may be called.
    """

    groups: tuple[str, ...]
    device: torch.device
    operators: Operators

    def read(self, data: Any, where: str) -> fx.GraphModule:
        """A graph; its placeholders have ``meta["declared"]``: element type and shape.

        Raises:
            FormatError: it is not what :func:`write_graph` writes.
        """
        parts = from_plain(_Parts, data, where, _PARTS)
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        for i, (name, dtype, shape) in enumerate(parts.inputs):
            self._check_name(name, nodes, f"{where}.inputs[{i}]")
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["declared"] = (dtype, shape)
        for i, node in enumerate(parts.nodes):
            self._call(graph, nodes, node, f"{where}.nodes[{i}]")
        graph.output(tuple(self._read(o, nodes, f"{where}.outputs[{i}]") for i, o in enumerate(parts.outputs)))
        for name, made in nodes.items():
            if made.name != name:  # torch renames what its generated code could not call so
                fail(where, name, "a name that is free in generated code")
        return fx.GraphModule(nn.Module(), graph)

    def _check_name(self, name: Any, nodes: Mapping[str, fx.Node], where: str) -> None:
        if type(name) is not str or not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _RESERVED:
            fail(where, name, "the name of a node: letters, digits and underscores")
        if name in nodes:
            fail(where, name, "a name that no other node has")

    def _call(self, graph: fx.Graph, nodes: dict[str, fx.Node], data: Any, where: str) -> None:
        if type(data) is not list or len(data) not in (3, 4) or type(data[1]) is not str or type(data[2]) is not list:
            fail(where, data, "[name, operator, arguments] or [name, operator, arguments, keyword arguments]")
        name, operator, args, *rest = data
        self._check_name(name, nodes, where)
        if operator not in self.operators:
            fail(where, operator, "an operator of the list that exports may call (or that load is told to allow)")
        target = self.operators[operator]
        given = rest[0] if rest else {}
        if type(given) is not dict or not all(k.isidentifier() for k in given):
            fail(where, given, "keyword arguments by name")
        values = tuple(self._read(a, nodes, where) for a in args)
        kwargs = {k: self._read(v, nodes, where) for k, v in given.items()}
        wrong = wrong_argument(target, values, kwargs)
        if wrong:
            fail(where, wrong, f"what {operator} takes")
        nodes[name] = graph.create_node("call_function", target, values, kwargs, name=name)

    def _read(self, data: Any, nodes: Mapping[str, fx.Node], where: str) -> Any:
        if type(data) is str:
            if data[:1] != "%" or data[1:] not in nodes:
                fail(where, data, "'%' and the name of an earlier node")
            return nodes[data[1:]]
        if type(data) is list:
            return [self._read(a, nodes, where) for a in data]
        if type(data) is dict:
            return self._special(data, where)
        if type(data) is int and not -MAX_INT <= data <= MAX_INT:
            fail(where, data, "a number of 64 bits")
        return data

    def _special(self, data: dict[str, Any], where: str) -> Any:
        if len(data) != 1:
            fail(where, data, f"an object with one key out of {', '.join(_SPECIAL)}")
        ((tag, value),) = data.items()
        if tag == "group" and type(value) is int and 0 <= value < len(self.groups):
            return self.groups[value]
        if tag == "device" and value == "here":
            return self.device
        if tag == "dtype":
            return from_plain(torch.dtype, value, where)
        if tag == "text" and type(value) is str and value.isprintable() and len(value) < 1000:
            return value
        table: Mapping[str, Mapping[str, Any]] = {"layout": _LAYOUTS, "memory_format": _MEMORY_FORMATS, "float": _FLOATS}
        if tag in table and type(value) is str and value in table[tag]:
            return table[tag][value]
        return fail(where, data, f"one of {', '.join(_SPECIAL)} with a value that it can have")


class _Raw:
    """JSON that is read node by node."""


@dataclass(frozen=True)
class _Parts:
    """A graph in pieces."""

    inputs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    nodes: tuple[_Raw, ...]
    outputs: tuple[_Raw, ...]


_PARTS = {_Raw: Hook(write=lambda value: value, read=lambda data, where: data)}
