"""Which forward values are kept for the backward, decided before planning, as a change of the graph.

Cheap ops that the backward reads are *copied* into it (``gelu`` becomes ``gelu_r``), and read either what is kept or
parameters and inputs:

    before                             after
    add = mm + bias      (forward)     add = mm + bias      (forward)
    gelu = gelu(add)     (forward)     gelu = gelu(add)     (forward)
    gb = gelu_backward(g, add)         gb = gelu_backward(g, add)
    gw = mm(x, gelu)                   gelu_r = gelu(add)   (backward)
                                       gw = mm(x, gelu_r)
    kept: add, gelu                    kept: add

The choice is a minimum cut. Every forward value is an arc whose capacity is its bytes; arcs lead from a value to what
is computed from it; what must be computed in the forward hangs on the source, what the backward reads on the sink. A
view is never kept (its arc is infinite): it is taken again from its root, so no kept value shares memory with another.
Computing a value again costs a small part of its bytes, so that a tie is decided for keeping the later value.

What may be computed again is a policy (:class:`Policy`), op by op: at level ``selective`` everything but products with
parameters, weighed by its time; at level ``full`` everything inside a part of the program, of which only what it reads from
outside is kept. A recomputed op is an ordinary op: if it needs a gathered parameter or another collective, planning prices it.

Source: the idea is that of min-cut rematerialisation in AOTAutograd (H. He, S. Shah, 2022); there it follows planning.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from meshwright.planner.ir.graph import Capture, GraphOutput, Op, OpGraph, fx_value, ops_of
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.joint import joint_module, written
from meshwright.planner.kinds import argument, packet
from meshwright.planner.order import finish_gradients_early, widen_late
from meshwright.planner.solve.backend import min_cut

aten = torch.ops.aten

VIEWS = frozenset(
    map(
        str,
        (
            aten.reshape.default,
            aten.permute.default,
            aten.expand.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.split_with_sizes.default,
            aten.unbind.int,
            aten.view.dtype,
        ),
    )
)
"""Ops whose result shares its input's memory; computing them again is free."""

CHEAP = frozenset(
    map(str, (aten._to_copy.default, aten.full.default, aten.arange.start_step, aten.cat.default, aten.slice_backward.default))
) | {"meshwright.uniform.default"}
"""Ops that only move or make numbers; with the pointwise ones they may be computed again. Random numbers are seeded."""

RECOMPUTE_PER_KEPT = 32
"""A byte computed again weighs 1/32 of a byte kept: ten chained pointwise ops for a third of the memory they save."""


def _overload(target: str) -> torch._ops.OpOverload | None:
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload, None)


def may_recompute(op: Op) -> bool:
    """Whether the op is cheap enough to run twice: a view, a copy, a constant, a seeded draw or pointwise."""
    if op.target in VIEWS or op.target in CHEAP:
        return True
    overload = _overload(op.target)
    if overload is None or torch.Tag.nondeterministic_seeded in overload.tags:
        return False
    return torch.Tag.pointwise in overload.tags


FLOPS_PER_BYTE = 200
"""Arithmetic that takes as long as one byte of memory traffic: H100, 660 TFLOP/s reached over 3.35 TB/s (devices.csv)."""

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear", "aten.convolution", "aten.convolution_backward"})
"""Products with parameters: computed again only where a whole block is."""


def _is_random(op: Op) -> bool:
    """Whether a second run could give other numbers; attention draws only for dropout."""
    overload = _overload(op.target)
    drawing = overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
    return overload is None or (drawing and not ("scaled_dot_product" in op.target and argument(op, "dropout_p") == 0.0))


