"""Real step times of every strategy on local ranks beside their predictions, after measuring this machine.

    python benchmarks/strategies.py [--ranks 4] [--rounds 7] [--only ddp ...] [--json]

First the ranks measure, all at once as they will run (``machine.py``): rates of matmuls, memory and functions, cost of a small op, of
gloo's collectives by kind, size and group, of messages, and of an action of a pipeline besides its kernels. With that record every
strategy is planned for two models; then all of them run in turn, round by round, so that what else the machine does falls on all
alike; of two steps in a row the second is timed. What is one plan by several names runs once. A step is forward and backward; the optimizer runs outside the clock, but does run, so that what is gathered once per step is
gathered. Nothing is fitted to the strategies.

Where there are more ranks than cores, wall clock tells how ranks wait for a core, not how fast a strategy is: one that leaves ranks
idle looks fast. The time of a step is therefore that of ranks with a core each: the CPU seconds of a rank's process, all its threads,
gloo's too. Every rank is held to one core: else gloo's thread spins on a lock whose holder waits for another core, for longer than the
step takes. Ranks that share a core send each other for less, so which do changes from round to round. Without stages the time is the busiest rank's; with stages the step is replayed, as benchmarks/pipeline.py does: each rank's
actions in the order in which they ran, each with its own CPU seconds, to which what the rank does beside its actions is added in
proportion. The machine is measured by the same clock, collectives between kernels as in a step. Freed memory is kept, as a GPU's
allocator keeps it. Wall seconds are printed too.

Printed: seconds, Spearman's rank correlation of predicted and measured times over distinct plans (equal predictions share a rank), and the regret of
``auto``: its measured time over the best measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
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
from machine import local_source, mean_of_all, measured_device, measured_link, over_turns, pin
from pipeline import SEQ, VOCABULARY, Model
from rich.console import Console
from torch import distributed as dist, multiprocessing as mp, nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Device, Hardware, Link, Measured
from meshwright.planner.orders import Action
from meshwright.planner.simulate import simulate
from meshwright.planning import capture_call, plan_capture
from meshwright.report.tables import make_table
from meshwright.request import Request
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


def _transformer() -> Model:
    """Few weights for many tokens."""
    return Model(4)


class Wide(nn.Module):
    """Many weights for few samples: what moves parameters is slow."""

    def __init__(self, width: int = 1024, layers: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (16, SEQ), generator=torch.Generator().manual_seed(0))
    return {"ids_BS": ids, "labels_BS": ids.roll(-1, 1)}


def _vectors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(64, 1024, generator=g), "target": torch.randn(64, 1024, generator=g)}


class Plain(nn.Module):
    """Whatever, for what a pipeline takes besides its kernels, which are long enough to leave nothing else in the nearest cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "transformer": (_transformer, _tokens),
    "wide": (Wide, _vectors),
    "plain": (Plain, lambda: {"x": torch.ones(2048, 512)}),
}
COMPARED = ("transformer", "wide")


@dataclass(frozen=True)
class Ready:
    """A strategy that is planned."""

    strategy: str
    capture: Capture
    plan: mw.Plan


# --- this machine -------------------------------------------------------------------------------------------------


def measured_hardware(plain: list[Ready]) -> Hardware:
    """What one rank gets of this machine while all of them run; equal on all ranks. ``plain``: pipelines (see :func:`plain_pipelines`)."""
    source = local_source()
    device, link = measured_device(source), measured_link(source)
    action_s, message_s = _action_and_message_s(plain, link.bytes_per_s)
    return Hardware(replace(device, action_overhead_s=action_s), (replace(link, latency_s=message_s),), source)


def _action_and_message_s(plain: list[Ready], bytes_per_s: float) -> tuple[float, float]:
    """What an action of a pipeline takes besides its kernels, and what a message does besides its bytes, at both its ends together.

    Pipelines have the more of the one the more they have of the other; what both explain is what counts: least squares, neither below
    zero. What a step takes once is spread over them.
    """
    counts, seconds = zip(*(_besides_actions(ready, bytes_per_s) for ready in plain), strict=True)
    action_s, message_s = _least_squares(np.array(counts), np.array(seconds))
    return float(action_s), float(message_s)


