"""Pins on a folded capture: those that treat all copies of a block alike stay, others need the whole model.

{"h.*.mlp.weight": P}                              stays
{"h.1.mlp.weight": P, ..., "h.30.mlp.weight": P}   stays as the pins of h.1 and h.2, which stand for all
{"h.7.mlp.weight": P}                              plans the whole model
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from meshwright.planner.correspond import child_of
from meshwright.planner.ir.graph import OpGraph, Repeat


def _rests(graph: OpGraph, repeat: Repeat) -> set[str]:
    """Names inside block 1: of parameters and of modules."""
    names = [n for i in graph.inputs for n in (i.name, *i.aliases)] + [op.module_path + "." for op in graph.ops]
    found = (child_of(name, repeat.path) for name in names)
    return {child[1].rstrip(".") for child in found if child is not None and child[0] == repeat.position}


def folded_pins(pins: Mapping[str, Any], graph: OpGraph, repeats: tuple[Repeat, ...]) -> dict[str, Any] | None:
    """The pins that say for the folded program what ``pins`` say for the whole one; None where that cannot be.

    Args:
        pins: name pattern to placements, for the whole model.
        graph: the folded program.
        repeats: what stands for more in it.
    """
    if not repeats:
        return dict(pins)
    kept = dict(pins)
    known = [n for i in graph.inputs for n in (i.name, *i.aliases)] + [op.module_path for op in graph.ops]
    for repeat in repeats:
        rests = _rests(graph, repeat)
        shared = range(repeat.first, repeat.first + repeat.copies + 1)
        if any(other.planned_at for other in repeats if other.path == repeat.path):  # the program numbers blocks otherwise
            shared = range(repeat.total)
        hits: dict[int, set[tuple[str, str]]] = {}
        for k in shared:
            block = f"{repeat.path}.{k}"
            names = {rest: f"{block}.{rest}" if rest else block for rest in rests}
            matched = [(p, rest) for p in pins for rest, name in names.items() if fnmatchcase(name, p)]
            hits[k] = {(rest, str(pins[p])) for p, rest in matched}
            for p in {p for p, _ in matched}:
                if p in kept and not any(fnmatchcase(name, p) for name in known):
                    del kept[p]
        if any(found != hits[shared[0]] for found in hits.values()):
            return None
    ops = set(graph.by_name)
    if any(fnmatchcase(op, p) for p in kept for op in ops):
        return None
    return kept