def work_bytes(op: Op) -> int:
    """What computing an op again takes, as the bytes of memory traffic that take as long."""
    largest = max(v.size_bytes for v in (*op.ins, *(o for o in op.outs if o is not None)))
    name, out = packet(op.target), next(v for v in op.outs if v is not None)
    flops = 0
    if name in ("aten.bmm", "aten.baddbmm"):
        flops = 2 * out.numel * op.ins[-1].shape[1]
    elif "scaled_dot_product" in name:
        queries, keys = op.ins[0], op.ins[1]
        flops = 4 * queries.numel * keys.shape[-2] // (2 if argument(op, "is_causal", False) else 1)
    return max(largest, flops // FLOPS_PER_BYTE)


@dataclass(frozen=True)
class Policy:
    """What may be computed again, op by op.

    Attributes:
        level: of ops outside of all parts.
        parts: forward op to the number of its part.
        levels: part to its level.
    """

    level: str = "none"
    parts: Mapping[str, int] = field(default_factory=dict)
    levels: Mapping[int, str] = field(default_factory=dict)

    def level_of(self, op: Op) -> str:
        return self.levels[self.parts[op.name]] if op.name in self.parts else self.level


def policy_of(recompute: Recompute, parts: Mapping[str, int]) -> Policy:
    """The policy that a choice means for a program with these parts.

    Outside of blocks nothing is gained: what the backward needs first, or what is made first, is alive at the peak anyway.
    """
    return Policy("none", parts, {part: recompute.level_of(part) for part in set(parts.values())})


class _Network:
    """The flow network: two nodes per forward value, a source and a sink."""

    def __init__(self, graph: OpGraph, policy: Policy):
        self.graph, self.policy = graph, policy
        self.forward = [op for op in graph.ops if op.phase == "forward"]
        values = [v for op in self.forward for v in op.outs if v is not None]
        self.values = values
        self.index = {v.name: i for i, v in enumerate(values)}
        self.source, self.sink = 2 * len(values), 2 * len(values) + 1
        self.arcs: list[tuple[int, int, int]] = []
        work = sum(work_bytes(op) for op in self.forward if op.ins and any(op.outs))
        self.infinite = 1 + sum(v.size_bytes for v in values) * (RECOMPUTE_PER_KEPT + 1) + work
        changed = {o.name for o in graph.outputs_of("mutation")}
        self._unstable = {i.value.name for i in graph.inputs_of("buffer") if i.name in changed}
        self._made = {v.name: op for op in self.forward for v in op.outs if v is not None}
        self._leaving = self._handed_on()

    def _handed_on(self) -> frozenset[str]:
        """Values made in a part and read outside of it that are not to be computed again.

        Of a part that is recomputed as a whole all of them; of others what a single later part reads: else the backward would
        begin by computing a residual stream again through all blocks. (What many read is a mask, cheap as a rule.)
        """
        readers: dict[str, set[int | None]] = {}
        for op in self.forward:
            at = self.policy.parts.get(op.name)
            for v in op.ins:
                source = self._part_of(v.name)
                if source is not None and source != at:
                    readers.setdefault(self._root(v.name, source), set()).add(at)
        return frozenset(
            name
            for name, parts in readers.items()
            if self.policy.level_of(self._made[name]) == "full" or len(parts - {None}) == 1
        )

    def _part_of(self, value: str) -> int | None:
        return self.policy.parts.get(self._made[value].name) if value in self._made else None

    def _root(self, value: str, part: int) -> str:
        """The value behind a view, as far as it is made in the part."""
        while self._made[value].target in VIEWS and self._part_of(self._made[value].ins[0].name) == part:
            value = self._made[value].ins[0].name
        return value

    def fill(self) -> None:
        for op in self.forward:
            self._add_op(op)
        for value in self.graph.saved:
            self.arcs.append((2 * self.index[value.name] + 1, self.sink, self.infinite))

    def _add_op(self, op: Op) -> None:
        is_view, level = op.target in VIEWS, self.policy.level_of(op)
        stays = _is_random(op) or any(v.name in self._unstable for v in op.ins)
        cheap = may_recompute(op)
        for value in op.outs:
            if value is None:
                continue
            at = 2 * self.index[value.name]
            pinned = stays or value.name in self._leaving or not (cheap or level == "full" or self._light(op, level))
            lost = not pinned and (is_view or level == "full")
            keep = self.infinite if lost else value.size_bytes * RECOMPUTE_PER_KEPT
            again = self.infinite if pinned else 0 if is_view else value.size_bytes if cheap else work_bytes(op)
            self.arcs += [(at, at + 1, keep), (self.source, at, again)]
            self.arcs += [(2 * self.index[v.name] + 1, at, self.infinite) for v in op.ins if v.name in self.index]

    def _light(self, op: Op, level: str) -> bool:
        return level == "selective" and bool(op.ins) and packet(op.target) not in PRODUCTS

    def kept(self) -> set[str]:
        """Names of the values to keep: the minimum cut nearest to the backward."""
        tails, heads, capacities = np.array(self.arcs, dtype=np.int64).T
        behind = min_cut(heads, tails, np.ascontiguousarray(capacities), self.sink, self.source)
        return {v.name for i, v in enumerate(self.values) if 2 * i not in behind and 2 * i + 1 in behind}


def choose_kept(graph: OpGraph, policy: Policy | None = None) -> set[str]:
    """Names of the forward values to keep for the backward; all else that it reads can be computed from them."""
    network = _Network(graph, policy or Policy())
    network.fill()
    return network.kept() if network.arcs else set()


class _Rewriter:
    """Writes copies of forward ops into a graph, each before its first use in the backward.

    Attributes:
        changed: names of the ops that read copies from now on.
    """

    def __init__(self, graph: fx.Graph, kept: Set[str]):
        self.graph = graph
        self.kept = kept
        self.again: dict[fx.Node, fx.Node] = {}
        self.changed: set[str] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node.meta["phase"] != "backward":
                continue
            made_again = {n: self._copy(n, node) for n in node.all_input_nodes if self._is_lost(n)}
            if made_again:
                self.changed.add(node.name)
                node.args, node.kwargs = self._reading((node.args, node.kwargs), made_again)

    def _reading(self, arguments: Any, instead: Mapping[fx.Node, fx.Node]) -> Any:
        return fx.map_arg(arguments, lambda n: instead.get(n, n))

    def _is_lost(self, node: fx.Node) -> bool:
        """Whether the backward reads a copy instead: a forward op's result that is not kept."""
        return node.op == "call_function" and node.meta["phase"] != "backward" and not self._is_kept(node)

    def _is_kept(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return f"{node.args[0].name}#{node.args[1]}" in self.kept  # type: ignore[union-attr]
        return node.name in self.kept

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node once more before ``reader``; deep chains are written without recursion in Python."""
        pending = [node]
        with self.graph.inserting_before(reader):
            while node not in self.again:
                top = pending[-1]
                missing = [n for n in top.all_input_nodes if self._is_lost(n) and n not in self.again]
                if missing:
                    pending += missing
                    continue
                pending.pop()
                if top not in self.again:
                    self.again[top] = self._write(top)
        return self.again[node]

    def _write(self, node: fx.Node) -> fx.Node:
        args, kwargs = self._reading((node.args, node.kwargs), self.again)
        meta = {**node.meta, "phase": "backward", "recompute_of": node.name}
        return written(self.graph, node.target, args, kwargs, f"{node.name}_r", meta)


def save_few(capture: Capture, kept: Set[str] | None = None) -> Capture:
    """The same program, with fewer bytes kept between forward and backward.

    ``OpGraph.saved`` of the result is what is kept. Results are bitwise the same. A capture without a backward is
    returned as it is.

    Args:
        capture: the program.
        kept: names of the forward values to keep; None: those of :func:`choose_kept`, cheap ops alone computed again.
    """
    if not capture.training:
        return capture
    graph, view = rewritten(_copied(capture.gm.graph), capture.graph, choose_kept(capture.graph) if kept is None else kept)
    return dataclasses.replace(capture, gm=joint_module(graph), graph=view)


def rewritten(graph: fx.Graph, view: OpGraph, kept: Set[str]) -> tuple[fx.Graph, OpGraph]:
    """A captured graph and its view, with everything but ``kept`` computed again in the backward; ``graph`` itself is changed."""
    rewriter = _Rewriter(graph, kept)
    rewriter.run()
    finish_gradients_early(graph)
    widen_late(graph)
    same = {op.name: op for op in view.ops if op.name not in rewriter.changed}
    return graph, OpGraph(view.inputs, ops_of(graph, same), _outputs(view, graph))


def _copied(graph: fx.Graph) -> fx.Graph:
    new, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copied[node] = new.node_copy(node, copied.__getitem__)
    return new


def _outputs(view: OpGraph, graph: fx.Graph) -> tuple[GraphOutput, ...]:
    (returned,) = (n for n in graph.nodes if n.op == "output")
    pairs = zip(view.outputs, returned.args[0], strict=True)
    return tuple(dataclasses.replace(o, value=None if n is None else fx_value(n)) for o, n in pairs)
