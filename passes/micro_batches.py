"""Take the axis of micro-batches out of a rank's joint graph: what runs before, in and after the micro-batches.

A collective along that axis is a loop that must have run. By what it reads and where its result goes it is

* *known beforehand*, where it reads inputs alone (the number of labels that count): a pre-pass over the inputs of all
  micro-batches finds it before the first forward;
* *complete at the end*, where its result leads to results of the step only (the loss, gradients): each micro-batch adds to
  a sum, and what follows is done once to the sum;
* illegal otherwise: the planner has refused such programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.passes.cut_stages import Stages
from meshwright.passes.overlap import is_wait
from meshwright.passes.views import is_collective
from meshwright.planner.ir.errors import VerifyError

Pieces = Sequence[torch.Tensor]


def sum_over_time(pieces: Pieces) -> torch.Tensor:
    """The sum of what every micro-batch brings."""
    return _folded(torch.add, pieces)


def max_over_time(pieces: Pieces) -> torch.Tensor:
    """The element-wise maximum of what every micro-batch brings."""
    return _folded(torch.maximum, pieces)


def min_over_time(pieces: Pieces) -> torch.Tensor:
    """The element-wise minimum of what every micro-batch brings."""
    return _folded(torch.minimum, pieces)


def gather_over_time(pieces: Pieces) -> torch.Tensor:
    """What every micro-batch brings, one behind the other."""
    return torch.cat(list(pieces), 0)


def _folded(combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], pieces: Pieces) -> torch.Tensor:
    total = pieces[0]
    for piece in pieces[1:]:
        total = combine(total, piece)
    return total


OVER_TIME: Mapping[str, Callable[[Pieces], torch.Tensor]] = {
    "time.sum": sum_over_time,
    "time.max": max_over_time,
    "time.min": min_over_time,
    "time.gather": gather_over_time,
}
"""What stands in a :class:`PrePass` for a collective along the axis of micro-batches."""


@dataclass(frozen=True)
class OverTime:
    """One collective along the axis of micro-batches.

    Attributes:
        operand: what each micro-batch brings.
        kind: ``all_reduce`` or ``all_gather``.
        reduce: ``sum``, ``max`` or ``min``.
    """

    operand: fx.Node
    kind: str
    reduce: str

    @property
    def combine(self) -> Callable[[Pieces], torch.Tensor]:
        """Gives what the collective would return, from what every micro-batch brings."""
        return OVER_TIME["time.gather" if self.kind == "all_gather" else f"time.{self.reduce}"]


@dataclass(frozen=True)
class TimeNodes:
    """The nodes of a joint graph by when they run.

    Attributes:
        before: waits whose results are known beforehand, with what they combine.
        after: waits whose results are complete at the end, likewise.
        known: nodes that are computed from the former once per step.
        complete: nodes that depend on the latter.
        varying: nodes that differ between micro-batches.
        several: whether there is more than one micro-batch.
    """

    before: Mapping[fx.Node, OverTime]
    after: Mapping[fx.Node, OverTime]
    known: frozenset[fx.Node]
    complete: frozenset[fx.Node]
    varying: frozenset[fx.Node]
    several: bool = False

    def is_once(self, node: fx.Node) -> bool:
        """Whether every micro-batch makes the same, and all of it: a term of the loss that does not read the batch, its gradients."""
        return self.several and node not in self.varying and node not in self.complete


def time_nodes(gm: fx.GraphModule, stages: Stages, micro_batches: int) -> TimeNodes:
    """Sort the nodes of a joint graph whose first mesh axis is that of micro-batches (any graph, if there is one only).

    Raises:
        VerifyError: a collective along the axis is of no legal kind.
    """
    before: dict[fx.Node, OverTime] = {}
    after: dict[fx.Node, OverTime] = {}
    known: set[fx.Node] = set()
    complete: set[fx.Node] = set()
    varying: set[fx.Node] = set()
    for node in gm.graph.nodes if micro_batches > 1 else ():
        if node.op == "output":
            continue
        found = _over_time(node)
        if found is not None:
            if found.operand not in stages.free and found.reduce != "sum":
                raise VerifyError(
                    f"{found.operand.name}: micro-batches are only added up when all have run, not {found.reduce}: the planner must refuse this"
                )
            (before if found.operand in stages.free else after)[node] = found
            (known if node in before else complete).add(node)
            continue
        operands = node.all_input_nodes
        if _starts_to_vary(node) or any(a in varying for a in operands):
            varying.add(node)
            if any(a in complete for a in operands):
                raise VerifyError(
                    f"node {node.name} of each micro-batch reads what is complete only after all of them: the planner must refuse this"
                )
        elif any(a in complete for a in operands):
            complete.add(node)
        elif node in stages.free and any(a in known for a in operands):
            known.add(node)
    return TimeNodes(before, after, frozenset(known), frozenset(complete), frozenset(varying), micro_batches > 1)


def _over_time(node: fx.Node) -> OverTime | None:
    """The collective along the first axis that ``node`` waits for."""
    if not is_wait(node):
        return None
    issued = node.all_input_nodes[0]
    step = issued.meta["step"]
    if step.axis != 0 or not is_collective(issued):
        return None
    if step.kind not in ("all_reduce", "all_gather"):
        raise VerifyError(
            f"{issued.meta['step_value']}: {step.kind} over micro-batches is not possible, only sums and gathers are"
        )
    return OverTime(issued.all_input_nodes[0], step.kind, step.reduce_op)


def _starts_to_vary(node: fx.Node) -> bool:
    placements = node.meta.get("placements")
    step = node.meta.get("step")
    cut = step is not None and step.kind == "slice" and step.axis == 0
    return cut or (placements is not None and bool(placements) and placements[0].is_shard)


@dataclass(frozen=True)
class PrePass:
    """Computes what all micro-batches must know beforehand.

    Attributes:
        program: returns the results; in it, a function of :data:`OVER_TIME` stands where micro-batches are combined.
        inputs: value names of its arguments: batch inputs, buffers and constants.
        varying: names of its nodes that are computed for every micro-batch; the others once.
        results: names of the values that it finds.
    """

    program: fx.GraphModule
    inputs: tuple[str, ...]
    varying: tuple[str, ...]
    results: tuple[str, ...]

    def __call__(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run it.

        Args:
            inputs: for every micro-batch, the local tensors of its arguments, by value name.
        """
        varying, names = set(self.varying), iter(self.inputs)
        made: list[dict[fx.Node, Any]] = [{} for _ in inputs]
        with torch.no_grad():
            for node in self.program.graph.nodes:
                if node.op == "output":
                    return dict(zip(self.results, (made[0][n] for n in node.args[0]), strict=True))
                name = next(names) if node.op == "placeholder" else ""
                for i in range(len(inputs)):
                    made[i][node] = made[0][node] if i and node.name not in varying else self._value(node, i, name, inputs, made)
        raise AssertionError("a graph ends with its output")

    def _value(
        self,
        node: fx.Node,
        i: int,
        name: str,
        inputs: Sequence[Mapping[str, torch.Tensor]],
        made: Sequence[Mapping[fx.Node, Any]],
    ) -> Any:
        if node.op == "placeholder":
            return inputs[i][name]
        if node.target in OVER_TIME.values():
            return node.target([values[node.all_input_nodes[0]] for values in made])  # type: ignore[operator]
        args = fx.node.map_arg(node.args, made[i].__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, made[i].__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def pre_pass(gm: fx.GraphModule, times: TimeNodes, wanted: Sequence[fx.Node]) -> PrePass:
    """What finds the nodes ``wanted`` of a joint graph beforehand."""
    needed = set(wanted)
    for node in reversed(gm.graph.nodes):
        if node in needed:
            needed.update([times.before[node].operand] if node in times.before else node.all_input_nodes)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    mine = [n for n in gm.graph.nodes if n in needed]
    for node in mine:
        if node.op == "placeholder":
            new[node] = graph.placeholder(node.name)
        elif node in times.before:
            over = times.before[node]
            new[node] = graph.create_node("call_function", over.combine, (new[over.operand],), name=node.name)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
        new[node].meta.update(node.meta)
    graph.output(tuple(new[n] for n in wanted))
    return PrePass(
        program=fx.GraphModule(gm, graph),
        inputs=tuple(n.meta["value"] for n in mine if n.op == "placeholder"),
        varying=tuple(new[n].name for n in mine if n in times.varying),
        results=tuple(n.name for n in wanted),
    )
