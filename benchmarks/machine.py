"""What one rank gets of this machine while all of them run: the record that ``benchmarks/strategies.py`` plans with.

Everything is in CPU seconds of a rank's process, all its threads, gloo's too, the mean over ranks that are all at it together. Kernels
read what is no longer in the nearest cache, and collectives and messages run between kernels, as in a step. Where ranks share cores, which
do changes from turn to turn.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from meshwright.planner.cost import DEVICES
from meshwright.planner.cost.devices import matmul_tiles
from meshwright.planner.ir.hardware import Device, Link, Measured

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
SIZES = {1 << 6: 10, 1 << 17: 10, 1 << 20: 8, 1 << 23: 2, 1 << 25: 1}
"""Bytes of the collectives that are measured, and how many behind each other; the largest is more than a buffer that small ones share."""


def pin(turn: int) -> None:
    """Hold this rank, all its threads, to one core. Which ranks share one changes by turns: what they send each other costs them less."""
    rank, ranks, cores = dist.get_rank(), dist.get_world_size(), os.cpu_count() or 1
    core = rank % cores if turn % 2 == 0 else rank * cores // max(ranks, cores)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def over_turns(values: Sequence[float]) -> float:
    """The median over the turns of either way to share cores, their mean."""
    return statistics.mean(statistics.median(way) for way in (values[::2], values[1::2]) if way)


def cpu_s(run: Callable[[], Any], times: int) -> float:
    """CPU seconds of a call, all threads: over ``times`` turns, the mean over ranks, which all are at it together."""
    found = []
    for turn in range(times):
        pin(turn)
        dist.barrier()
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return mean_of_all(over_turns(found))


def mean_of_all(value: float) -> float:
    """The mean over ranks, equal on all."""
    together = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(together)
    return float(together) / dist.get_world_size()


def most_of_all(value: float) -> float:
    """The largest of all ranks, equal on all."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


# --- kernels ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured_device(source: str) -> Device:
    """A rank's core: matmuls, memory, functions, the fixed cost of an op; equal on all ranks."""
    base, (_, edge) = DEVICES["CPU"], matmul_tiles(DEVICES["CPU"])
    rows, n = 128, 512
    pairs = [(torch.randn(rows, n), torch.randn(n, n)) for _ in range(8)]
    matmul_s = cpu_s(lambda: [a @ b for a, b in pairs * 8], 9) / 64
    flops = 2 * (rows + edge) * (n + edge) ** 2 / matmul_s
    x, y, z = (torch.randn(1 << 22) for _ in range(3))
    rate = 3 * x.numel() * 4 / (cpu_s(lambda: [torch.add(x, y, out=z) for _ in range(4)], 9) / 4)
    scale = flops / (base.peak_flops_per_s["float32"] * base.matmul_efficiency["float32"])
    return replace(
        base,
        source=source,
        memory_bytes_per_s=rate,
        peak_flops_per_s={name: peak * scale for name, peak in base.peak_flops_per_s.items()},
        kernel_overhead_s=_small_op_s(),
        functions_per_s=_functions_per_s(rate),
    )


def _small_op_s() -> float:
    """Seconds of a kernel or view of so few elements that all it costs is to be called, where some twenty stand between matmuls, as in a
    step: the first of a kind costs several times what the next do, since the matmul took its code and data from the nearest cache."""
    x, w, one = torch.randn(8, 8), torch.randn(8, 8), torch.ones(8)
    a, b = torch.randn(256, 768), torch.randn(768, 512)
    found = []
    for _ in range(60):
        torch.mm(a, b)
        began = time.process_time()
        for _ in range(3):
            y = torch.mm(torch.reshape(x, [8, 8]), torch.permute(w, [1, 0]))
            y = torch.add(torch.mul(y, x), x)
            y = torch.native_layer_norm(y, [8], one, one, 1e-5)[0]
            torch.sum(y, [0], False)
        found.append((time.process_time() - began) / 21)
    return mean_of_all(statistics.median(found))


