"""Bubble and memory in flight of real pipeline steps against the planner's simulator.

    python benchmarks/pipeline.py [--ranks 2] [--micro-batches 8] [--steps 5] [--json]

Wall clock means nothing where there are more ranks than cores, so every action is timed by its thread's CPU clock and the step is
replayed: each rank's actions in the order in which they ran, each with its own duration, an action beginning when its rank is free and
what it needs has been made. The simulator is given one duration per stage and kind of action, the median over steps. Both bubbles are
shares of all ranks' time; bytes are what a rank's stages hold for later backwards, measured and as the plan's profile predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import distributed as dist, multiprocessing as mp, nn

import meshwright as mw
from meshwright.planner.ir.pipeline import Pipeline
from meshwright.planner.orders import Action, orders
from meshwright.planner.simulate import simulate

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
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
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
        memory = dict(pm.plan.predicted.memory_bytes)
        found[schedule] = {"pipeline": pm.plan.pipeline.to_json_dict(), "logs": logs, "memory": memory}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


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
    planned = max(found[schedule]["memory"]["activations"] for found in by_rank)
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
    options = parser.parse_args()
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
    table = Table(title=f"{options.ranks} ranks, {options.micro_batches} micro-batches, load {os.getloadavg()[0]:.1f}")
    for column in ("schedule", "stages", "bubble", "simulated", "off by", "MB held", "planned", "ratio"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for r in rows:
        shares = (f"{r['bubble_measured']:.3f}", f"{r['bubble_simulated']:.3f}", f"{r['difference']:+.3f}")
        sizes = (f"{r['held_bytes'] / 1e6:.1f}", f"{r['planned_bytes'] / 1e6:.1f}", f"{r['planned_bytes'] / r['held_bytes']:.2f}")
        table.add_row(r["schedule"], str(r["stages"]), *shares, *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
