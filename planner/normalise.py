"""The captured joint graph in normal form: small vocabulary, nothing twice, forward before backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.planner.builder import Builder, shape_of
from meshwright.planner.ir.errors import TraceError
from meshwright.planner.joint import written
from meshwright.planner.rewrites import REMOVED, REWRITES


def _non_negative_dims(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional ``dim`` arguments counted from the front, by the schema's names."""
    first = args[0] if args else None
    tensor = first[0] if isinstance(first, list | tuple) and first else first
    if not isinstance(tensor, fx.Node) or not isinstance(tensor.meta["val"], torch.Tensor):
        return args
    rank = len(shape_of(tensor)) or 1
    fixed = list(args)
    for i, argument in enumerate(target._schema.arguments[: len(args)]):
        if argument.name != "dim" or args[i] is None:
            continue
        fixed[i] = [d % rank for d in args[i]] if isinstance(args[i], list | tuple) else args[i] % rank
    return tuple(fixed)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a kernel with dropout inside is called without it."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    at = next((i for i, argument in enumerate(schema) if argument.name == "dropout_p"), None)
    if at is None:
        return False
    default = schema[at].default_value if schema[at].has_default_value() else None
    chance = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", default)
    return isinstance(chance, int | float) and chance == 0


def _check_known(node: fx.Node, where: Callable[[fx.Node], str]) -> None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise TraceError(
            f"{target} at {where(node)} is not a single operator and cannot be planned: "
            "write that part of the model with ordinary tensor operations"
        )
    if torch.Tag.nondeterministic_seeded in target.tags and not _drops_nothing(node):
        raise TraceError(
            f"random operator {target} at {where(node)} cannot be reproduced across ranks: draw with dropout, torch.rand, "
            "randn, randint or bernoulli, or pass the random numbers in as an input"
        )
    if target._schema.is_mutable:
        raise TraceError(
            f"operator {target} at {where(node)} writes to its argument in place: use the form that returns a result"
        )


def rewrite_node(b: Builder, node: fx.Node, where: Callable[[fx.Node], str]) -> Any:
    """The new node for one old ``call_function`` node.

    Raises:
        TraceError: a random, in-place or higher-order operator that has no rewrite.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), b.made.__getitem__)
    if node.target is operator.getitem:
        source: Any = args[0]
        index: Any = args[1]
        if isinstance(source, tuple):
            return source[index]
        return b.emit(operator.getitem, source, index, val=node.meta["val"])
    b.like = node
    rewrite = REWRITES.get(node.target)
    if rewrite is not None:
        return rewrite(b, node, args, kwargs)
    _check_known(node, where)
    return b.emit(node.target, *_non_negative_dims(node.target, args), val=node.meta["val"], **kwargs)


def rewrite_ops(b: Builder, nodes: Iterable[fx.Node], where: Callable[[fx.Node], str]) -> None:
    """Writes every op of ``nodes`` into ``b``; ``b.made`` already maps the placeholders and constants.

    Raises:
        TraceError: as :func:`rewrite_node`.
    """
    for node in nodes:
        if node.op == "call_function" and node.target not in REMOVED:
            b.made[node] = rewrite_node(b, node, where)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def copy_op(graph: fx.Graph, node: fx.Node, map_node: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A ``call_function`` node in another graph, named after its operator."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), map_node)
    target = node.target
    name = "getitem" if target is operator.getitem else target._opname  # type: ignore[union-attr]
    return written(graph, target, args, kwargs, name, node.meta)


def arranged(
    source: fx.Graph,
    placeholders: Sequence[fx.Node],
    forward_outputs: Sequence[fx.Node | None],
    backward_outputs: Sequence[fx.Node | None],
) -> fx.Graph:
    """A copy with placeholders in the given order, then what the forward outputs need, then the rest that is needed.

    Every op's ``meta["phase"]`` is set. Results are ``forward_outputs`` then ``backward_outputs``.
    """
    ops = [n for n in source.nodes if n.op == "call_function"]
    forward = ancestors(n for n in forward_outputs if n is not None)
    needed = forward | ancestors(n for n in backward_outputs if n is not None)
    # A result that only the backward reads is still made by the forward op that has it.
    forward |= {n for n in ops if n in needed and n.target is operator.getitem and n.args[0] in forward}
    backward = needed - forward
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        copied[node] = graph.node_copy(node)
    for phase, members in (("forward", forward), ("backward", backward)):
        for node in ops:
            if node in members:
                copied[node] = copy_op(graph, node, copied.__getitem__)
                copied[node].meta["phase"] = phase
    graph.output(tuple(None if n is None else copied[n] for n in (*forward_outputs, *backward_outputs)))
    return graph
