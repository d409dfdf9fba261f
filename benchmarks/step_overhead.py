"""Step time of our plans over that of torch's own engines: same model, ranks, threads and data, in one run, alternating.

    python benchmarks/step_overhead.py [--rounds 20] [--json]

ddp against ``DistributedDataParallel``, zero3 against ``fully_shard`` (per block), tp against ``parallelize_module`` (columns and
rows, vocabulary-parallel embedding). Two gloo ranks, each pinned to one core with one thread. A round times one step of each of
the two in turn, the slower rank counting; ratios are medians over rounds of ours / theirs, below 1 where ours is faster: of
forward and backward, of the optimizer, and of the whole step.

Both sides run the same AdamW. ``foreach`` is torch's default on GPUs; on CPUs the default is ``loop``, in which every op on every
parameter passes through DTensor's dispatch: parameters of ours, of ``fully_shard`` and of ``parallelize_module`` are DTensors,
those of ``DistributedDataParallel`` are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

RANKS = 2
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 8, 512
BATCH, SEQ = 8, 64
WARM_UP = 3
OPTIMIZERS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
"""Name to how AdamW goes over the parameters."""
PARTS = ("forward+backward", "optimizer", "step")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x_BSD)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.o(attended.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


# --- torch's engines ----------------------------------------------------------------------------------------------


def torch_ddp(mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(make_model())


def torch_fsdp(mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def torch_tp(mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    table = {f"blocks.*.{name}": columns for name in ("q", "k", "v", "up")} | {"blocks.*.o": rows, "blocks.*.down": rows}
    whole = Replicate()
    table |= {"embed": RowwiseParallel(input_layouts=whole), "head": ColwiseParallel(output_layouts=whole)}
    return parallelize_module(make_model(), mesh, table)


PAIRS: dict[str, tuple[str, Callable[[DeviceMesh], nn.Module], bool]] = {
    "ddp": ("DistributedDataParallel", torch_ddp, True),
    "zero3": ("fully_shard", torch_fsdp, True),
    "tp": ("parallelize_module", torch_tp, False),
}
"""Our strategy: torch's engine, how to make it, whether it wants the local batch."""


# --- measuring ----------------------------------------------------------------------------------------------------


def batch_of(local: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()] if local else ids
    return mine, mine


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """DTensors and plain parameters apart: ``foreach`` takes no mixture, and ``parallelize_module`` leaves one."""
    parameters = list(model.parameters())
    kinds = ([p for p in parameters if isinstance(p, DTensor)], [p for p in parameters if not isinstance(p, DTensor)])
    return [{"params": kind} for kind in kinds if kind]


def stepper(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], optimizer: str) -> Callable[[], list[float]]:
    """A function that does one training step and returns the seconds of each of ``PARTS``."""
    adam = torch.optim.AdamW(groups_of(model), lr=1e-3, **OPTIMIZERS[optimizer])

    def step() -> list[float]:
        start = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        differentiated = time.perf_counter()
        adam.step()
        adam.zero_grad()
        float(loss.detach())
        end = time.perf_counter()
        return [differentiated - start, end - differentiated, end - start]

    return step


def timed(step: Callable[[], list[float]]) -> list[float]:
    """Seconds of each part of one step, the slowest rank's."""
    dist.barrier()
    took = torch.tensor(step(), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.tolist()


def measure(rounds: int, optimizer: str) -> Iterator[dict[str, object]]:
    """One record per pair and part of the step."""
    import meshwright as mw

    mesh = init_device_mesh("cpu", (RANKS,))
    for strategy, (engine, make_theirs, local) in PAIRS.items():
        whole = batch_of(local=False)
        ours = stepper(mw.autoparallelize(make_model(), mesh, whole, strategy=strategy), whole, optimizer)
        theirs = stepper(make_theirs(mesh), batch_of(local), optimizer)
        for _ in range(WARM_UP):
            ours(), theirs()
        times = [(timed(ours), timed(theirs)) for _ in range(rounds)]
        for i, part in enumerate(PARTS):
            yield {
                "strategy": strategy,
                "engine": engine,
                "part": part,
                "ours_s": statistics.median(a[i] for a, _ in times),
                "theirs_s": statistics.median(b[i] for _, b in times),
                "ratio": statistics.median(a[i] / b[i] for a, b in times),
                "rounds": rounds,
                "optimizer": optimizer,
            }


def rank_main(rounds: int, optimizer: str, result: str) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    records = list(measure(rounds, optimizer))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(records))
    dist.destroy_process_group()


def table_of(records: list[dict[str, Any]], optimizer: str) -> Table:
    size = f"{LAYERS} layers, width {WIDTH}, batch {BATCH} x {SEQ}, {RANKS} gloo ranks"
    table = Table(title=f"{size}, AdamW {optimizer}, torch {torch.__version__}")
    for column in ("ours", "against", "part", "ours ms", "theirs ms", "ratio"):
        table.add_column(column)
    for r in records:
        times = (f"{1e3 * r[key]:.1f}" for key in ("ours_s", "theirs_s"))
        table.add_row(r["strategy"], r["engine"], r["part"], *times, f"{r['ratio']:.2f}", end_section=r["part"] == PARTS[-1])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="foreach", help="how AdamW runs, on both sides")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        rank_main(options.rounds, options.optimizer, options.result)
        return 0
    from meshwright.runtime.launch import run_script

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        asked = ["--rounds", str(options.rounds), "--optimizer", options.optimizer, "--result", str(path)]
        code = run_script(__file__, asked, RANKS)
        if code:
            return code
        records = json.loads(path.read_text())
    if options.json:
        print("\n".join(map(json.dumps, records)))
        return 0
    Console().print(table_of(records, options.optimizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
