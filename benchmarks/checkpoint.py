"""Time and extra memory of saving and loading, per GB, against plain ``torch.distributed.checkpoint``.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 512] [--rounds 5] [--folder /tmp] [--json]

The same tensors (parameters of sharded linear layers, AdamW's state) are saved and loaded by both in turn, in one run, so that
whatever else the machine does hits both. Both wait for the disk (fsync); ours also computes checksums when it saves and compares them
when it loads. Seconds are the slowest rank's: wall clock and CPU. Extra memory is the growth of a rank's peak over what it held before
(VmHWM after ``clear_refs``), against the rank's own share of the tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import distributed as dist, multiprocessing as mp, nn
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.report.tables import make_table

WIDTH = 2048


def memory_bytes(field: str) -> int:
    """A line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])


def cpu_s() -> float:
    """CPU seconds of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(work: Callable[[], Any]) -> dict[str, float]:
    """Wall seconds, CPU seconds and extra bytes of a piece of work that all ranks begin together."""
    dist.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, started = memory_bytes("VmRSS"), cpu_s(), time.perf_counter()
    work()
    dist.barrier()
    return {"s": time.perf_counter() - started, "cpu_s": cpu_s() - cpu, "extra_bytes": memory_bytes("VmHWM") - before}


def torchs(pm: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What torch saves: the same tensors under the same kind of names."""
    state: dict[str, torch.Tensor] = {f"model.{n}": p.detach() for n, p in pm.named_parameters()}
    for name, p in pm.named_parameters():
        state.update((f"optim.{key}.{name}", value) for key, value in optimizer.state[p].items())
    return state


def run_rank(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """Save and load in turn, and write what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    layers = max(1, options.megabytes * 10**6 // (3 * 4 * WIDTH * WIDTH))
    batch = torch.zeros(2 * ranks, WIDTH)
    pm: Any = mw.autoparallelize(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))), (ranks,), batch, strategy="zero3"
    )
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3, foreach=True)
    for p in pm.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    state = torchs(pm, optimizer)
    share = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in state.values())
    ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
    ways: dict[str, Callable[[], Any]] = {
        "save torch": lambda: dcp.save(state, checkpoint_id=theirs),
        "save": lambda: pm.save_checkpoint(ours, optimizer, step=0),
        "load torch": lambda: dcp.load(state, checkpoint_id=theirs),
        "load": lambda: pm.load_checkpoint(ours, optimizer),
        "background": lambda: pm.save_checkpoint(ours, optimizer, step=0, asynchronous=True),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name in (*ways,) if turn % 2 else ("save", "save torch", "load", "load torch", "background"):
            measured = measure(ways[name])
            pm.wait_for_checkpoint()
            if turn:
                found[name].append(measured)
            if name == "background":
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(ours)
                    shutil.rmtree(theirs)
                dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps({"found": found, "share": share, "whole": share * ranks}))
    dist.destroy_process_group()


def rows_of(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per way: medians over rounds of the slowest rank."""
    gigabytes, share = by_rank[0]["whole"] / 1e9, by_rank[0]["share"]
    rows: dict[str, dict[str, Any]] = {}
    for name in by_rank[0]["found"]:
        turns = list(zip(*(r["found"][name] for r in by_rank), strict=True))
        most = {key: statistics.median(max(one[key] for one in turn) for turn in turns) for key in ("s", "cpu_s", "extra_bytes")}
        rows[name] = {
            "way": name,
            "s_per_gb": most["s"] / gigabytes,
            "cpu_s_per_gb": most["cpu_s"] / gigabytes,
            "extra_over_share": most["extra_bytes"] / share,
            "extra_mb": most["extra_bytes"] / 1e6,
        }
    for name in ("save", "load"):
        rows[name]["time_over_torch"] = rows[name]["s_per_gb"] / rows[f"{name} torch"]["s_per_gb"]
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512, help="of all tensors together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; a temporary directory by default")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(run_rank, (options.ranks, folder, options), options.ranks)
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    rows = rows_of(by_rank)
    if options.json:
        print("\n".join(map(json.dumps, rows)))
        return
    figures = ("s per GB", "CPU s per GB", "extra MB", "of a rank's share", "time / torch's")
    table = make_table(
        f"{options.ranks} ranks, {by_rank[0]['whole'] / 1e6:.0f} MB, load {os.getloadavg()[0]:.1f}",
        "way",
        *figures,
        right=figures,
    )
    for r in rows:
        ratio = f"{r['time_over_torch']:.2f}" if "time_over_torch" in r else ""
        numbers = (f"{r['s_per_gb']:.2f}", f"{r['cpu_s_per_gb']:.2f}", f"{r['extra_mb']:.0f}", f"{r['extra_over_share']:.2f}")
        table.add_row(r["way"], *numbers, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
