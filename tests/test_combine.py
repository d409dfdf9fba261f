"""Candidates of clusters: combinations of rows, compared with each row and value looked at one by one."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.planner import fuse, rules
from meshwright.planner.cost import CostModel, hardware_for
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Placement, R, divides
from meshwright.planner.solve.candidates import WHOLE_ROLES, edges, piece_bytes, pieces_exist, storable
from meshwright.planner.solve.combine import expand_all, table_of
from meshwright.planner.solve.keep import Gathers, root_of, with_kept
from meshwright.planner.solve.rows import Sizes
from meshwright.planner.trace import capture


class Odd(nn.Module):
    """A matmul whose sizes some axes divide and some do not, a merged dim, attention, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, 20)
        self.out = nn.Linear(20, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x).unflatten(-1, (4, 5)).transpose(1, 2)
        z = nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)
        return self.out(torch.relu(z)).square().mean()


@pytest.fixture(scope="module")
def clusters() -> tuple[Cluster, ...]:
    program = capture(Odd(), (), {"x": torch.zeros(4, 8, 12)})
    return fuse.fuse(program.graph, rules.rows_for).clusters


def placed(cluster: Cluster, row: ClusterRow) -> Iterator[tuple[tuple[int, ...], Placement]]:
    if cluster.source is not None:
        yield cluster.source.value.shape, row.rest or R
    yield from ((v.shape, p) for v, p in zip(cluster.ins, row.ins, strict=True))
    yield from ((v.shape, p) for v, p in zip(cluster.outs, row.outs, strict=True))
    for op, member in zip(cluster.ops, row.members, strict=True):
        yield from ((v.shape, p or R) for v, p in zip(op.outs, member.outs, strict=True) if v is not None)


def is_legal(cluster: Cluster, rows: tuple[ClusterRow, ...], sizes: tuple[int, ...]) -> bool:
    """What the docstrings of candidates say, value by value."""
    is_parameter = cluster.source is not None and cluster.source.role == "parameter"
    for axis, (row, n) in enumerate(zip(rows, sizes, strict=True)):
        must_be_whole = n == 1 or (cluster.source is not None and cluster.source.role in WHOLE_ROLES)
        if must_be_whole and (any(p != R for _, p in placed(cluster, row)) or row is not _whole(cluster)):
            return False
        if not must_be_whole and not is_legal_over((axis,), cluster, rows, sizes, is_parameter):
            return False
        if row.rest is not None and row.rest.is_partial:
            return False
    if is_parameter and not storable(tuple(row.rest or R for row in rows)):
        return False
    return is_legal_over(tuple(range(len(sizes))), cluster, rows, sizes, is_parameter)


def _whole(cluster: Cluster) -> ClusterRow:
    return next(row for row in cluster.rows if all(p == R for _, p in placed(cluster, row)))


def is_legal_over(axes, cluster, rows, sizes, is_parameter: bool) -> bool:
    values = list(zip(*(placed(cluster, rows[a]) for a in axes), strict=True))
    for over in values:
        shape, vector, over_sizes = over[0][0], tuple(p for _, p in over), [sizes[a] for a in axes]
        if divides(shape, vector, over_sizes):
            continue
        uneven = all(rows[a].uneven for a, p in zip(axes, vector, strict=True) if p.is_shard)
        if not (is_parameter and uneven and pieces_exist(shape, vector, over_sizes)):
            return False
    return True


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (4, 2), (1, 2), (2, 3), (2, 2, 2)])
def test_combinations_are_those_that_are_legal_one_by_one(clusters: tuple[Cluster, ...], sizes: tuple[int, ...]) -> None:
    found = expand_all([table_of(c) for c in clusters], sizes, [() for _ in clusters])
    for cluster, expanded in zip(clusters, found, strict=True):
        if len(cluster.rows) ** len(sizes) > 2000:
            continue
        products = itertools.product(cluster.rows, repeat=len(sizes))
        assert [c.rows for c in expanded.candidates] == [rows for rows in products if is_legal(cluster, rows, sizes)], (
            cluster.name
        )


def test_wanted_rows_are_kept_and_where_none_is_legal_all_are(clusters: tuple[Cluster, ...]) -> None:
    kernel = max((c for c in clusters if c.source is None), key=lambda c: len(c.rows))
    table, sizes = table_of(kernel), (2, 2)
    all_of_them, some, none = (
        expand_all([table], sizes, [wanted])[0]
        for wanted in ((), (frozenset({edges(kernel.rows[0]), edges(kernel.rows[1])}), None), (frozenset(), None))
    )
    assert [c for c in all_of_them.candidates if c.rows[0] in kernel.rows[:2]] == list(some.candidates) != []
    assert none is all_of_them and expand_all([table], sizes, [()])[0] is all_of_them


