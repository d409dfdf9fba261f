"""Users' pins: the placement of a parameter at rest, of a batch input, or of an op's result, by name pattern.

``{"*.wte.weight": "RS(0)", "model.layers.*.mlp": "S(0)R"}``: a pattern (``fnmatch``) is looked for among parameters' names, then inputs'
names, then op names, then module paths; the last pins the result of the last forward op of each module that it matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, Placements, R, format_placements, parse_placements
from meshwright.planner.solve.candidates import Candidate
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.tables import Tables

_SHOWN = 12


@dataclass(frozen=True, order=True)
class Pin:
    """One pin at one cluster.

    Attributes:
        pattern: what the user wrote.
        op: index of the op in the cluster whose first result is pinned; -1 for the placeholder at rest.
        placements: what is wanted.
        label: the parameter, input or op, for messages.
    """

    pattern: str
    op: int
    placements: Placements
    label: str

    @property
    def key(self) -> tuple:
        """What tied clusters must share: what is pinned where, by whichever pattern."""
        return self.op, self.placements

    def holds(self, candidate: Candidate) -> bool:
        return self._found(candidate) == self.placements

    def _found(self, candidate: Candidate) -> Placements | None:
        if self.op < 0:
            return candidate.rest
        return tuple(_first_result(row.members[self.op].outs) for row in candidate.rows)

    def possible(self, candidates: Sequence[Candidate]) -> str:
        """What could be asked for instead."""
        texts = list(dict.fromkeys(format_placements(f) for c in candidates if (f := self._found(c)) is not None))
        return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def _first_result(outs: Sequence[Placement | None]) -> Placement:
    return next((p for p in outs if p is not None), R)


def find_pins(
    pins: Mapping[str, str | Placements], graph: OpGraph, clusters: ClusterGraph, mesh: MeshShape
) -> dict[int, tuple[Pin, ...]]:
    """Cluster index to its pins.

    Raises:
        InputError: a pattern matches nothing, or its placements do not suit the mesh.
    """
    found: dict[int, list[Pin]] = {}
    for pattern, text in pins.items():
        wanted = _placements(pattern, text, mesh)
        targets = _targets(pattern, graph, clusters)
        if not targets:
            raise InputError(
                f"pin {pattern!r} matches no parameter, input, op or module: see the names in the plan's report, or use a wider pattern"
            )
        for cluster, op, label in targets:
            found.setdefault(cluster, []).append(Pin(pattern, op, wanted, label))
    return {i: tuple(ps) for i, ps in found.items()}


def _placements(pattern: str, text: str | Placements, mesh: MeshShape) -> Placements:
    wanted = parse_placements(text) if isinstance(text, str) else tuple(text)
    if len(wanted) != mesh.num_axes:
        raise InputError(
            f"pin {pattern!r}: {format_placements(wanted)!r} has {len(wanted)} placements, but mesh {mesh} has {mesh.num_axes} axes "
            f"({', '.join(mesh.names)}): write one placement per axis"
        )
    return tuple(R if n == 1 else p for p, n in zip(wanted, mesh.sizes, strict=True))


def _targets(pattern: str, graph: OpGraph, clusters: ClusterGraph) -> list[tuple[int, int, str]]:
    """(cluster, op index or -1, label) of everything that the pattern names, of the first kind that matches."""
    places = {op.name: (i, m) for i, c in enumerate(clusters.clusters) for m, op in enumerate(c.ops)}
    for role in ("parameter", "input"):
        found = [
            (i, -1, f"{role} {c.source.name!r}")
            for i, c in enumerate(clusters.clusters)
            if c.source is not None and c.source.role == role and _any_matches(pattern, (c.source.name, *c.source.aliases))
        ]
        if found:
            return found
    by_op = [op.name for op in graph.ops if fnmatchcase(op.name, pattern)]
    last = {op.module_path: op.name for op in graph.ops if op.phase == "forward" and op.module_path}
    by_module = [name for path, name in last.items() if fnmatchcase(path, pattern)]
    return [(*places[name], f"op {name!r}") for name in by_op or by_module]


def _any_matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def restrict_to_pins(tables: Tables, pins: Mapping[int, tuple[Pin, ...]]) -> Restriction:
    """Candidates that hold every pin.

    Raises:
        InputError: no candidate of a pinned cluster holds a pin.
    """
    allowed: dict[int, np.ndarray] = {}
    for cluster, at_cluster in pins.items():
        choice = tables.class_of[cluster]
        candidates = tables.candidates[choice]
        for pin in at_cluster:
            mask = np.array([pin.holds(c) for c in candidates])
            if not mask.any():
                raise InputError(
                    f"pin {pin.pattern!r}: {pin.label} cannot be {format_placements(pin.placements)} on mesh {tables.mesh}; "
                    f"possible: {pin.possible(candidates)}"
                )
            allowed[choice] = allowed.get(choice, np.ones(len(candidates), dtype=bool)) & mask
    return Restriction(allowed)
