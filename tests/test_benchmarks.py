"""Benchmarks of plans: what they compare is what was published, and their numbers are read right."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measured_runs  # noqa: E402
import plan_quality  # noqa: E402

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
