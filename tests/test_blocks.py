"""Folding: what is tied is alike, repeated blocks are found without their names, and unlike ones are told apart."""

from __future__ import annotations

import random

import pytest

from meshwright.planner.blocks import blocks, colours, fold, summary
from meshwright.planner.fuse import fuse, trivial_clusters
from meshwright.planner.ir.cluster import Cluster, ClusterGraph
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.rules import rows_for
from tests.helpers.sketch import Sketch
from tests.test_fuse import random_graph


def stack(layers: int, *, hidden: int = 16, batch: int = 8, odd: int | None = None) -> OpGraph:
    """A stack of two-matmul residual blocks with a hand-written backward; layer ``odd`` has gelu for relu."""
    s = Sketch()
    h = s.op("aten.mm.default", s.input("x", (batch, hidden)), s.parameter("first", (hidden, hidden)))
    kept = []
    for i in range(layers):
        w = s.parameter(f"block.{i}.w", (hidden, hidden))
        y = s.op("aten.mm.default", h, w)
        kept.append((h, w, y))
        h = s.op("aten.add.Tensor", h, s.op(f"aten.{'gelu' if i == odd else 'relu'}.default", y))
    loss = s.op("aten.sum.dim_IntList", h, [0, 1])
    s.backward()
    g = s.op("aten.expand.default", s.placeholder("t", (), "tangent"), [batch, hidden])
    for i, (x, w, y) in reversed(list(enumerate(kept))):
        dy = s.op("aten.threshold_backward.default", g, y, 0.0)
        s.gradient(s.op("aten.mm.default", s.op("aten.permute.default", x, [1, 0]), dy), f"block.{i}.w")
        g = s.op("aten.add.Tensor", g, s.op("aten.mm.default", dy, s.op("aten.permute.default", w, [1, 0])))
    return s.done(loss)


def alike(a: Cluster, b: Cluster) -> bool:
    """Whether two clusters may take one candidate: equal targets, shapes and rows, in order."""

    def ops(c: Cluster) -> list:
        return [(op.target, [(v.shape, v.dtype) for v in op.ins], [v and (v.shape, v.dtype) for v in op.outs]) for op in c.ops]

    def values(c: Cluster) -> list:
        return [(v.shape, v.dtype) for v in (*c.ins, *c.outs)]

    return a.phase == b.phase and ops(a) == ops(b) and values(a) == values(b) and a.rows == b.rows


def check(graph: ClusterGraph) -> None:
    """Clusters of one class are alike, and so are the edges between classes, slot by slot, on the side that reads."""
    first: dict[int, Cluster] = {}
    for c, cls in zip(graph.clusters, graph.class_of, strict=True):
        assert alike(first.setdefault(cls, c), c)
    makers: dict[tuple[int, int], tuple[int, int]] = {}
    for c, cls in zip(graph.clusters, graph.class_of, strict=True):
        for slot, v in enumerate(c.ins):
            i, k = graph.producer[v.name]
            shape_of_maker = (k, len(graph.clusters[i].outs))
            assert makers.setdefault((cls, slot), shape_of_maker) == shape_of_maker


@pytest.mark.parametrize("seed", range(20))
def test_only_clusters_that_are_alike_are_tied(seed: int):
    graph = random_graph(random.Random(seed), 30)
    check(fold(fuse(graph, rows_for)))
    check(fold(trivial_clusters(graph, rows_for)))


def test_the_number_of_classes_does_not_grow_with_depth():
    counts = [len(set(fold(fuse(stack(n), rows_for)).class_of)) for n in (8, 16, 32)]
    assert counts[0] == counts[1] == counts[2] < len(fuse(stack(8), rows_for).clusters)


def test_weights_of_equal_layers_are_tied_and_so_are_their_gradients():
    graph = fold(fuse(stack(12), rows_for))
    cls = {c.name: k for c, k in zip(graph.clusters, graph.class_of, strict=True)}
    assert len({cls[f"block.{i}.w"] for i in range(4, 8)}) == 1
    made = {o.name: graph.producer[o.value.name][0] for o in graph.outputs if o.role == "gradient" and o.value is not None}
    assert len({graph.class_of[made[f"block.{i}.w"]] for i in range(4, 8)}) == 1


def test_a_layer_that_differs_is_decided_alone():
    graph = fold(fuse(stack(12, odd=6), rows_for))
    cls = {c.name: k for c, k in zip(graph.clusters, graph.class_of, strict=True)}
    assert cls["block.6.w"] != cls["block.3.w"]


def test_the_summary_counts_repeated_blocks():
    graph = fold(fuse(stack(12), rows_for))
    said = summary(graph)
    assert said["clusters"] == len(graph.clusters) and said["classes"] == len(set(graph.class_of))
    assert sum(b.times * b.clusters for b in blocks(graph)) == sum(graph.class_of.count(k) > 1 for k in graph.class_of)
    assert any(b.times >= 8 and b.parameters for b in blocks(graph))


def test_without_repetition_every_cluster_is_its_own_class():
    s = Sketch()
    y = s.op("aten.mm.default", s.input("x", (8, 4)), s.parameter("w", (4, 6)))
    fused = fuse(s.done(s.op("aten.relu.default", y)), rows_for)
    assert fold(fused).class_of == fused.class_of


def test_colours_do_not_depend_on_names():
    plain = fuse(stack(6), rows_for)
    assert colours(plain) == colours(fuse(stack(6), rows_for))
