"""Real step times of every strategy on local ranks beside their predictions, after measuring this machine.

    python benchmarks/strategies.py [--ranks 4] [--rounds 7] [--only ddp ...] [--json]

First the ranks measure, all at once as they will run, what one of them gets: matmul rate, memory rate, cost of a small op, latency and
rate of a gloo all_reduce. With that record every strategy is planned for two models; then all of them run in turn, round by round,
so that what else the machine does falls on all alike. A step is forward and backward; the optimizer runs outside the clock, but does
run, so that what is gathered once per step is gathered. Printed: seconds, Spearman's rank correlation of predicted and measured
times, and the regret of ``auto``: its measured time over the best measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pipeline import SEQ, VOCABULARY, Model
from rich.console import Console
from torch import distributed as dist, multiprocessing as mp, nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.planner.cost import DEVICES
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Device, Hardware, Link
from meshwright.planning import Request, capture_call, plan_capture
from meshwright.report.tables import make_table
from meshwright.runtime.module import build
from meshwright.target import target_of

STRATEGIES = (
    "auto",
    "ddp",
    "data_parallel",
    "zero1",
    "zero2",
    "zero3",
    "tp",
    "zero1+tp",
    "pipeline",
    "ddp+pipeline",
    "3d",
    "model_parallel",
)
SMALL, LARGE = 1 << 4, 1 << 21
"""Elements of the all_reduces that latency and rate come from."""


def _transformer() -> Model:
    """Few weights for many tokens."""
    return Model(4)


class Wide(nn.Module):
    """Many weights for few samples: what moves parameters is slow."""

    def __init__(self, width: int = 768, layers: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (16, SEQ), generator=torch.Generator().manual_seed(0))
    return {"ids_BS": ids, "labels_BS": ids.roll(-1, 1)}


def _vectors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(64, 768, generator=g), "target": torch.randn(64, 768, generator=g)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "transformer": (_transformer, _tokens),
    "wide": (Wide, _vectors),
}


# --- this machine -------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], Any], times: int) -> float:
    """Median seconds of a call on the slowest rank, all ranks at it together."""
    found = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(found), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measured_hardware() -> Hardware:
    """What one rank gets of this machine while all of them run; equal on all ranks."""
    n, ranks = 512, dist.get_world_size()
    a, b = torch.randn(n, n), torch.randn(n, n)
    matmul_s = _seconds(lambda: [a @ b for _ in range(8)], 9) / 8
    x, y, z = (torch.randn(1 << 23) for _ in range(3))
    add_s = _seconds(lambda: torch.add(x, y, out=z), 9)
    tiny = torch.randn(64)
    small_op_s = _seconds(lambda: [tiny.add(1.0) for _ in range(2000)], 9) / 2000
    little, much = torch.zeros(SMALL), torch.zeros(LARGE)
    short_s, long_s = _seconds(lambda: dist.all_reduce(little), 21), _seconds(lambda: dist.all_reduce(much), 21)
    latency_s = short_s / (1 + 2 * (ranks - 1))
    moved = 2 * (ranks - 1) / ranks * LARGE * 4
    flops, rate = 2 * n**3 / matmul_s, 3 * x.numel() * 4 / add_s
    source = f"measured on {ranks} local ranks of {os.cpu_count()} cores together, load {os.getloadavg()[0]:.1f}"
    base = DEVICES["CPU"]
    peaks = {name: peak / base.peak_flops_per_s["float32"] * flops / 0.9 for name, peak in base.peak_flops_per_s.items()}
    device = Device(
        "CPU", base.memory_bytes, rate, peaks, base.matmul_efficiency, small_op_s + base.kernel_overhead_s / 2, source
    )
    return Hardware(device, (Link("gloo", moved / max(long_s - short_s, 1e-6), latency_s, source),), source)


# --- running ------------------------------------------------------------------------------------------------------


def in_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """What ``work(*args)`` returns on the first of forked ranks, which share what this process has captured and planned."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        children = [context.Process(target=_one_rank, args=(rank, ranks, folder, work, args)) for rank in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            raise SystemExit(f"a rank failed: exit codes {[child.exitcode for child in children]}")
        with open(f"{folder}/found.json") as file:
            return json.load(file)


def _one_rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(*args)
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ready:
    """A strategy that is planned."""

    strategy: str
    capture: Capture
    plan: mw.Plan


