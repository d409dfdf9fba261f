"""The memory of a problem as one rank of a pipeline has it: a share of what rests, and the micro-batches in flight.

The problem is that of the whole program and batch on the devices of one stage. With ``p`` ranks and ``m`` micro-batches, a rank rests
``1/p`` of the parameters and what belongs to them; it holds ``min(m, p)`` micro-batches of ``1/p`` of the activations, which is what
1F1B has in flight on its first rank. One micro-batch runs at a time; gradients are summed over all of them, whole ones as their ops make
them. It is an estimate for the search: ranks are not exactly alike, and what a plan really holds is counted when it is cut.

What is done once per step, before and behind all micro-batches, hides behind nothing, and no rank idles for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from meshwright.planner.solve.candidates import piece_numel
from meshwright.planner.solve.problem import Choice, Problem
from meshwright.planner.solve.results import parameter_of
from meshwright.planner.solve.rows import ELSEWHERE
from meshwright.planner.solve.tables import Tables

_SUM_BYTES = 4
"""Bytes of an element of a sum of gradients over micro-batches at least."""


def as_one_rank(
    tables: Tables,
    degree: int,
    micro_batches: int,
    *,
    whole_sums: bool,
    limit_bytes: int | None,
    once: Callable[[str], bool] | None,
    busy: float,
) -> Problem:
    """The problem with the memory of one rank, a limit for that, and what is done once per step.

    Args:
        tables: the problem of the whole program, and its meaning.
        degree: ranks along the pipeline axis.
        micro_batches: per step.
        whole_sums: whether gradients are summed as their ops make them, rather than in the pieces in which parameters rest.
        limit_bytes: per device; None for no limit.
        once: whether a value is brought to where it is needed once per step; kept copies of parameters are. None: hide that behind
            compute as without stages, which suits plans whose parameters are gathered by every micro-batch.
        busy: share of the step's micro-batches that a rank is busy: by so much less counts what is done once.
    """
    scale = {
        "parameters": (1 if whole_sums else 2) / degree,  # sums in pieces are as large as they
        "optimizer": 1 / degree,
        "accumulated": 1 / degree,
        "kept": 1 / degree,
        "activations": min(micro_batches, degree) / degree / micro_batches,
        "working": 1 / micro_batches,
        "gradients": 0.0,
    }
    sums = _sums(tables) if whole_sums else {}
    exposes = None if once is None else busy
    choices = tuple(_changed(choice, scale, sums.get(g), degree, exposes) for g, choice in enumerate(tables.problem.choices))
    flows = tables.problem.flows
    if once is not None:
        flows = tuple(replace(f, hidden=False, count=f.count * busy) if once(f.name) else f for f in flows)
    peaks = tuple(p for p in tables.problem.peaks if p.category != ELSEWHERE)
    return replace(tables.problem, choices=choices, flows=flows, peaks=peaks, memory_limit_bytes=limit_bytes)


def _changed(choice: Choice, scale: Mapping[str, float], sums: np.ndarray | None, degree: int, exposes: float | None) -> Choice:
    gather_s = choice.gather_s if choice.gather_s is None or exposes is None else choice.gather_s * exposes
    sizes = {k: v * scale.get(k, 1.0) for k, v in choice.memory_bytes.items() if scale.get(k, 1.0)}
    sizes = sizes if sums is None else {**sizes, "gradients": sums / degree}
    return replace(choice, memory_bytes=sizes, gather_s=gather_s, gather_hidden=choice.gather_hidden and exposes is None)


def _sums(tables: Tables) -> dict[int, np.ndarray]:
    """Choice to bytes by candidate of the sums of the gradients that it makes, each as it is made, and of one micro-batch's."""
    parameters = parameter_of(tables.graph)
    made = {o.value.name for o in tables.graph.outputs_of("gradient") if o.value is not None and o.name in parameters}
    found: dict[int, np.ndarray] = {}
    for i, cluster in enumerate(tables.clusters.clusters):
        g = tables.class_of[i]
        for slot, value in enumerate(cluster.outs):
            if value.name in made:
                each = _SUM_BYTES + value.dtype.itemsize
                numels = [piece_numel(value.shape, c.outs[slot], tables.mesh.sizes) for c in tables.candidates[g]]
                found[g] = found.get(g, np.zeros(len(numels))) + np.array(numels, float) * each * tables.clusters.times(
                    value.name
                )
    return found
