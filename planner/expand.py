"""A plan for a folded capture, said of the whole model: every copy of a block does what the block does.

planned                                         whole
ops["mm"], ops["mm__1"]: equal specs            ops["mm"], ops["mm__1"], ..., ops["mm__29"]
redistribution of y (to the copy) and y__1      y ... y__28 as y; y__29 as y__1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.correspond import child_of
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import OpGraph, Repeat
from meshwright.planner.ir.plan import Plan, Redistribution
from meshwright.planner.ir.spec import Placements


def _copies(planned: OpGraph, repeats: tuple[Repeat, ...]) -> Iterator[tuple[str, str]]:
    """(name in the whole program, name in the planned one) of every op and placeholder that is a copy."""
    forward = {op.name: op.phase == "forward" for op in planned.ops}
    again = {op.recompute_of: True for op in planned.ops if op.recompute_of is not None}
    for repeat in repeats:
        for name in repeat.names:
            mine, copy = repeat.planned(name), repeat.planned(name, 1)
            for k in range(repeat.copies + 1):
                source = mine if k == 0 or (forward.get(mine, True) and k < repeat.copies) else copy
                yield repeat.whole(name, k), source
                if mine in again:
                    yield repeat.whole(name, k) + "_r", (mine if k < repeat.copies else copy) + "_r"


def planned_names(planned: OpGraph, whole: OpGraph, repeats: tuple[Repeat, ...]) -> dict[str, str]:
    """Name of every op and placeholder of the whole program to that of the planned one whose decision it shares.

    Raises:
        VerifyError: the programs do not belong together (a bug).
    """
    copies = dict(_copies(planned, repeats))
    known = {*planned.by_name, *(i.value.name for i in planned.inputs)}
    names = {n: copies.get(n, n) for n in (*whole.by_name, *(i.value.name for i in whole.inputs))}
    for name, source in names.items():
        if source not in known:
            raise VerifyError(f"{name} of the whole program has no counterpart ({source}) in the folded one")
    return names


def _planned_fqn(name: str, repeats: tuple[Repeat, ...]) -> str:
    for repeat in repeats:
        child = child_of(name, repeat.path)
        start = repeat.first + repeat.whole_at
        if child is not None and start <= child[0] <= start + repeat.copies:
            return f"{repeat.path}.{repeat.position + (child[0] > start)}.{child[1]}"
    return name


def expanded(plan: Plan, planned: OpGraph, whole: OpGraph, repeats: tuple[Repeat, ...]) -> Plan:
    """The plan for the whole program.

    Args:
        plan: the plan for ``planned``.
        planned: the folded program.
        whole: the program with every block.
        repeats: how they belong together.
    """
    names = planned_names(planned, whole, repeats)
    ends = {(o.role, o.name): p for o, p in zip(planned.outputs, plan.outputs, strict=True)}
    paths: dict[str, list[Redistribution]] = {}
    for r in plan.redistributions:
        paths.setdefault(r.value, []).append(r)
    moved: list[Redistribution] = []
    kept: dict[str, Placements] = {}
    told = {value.partition("#")[0] for value in (*paths, *plan.kept)}
    for maker, values in [*((i.value.name, (i.value,)) for i in whole.inputs), *((op.name, op.outs) for op in whole.ops)]:
        if names[maker] not in told:
            continue
        for value in filter(None, values):
            source = names[maker] + value.name[len(maker) :]
            moved += [replace(r, value=value.name) for r in paths.get(source, ())]
            if source in plan.kept:
                kept[value.name] = plan.kept[source]
    return replace(
        plan,
        graph_hash=whole.hash,
        inputs={i.value.name: plan.inputs[names[i.value.name]] for i in whole.inputs},
        ops={op.name: plan.ops[names[op.name]] for op in whole.ops},
        outputs=tuple(ends[o.role, _planned_fqn(o.name, repeats)] for o in whole.outputs),
        redistributions=tuple(moved),
        kept=kept,
        kernel_s={op.name: plan.kernel_s[names[op.name]] for op in whole.ops if names[op.name] in plan.kernel_s},
    )
