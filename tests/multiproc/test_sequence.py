"""Attention with the sequence sharded trains as one process does: pinned plans, alone and beside batch and head shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest

from meshwright.planner import remat, search, trace
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import format_placements
from tests.helpers.equality import Reference, Trial, reference_of, try_all
from tests.helpers.models import Case, _masked_tokens, _tokens, gpt2, llama
from tests.helpers.prepared import toy_hardware
from tests.helpers.ranks import run_ranks
from tests.helpers.threads import run_threads

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu*"
CASES = {
    "llama": Case("llama", llama, _tokens()),
    "llama_padded": Case("llama_padded", llama, _masked_tokens),
    "gpt2": Case("gpt2", gpt2, _tokens()),
}


@functools.cache
def _prepared(name: str) -> tuple[Capture, Reference]:
    case = CASES[name]
    return remat.save_few(trace.capture(case.model(), (), case.batch())), reference_of(case)


def _trial(name: str, sizes: tuple[int, ...], attention: str, batch: str) -> Trial:
    """The best plan among those that shard attention and the batch as said."""
    capture, reference = _prepared(name)
    mesh, pins = MeshShape.of(*sizes), {ATTENTION: attention, "input_ids": batch, "labels": batch}
    plan = search.make_plan(capture, mesh, toy_hardware(mesh), search.Options(alternatives=False, pins=pins))
    found = {format_placements(plan.ops[op.name].outs[0]) for op in capture.graph.ops if "scaled_dot_product" in op.target}
    assert found == {attention}
    return Trial(f"{name} {attention}", CASES[name], CASES[name].model(), capture, plan, reference)


def _assert_equal(found: list[Mapping[str, list[str]]]) -> None:
    for rank, trials in enumerate(found):
        wrong = {label: differences for label, differences in trials.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


LAYOUTS = {
    "2": ((2,), "S(2)", "S(1)"),
    "4": ((4,), "S(2)", "S(1)"),
    "batch x sequence": ((2, 2), "S(0)S(2)", "S(0)S(1)"),
    "sequence x heads": ((2, 2), "S(2)S(1)", "S(1)R"),
    "striped": ((2,), "S(2;8)", "S(1)"),
    "striped twice": ((2, 2), "S(2)S(2;8)", "S(1)S(1)"),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "2"),
        pytest.param("gpt2", "sequence x heads", marks=pytest.mark.slow),
        ("llama", "4"),
        ("llama_padded", "batch x sequence"),
        pytest.param("llama", "striped", marks=pytest.mark.slow),
        ("gpt2", "striped twice"),
    ],
)
def test_sharded_queries_train_as_one_process(name, layout):
    trials = [_trial(name, *LAYOUTS[layout])]
    ranks = trials[0].plan.mesh.num_devices
    _assert_equal(run_threads(ranks, lambda rank: try_all(rank, trials, adam=False), timeout=400))


def test_sharded_queries_train_as_one_process_over_gloo():
    trials = [_trial("llama", (2, 2), "S(2)S(2)", "S(1)S(1)"), _trial("gpt2", (2, 2), "S(0)S(2;8)", "S(0)S(1)")]
    _assert_equal(run_ranks(4, lambda rank: try_all(rank, trials, adam=False), timeout=500))
