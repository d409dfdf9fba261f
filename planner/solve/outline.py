"""A smaller problem whose optimum is a lower bound: the repeated block alone, and the compute of everything else.

What is left out only adds cost and constraints: clusters outside the block keep their least compute, values between them and the
block come and go in any placement, and their memory counts as nothing. Three captured layers make a third of the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.solve.floor import Floors
from meshwright.planner.solve.problem import SEGMENTS, Choice
from meshwright.planner.solve.tables import Tables

# The outline must be at most this part of the program to be worth building.
_PART = 0.6
# A class is of the repeated block if it occurs more often than this part of the most frequent one, of which a block may have many.
_OFTEN = 8


def repeated_part(clusters: ClusterGraph, counts: Mapping[int, int]) -> tuple[int, ...]:
    """Indices of the clusters whose classes occur in most blocks; none where that is most of the program.

    Args:
        clusters: of the program.
        counts: class to how often it occurs in the model.
    """
    often = max(counts.values(), default=1) / _OFTEN
    kept = [i for i, g in enumerate(clusters.class_of) if counts[g] > max(1.0, often)]
    if not kept or len({clusters.class_of[i] for i in kept}) > _PART * len(counts):
        return ()
    return tuple(kept)


def part_of(clusters: ClusterGraph, kept: Sequence[int]) -> ClusterGraph:
    """Some of the clusters alone."""
    return replace(
        clusters,
        clusters=tuple(clusters.clusters[i] for i in kept),
        class_of=tuple(clusters.class_of[i] for i in kept),
        weight=tuple(clusters.weights[i] for i in kept),
    )


def with_floor_of_the_rest(tables: Tables, clusters: ClusterGraph, floors: Floors) -> Tables:
    """The outline's tables with one choice more per segment: the least compute of the classes that it leaves out."""
    inside = set(tables.clusters.class_of)
    seconds = [0.0] * len(SEGMENTS)
    segment_of = {g: SEGMENTS.index(c.phase) for g, c in zip(clusters.class_of, clusters.clusters, strict=True)}
    for g in floors.counts:
        if g not in inside:
            seconds[segment_of[g]] += floors.class_s(g, tables.mesh.sizes)
    rest = tuple(Choice("the rest", 1, k, np.array([s])) for k, s in enumerate(seconds))
    problem = replace(tables.problem, choices=(*tables.problem.choices, *rest), tie_memory_s_per_byte=0.0)
    return replace(tables, problem=problem)
