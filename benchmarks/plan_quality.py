"""How good plans are: the searched plan beside every named strategy and the configurations that experts published.

    python benchmarks/plan_quality.py [--only llama-3-8b] [--without-named] [--json] [--timeout 600]

Everything in a table is priced by the same cost model, for the same model, batch and cluster. A published configuration is its
degrees, scaled to the row's number of devices by data parallelism: on ``dp`` the batch is sharded, parameters are used whole and
rest sharded or not (DDP or ZeRO, each parameter as is best); on ``cp`` the sequence is; on ``tp`` parameters are used as they
rest, the sequence sharded between as is best. Whatever is not said by that is chosen as well as it can be, so a configuration is
never worse here than as published. With ``pp`` it has that many pipeline ranks; schedule, stages per rank, micro-batches
and recomputation are chosen, as for ``auto``. Experts are not sharded as such, which the table says.
``auto/this`` is the ratio that should be at most 1 wherever the other fits the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plan_speed import IMAGES, MODELS, ROWS, Row


@dataclass(frozen=True)
class Published:
    """A configuration that somebody published.

    Attributes:
        degrees: devices for ``pp``, ``dp``, ``cp`` and ``tp``; with ``pp``, what they leave is ``dp``.
        source: where.
        left_out: what of it cannot be said here, or ``""``.
    """

    degrees: dict[str, int]
    source: str
    left_out: str = ""

    @property
    def label(self) -> str:
        return " x ".join(f"{name} {n}" for name, n in self.degrees.items())


_DGX_CLOUD = "NVIDIA DGX Cloud Benchmarking v25.04.02"
_HERD = "The Llama 3 Herd of Models (arXiv 2407.21783), table 4"
_TITAN = "torchtitan benchmarks, December 2024"
_MODEL_ZOO = "Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf"
_MLPERF = "MLPerf Training v0.7, NVIDIA DGX A100"

PUBLISHED: dict[str, tuple[Published, ...]] = {
    "llama-3-8b": (
        Published({"dp": 32, "cp": 2}, f"{_DGX_CLOUD}: Llama 3.1 8B on 64 H100, tp 1 pp 1 cp 2"),
        Published({"dp": 64}, f"{_TITAN}: Llama 3.1 8B, FSDP"),
        Published({"dp": 8, "tp": 8}, "torchtitan async TP benchmark, June 2025: Llama 3.1 8B on 64 H100, FSDP 8 tp 8"),
    ),
    "llama-3-70b": (
        Published({"dp": 64, "tp": 8}, f"{_TITAN}: Llama 3.1 70B, FSDP 32 tp 8 on 256 H100"),
        Published({"dp": 256, "cp": 2}, "NVIDIA NeMo AutoModel: Llama3 70B on 64 H100, FSDP 32 cp 2"),
        Published({"pp": 4, "cp": 2, "tp": 4}, f"{_DGX_CLOUD}: Llama 3.1 70B on 512 H100, tp 4 pp 4 cp 2"),
    ),
    "llama-3-405b": (
        Published({"pp": 16, "cp": 1, "tp": 8}, f"{_HERD}: tp 8 pp 16 dp 128 on 16,384 H100"),
        Published({"pp": 8, "cp": 2, "tp": 8}, f"{_DGX_CLOUD}: Llama 3.1 405B on 512 H100, tp 8 pp 8 cp 2"),
    ),
    "405b on 512": (Published({"pp": 8, "cp": 2, "tp": 8}, f"{_DGX_CLOUD}: Llama 3.1 405B on 512 H100, tp 8 pp 8 cp 2"),),
    "70b on 512": (Published({"pp": 4, "cp": 2, "tp": 4}, f"{_DGX_CLOUD}: Llama 3.1 70B on 512 H100, tp 4 pp 4 cp 2"),),
    "70b on 64": (Published({"pp": 4, "cp": 2, "tp": 4}, f"{_DGX_CLOUD}: Llama 3.1 70B on 64 H100, tp 4 pp 4 cp 2"),),
    "mixtral-8x22b": (Published({"pp": 8, "cp": 1, "tp": 2}, f"{_MODEL_ZOO}: Mixtral-8x22B, tp 2 pp 8 ep 8", "ep 8"),),
    "gpt2-xl": (Published({"dp": 16}, "Narayanan et al. 2021, table 1: GPT 1.7B on 32 A100, data parallel"),),
    "bert-large": (Published({"dp": 16}, f"{_MLPERF}: BERT-large, data parallel"),),
    "vit-h": (Published({"dp": 16}, "facebookresearch/mae: ViT-Huge, distributed data parallel"),),
    "t5-3b": (Published({"dp": 8, "tp": 2}, "NVIDIA NeMo-Framework-Launcher, training/t5/3b.yaml: tp 2"),),
    "few tokens": (
        Published({"dp": 8, "tp": 8}, "torchtitan async TP benchmark, June 2025: Llama 3.1 8B on 64 H100, FSDP 8 tp 8"),
    ),
    "long sequence": (
        Published(
            {"dp": 4, "cp": 16}, "The Llama 3 Herd of Models, table 4: 405B on 131,072 tokens, tp 8 cp 16 pp 16", "tp 8, pp 16"
        ),
    ),
    "resnet-152": (Published({"dp": 16}, "pytorch/vision references/classification: distributed data parallel"),),
}
CHOSEN = (
    *(row for row in ROWS if row.name in PUBLISHED),
    Row("70b on 64", "8x8xH100", "llama-3-70b", 128, 8192),
    Row("70b on 512", "64x8xH100", "llama-3-70b", 1024, 8192),
    Row("405b on 512", "64x8xH100", "llama-3-405b", 256, 8192),
    Row("few tokens", "8x8xH100", "llama-3-8b", 8, 4096),
    Row("long sequence", "8x8xH100", "llama-3-8b", 4, 131072),
)
_UNLIMITED = 1 << 60


def measure(row: Row, *, named: bool = True) -> Iterator[dict[str, Any]]:
    """The row's table: auto, named strategies, published configurations; captured once."""
    from meshwright.planning import capture_call, plan_capture
    from meshwright.request import Request
    from meshwright.target import target_of

    model, inputs = _model_and_inputs(row)
    request, target = Request(precision="bf16-mixed", alternatives=named), target_of(row.cluster)
    captured, times = capture_call(model, ((), inputs), request, True)
    auto = plan_capture(captured, target, request, row.model, times, stages_if_faster=True)
    yield _found("auto", auto, auto)
    for other in auto.alternatives:
        yield {
            "configuration": other.strategy,
            "step_time_s": other.step_time_s,
            "peak_memory_bytes": other.peak_memory_bytes,
            "fits": other.fits,
            "mesh": list(other.mesh),
            "auto_over_this": auto.predicted.step_time_s / other.step_time_s if other.step_time_s else None,
            "reason": other.reason,
        }
    program = captured.plannable if auto.folded.get("captured") else captured.whole
    for published in PUBLISHED[row.name]:
        about = {"source": published.source, "left_out": published.left_out}
        if "pp" in published.degrees:
            yield {**about, **_in_stages(published, captured, target, row, auto)}
        else:
            yield {**about, **_evaluated(published, program, target.topology, auto)}