def test_seconds_of_several_clusters_are_those_of_each(clusters: tuple[Cluster, ...]) -> None:
    mesh = MeshShape.of(2, 2)
    costs = CostModel(hardware_for(mesh, "H100"), mesh)
    found = expand_all([table_of(c) for c in clusters], mesh.sizes, [() for _ in clusters])
    together = costs.clusters_costs([(c, e.priced) for c, e in zip(clusters, found, strict=True)])
    for cluster, expanded, seconds in zip(clusters, found, together, strict=True):
        assert np.array_equal(costs.cluster_costs(cluster, [c.rows for c in expanded.candidates]), seconds)


def test_what_is_known_of_an_object_goes_with_it() -> None:
    class Thing:
        pass

    made: list[Thing] = []

    def work_out(thing: Thing) -> list[int]:
        made.append(weakref.ref(thing))
        return [len(made)]

    known, thing = Known(work_out), Thing()
    assert known(thing) is known(thing) and len(made) == 1
    assert known(Thing()) != known(thing)
    del thing
    gc.collect()
    assert not known._known


def test_clusters_that_are_alike_share_their_table_and_others_do_not() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).exp().sum() + self.b(x).exp().sum() + self.c(x).exp().sum()

    program = capture(Twins(), (), {"x": torch.zeros(4, 8)})
    products = [
        c for c in fuse.fuse(program.graph, rules.rows_for).clusters if any(op.target == "aten.mm.default" for op in c.ops)
    ]
    forward = [c for c in products if c.phase == "forward"]
    assert len(forward) == 3
    a, b, c = (table_of(cluster) for cluster in forward)
    assert a is b and c is not a


def test_placeholders_that_are_alike_share_their_table_and_others_do_not() -> None:
    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)
            self.register_buffer("d", torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).exp().sum() + self.b(x).exp().sum() + self.c(x).exp().sum() + (x @ self.d.t()).exp().sum()

    program = capture(Four(), (), {"x": torch.zeros(4, 8)})
    sources = [c for c in fuse.fuse(program.graph, rules.rows_for).clusters if c.source is not None]
    named = {s.source.name: table_of(s) for s in sources if s.source is not None}
    a, b, c, d = (named[name] for name in ("a.weight", "b.weight", "c.weight", "d"))
    assert a is b and c is not a and d is not a


def test_candidates_are_a_sequence_and_each_is_one_object(clusters: tuple[Cluster, ...]) -> None:
    kernel = max((c for c in clusters if c.source is None), key=lambda c: len(c.rows))
    found = expand_all([table_of(kernel)], (2, 2), [()])[0].candidates
    each = [found[k] for k in range(len(found))]
    assert all(x is y for x, y in zip(each, found, strict=True)) and found[1:3] == each[1:3] and found[-1] is each[-1]
    assert [x.ins for x in each] == [tuple(zip(*(r.ins for r in x.rows), strict=True)) for x in each]


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 1, 2)])
def test_bytes_held_are_those_of_each_value_looked_at_alone(clusters: tuple[Cluster, ...], sizes: tuple[int, ...]) -> None:
    mesh = MeshShape.of(*sizes)
    costs, known, kept = CostModel(hardware_for(mesh, "H100"), mesh), Gathers(), 0
    expanded = expand_all([table_of(c) for c in clusters], sizes, [() for _ in clusters])
    expanded = [with_kept(e, sizes, costs, known)[0] for e in expanded]
    found = Sizes(expanded, sizes)
    for g, (cluster, e) in enumerate(zip(clusters, expanded, strict=True)):
        made = [(m, k, v) for m, op in enumerate(cluster.ops) for k, v in enumerate(op.outs) if v is not None]
        held = found.flat[found.start[g] :][: len(e) * len(made)].reshape(len(e), len(made))
        for i, candidate in enumerate(e.candidates):
            root = root_of(cluster) if candidate.kept is not None else None
            for slot, (m, k, v) in enumerate(made):
                placed = tuple(row.members[m].outs[k] or R for row in candidate.rows)
                counts_apart = root is not None and v.name in root.views
                assert held[i, slot] == (0 if counts_apart else piece_bytes(v, placed, sizes))
            if cluster.source is not None and candidate.rest is not None:
                value = cluster.source.value
                assert found.at_rest(g)[i] * value.dtype.itemsize == piece_bytes(value, candidate.rest, sizes)
            if (root := root_of(cluster)) is not None:
                wanted = 0 if candidate.kept is None else piece_bytes(root.value, candidate.kept[-1], sizes)
                assert found.kept(g)[i] * root.value.dtype.itemsize == wanted
                kept += candidate.kept is not None
    assert kept >= 3