def _least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The ``x``, nowhere negative, for which ``a @ x`` is nearest to ``b``: the best of those that leave some columns out."""
    best = np.zeros(a.shape[1])
    for kept in itertools.product((False, True), repeat=a.shape[1]):
        x = np.zeros(a.shape[1])
        x[list(kept)] = np.linalg.lstsq(a[:, list(kept)], b, rcond=None)[0]
        if np.all(x >= 0) and np.linalg.norm(a @ x - b) < np.linalg.norm(a @ best - b):
            best = x
    return best


def _besides_actions(ready: Ready, bytes_per_s: float) -> tuple[tuple[float, float], float]:
    """(Actions and messages) of a rank in a step, and its seconds besides the actions' own and the messages' bytes; means over ranks."""
    make, make_batch = MODELS[ready.strategy]
    pm: Any = build(make(), ready.capture, ready.plan, init_device_mesh("cpu", (dist.get_world_size(),)))
    batch, found, actions = make_batch(), [], 0.0
    for turn in range(20):
        pin(turn)
        log = pm._programs[0].engine.log_actions(held=False)
        dist.barrier()
        began = time.process_time()
        pm.step(batch)
        busy_s = time.process_time() - began
        actions = mean_of_all(len(log))
        found.append(mean_of_all(busy_s - sum(entry.cpu_s for entry in log)))
    pipeline = ready.plan.pipeline
    assert pipeline is not None
    apart = sum(pipeline.rank_of(k) != pipeline.rank_of(k + 1) for k in range(pipeline.num_stages - 1))
    sent = 2 * apart / dist.get_world_size()
    moved_s = sent * batch["x"].numel() * 4 / bytes_per_s
    return (actions, sent * pipeline.micro_batches), max(0.0, over_turns(found) - moved_s)


def plain_pipelines(ranks: int) -> list[Ready]:
    """Pipelines of the plain model with few micro-batches and with more, by two runtimes of torch's, planned."""
    return [_plain(ranks, schedule, count) for schedule in ("gpipe", "zero_bubble") for count in (2, 8)]


def _plain(ranks: int, schedule: str, micro_batches: int) -> Ready:
    make, make_batch = MODELS["plain"]
    request = Request(
        strategy="pipeline", degrees={"pp": ranks}, schedule=schedule, micro_batches=micro_batches, alternatives=False
    )
    folded, times = capture_call(make(), ((), make_batch()), request, True)
    target = replace(target_of(mw.MeshShape.of(ranks), "CPU"), searched=True)
    plan = plan_capture(folded, target, request, "plain", times)
    return Ready("plain", folded.at(plan.recompute).whole, plan)