def _model_and_inputs(row: Row) -> tuple[Any, dict[str, Any]]:
    """The model and its batch, on the meta device."""
    import torch

    with torch.device("meta"):
        model = MODELS[row.model](row.layers).train()
        if row.model in IMAGES:
            labels = torch.empty(row.batch, dtype=torch.int64)
            return model, {"pixel_values": torch.empty(row.batch, 3, 224, 224), "labels": labels}
        tokens = torch.empty(row.batch, row.seq, dtype=torch.int64)
        return model, {"input_ids": tokens, "labels": tokens}


def _evaluated(published: Published, program: Any, topology: Any, auto: Any) -> dict[str, Any]:
    """The best plan of a configuration; where it does not fit, its time with memory enough."""
    from meshwright.planner import search
    from meshwright.planner.ir.errors import InfeasibleError, InputError
    from meshwright.planner.ir.mesh import MeshShape
    from meshwright.planner.meshes import LogicalMesh
    from meshwright.planner.solve.strategies import AxisRule

    rules = {
        "dp": AxisRule(batch="sharded", use="whole"),
        "cp": AxisRule(batch="sequence only", use="whole"),
        "tp": AxisRule(batch="whole", rest="preferred", use="in place"),
    }
    mesh = MeshShape(tuple(published.degrees.values()), tuple(published.degrees))
    where = LogicalMesh(mesh, topology.hardware(mesh), tuple(rules[name] for name in mesh.names), published.label)
    options = search.Options(alternatives=False)
    failed = {"configuration": published.label, "step_time_s": None, "peak_memory_bytes": None, "fits": False}
    try:
        return _found(published.label, search.search_plan(program, (where,), options), auto)
    except InputError as error:
        return {**failed, "reason": str(error).splitlines()[0]}
    except InfeasibleError as error:
        unlimited = search.Options(alternatives=False, memory_limit_bytes=_UNLIMITED)
        try:
            plan = search.search_plan(program, (where,), unlimited)
        except InfeasibleError:
            return {**failed, "reason": str(error).splitlines()[0]}
        return {**_found(published.label, plan, auto), "fits": False}