def planned(name: str, ranks: int, hardware: Hardware, strategies: Sequence[str]) -> list[Ready]:
    """Every strategy of one model, captured once."""
    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    folded, times = capture_call(make(), ((), make_batch()), Request(), True)
    target = replace(target_of(mw.MeshShape.of(ranks), hardware), searched=True)
    found = []
    for strategy in strategies:
        plan = plan_capture(folded, target, Request(strategy=strategy, alternatives=False), name, times)
        found.append(Ready(strategy, folded.at(plan.recompute).whole, plan))
    return found


def run_all(name: str, ready: Sequence[Ready], rounds: int) -> dict[str, float]:
    """Median measured seconds of a step by strategy; on every rank."""
    make, make_batch = MODELS[name]
    batch, modules, times = make_batch(), dict[str, Any](), dict[str, list[float]]()
    for r in ready:
        torch.manual_seed(0)
        modules[r.strategy] = build(make(), r.capture, r.plan, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = {s: torch.optim.SGD(list(pm.parameters()), lr=1e-4, foreach=True) for s, pm in modules.items()}
    for number in range(rounds + 1):
        for strategy, pm in modules.items():
            optimizers[strategy].zero_grad(set_to_none=True)
            dist.barrier()
            began = time.perf_counter()
            pm.step(batch)
            dist.barrier()
            if number:
                times.setdefault(strategy, []).append(time.perf_counter() - began)
            optimizers[strategy].step()
    return {strategy: statistics.median(found) for strategy, found in times.items()}


def measured_fields() -> dict[str, Any]:
    """The measured record as JSON."""
    return asdict(measured_hardware())


def _told(hardware: Hardware) -> dict[str, float]:
    device, link = hardware.device, hardware.links[0]
    return {
        "matmul_gflops_per_s": device.peak_flops_per_s["float32"] * 0.9 / 1e9,
        "memory_gb_per_s": device.memory_bytes_per_s / 1e9,
        "kernel_us": device.kernel_overhead_s * 1e6,
        "gloo_gb_per_s": link.bytes_per_s / 1e9,
        "gloo_latency_us": link.latency_s * 1e6,
    }


def run_model(name: str, hardware: Hardware, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a step, by strategy."""
    ready = planned(name, options.ranks, hardware, options.only or STRATEGIES)
    measured = in_ranks(options.ranks, run_all, name, ready, options.rounds)
    return [
        {
            "model": name,
            "strategy": r.strategy,
            "predicted_s": r.plan.predicted.step_time_s,
            "measured_s": measured[r.strategy],
            "mesh": list(r.plan.mesh.sizes),
            "stages": 1 if r.plan.pipeline is None else r.plan.pipeline.degree,
        }
        for r in ready
    ]


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation."""
    a, b = (np.argsort(np.argsort(values)).astype(float) for values in (first, second))
    return float(np.corrcoef(a, b)[0, 1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Spearman over the strategies of one model, and the regret of auto."""
    measured = {r["strategy"]: r["measured_s"] for r in rows}
    return {
        "model": rows[0]["model"],
        "spearman": spearman([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "regret": measured["auto"] / min(measured.values()) if "auto" in measured else None,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="these strategies alone")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    fields = in_ranks(options.ranks, measured_fields)
    hardware = Hardware(Device(**fields["device"]), tuple(Link(**link) for link in fields["links"]), fields["source"])
    by_model = [run_model(name, hardware, options) for name in MODELS]
    summaries = [summary(rows) for rows in by_model]
    if options.json:
        print("\n".join(map(json.dumps, [_told(hardware), *(r for rows in by_model for r in rows), *summaries])))
        return
    console = Console()
    console.print("this machine, per rank: " + ", ".join(f"{k} {v:.3g}" for k, v in _told(hardware).items()))
    for rows, told in zip(by_model, summaries, strict=True):
        regret = "-" if told["regret"] is None else f"{told['regret']:.2f}"
        figures = ("stages", "mesh inside", "predicted ms", "measured ms", "ratio")
        table = make_table(
            f"{told['model']}: Spearman {told['spearman']:.2f}, regret of auto {regret}, load {told['load']:.1f}",
            "strategy",
            *figures,
            right=figures,
        )
        for r in sorted(rows, key=lambda r: r["measured_s"]):
            seconds = (
                f"{1e3 * r['predicted_s']:.1f}",
                f"{1e3 * r['measured_s']:.1f}",
                f"{r['predicted_s'] / r['measured_s']:.2f}",
            )
            table.add_row(r["strategy"], str(r["stages"]), "x".join(map(str, r["mesh"])), *seconds)
        console.print(table)


if __name__ == "__main__":
    main()
