"""Memory at the points of a step as the solver sees it, against each value looked at alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.planner import fuse, rules
from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import R
from meshwright.planner.solve.candidates import Candidate, piece_bytes
from meshwright.planner.solve.keep import root_of
from meshwright.planner.solve.liveness import Span
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.problem import Choice
from meshwright.planner.solve.tables import Tables, build_tables
from meshwright.planner.trace import capture


class Twins(nn.Module):
    """Layers that are alike, so that they share what is worked out, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.back(torch.relu(self.into(x))))).square().mean()


def tables_of(*sizes: int) -> Tables:
    graph = capture(Twins(), (), {"x": torch.zeros(8, 8)}).graph
    clusters, mesh = fuse.fuse(graph, rules.rows_for), MeshShape.of(*sizes)
    costs = CostModel(hardware_for(mesh, "H100"), mesh)
    return build_tables(graph, clusters, clusters.class_of, mesh, costs, trained=Trained(8), memory_limit_bytes=None)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_what_is_held_at_a_point_is_what_lives_there(sizes: tuple[int, ...]) -> None:
    tables, random = tables_of(*sizes), np.random.default_rng(0)
    points, keeps = [tables.points.base, *tables.points.others], 0
    assert len(points) > 1
    for _ in range(20):
        chosen = [int(random.integers(len(c))) for c in tables.candidates]
        alive = profile(tables, chosen)
        at_base = sum(float(b[k]) for c, k in zip(tables.problem.choices, chosen, strict=True) for b in _comes_and_goes(c))
        assert at_base == alive[points[0]]
        for point in points[1:]:
            assert at_base + sum(float(b[chosen[g]]) for g, b in tables.points.more_at(point).items()) == alive[point]
        keeps += sum(c[k].kept is not None for c, k in zip(tables.candidates, chosen, strict=True))
    assert keeps > 10


def _comes_and_goes(choice: Choice) -> list[np.ndarray]:
    return [b for category, b in choice.memory_bytes.items() if category in ("activations", "working", "gradients")]


def profile(tables: Tables, chosen: list[int]) -> np.ndarray:
    """Bytes alive at every point, value by value."""
    found: list[tuple[Span, float]] = []
    for item in tables.points._alive.items:
        cluster, candidate = tables.first(item.choice), tables.candidates[item.choice][chosen[item.choice]]
        found += [(span, _bytes(cluster, candidate, item.result, tables.mesh.sizes)) for span in item.spans]
    return tables.points.line.profile(found)


def _bytes(cluster: Cluster, candidate: Candidate, result: tuple[int, int] | None, sizes: tuple[int, ...]) -> float:
    """Of an op's result, less what only looks at a kept copy; of a gradient, which lies as its parameter rests."""
    if result is None:
        assert cluster.source is not None and candidate.rest is not None
        return piece_bytes(cluster.source.value, candidate.rest, sizes)
    m, k = result
    value, root = cluster.ops[m].outs[k], root_of(cluster)
    assert value is not None
    if candidate.kept is not None and root is not None and value.name in root.views:
        return 0
    return piece_bytes(value, tuple(row.members[m].outs[k] or R for row in candidate.rows), sizes)
