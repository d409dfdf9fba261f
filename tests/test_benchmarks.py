"""Benchmarks of plans: what they compare is what was published, and their numbers are read right."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measured_runs  # noqa: E402
import plan_quality  # noqa: E402
import strategies  # noqa: E402

from meshwright.planner.ir.mesh import Cluster  # noqa: E402

ROWS = {row.name: row for row in plan_quality.CHOSEN}


def test_every_row_has_published_configurations_of_as_many_devices():
    assert set(ROWS) == set(plan_quality.PUBLISHED)
    for name, row in ROWS.items():
        devices = Cluster.parse(row.cluster).mesh.num_devices
        for published in plan_quality.PUBLISHED[name]:
            named = math.prod(published.degrees.values())  # with stages, data parallelism takes what is left
            assert published.source and (devices % named == 0 if "pp" in published.degrees else named == devices)


def test_the_worst_ratio_counts_only_what_fits():
    table = [
        {"configuration": "auto", "fits": True, "auto_over_this": 1.0},
        {"configuration": "ddp", "fits": False, "auto_over_this": 1.2},
        {"configuration": "dp 8", "fits": True, "auto_over_this": 0.9},
    ]
    assert plan_quality.worst(table) == 0.9


HEADER = (
    "id,model,gpu,num_gpus,precision,dp,tp,pp,cp,zero_stage,micro_batch,global_batch,seq_len,recompute,step_time_s,"
    "tokens_per_s_per_gpu,source\n"
)


@pytest.mark.parametrize(
    ("line", "measured_s"),
    [
        ("a,MPT-1b,h100_80gb,16,amp_bf16,16,1,1,,3,2,32,2048,none,,4096,x", 1.0),
        ("a,GPT 22B,A100 80GB,8,fp16,1,8,1,,,4,8,2048,selective,2.2,,x", 1.1),
        ("a,GPT 22B,A100 80GB,8,fp16,1,8,2,,,4,8,2048,selective,2.2,,x", None),
        ("a,GPT 22B,A100 80GB,8,fp16,1,8,1,,,4,8,2048,full,2.2,,x", None),
        ("a,Unknown,A100 80GB,8,fp16,1,8,1,,,4,8,2048,none,2.2,,x", None),
    ],
    ids=["throughput", "accumulated", "pipeline", "recomputed", "unknown"],
)
def test_published_runs_are_read_as_seconds_of_a_micro_batch(tmp_path: Path, line: str, measured_s: float | None):
    (tmp_path / "runs.csv").write_text(HEADER + line + "\n")
    found = [run.measured_s for run in measured_runs.read(tmp_path / "runs.csv", None)]
    assert found == ([] if measured_s is None else [pytest.approx(measured_s)])


# --- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "sums", "found"),
    [
        ([[1, 4, 3], [1, 16, 12]], [5.0, 17.0], None),
        ([[1, 2], [1, 4]], [5.0, 9.0], [1.0, 2.0]),
        ([[1, 2], [1, 4]], [5.0, 3.0], [4.0, 0.0]),  # no line that falls: the mean is nearest
        ([[1, 2], [1, 4]], [1.0, 3.0], [0.0, 0.7]),  # nor one that begins below zero
    ],
)
def test_what_actions_and_messages_take_is_nowhere_negative(rows, sums, found):
    x = strategies._least_squares(np.array(rows, dtype=float), np.array(sums))
    assert np.all(x >= 0)
    if found is None:
        assert np.array(rows) @ x == pytest.approx(sums)
    else:
        assert x == pytest.approx(found)


def test_times_are_medians_for_either_way_to_share_cores_and_the_busiest_rank_counts():
    ways = [[1.0, 9.0], [3.0, 5.0], [1.0, 8.0], [3.0, 5.0], [100.0, 100.0], [3.0, 50.0]]
    assert strategies._busiest_s(ways) == (9.0 + 5.0) / 2
    assert strategies._busiest_s([[2.0, 1.0]]) == 2.0


def row(strategy: str, plan: str, predicted_s: float, measured_s: float) -> dict:
    return {
        "model": "m", "strategy": strategy, "plan": plan, "predicted_s": predicted_s, "measured_s": measured_s, "wall_s": 1 / predicted_s,
    }  # fmt: skip


def test_one_plan_by_two_names_counts_once():
    rows = [row("auto", "a", 1.0, 2.2), row("ddp", "b", 1.5, 2.0), row("zero1", "c", 2.0, 3.0), row("zero2", "c", 2.0, 3.0)]
    told = strategies.summary(rows)
    assert told["plans"] == 3 and told["spearman"] == pytest.approx(0.5) and told["spearman_wall"] == pytest.approx(-1.0)
    assert told["regret"] == pytest.approx(1.1)
    assert strategies.spearman([1.0, 1.0, 2.0], [1.0, 1.0, 5.0]) == pytest.approx(1.0)
