"""Predicted step times beside published measurements of runs without pipeline stages.

    python benchmarks/measured_runs.py RUNS.csv [DEFECTS.csv] [--only MPT-7b] [--json]

``RUNS.csv`` lists published runs, one a line: model, device, degrees, batch, sequence, recomputation, throughput. Taken are those
that this version can plan as they ran: dense decoders whose dims are known, bf16 or fp16, on a device with a record, without pipeline
or full recomputation, not listed in ``DEFECTS.csv`` as unusable. Each is planned with its own degrees and sharding, and compared by
the seconds of one micro-batch. Nothing is fitted to these runs.

What the model leaves out, and measurements have: the optimizer's own step, host time, data loading, and element-wise kernels that a
framework does not fuse. Predictions are therefore expected to be too fast, most of all for small models.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plan_speed import MODELS

DEVICES = {"a100_80gb": "A100-80", "A100 80GB": "A100-80", "h100_80gb": "H100", "H100": "H100"}
"""Device as published, to the record that it is priced with."""

# Layers, hidden, heads, vocabulary. Sources: llm-foundry scripts/train/yamls/pretrain; Korthikanti et al. 2022, table 3.
DECODERS = {
    "MPT-125m": (12, 768, 12, 50368),
    "MPT-350m": (24, 1024, 16, 50368),
    "MPT-760m": (24, 1536, 12, 50368),
    "MPT-1b": (24, 2048, 16, 50368),
    "MPT-3b": (32, 2560, 20, 50368),
    "MPT-7b": (32, 4096, 32, 50368),
    "MPT-13b": (40, 5120, 40, 50368),
    "MPT-30b": (48, 7168, 56, 50368),
    "MPT-70b": (80, 8192, 64, 50368),
    "GPT 22B": (48, 6144, 64, 51200),
}
LLAMAS = {"Llama 3.1 8B": "llama-3-8b", "Llama 3 8B": "llama-3-8b"}
PLAIN = ("none", "", "selective", "selective op", "selective + sequence parallel")
"""Kinds of recomputation that plans come close to: cheap forward values are always made again in the backward."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        id: of its row.
        model: its name; ``device`` the record it is priced with.
        devices: how many.
        degrees: devices for ``dp``, ``cp``, ``tp``.
        zero3: whether parameters were sharded at rest.
        sequences: of one micro-batch over all devices; ``seq`` tokens each.
        measured_s: seconds of one micro-batch.
        recompute: as published.
        source: as published.
    """

    id: str
    model: str
    device: str
    devices: int
    degrees: tuple[tuple[str, int], ...]
    zero3: bool
    sequences: int
    seq: int
    measured_s: float
    recompute: str
    source: str


def read(runs: Path, defects: Path | None) -> Iterator[Run]:
    """The runs that can be compared."""
    unusable: set[str] = set()
    if defects is not None:
        unusable = {r["id"] for r in csv.DictReader(defects.open()) if r["verdict"].startswith("unusable")}
    for row in csv.DictReader(runs.open()):
        known = row["model"] in DECODERS or row["model"] in LLAMAS
        plain = row["pp"] in ("", "1") and row["recompute"] in PLAIN and row["precision"].lower() in ("bf16", "amp_bf16", "fp16")
        if known and plain and row["gpu"] in DEVICES and row["id"] not in unusable and (run := _run(row)) is not None:
            yield run


def _run(row: dict[str, str]) -> Run | None:
    """A row as a run; None where the micro-batch or its time is not published."""
    devices, tp, cp = (int(row[k] or 1) for k in ("num_gpus", "tp", "cp"))
    dp = int(row["dp"] or devices // (tp * cp))
    if not row["micro_batch"] or not row["seq_len"] or dp * tp * cp != devices:
        return None
    sequences, seq = int(row["micro_batch"]) * dp, int(row["seq_len"])
    if row["step_time_s"]:
        accumulated = int(row["global_batch"]) / sequences
        measured = float(row["step_time_s"]) / accumulated
    elif row["tokens_per_s_per_gpu"]:
        measured = sequences * seq / devices / float(row["tokens_per_s_per_gpu"])
    else:
        return None
    degrees = tuple((name, n) for name, n in (("dp", dp), ("cp", cp), ("tp", tp)) if n > 1) or (("dp", 1),)
    device, zero3 = DEVICES[row["gpu"]], row["zero_stage"] == "3"
    return Run(
        row["id"], row["model"], device, devices, degrees, zero3, sequences, seq, measured, row["recompute"], row["source"]
    )


@cache
def _captured(model: str, sequences: int, seq: int) -> Any:
    """The training step as it is planned: few of the repeated layers standing for all."""
    import torch

    from meshwright.planner.repeat import capture_folded

    with torch.device("meta"):
        made = MODELS[LLAMAS[model]](0) if model in LLAMAS else decoder(*DECODERS[model], seq)
        tokens = torch.empty(sequences, seq, dtype=torch.int64)
    return capture_folded(made.train(), (), {"input_ids": tokens, "labels": tokens}, precision="bf16-mixed").plannable


def predict(run: Run) -> Any:
    """The best plan with the run's degrees and sharding, whatever memory it takes."""
    from meshwright.planner import search
    from meshwright.planner.ir.mesh import MeshShape
    from meshwright.planner.meshes import LogicalMesh
    from meshwright.planner.solve.strategies import AxisRule
    from meshwright.target import target_of

    rules = {
        "dp": AxisRule(batch="sharded", rest="sharded" if run.zero3 else "free", use="whole"),
        "cp": AxisRule(batch="sequence only", use="whole"),
        "tp": AxisRule(batch="whole", rest="preferred", use="in place"),
    }
    per_node = min(run.devices, 8)
    topology = target_of(f"{run.devices // per_node}x{per_node}x{run.device}").topology
    mesh = MeshShape(tuple(n for _, n in run.degrees), tuple(name for name, _ in run.degrees))
    where = LogicalMesh(mesh, topology.hardware(mesh), tuple(rules[name] for name in mesh.names), "the run's degrees")
    options = search.Options(alternatives=False, memory_limit_bytes=1 << 60)
    return search.search_plan(_captured(run.model, run.sequences, run.seq), (where,), options)