def _functions_per_s(bytes_per_s: float) -> float:
    """Values per second of usual functions, besides reading and writing: the mean time of several, over tensors that share no cache."""
    shape = (256, 512)
    given = [torch.randn(shape) for _ in range(16)]
    pairs = list(itertools.pairwise(given))
    calls = [
        (2, lambda: [torch.exp(x) for x in given]),
        (2, lambda: [aten.gelu.default(x) for x in given]),
        (2, lambda: [torch.sigmoid(x) for x in given]),
        (2, lambda: [torch.native_layer_norm(x, [512], None, None, 1e-5) for x in given]),
        (3, lambda: [aten.gelu_backward.default(x, y) for x, y in (*pairs, pairs[0])]),
    ]
    numel = given[0].numel()
    each_s = [cpu_s(run, 9) / len(given) / numel - tensors * 4 / bytes_per_s for tensors, run in calls]
    return 1 / max(statistics.mean(each_s), 1e-11)


# --- links --------------------------------------------------------------------------------------------------------


def between_kernels_s(call: Callable[[], Any], times: int = 10) -> float:
    """CPU seconds of a call on this rank where kernels run before and behind, as in a step: ranks come to it one by one, with caches full of other things."""
    a, b, x, y = torch.randn(256, 768), torch.randn(768, 512), torch.randn(1 << 19), torch.randn(1 << 19)

    def kernels(and_then: Callable[[], Any]) -> float:
        dist.barrier()
        began = time.process_time()
        for _ in range(times):
            torch.mm(a, b)
            x.add_(y)
            and_then()
        return time.process_time() - began

    found = []
    with torch.no_grad():
        for turn in range(14):
            pin(turn)
            found.append(kernels(call) - kernels(lambda: None))
    return max(1e-6, over_turns(found) / times)


def measured_link(source: str) -> Link:
    """Messages between neighbouring ranks, alone, and collectives of every kind among pairs and among all."""
    few, many = 1 << 6, 1 << 20
    latency_s, large_s = (mean_of_all(between_kernels_s(partial(_message, torch.zeros(size // 4)))) for size in (few, many))
    ranks = dist.get_world_size()
    measured = [_collectives(kind, [list(range(ranks))]) for kind in COLLECTIVES]
    if ranks > 2 and ranks % 2 == 0:
        pairs = [[i, i + 1] for i in range(0, ranks, 2)]
        measured += [_collectives(kind, pairs) for kind in COLLECTIVES if kind not in ONE_SIDED]
    return Link("gloo", many / max(large_s - latency_s, 1e-6), latency_s, source, tuple(measured))


def _message(buffer: torch.Tensor) -> None:
    """To the next rank and from the one before: a message at both its ends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(buffer)
    ops = [dist.P2POp(dist.isend, buffer, (rank + 1) % ranks), dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return c10d.all_reduce_(x, "sum", group.group_name)


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return c10d.all_gather_into_tensor(x[: len(x) // group.size()], group.size(), group.group_name)


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return c10d.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = [len(x) // group.size()] * group.size()
    return c10d.all_to_all_single(x, pieces, pieces, group.group_name)


def _broadcast(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.broadcast(x, group_src=0, group=group)
    return x


def _scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = x.split(len(x) // group.size())
    dist.scatter(torch.empty_like(pieces[0]), list(pieces) if group.rank() == 0 else None, group_src=0, group=group)
    return x


COLLECTIVES: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
}
"""As a program, or its one controller, calls them."""
ONE_SIDED = ("broadcast", "scatter")
"""What takes the first rank longer than others: its time counts, not the mean."""


def _collectives(kind: str, groups: list[list[int]]) -> Measured:
    """One kind, all groups at once."""
    made = [dist.new_group(g) for g in groups]
    mine = next(m for m, g in zip(made, groups, strict=True) if dist.get_rank() in g)
    size, found = len(groups[0]), []
    for size_bytes, times in SIZES.items():
        x = torch.zeros(size_bytes // 4)
        own_s = between_kernels_s(lambda x=x: c10d.wait_tensor(COLLECTIVES[kind](x, mine)), times)
        seconds = most_of_all(own_s) if kind in ONE_SIDED else mean_of_all(own_s)
        found.append(max([seconds, *found]))
    return Measured(kind, size, tuple(SIZES), tuple(found))


def local_source() -> str:
    """Where the numbers are from."""
    return f"CPU seconds on {dist.get_world_size()} local ranks of {os.cpu_count()} cores together, load {os.getloadavg()[0]:.1f}"