def _in_stages(published: Published, captured: Any, target: Any, row: Row, auto: Any) -> dict[str, Any]:
    """The best plan of a configuration with pipeline stages; where it does not fit, its time with memory enough."""
    from meshwright.planner.ir.errors import InfeasibleError, InputError
    from meshwright.planning import plan_capture
    from meshwright.request import Request

    failed = {"configuration": published.label, "step_time_s": None, "peak_memory_bytes": None, "fits": False}
    for limit in (None, _UNLIMITED):
        request = Request(precision="bf16-mixed", degrees=published.degrees, alternatives=False, memory_limit=limit)
        try:
            plan = plan_capture(captured, target, request, row.model, {})
        except (InfeasibleError, InputError) as error:
            failed["reason"] = str(error).splitlines()[0]
            continue
        return {**_found(published.label, plan, auto), "fits": limit is None}
    return failed


def _found(label: str, plan: Any, auto: Any) -> dict[str, Any]:
    predicted = plan.predicted
    return {
        "configuration": label,
        "step_time_s": predicted.step_time_s,
        "peak_memory_bytes": predicted.peak_memory_bytes,
        "fits": True,
        "mesh": list(plan.mesh.sizes),
        "gap": plan.gap,
        "recompute": str(plan.recompute),
        "pipeline": "" if plan.pipeline is None else _told(plan.pipeline),
        "cpu_s": round(time.process_time(), 1),
        "auto_over_this": auto.predicted.step_time_s / predicted.step_time_s,
    }


def _told(pipeline: Any) -> str:
    return f"pp {pipeline.degree}, {pipeline.schedule} x {pipeline.stages_per_rank}, {pipeline.micro_batches} micro-batches"


def in_own_process(row: Row, timeout_s: float, *, named: bool = True) -> list[dict[str, Any]]:
    """The row's table, made in a process of its own."""
    about = {"benchmark": "plan_quality", "name": row.name, "cluster": row.cluster}
    command = [sys.executable, os.path.abspath(__file__), "--child", row.name, *([] if named else ["--without-named"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as stopped:
        text = stopped.stdout or b""
        made = text.decode() if isinstance(text, bytes) else text
        lines = [json.loads(line) for line in made.splitlines() if line.startswith("{")]
        return [*({**about, **found} for found in lines), {**about, "error": f"not done after {timeout_s:g} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        lines.append({"error": (done.stderr.strip().splitlines() or ["?"])[-1]})
    return [{**about, **found} for found in lines]


def line(found: dict[str, Any]) -> str:
    """One line of a table."""
    if "error" in found:
        return f"  {found['error'][:140]}"
    if found["step_time_s"] is None:
        return f"  {found['configuration']:22} {'-':>10}    {found.get('reason', '')[:90]}"
    mesh = "x".join(map(str, found.get("mesh", ())))
    note = "" if found["fits"] else "does not fit; "
    note += "; ".join(t for t in (found.get("pipeline", ""), found.get("source", "")) if t) + (
        f" (left out: {found['left_out']})" if found.get("left_out") else ""
    )
    gap = f"{found['gap']:6.2%}" if "gap" in found else " " * 6
    return (
        f"  {found['configuration']:22} {found['step_time_s'] * 1e3:10.2f} ms {found['peak_memory_bytes'] / 1e9:8.2f} GB "
        f"{mesh:>8} {gap} {found['auto_over_this']:8.3f}  {note}"
    )


def worst(table: list[dict[str, Any]]) -> float:
    """The largest ratio of auto's time to that of something else that fits."""
    return max((f["auto_over_this"] for f in table if f.get("fits") and f["configuration"] != "auto"), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", help="part of a row's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one model")
    parser.add_argument("--without-named", action="store_true", help="published configurations alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for found in measure(next(r for r in CHOSEN if r.name == args.child), named=not args.without_named):
            print(json.dumps(found), flush=True)
        return
    for row in CHOSEN:
        if args.only is not None and args.only not in row.name:
            continue
        table = in_own_process(row, args.timeout, named=not args.without_named)
        if args.json:
            print("\n".join(map(json.dumps, table)), flush=True)
            continue
        print(
            f"{row.name}, batch {row.batch}{f' x {row.seq}' if row.seq else ''}, {row.cluster}: auto is at worst "
            f"{worst(table):.3f} of another that fits"
        )
        print(f"  {'configuration':22} {'step':>13} {'memory':>11} {'mesh':>8} {'gap':>6} {'auto/this':>9}")
        print("\n".join(map(line, table)), flush=True)


if __name__ == "__main__":
    main()
