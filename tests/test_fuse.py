"""Fusing: what is joined, what is not, and that joined rows are exactly the consistent combinations."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from meshwright.planner.fuse import fuse, trivial_clusters
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.spec import P, R, Row, S
from meshwright.planner.join import MAX_ROWS, join
from meshwright.planner.rules import rows_for
from tests.helpers.sketch import Sketch


def kinds(graph: ClusterGraph) -> list[str]:
    """The compute clusters as text: ``"mm reshape"``."""
    return [" ".join(op.target.split(".")[1] for op in c.ops) for c in graph.clusters if c.source is None]


def cluster_of(graph: ClusterGraph, op: str) -> Cluster:
    return next(c for c in graph.clusters if any(o.name == op for o in c.ops))


def check(graph: OpGraph, fused: ClusterGraph) -> None:
    """What every cluster graph must satisfy."""
    assert sorted(op.name for c in fused.clusters for op in c.ops) == sorted(op.name for op in graph.ops)
    assert [c.source for c in fused.clusters if c.source is not None] == list(graph.inputs)
    made: set[str] = set()
    for c in fused.clusters:
        assert all(v.name in made for v in c.ins), f"{c.name} runs before what it reads"
        made.update(v.name for v in c.outs)
        replicated = c.rows[0]
        assert all(p.is_replicate for p in (*replicated.ins, *replicated.outs)) and replicated.rest in (None, R)
        assert len({(r.ins, r.outs, r.rest) for r in c.rows}) == len(c.rows)
        for row in c.rows:
            placed = dict(zip((v.name for v in c.ins), row.ins, strict=True))
            for op, member in zip(c.ops, row.members, strict=True):
                for v, p in zip(op.ins, member.ins, strict=True):
                    assert placed.setdefault(v.name, p) == p
                placed.update((v.name, p) for v, p in zip(op.outs, member.outs, strict=True) if v is not None and p is not None)
            assert all(placed.get(v.name, row.rest) == p for v, p in zip(c.outs, row.outs, strict=True))
    phases = [c.phase for c in fused.clusters if c.source is None]
    assert phases == sorted(phases, reverse=True), "forward comes before backward"


def norm(s: Sketch, x, w):
    """RMS norm as a capture has it."""
    total = s.op("aten.sum.dim_IntList", s.op("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    scale = s.op("aten.rsqrt.default", s.op("aten.add.Scalar", s.op("aten.div.Scalar", total, x.shape[-1]), 1e-5))
    return s.op("aten.mul.Tensor", w, s.op("aten.mul.Tensor", x, scale))


def block(s: Sketch, x, layer: int = 0, wide: int = 32):
    """A norm, two matmuls and a residual: [B, S, H] -> [B, S, H]."""
    batch, seq, hidden = x.shape
    w, up, down = (
        s.parameter(f"{n}{layer}", shape) for n, shape in (("w", (hidden,)), ("up", (wide, hidden)), ("down", (hidden, wide)))
    )
    flat = s.op("aten.reshape.default", norm(s, x, w), [batch * seq, hidden])
    h = s.op("aten.silu.default", s.op("aten.mm.default", flat, s.op("aten.permute.default", up, [1, 0])))
    y = s.op("aten.mm.default", h, s.op("aten.permute.default", down, [1, 0]))
    return s.op("aten.add.Tensor", x, s.op("aten.reshape.default", y, [batch, seq, hidden]))


@pytest.fixture
def one_block() -> OpGraph:
    s = Sketch()
    return s.done(block(s, s.input("x", (4, 8, 16))))


def test_a_block_becomes_its_kernels(one_block: OpGraph):
    fused = fuse(one_block, rows_for)
    check(one_block, fused)
    assert kinds(fused) == ["pow sum", "div add rsqrt mul mul reshape", "mm", "silu", "mm reshape", "add"]


def test_one_cluster_per_op_is_also_a_cluster_graph(one_block: OpGraph):
    trivial = trivial_clusters(one_block, rows_for)
    check(one_block, trivial)
    assert all(len(c.ops) == (c.source is None) for c in trivial.clusters)


def test_views_of_a_parameter_belong_to_it(one_block: OpGraph):
    up = next(c for c in fuse(one_block, rows_for).clusters if c.name == "up0")
    assert [op.target for op in up.ops] == ["aten.permute.default"]
    assert {(r.rest, r.outs) for r in up.rows} >= {(R, (R,)), (S(0), (S(1),)), (S(1), (S(0),))}
    assert all(r.uneven for r in up.rows)


def test_sequence_shards_survive_the_merge_of_batch_and_sequence(one_block: OpGraph):
    rows = cluster_of(fuse(one_block, rows_for), "mm").rows
    assert any(r.ins == (S(0, 4), R) and r.outs == (S(0, 4),) for r in rows)


def test_a_partial_sum_may_leave_the_matmul_before_the_residual(one_block: OpGraph):
    assert any(r.outs == (P,) for r in cluster_of(fuse(one_block, rows_for), "mm_1").rows)


def test_a_fused_qkv_weight_may_rest_in_three_groups():
    s = Sketch()
    x, w = s.input("x", (8, 6)), s.parameter("w", (6, 36))
    q, k, v = s.op("aten.split_with_sizes.default", s.op("aten.mm.default", x, w), [12, 12, 12], 1)
    graph = s.done(s.op("aten.mul.Tensor", s.op("aten.mul.Tensor", q, k), v))
    fused = fuse(graph, rows_for)
    check(graph, fused)
    weight = next(c for c in fused.clusters if c.name == "w")
    assert S(1, 3) in {r.rest for r in weight.rows}
    assert any(r.outs == (S(1, 3),) for r in cluster_of(fused, "mm").rows)


def test_softmax_over_a_sharded_dim_stays_possible():
    s = Sketch()
    x = s.input("x", (8, 16))
    e = s.op("aten.exp.default", s.op("aten.sub.Tensor", x, s.op("aten.amax.default", x, [1], True)))
    graph = s.done(s.op("aten.div.Tensor", e, s.op("aten.sum.dim_IntList", e, [1], True)))
    fused = fuse(graph, rows_for)
    check(graph, fused)
    assert kinds(fused) == ["amax", "sub exp sum", "div"]
    assert any(r.ins == (S(1), R) and r.outs == (S(1), P) for r in cluster_of(fused, "sum").rows)


def test_a_view_beside_other_readers_goes_to_its_reader():
    s = Sketch()
    x, w = s.input("x", (8, 8)), s.parameter("w", (8, 8))
    y = s.op("aten.mm.default", x, w)
    graph = s.done(s.op("aten.mm.default", y, y), s.op("aten.mm.default", s.op("aten.permute.default", y, [1, 0]), y))
    assert kinds(fuse(graph, rows_for)) == ["mm", "mm", "permute mm"]


def test_an_op_between_two_kernels_makes_no_cycle():
    s = Sketch()
    x, w = s.input("x", (8, 8)), s.parameter("w", (8, 8))
    a = s.op("aten.relu.default", x)
    b = s.op("aten.mm.default", a, w)
    graph = s.done(s.op("aten.add.Tensor", a, b))
    fused = fuse(graph, rows_for)
    check(graph, fused)
    assert kinds(fused) == ["relu", "mm", "add"]


def test_clusters_that_grow_after_they_were_read_make_no_cycle():
    """Recomputed values, as a backward reads them: early by one kernel, late by the op that they are computed with."""
    s = Sketch()
    x, y, w = s.input("x", (8, 8)), s.input("y", (8, 8)), s.parameter("w", (8, 8))
    a = s.op("aten.relu.default", x)
    by_a = s.op("aten.mm.default", a, w)
    b = s.op("aten.relu.default", y)
    by_b = s.op("aten.mm.default", b, w)
    late_a = s.op("aten.mul.Tensor", a, by_b)
    late_b = s.op("aten.mul.Tensor", b, by_a)
    graph = s.done(s.op("aten.mm.default", late_a, late_b))
    check(graph, fuse(graph, rows_for))


def test_an_op_without_a_rule_is_replicated_and_named():
    s = Sketch()
    y = s.op("aten.mul.Tensor", s.op("aten.relu.default", s.input("x", (8, 8))), 2.0)
    graph = s.done(y)
    fused = fuse(graph, lambda op: None if "relu" in op.target else rows_for(op))
    check(graph, fused)
    relu = cluster_of(fused, "relu")
    assert relu.fallback == ("aten.relu.default",) and relu.rows == (relu.rows[0],)


def test_an_unused_parameter_has_a_cluster_without_results():
    s = Sketch()
    s.parameter("idle", (4, 4))
    graph = s.done(s.op("aten.relu.default", s.input("x", (8, 8))))
    idle = next(c for c in fuse(graph, rows_for).clusters if c.name == "idle")
    assert idle.outs == () and {r.rest for r in idle.rows} == {R, S(0), S(1)}


def random_graph(rng: random.Random, ops: int, size: int = 8) -> OpGraph:
    """A random program of matmuls, element-wise ops, sums, broadcasts and transposes over size x size."""
    s = Sketch()
    values = [s.input("x", (size, size)), s.parameter("w", (size, size))]
    columns = []
    for i in range(ops):
        if i == ops // 2:
            s.backward()
        a, b = rng.choice(values), rng.choice(values)
        pick = rng.choice(["mm", "add", "mul", "relu", "permute", "sum", "broadcast", "cast"])
        if pick == "sum":
            columns.append(s.op("aten.sum.dim_IntList", a, [1], True))
        elif pick == "broadcast" and columns:
            values.append(s.op("aten.mul.Tensor", a, rng.choice(columns)))
        elif pick == "permute":
            values.append(s.op("aten.permute.default", a, [1, 0]))
        elif pick == "cast":
            half = s.op("aten._to_copy.default", a, dtype=torch.bfloat16)
            values.append(s.op("aten._to_copy.default", half, dtype=torch.float32))
        elif pick in ("mm", "add", "mul"):
            values.append(s.op({"mm": "aten.mm.default"}.get(pick, f"aten.{pick}.Tensor"), a, b))
        else:
            values.append(s.op("aten.relu.default", a))
    return s.done(*rng.sample(values, 2))


def combinations(c: Cluster) -> set[tuple]:
    """Rows of a cluster by enumeration of its ops' rows."""
    found = set()
    for members in itertools.product(*(rows_for(op) or () for op in c.ops)):
        placed: dict[str, object] = {}
        touched = [
            *((v, p) for op, m in zip(c.ops, members, strict=True) for v, p in zip(op.ins, m.ins, strict=True)),
            *((v, p) for op, m in zip(c.ops, members, strict=True) for v, p in zip(op.outs, m.outs, strict=True)),
        ]
        if all(placed.setdefault(v.name, p) == p for v, p in touched):
            found.add((tuple(placed[v.name] for v in c.ins), tuple(placed[v.name] for v in c.outs)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_joined_rows_are_the_consistent_combinations(seed: int):
    graph = random_graph(random.Random(seed), 14)
    for fused in (fuse(graph, rows_for), trivial_clusters(graph, rows_for)):
        check(graph, fused)
        for c in fused.clusters:
            if c.source is None and len(c.ops) <= 4:
                assert {(r.ins, r.outs) for r in c.rows} == combinations(c)


def test_of_equal_rows_the_one_that_shards_inside_is_kept():
    s = Sketch()
    y = s.op("aten.relu.default", s.input("x", (8, 8)))
    s.op("aten.sum.dim_IntList", y, [0, 1])
    graph = s.done()
    relu, total = graph.ops
    rows = [
        (Row((R,), (R,)), Row((R,), (S(0),)), Row((S(0),), (S(0),))),
        (Row((R,), (R,)), Row((S(0),), (R,)), Row((S(0),), (P,))),
    ]
    (joined, *_) = join(graph.ops, rows, relu.ins, [v for v in total.outs if v is not None])
    assert joined.ins == (R,) and joined.outs == (R,) and joined.members[1].ins == (S(0),)


def test_a_kernel_of_many_products_keeps_the_rows_that_shard():
    """``((x w1) + (x w2) + ...) -> sums``: each product may be partial in either operand, which doubles the combinations each time."""
    s = Sketch()
    x, total = s.input("x", (8, 8)), s.input("y", (8, 8))
    for i in range(40):
        total = s.op("aten.add.Tensor", total, s.op("aten.mul.Tensor", s.input(f"x{i}", (8, 8)), s.input(f"w{i}", (8,))))
    s.op("aten.sum.dim_IntList", s.op("aten.add.Tensor", total, x), [0])
    (kernel,) = [c for c in fuse(s.done(), rows_for).clusters if len(c.ops) > 40]
    assert len(kernel.rows) <= MAX_ROWS
    first, *others = kernel.rows
    assert all(p == R for p in (*first.ins, *first.outs))
    of_matrices = [k for k, v in enumerate(kernel.ins) if v.shape == (8, 8)]
    for placement in (S(0), S(1)):
        assert any(all(row.ins[k] == placement for k in of_matrices) for row in others), (
            f"all of it may be sharded as {placement}"
        )
