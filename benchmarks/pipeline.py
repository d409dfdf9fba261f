"""Bubble and memory in flight of real pipeline steps against the planner's simulator; step time against torch's own pipelining.

    python benchmarks/pipeline.py [--ranks 2] [--micro-batches 8] [--steps 5] [--json]
    python benchmarks/pipeline.py --against-torch [--steps 15] [--json]

Wall clock means nothing where there are more ranks than cores, so every action is timed by its thread's CPU clock and the step is
replayed: each rank's actions in the order in which they ran, each with its own duration, an action beginning when its rank is free and
what it needs has been made. The simulator is given one duration per stage and kind of action, the median over steps. Both bubbles are
shares of all ranks' time; bytes are what a rank's stages hold for later backwards, measured and as the plan's profile predicts.

``--against-torch`` runs two pinned ranks and alternates, step by step, between our module and ``torch.distributed.pipelining`` on the same
model cut by hand behind the same block: seconds of a step (forward and backward of all micro-batches, all ranks done) and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import distributed as dist, multiprocessing as mp, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import meshwright as mw
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.orders import Action, orders
from meshwright.planner.simulate import simulate
from meshwright.report.tables import make_table

LAYERS, WIDTH, HEADS, VOCABULARY, SEQ = 8, 192, 6, 512, 64
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x_BSD)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.tokens(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), labels_BS.flatten())


def run_rank(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """Run every schedule and write what was logged."""
    torch.set_num_threads(1)
    if rank < (os.cpu_count() or 1):
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2 * options.micro_batches, SEQ))
    batch, found = {"ids_BS": ids, "labels_BS": ids.roll(-1, 1)}, {}
    for schedule in SCHEDULES:
        pm: Any = mw.autoparallelize(
            Model(), (ranks,), batch, degrees={"pp": ranks}, schedule=schedule, micro_batches=options.micro_batches
        )
        pm.step(batch)
        logs = []
        for _ in range(options.steps):
            log = pm._programs[0].engine.log_actions()
            pm.step(batch)
            logs.append([tuple(entry) for entry in log])
        planned = pm.plan.predicted.in_flight_bytes
        found[schedule] = {"pipeline": pm.plan.pipeline.to_json_dict(), "logs": logs, "planned_bytes": planned}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


# --- against torch ------------------------------------------------------------------------------------------------

AGAINST, CUT = ("gpipe", "1f1b"), LAYERS // 2


class Part(nn.Module):
    """A stage of :class:`Model`, cut by hand behind block ``cut``."""

    def __init__(self, model: Model, cut: int, first: bool):
        super().__init__()
        self.tokens = model.tokens if first else None
        self.blocks = model.blocks[:cut] if first else model.blocks[cut:]
        self.head = None if first else model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def by_hand(rank: int, schedule: str, cut: int, micro_batches: int, ids: torch.Tensor) -> tuple[nn.Module, Any]:
    """This rank's stage and a callable that runs one step on a batch."""
    torch.manual_seed(0)
    part = Part(Model(), cut, rank == 0)
    piece = ids[: len(ids) // micro_batches]
    given = piece if rank == 0 else torch.zeros(*piece.shape, WIDTH)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=(given,))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    run = kind(stage, micro_batches, loss_fn=loss_of)

    def step(batch: dict[str, torch.Tensor]) -> None:
        if rank == 0:
            run.step(batch["ids_BS"])
        else:
            run.step(target=batch["labels_BS"], losses=[])

    return part, step


def cut_behind(blocks: int, schedule: str, micro_batches: int, batch: dict[str, torch.Tensor]) -> mw.Plan:
    """Our plan, cut where the other model is cut."""
    degrees = {"pp": 2}
    plan = mw.plan(
        Model(), mw.MeshShape.of(2), batch, hardware="CPU", degrees=degrees, schedule=schedule, micro_batches=micro_batches
    )
    inside = [
        name for name, op in plan.op_info.items() if op.phase == "forward" and op.module_path.startswith(f"blocks.{blocks - 1}")
    ]
    assert plan.pipeline is not None
    return replace(plan, pipeline=replace(plan.pipeline, cuts=(inside[-1],)))