def keep_memory() -> None:
    """Let the allocator keep what is freed, as a GPU's does: else each step pays for the pages of its gradients again."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap never shrinks


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
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(*args)
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


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


def run_all(name: str, ready: Sequence[Ready], rounds: int) -> dict[str, tuple[float, float]]:
    """By hash of the plan: median seconds of a step, of ranks with a core each and by the wall clock; on every rank."""
    make, make_batch = MODELS[name]
    batch, modules, times = make_batch(), dict[str, Any](), dict[str, list[tuple[list[float], float]]]()
    for r in {r.plan.hash: r for r in reversed(ready)}.values():  # what is one plan by two names runs once
        torch.manual_seed(0)
        modules[r.plan.hash] = build(make(), r.capture, r.plan, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = {h: torch.optim.SGD(list(pm.parameters()), lr=1e-4, foreach=True) for h, pm in modules.items()}
    gc.collect()
    gc.freeze()  # all that is there stays: none of the steps shall pay for looking through it
    for turn in range(rounds):
        pin(turn)
        for plan, pm in modules.items():
            for _ in range(2):  # the first brings back what others drove from the caches: steps follow steps of their like
                optimizers[plan].zero_grad(set_to_none=True)
                log = pm._programs[0].engine.log_actions(held=False) if pm.plan.pipeline else []
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                pm.step(batch)
                busy = time.process_time() - cpu
                dist.barrier()
                wall = time.perf_counter() - began
                optimizers[plan].step()
            times.setdefault(plan, []).append((_with_a_core_each(pm.plan, busy, log), wall))
    return {h: (_busiest_s([c for c, _ in found]), statistics.median(w for _, w in found)) for h, found in times.items()}


def _busiest_s(rounds: list[list[float]]) -> float:
    """Seconds of a step: of each rank (or column) over the rounds, the busiest."""
    return max(over_turns(own) for own in zip(*rounds, strict=True))


def _with_a_core_each(plan: mw.Plan, busy_s: float, log: Sequence[Any]) -> list[float]:
    """Seconds of a step, were every rank alone on a core: of each rank, or with stages of each column of ranks. Collective.

    Args:
        plan: what ran.
        busy_s: CPU seconds of this rank.
        log: the actions of this rank's stages.
    """
    actions = [(entry.kind, entry.stage, entry.micro_batch, entry.cpu_s) for entry in log]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (busy_s, actions))
    if plan.pipeline is None:
        return [busy for busy, _ in told]
    inside = len(told) // plan.pipeline.degree
    columns = []
    for column in range(inside):  # ranks of one column send to each other; columns wait for each other inside stages
        ranks = [told[row * inside + column] for row in range(plan.pipeline.degree)]
        own = {
            Action(kind, stage, i): seconds * busy / max(sum(s for *_, s in actions), 1e-9)
            for busy, actions in ranks
            for kind, stage, i, seconds in actions
        }
        order = [tuple(Action(kind, stage, i) for kind, stage, i, _ in actions) for _, actions in ranks]
        columns.append(simulate(plan.pipeline, order, own.__getitem__).step_s)
    return columns


def measured_fields(plain: list[Ready]) -> dict[str, Any]:
    """The measured record as JSON."""
    return asdict(measured_hardware(plain))


def hardware_of(fields: dict[str, Any]) -> Hardware:
    """The record that :func:`measured_fields` made."""
    links = [
        Link(**{**link, "measured": tuple(Measured(**{k: _tuple(v) for k, v in m.items()}) for m in link["measured"])})
        for link in fields["links"]
    ]
    return Hardware(Device(**fields["device"]), tuple(links), fields["source"])


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _told(hardware: Hardware) -> dict[str, float | list[int]]:
    device, link = hardware.device, hardware.links[0]
    return {
        "matmul_gflops_per_s": device.peak_flops_per_s["float32"] * 0.9 / 1e9,
        "memory_gb_per_s": device.memory_bytes_per_s / 1e9,
        "action_us": device.action_overhead_s * 1e6,
        "kernel_us": device.kernel_overhead_s * 1e6,
        "functions_g_per_s": device.functions_per_s / 1e9,
        "gloo_gb_per_s": link.bytes_per_s / 1e9,
        "gloo_latency_us": link.latency_s * 1e6,
        **{f"{m.kind}_{m.group}_us": [round(s * 1e6) for s in m.seconds] for m in link.measured},
    }


def run_model(name: str, hardware: Hardware, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a step, by strategy."""
    ready = planned(name, options.ranks, hardware, options.only or STRATEGIES)
    measured = in_ranks(options.ranks, run_all, name, ready, options.rounds)
    return [
        {
            "model": name,
            "strategy": r.strategy,
            "plan": r.plan.hash[:12],
            "predicted_s": r.plan.predicted.step_time_s,
            "measured_s": measured[r.plan.hash][0],
            "wall_s": measured[r.plan.hash][1],
            "mesh": list(r.plan.mesh.sizes),
            "stages": 1 if r.plan.pipeline is None else r.plan.pipeline.degree,
        }
        for r in ready
    ]


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; what is equal shares the mean of its ranks."""
    a, b = (np.array([np.mean(np.flatnonzero(np.sort(values) == v)) for v in values]) for values in (first, second))
    return float(np.corrcoef(a, b)[0, 1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Spearman over the distinct plans of one model, and the regret of auto."""
    plans = list({r["plan"]: r for r in rows}.values())
    predicted, measured, wall = ([r[f"{what}_s"] for r in plans] for what in ("predicted", "measured", "wall"))
    auto = next((r["measured_s"] for r in rows if r["strategy"] == "auto"), None)
    return {
        "model": rows[0]["model"],
        "plans": len(plans),
        "spearman": spearman(predicted, measured),
        "spearman_wall": spearman(predicted, wall),
        "regret": None if auto is None else auto / min(measured),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="these strategies alone")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    keep_memory()
    fields = in_ranks(options.ranks, measured_fields, plain_pipelines(options.ranks))
    hardware = hardware_of(fields)
    by_model = [run_model(name, hardware, options) for name in COMPARED]
    summaries = [summary(rows) for rows in by_model]
    if options.json:
        print("\n".join(map(json.dumps, [_told(hardware), *(r for rows in by_model for r in rows), *summaries])))
        return
    console = Console()
    console.print(
        "this machine, per rank: "
        + ", ".join(f"{k} {v if isinstance(v, list) else f'{v:.3g}'}" for k, v in _told(hardware).items())
    )
    for rows, told in zip(by_model, summaries, strict=True):
        regret = "-" if told["regret"] is None else f"{told['regret']:.2f}"
        figures = ("stages", "mesh", "predicted", "measured", "ratio", "wall")
        table = make_table(
            f"{told['model']}, ms a step, {told['plans']} plans: Spearman {told['spearman']:.2f} (with the wall clock "
            f" {told['spearman_wall']:.2f}), regret of auto {regret}, load {told['load']:.1f}",
            "strategy",
            *figures,
            right=figures,
        )
        for r in sorted(rows, key=lambda r: r["measured_s"]):
            seconds = (
                f"{1e3 * r['predicted_s']:.1f}",
                f"{1e3 * r['measured_s']:.1f}",
                f"{r['predicted_s'] / r['measured_s']:.2f}",
                f"{1e3 * r['wall_s']:.1f}",
            )
            table.add_row(r["strategy"], str(r["stages"]), "x".join(map(str, r["mesh"])), *seconds)
        console.print(table)


if __name__ == "__main__":
    main()
