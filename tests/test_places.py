"""What is found along a folded program, said of the whole one: the same as is found along the whole one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.inputs import call_of, model_of
from meshwright.planner.expand import expanded, planned_names
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.meshes import logical_meshes
from meshwright.planner.on_mesh import Found, OnMesh
from meshwright.planner.options import Options
from meshwright.planner.pipelined import Lying, PipelineRequest, Uncut
from meshwright.planner.places import places_in_whole
from meshwright.planner.program import Program
from meshwright.planner.solve.segments import hidden_values
from meshwright.planner.spell import checked_plan
from meshwright.planner.stage_memory import Resting
from meshwright.planning import capture_call
from meshwright.request import Request
from meshwright.target import target_of
from tests.test_staging import llama, tokens

MICRO_BATCHES = 4


def t5() -> nn.Module:
    """An encoder and a decoder: two lists of blocks, what the first makes is read by every block of the second."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, vocab_size=128, decoder_start_token_id=0, use_cache=False
    )
    return T5ForConditionalGeneration(config)


def tied() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


CASES = {
    "llama": (lambda: llama(6, 64), "none", "1x4xH100"),
    "tied": (tied, "selective", "1x4xH100"),
    "t5": (t5, "none", "1x2xH100"),
    "mixed": (lambda: llama(10, 64), Recompute("full", 4, "none"), "1x4xH100"),
}


def both(name: str) -> tuple[Uncut, Uncut]:
    """The case planned folded, and the same plan of its whole program."""
    make, level, cluster = CASES[name]
    recompute = Recompute(level) if isinstance(level, str) else level
    captured, _ = capture_call(model_of(make), call_of(tokens(32, 32)), Request(precision="bf16-mixed"), True)
    target = target_of(cluster)
    where = logical_meshes(target.topology, Request().mesh_request(), search=True)[-1]
    options = Options(alternatives=False, micro_batches=MICRO_BATCHES, memory_limit_bytes=1 << 40)
    capture = captured.capture_at(recompute)
    program = Program.of(capture, where.hardware, options, recompute=recompute)
    found = OnMesh(program, where).solve("auto", limited=False)
    assert isinstance(found, Found)
    plan = checked_plan(program, "auto", found, found.bound_s, (), ())
    lying = Lying(program.times, hidden_values(capture.graph, program.clusters))
    places = places_in_whole(capture.graph, capture.repeats)
    assert places is not None and capture.repeats
    rest = MICRO_BATCHES, where.hardware, where.hardware.links[0], 1 << 40
    folded, whole = captured.at(recompute), captured.at(recompute).whole_view
    names = planned_names(capture.graph, whole, folded.repeats)
    said = expanded(plan, capture.graph, whole, folded.repeats)
    return Uncut(plan, capture.graph, lying, *rest, places=places, clusters=program.clusters), Uncut(
        said, whole, lying.of_copies(whole, names), *rest
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "tied" else name for name in CASES])
def test_a_folded_program_says_the_same_of_its_stages_as_the_whole_one(name: str) -> None:
    folded, whole = both(name)
    a, b = folded.profile, whole.profile
    assert a.names == b.names
    for field in ("forward_s", "backward_s", "weight_s", "once_s", "alive_bytes"):
        np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol=1e-9, atol=1e-15, err_msg=field)
    assert a.stash_bytes.sum() == pytest.approx(b.stash_bytes.sum(), rel=1e-3)
    assert sorted((s, sorted(p), sorted(w)) for s, p, w in a.saved) == sorted((s, sorted(p), sorted(w)) for s, p, w in b.saved)
    assert _held(folded.resting) == _held(whole.resting)
    request = PipelineRequest(2, "1f1b", MICRO_BATCHES, 1)
    cut, cut_whole = folded.cut(request), whole.cut(request)
    assert cut.pipeline is not None and cut_whole.pipeline is not None and cut.pipeline.cuts == cut_whole.pipeline.cuts
    assert cut.predicted.step_time_s == pytest.approx(cut_whole.predicted.step_time_s)
    assert cut.predicted.memory_bytes == pytest.approx(cut_whole.predicted.memory_bytes, rel=0.01)
    assert cut.predicted.moved_bytes == cut_whole.predicted.moved_bytes


def _held(resting: Resting) -> list[tuple[int, ...]]:
    """Bytes of every parameter and where it is read, in some order."""
    read: dict[int, list[int]] = {}
    for parameter, place in zip(resting.reader.tolist(), resting.place.tolist(), strict=True):
        read.setdefault(parameter, []).append(place)
    columns = (resting.at_rest, resting.state, resting.kept, resting.sums, resting.fresh, resting.travel)
    return sorted((*(int(c[i]) for c in columns), *sorted(places)) for i, places in read.items())


def test_the_places_of_a_program_without_repeats_are_its_own() -> None:
    captured, _ = capture_call(model_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), call_of(torch.empty(8, 4)), Request(), False)
    graph = captured.whole_view
    places = places_in_whole(graph, ())
    assert places is not None
    assert places.names == tuple(op.name for op in graph.ops)
    assert [places.spread(op, i).tolist() for i, op in enumerate(graph.ops)] == [[i] for i in range(len(graph.ops))]