def race_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Alternate between the two and write seconds of every step."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ids = torch.randint(0, VOCABULARY, (2 * options.micro_batches, SEQ), generator=torch.Generator().manual_seed(0))
    batch, found = {"ids_BS": ids, "labels_BS": ids.roll(-1, 1)}, {}
    for schedule in AGAINST:
        torch.manual_seed(0)
        plan = cut_behind(CUT, schedule, options.micro_batches, batch)
        pm: Any = mw.autoparallelize(Model(), (2,), batch, plan=plan)
        part, step = by_hand(rank, schedule, CUT, options.micro_batches, ids)
        seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
        for number in range(options.steps + 2):
            for name, module, run in (("ours", pm, pm.step), ("torch", part, step)):
                module.zero_grad(set_to_none=True)
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                run(batch)
                busy = time.process_time() - cpu
                dist.barrier()
                if number >= 2:
                    seconds[name].append((time.perf_counter() - began, busy))
        found[schedule] = {"seconds": seconds}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def against_torch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per schedule."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(race_rank, (folder, options), 2)
        by_rank = []
        for rank in range(2):
            with open(f"{folder}/{rank}.json") as file:
                by_rank.append(json.load(file))
    rows = []
    for schedule in AGAINST:
        row: dict[str, Any] = {"schedule": schedule, "cut_behind_block": CUT, "load": os.getloadavg()[0]}
        for name in ("ours", "torch"):
            each = [found[schedule]["seconds"][name] for found in by_rank]
            row[f"{name}_s"] = statistics.median(max(wall for wall, _ in step) for step in zip(*each, strict=True))
            row[f"{name}_cpu_s"] = statistics.median(sum(cpu for _, cpu in step) for step in zip(*each, strict=True))
        row["ratio"], row["cpu_ratio"] = row["ours_s"] / row["torch_s"], row["ours_cpu_s"] / row["torch_cpu_s"]
        rows.append(row)
    return rows


def show_race(rows: list[dict[str, Any]]) -> None:
    figures = ("cut behind block", "ours", "torch", "ratio", "CPU ours", "CPU torch", "ratio")
    table = make_table(
        f"seconds of a step, ours against torch.distributed.pipelining, load {os.getloadavg()[0]:.1f}",
        "schedule",
        *figures,
        right=figures,
    )
    for r in rows:
        walls = (f"{r['ours_s']:.4f}", f"{r['torch_s']:.4f}", f"{r['ratio']:.3f}")
        cpus = (f"{r['ours_cpu_s']:.4f}", f"{r['torch_cpu_s']:.4f}", f"{r['cpu_ratio']:.3f}")
        table.add_row(r["schedule"], str(r["cut_behind_block"]), *walls, *cpus)
    Console().print(table)


# --- against the simulator ----------------------------------------------------------------------------------------


def compare(schedule: str, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One schedule's row."""
    pipeline = Pipeline.from_json_dict(by_rank[0][schedule]["pipeline"])
    steps = len(by_rank[0][schedule]["logs"])
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    replays, held = [], 0
    for step in range(steps):
        own: dict[Action, float] = {}
        order = []
        for found in by_rank:
            log = found[schedule]["logs"][step]
            order.append(tuple(Action(*entry[:3]) for entry in log))
            now: dict[int, int] = {}
            for kind, stage, i, seconds, size in log:
                own[Action(kind, stage, i)] = seconds
                times[kind, stage].append(seconds)
                now[stage] = size
                held = max(held, sum(now.values()))
        replays.append(simulate(pipeline, order, own.__getitem__).bubble)
    medians = {key: statistics.median(values) for key, values in times.items()}
    predicted = simulate(pipeline, orders(pipeline), lambda a: medians[a.kind, a.stage])
    planned = by_rank[0][schedule]["planned_bytes"]
    measured = statistics.median(replays)
    return {
        "schedule": schedule,
        "stages": pipeline.num_stages,
        "bubble_measured": measured,
        "bubble_simulated": predicted.bubble,
        "difference": predicted.bubble - measured,
        "held_bytes": held,
        "planned_bytes": planned,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--against-torch", action="store_true", help="step time beside torch's own pipelining, on two pinned ranks"
    )
    options = parser.parse_args()
    if options.against_torch:
        rows = against_torch(options)
        print("\n".join(map(json.dumps, rows))) if options.json else show_race(rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options.ranks, folder, options), options.ranks)
        by_rank = []
        for rank in range(options.ranks):
            with open(f"{folder}/{rank}.json") as file:
                by_rank.append(json.load(file))
    rows = [compare(schedule, by_rank) for schedule in SCHEDULES]
    if options.json:
        print("\n".join(map(json.dumps, rows)))
        return
    figures = ("stages", "bubble", "simulated", "off by", "MB held", "planned", "ratio")
    table = make_table(
        f"{options.ranks} ranks, {options.micro_batches} micro-batches, load {os.getloadavg()[0]:.1f}",
        "schedule",
        *figures,
        right=figures,
    )
    for r in rows:
        shares = (f"{r['bubble_measured']:.3f}", f"{r['bubble_simulated']:.3f}", f"{r['difference']:+.3f}")
        sizes = (f"{r['held_bytes'] / 1e6:.1f}", f"{r['planned_bytes'] / 1e6:.1f}", f"{r['planned_bytes'] / r['held_bytes']:.2f}")
        table.add_row(r["schedule"], str(r["stages"]), *shares, *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