def decoder(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> Any:
    """A decoder with layer norms, a GELU MLP four times as wide, learnt positions, and the head tied to the embedding."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
            self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(self.norm1(x)).split(hidden, -1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Parameter(torch.zeros(seq, hidden))
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, vocab, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.tokens(input_ids) + self.positions
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())

    return Decoder()


def compare(run: Run) -> dict[str, Any]:
    """One row of the table."""
    plan = predict(run)
    predicted = plan.predicted.step_time_s
    return {
        "benchmark": "measured_runs",
        "id": run.id,
        "model": run.model,
        "device": run.device,
        "devices": run.devices,
        "degrees": dict(run.degrees),
        "sequences": run.sequences,
        "seq": run.seq,
        "recompute": run.recompute,
        "measured_s": run.measured_s,
        "predicted_s": predicted,
        "exposed_s": plan.predicted.exposed_s,
        "compute_s": plan.predicted.compute_s,
        "error": predicted / run.measured_s - 1,
        "source": run.source,
    }


def line(found: dict[str, Any]) -> str:
    """One row for people."""
    degrees = " ".join(f"{name} {n}" for name, n in found["degrees"].items())
    return (
        f"{found['id']:6} {found['model']:13} {found['devices']:4} {found['device']:8} {degrees:13} "
        f"{found['sequences']:5} x {found['seq']:<6} {found['measured_s'] * 1e3:9.1f} ms {found['predicted_s'] * 1e3:9.1f} ms "
        f"{found['error']:+7.1%}  {found['source'][:50]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", type=Path, help="published runs, CSV")
    parser.add_argument("defects", type=Path, nargs="?", help="rows of it that cannot be used, CSV")
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    table = []
    for run in read(args.runs, args.defects):
        if args.only is None or args.only in run.model:
            table.append(compare(run))
            print(json.dumps(table[-1]) if args.json else line(table[-1]), flush=True)
    if not args.json and table:
        errors = sorted(abs(f["error"]) for f in table)
        signed = [f["error"] for f in table]
        print(
            f"{len(table)} runs: error {statistics.mean(signed):+.1%} on average, {statistics.median(errors):.1%} in the median "
            f"without its sign, {errors[-1]:.1%} at worst"
        )


if __name__ == "__main__":
    main()
