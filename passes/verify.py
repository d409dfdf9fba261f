"""The last pass: checks that one rank's graph does what the plan says, and fingerprints its collectives."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from meshwright.passes.program import EmittedCollective
from meshwright.passes.redistribute import Step
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.redistribute import COLLECTIVES
from meshwright.planner.ir.spec import format_placements
from meshwright.planner.ir.verify import kept_values, planned_steps

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Name of a functional collective to the kind that plans speak of."""


@dataclass(frozen=True)
class VerifyProgram:
    """The pass: changes nothing.

    Attributes:
        plan: what was asked for.
        graph: the global program.
    """

    plan: Plan
    graph: OpGraph

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        _same_collectives(self.plan, self.graph, collectives_of(gm.graph.nodes))
        lowered = {n.meta["op"] for n in gm.graph.nodes if "op" in n.meta} | {n.name for n in gm.graph.nodes}
        lowered |= kept_values(self.plan, self.graph).keys()
        unlowered = [op.name for op in self.graph.ops if op.name not in lowered and not _is_alias(op.target)]
        if unlowered:
            raise VerifyError(f"op {unlowered[0]} of the program was not lowered ({len(unlowered)} missing)")
        return gm


def _is_alias(target: str) -> bool:
    """Whether a rank may have nothing to do for it: a layout op can be the identity on a piece."""
    return target.split(".")[1] in ("reshape", "expand", "permute", "slice", "_to_copy", "clone")


def collectives_of(nodes: Iterable[fx.Node]) -> tuple[EmittedCollective, ...]:
    """The collectives among ``nodes``, in order."""
    found = []
    for node in nodes:
        steps: tuple[Step, ...] = node.meta.get("steps") or ((node.meta["step"],) if "step" in node.meta else ())
        name = str(node.target).split(".")
        if node.op != "call_function" or name[0] != "_c10d_functional" or name[1] == "wait_tensor":
            continue
        if name[1] not in KINDS or not steps:
            raise VerifyError(f"node {node.format_node()} is a collective that no redistribution of the plan asks for")
        shape = steps[0].buffer_shape if len(steps) == 1 else (sum(s.buffer_numel for s in steps),)
        values = node.meta.get("step_values") or (node.meta["step_value"],)
        dtype = str(steps[0].dtype).removeprefix("torch.")
        found.append(EmittedCollective(KINDS[name[1]], steps[0].axis, node.meta["phase"], shape, dtype, values))
    return tuple(found)


def _same_collectives(plan: Plan, graph: OpGraph, emitted: tuple[EmittedCollective, ...]) -> None:
    """Every collective that the plan's paths ask for is there, once, and no other."""
    planned = {(s.phase, s.axis, s.kind, s.value.name): s for s in planned_steps(plan, graph) if s.kind != "slice"}
    wanted = Counter((s.phase, s.axis, s.kind, s.value.name) for s in planned_steps(plan, graph) if s.kind != "slice")
    found = Counter((c.phase, c.axis, c.kind, value) for c in emitted for value in c.values)
    for key in (wanted - found) or (found - wanted):
        phase, axis, kind, value = key
        step = planned.get(key)
        path = f" ({format_placements(step.src)} -> {format_placements(step.dst)})" if step else ""
        raise VerifyError(
            f"{value}{path}: the plan asks for {wanted[key]} {kind} over axis {plan.mesh.names[axis]!r} in {phase}, "
            f"the lowered program has {found[key]}"
        )
    _same_totals(plan, emitted)


def _same_totals(plan: Plan, emitted: tuple[EmittedCollective, ...]) -> None:
    """The plan's own table of predicted collectives agrees; a hand-written plan may leave it empty."""
    if not plan.collectives:
        return
    stated: Counter[tuple[str, int]] = Counter()
    for c in plan.collectives:
        if c.kind in COLLECTIVES:  # not what one controller hands out around the program
            stated[c.kind, c.axis] += c.count
    found = Counter((c.kind, c.axis) for c in emitted for _ in c.values)
    for kind, axis in stated.keys() | found.keys():
        if stated[kind, axis] != found[kind, axis]:
            raise VerifyError(
                f"the plan predicts {stated[kind, axis]} {kind} over axis {plan.mesh.names[axis]!r}, "
                f"the lowered program has {found[kind, axis]}"
            )


def sequence_hash(collectives: Iterable[EmittedCollective]) -> str:
    """sha256 of what goes over the wire, in order; equal on all ranks of a right program."""
    h = hashlib.sha256()
    for c in collectives:
        h.update(f"{c.kind} {c.axis} {c.phase} {c.shape} {c.dtype} {' '.join(c.values)}\n".encode())
    return h.hexdigest()
