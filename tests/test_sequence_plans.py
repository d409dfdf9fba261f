"""Sequence sharding appears where it pays: Megatron's in a node with few tokens, context parallelism where heads run out.

Made-up devices, so that small models are in the regime of large ones: nothing costs for being small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.planner import search
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import format_placements
from meshwright.planner.ir.verify import PlannedStep, planned_steps
from meshwright.planner.meshes import LogicalMesh
from meshwright.planner.repeat import capture_folded
from meshwright.planner.solve.optimise import Effort
from meshwright.planner.solve.strategies import AxisRule
from tests.helpers.models import llama

_SOURCE = "made up for tests"


def _hardware(rates: tuple[float, ...]) -> Hardware:
    """100 TFLOP/s, 500 GB/s of memory, and links of ``rates`` bytes/s."""
    rate = {"float32": 5e13, "bfloat16": 1e14}
    device = Device("made up", 1 << 40, 5e11, rate, dict.fromkeys(rate, 0.8), 0.0, _SOURCE)
    return Hardware(device, tuple(Link("made up", r, 2e-7, _SOURCE) for r in rates), _SOURCE)


def _planned(
    mesh: MeshShape, rates: tuple[float, ...], batch: int, seq: int, hidden: int, heads: int, gap: float, **options
) -> tuple[Plan, OpGraph]:
    """The best plan of a Llama of 4 layers, ``hidden`` wide, and what it is for."""
    with torch.device("meta"):
        model = llama(4, hidden, hidden * 11 // 4, heads, heads // 2, 1024, seq).train()
    ids = torch.zeros(batch, seq, dtype=torch.long)
    capture = capture_folded(model, (), {"input_ids": ids, "labels": ids}, precision="bf16-mixed").plannable
    effort = Effort(gap=gap)
    plan = search.make_plan(capture, mesh, _hardware(rates), search.Options(alternatives=False, effort=effort, **options))
    return plan, capture.graph


def _norms(graph: OpGraph) -> list[Op]:
    """The op of each layer's norms that reads the residual."""
    return [op for op in graph.ops if op.phase == "forward" and "aten.pow" in op.target and "layernorm" in op.module_path]


def _reads(plan: Plan, op: Op) -> str:
    return format_placements(plan.ops[op.name].ins[0])


def _activation_steps(plan: Plan, graph: OpGraph, tokens: int) -> Iterator[PlannedStep]:
    """Changes of placement of whole activations: every token, and more than one number of it."""
    for step in planned_steps(plan, graph):
        shape = step.value.shape
        by_token = shape[:1] == (tokens,) or shape[:2] in ((1, tokens), (2, tokens // 2)) or shape[2:3] == (tokens,)
        if step.kind != "slice" and by_token and step.value.numel > tokens and not step.value.name.startswith("_to_copy"):
            yield step


def test_few_tokens_in_a_node_take_megatrons_sequence_parallelism():
    """512 tokens on 4 devices: moving tokens costs less than moving parameters, and norms are cut along the sequence."""
    plan, graph = _planned(MeshShape.of(4), (1e11,), batch=1, seq=512, hidden=1024, heads=8, gap=1e-2)
    assert {_reads(plan, op) for op in _norms(graph)} == {"S(1)"}
    products = {n: [op for op in graph.ops if op.module_path.endswith(n) and op.target == "aten.mm.default"] for n in _MLP}
    for name, specs in _MLP.items():
        assert {str(plan.ops[op.name]) for op in products[name] if op.phase == "forward"} == {specs}
    kinds = {step.kind for step in _activation_steps(plan, graph, 512)}
    assert "all_reduce" not in kinds and {"all_gather", "reduce_scatter"} <= kinds


_MLP = {"gate_proj": "R,S(1)->S(1)", "up_proj": "R,S(1)->S(1)", "down_proj": "S(1),S(0)->P"}
"""Columns, then rows: a gather before, a reduce-scatter behind."""


def test_several_nodes_shard_parameters_between_them_and_the_sequence_inside():
    """ZeRO over the slow axis, tensor parallelism with sequence-sharded norms over the fast one."""
    mesh = MeshShape((2, 4), ("dp", "tp"))
    plan, graph = _planned(mesh, (2e10, 1e11), 2, 512, 1024, 8, gap=5e-2, respect_axis_names=True)
    assert {_reads(plan, op) for op in _norms(graph)} == {"S(0)S(1)"}
    matrices = [plan.inputs[i.value.name] for i in graph.inputs_of("parameter") if "proj" in i.name]
    assert matrices and all(p.is_shard for placements in matrices for p in placements)
    inside = {step.kind for step in _activation_steps(plan, graph, 1024) if step.axis == 1}
    assert "all_reduce" not in inside and {"all_gather", "reduce_scatter"} <= inside


def test_a_long_sequence_with_few_heads_is_cut_and_only_keys_and_values_are_gathered():
    """8 devices, 4 heads, one sequence: each device keeps its queries, and gathers what keys and values are made of."""
    plan, graph = _planned(MeshShape.of(8), (3e10,), batch=1, seq=16384, hidden=512, heads=4, gap=1e-2)
    attention = [op for op in graph.ops if "scaled_dot_product" in op.target]
    assert {_first_result(plan, op) for op in attention} <= {"S(2)", "S(2;8)"}
    assert {_reads(plan, op) for op in _norms(graph)} == {"S(1)"}
    layers = sum(op.phase == "forward" for op in attention)
    moved = [step for step in _activation_steps(plan, graph, 16384) if step.kind != "all_to_all"]
    assert {(step.kind, step.phase) for step in moved} == {("all_gather", "forward"), ("reduce_scatter", "backward")}
    widths = [step.value.numel // 16384 for step in moved]
    assert sum(widths) == layers * 2 * 512  # keys and values, 256 wide each, or the 512 wide value that both are made of


def test_queries_are_striped_where_attention_outweighs_their_exchange():
    """In stretches the last of 8 devices would see 15/16 of the keys, in stripes 9/16."""
    plan, graph = _planned(MeshShape.of(8), (3e11,), batch=1, seq=32768, hidden=512, heads=4, gap=1e-2)
    attention = [op for op in graph.ops if "scaled_dot_product" in op.target]
    assert {_first_result(plan, op) for op in attention} == {"S(2;8)"}
    exchanged = {step.value.numel // 32768 for step in _activation_steps(plan, graph, 32768) if step.kind == "all_to_all"}
    assert exchanged <= {512}, "queries, results and their gradients, nothing wider"


def _first_result(plan: Plan, op: Op) -> str:
    placements = plan.ops[op.name].outs[0]
    assert placements is not None
    return format_placements(placements)


class FusedQKV(torch.nn.Module):
    """Attention whose one weight makes queries, keys and values, which lie across the pieces that it is cut into."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


def test_an_axis_on_which_parameters_are_used_in_place_keeps_no_gathered_copies_either():
    """Gathering the few weights of many tokens once per step would be faster, and is another strategy."""
    with torch.device("meta"):
        model = FusedQKV(256)
    capture = capture_folded(model, (torch.zeros(8, 2048, 256),), {}, precision="bf16-mixed").plannable
    rule = AxisRule("whole", "preferred", "in place")
    where = LogicalMesh(MeshShape.of(4), _hardware((1e11,)), (rule,), "a test")
    plan = search.search_plan(capture, (where,), search.Options(alternatives=False))
    cut = [i.value.name for i in capture.graph.inputs_of("parameter") if format_placements(plan.inputs[i.value.name]) != "R"]
    assert cut and not plan.kept
