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
from meshwright.passes.split import is_collective
from meshwright.planner.ir.errors import VerifyError

_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


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

    def combine(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the collective would return, from what every micro-batch brings."""
        if self.kind == "all_gather":
            return torch.cat(list(pieces), 0)
        total = pieces[0]
        for piece in pieces[1:]:
            total = _COMBINE[self.reduce](total, piece)
        return total


@dataclass(frozen=True)
class TimeNodes:
    """The nodes of a joint graph by when they run.

    Attributes:
        before: waits whose results are known beforehand, with what they combine.
        after: waits whose results are complete at the end, likewise.
        known: nodes that are computed from the former once per step.
        complete: nodes that depend on the latter.
        varying: nodes that differ between micro-batches.
    """

    before: Mapping[fx.Node, OverTime]
    after: Mapping[fx.Node, OverTime]
    known: frozenset[fx.Node]
    complete: frozenset[fx.Node]
    varying: frozenset[fx.Node]


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
    return TimeNodes(before, after, frozenset(known), frozenset(complete), frozenset(varying))


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


class PrePass:
    """Computes what all micro-batches must know beforehand.

    Attributes:
        results: names of the values that it finds.
        inputs: value names of the inputs that it reads, by the names of their nodes.
    """

    def __init__(self, times: TimeNodes, wanted: Sequence[fx.Node]):
        self._times, self._wanted = times, tuple(wanted)
        self.results = tuple(n.name for n in wanted)

    def __call__(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run it.

        Args:
            inputs: for every micro-batch, the local tensors of batch inputs, buffers and constants, by value name.
        """
        made: dict[tuple[fx.Node, int], Any] = {}

        def value(node: fx.Node, i: int) -> Any:
            at = (node, i if node in self._times.varying else 0)
            if at not in made:
                made[at] = compute(node, at[1])
            return made[at]

        def compute(node: fx.Node, i: int) -> Any:
            if node.op == "placeholder":
                return inputs[i][node.meta["value"]]
            if node in self._times.before:
                over = self._times.before[node]
                return over.combine([value(over.operand, j) for j in range(len(inputs))])
            args = fx.node.map_arg(node.args, lambda a: value(a, i))
            kwargs = fx.node.map_arg(node.kwargs, lambda a: value(a, i))
            assert callable(node.target)
            return node.target(*args, **kwargs)  # type: ignore[arg-type]

        with torch.no_grad():
            return {node.name: value(node, 0) for node in self._wanted}
