"""Seconds of a cluster on one device: a roofline over the pieces that a rank has.

Works on many candidates at once: a local shape is an integer array [candidates, dims].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from meshwright.planner.cost import formulas
from meshwright.planner.cost.devices import matmul_tiles
from meshwright.planner.cost.eager import SCATTERED, beside, query_block
from meshwright.planner.ir.cluster import Cluster, ClusterRow
from meshwright.planner.ir.cuts import Cuts, cuts_of_columns, padded, piece_shapes, repeated, split_at, stacked
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.hardware import Device
from meshwright.planner.ir.spec import Placement
from meshwright.planner.kinds import argument, is_free, packet

Local = np.ndarray
"""Local shape of one value for every candidate: int64 [candidates, dims]."""

ATTENTION_CEILING = 0.75
"""Attention kernels relative to large matmuls: FlashAttention-2 reaches 73 % of peak forwards and 63 % backwards on A100,
where matmul reaches 87 % (arXiv:2307.08691, section 4.1; devices.csv)."""

MERGE_KERNELS = 7
"""Kernels besides the first call where causal attention of a stretch of the queries takes two calls: counted in its local form,
forwards and backwards."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a kernel formula sees: the op, and local shapes of its ins and outs (None for a missing result).

    ``cut(slot, dim)`` says how a dim of an input is cut: in how many groups, and in how many plain pieces before that.
    """

    op: Op
    ins: tuple[Local, ...]
    outs: tuple[Local | None, ...]
    device: Device
    cut: Callable[[int, int], tuple[np.ndarray, np.ndarray]]

    def rate(self) -> tuple[float, float]:
        """(peak FLOP/s, measured ceiling) for the op's element type."""
        name = str(self.op.ins[0].dtype).removeprefix("torch.")
        peaks, ceilings = self.device.peak_flops_per_s, self.device.matmul_efficiency
        return peaks.get(name, peaks["float32"]), ceilings.get(name, ceilings["float32"])

    def out(self, slot: int = 0) -> Local:
        found = next(o for o in self.outs[slot:] if o is not None)
        return found


def _numel(local: Local) -> np.ndarray:
    return local.prod(axis=1)


def matmul_s(p: Pieces, b: np.ndarray | float, m: np.ndarray, k: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Seconds of ``b`` matmuls of m x k by k x n."""
    rate, ceiling = p.rate()
    return formulas.matmul_s(b, m, k, n, rate, ceiling, *matmul_tiles(p.device))


def _mm(p: Pieces) -> np.ndarray:
    return matmul_s(p, 1.0, p.out()[:, 0], p.ins[-2][:, 1], p.out()[:, 1])


def _bmm(p: Pieces) -> np.ndarray:
    return matmul_s(p, p.out()[:, 0], p.out()[:, 1], p.ins[-2][:, 2], p.out()[:, 2])


def _linear(p: Pieces) -> np.ndarray:
    out = p.out()
    return matmul_s(p, 1.0, out[:, :-1].prod(axis=1), p.ins[0][:, -1], out[:, -1])


def _grouped(p: Pieces) -> np.ndarray:
    """As many matmuls as groups, of equal sizes: how routing spreads rows is not known before it runs."""
    a, b = p.ins[0], p.ins[1]
    groups = float(p.op.ins[2].shape[0])
    if b.shape[1] == 3:
        return matmul_s(p, groups, a[:, 0] / groups, a[:, 1], b[:, 2])
    return matmul_s(p, groups, a[:, 0], a[:, 1] / groups, b[:, 1])


def _convolution(p: Pieces) -> np.ndarray:
    y, w = p.out(), p.ins[1]
    if argument(p.op, "transposed", False):
        y = p.ins[0]
    return matmul_s(p, 1.0, _numel(y) // np.maximum(y[:, 1], 1), w[:, 1:].prod(axis=1), y[:, 1])


def _convolution_backward(p: Pieces) -> np.ndarray:
    dy, w = p.ins[0], p.ins[2]
    if argument(p.op, "transposed", False):
        dy = p.ins[1]
    wanted = sum(map(bool, tuple(argument(p.op, "output_mask", (True, True, False)))[:2]))
    return wanted * matmul_s(p, 1.0, _numel(dy) // np.maximum(dy[:, 1], 1), w[:, 1:].prod(axis=1), dy[:, 1])


def _attention_s(p: Pieces, q: Local, k: Local, formula: Callable[..., np.ndarray]) -> np.ndarray:
    if not p.device.fuses:
        return _blocked_attention_s(p, q, k, 5 if formula is formulas.attention_backward_flops else 2)
    rate, ceiling = p.rate()
    flops = formula(q[:, 0], q[:, 1], q[:, 2], k[:, 2], q[:, 3])
    return formulas.flops_s(_seen(p, q[:, 2], k[:, 2]) * flops, rate, ceiling * ATTENTION_CEILING)


def _blocked_attention_s(p: Pieces, q: Local, k: Local, matmuls: int) -> np.ndarray:
    """Seconds of attention on one core: ``matmuls`` of each block of queries of each head, with their edges, and the exponentials.

    A causal block sees all keys up to its last query: half a block more than its queries do on average.
    """
    queries, keys = q[:, 2], k[:, 2]
    block = query_block(queries)
    seen = _seen(p, queries, keys) * keys
    if argument(p.op, "is_causal", False):
        seen = np.minimum(seen + block / 2, keys)
    heads = q[:, 0] * q[:, 1]
    kernels_s = matmuls * matmul_s(p, heads * queries / block, block, q[:, 3], seen)
    return kernels_s + (heads * queries * seen / p.device.functions_per_s if p.device.functions_per_s else 0.0)


def _seen(p: Pieces, queries: np.ndarray, keys: np.ndarray) -> np.ndarray | float:
    """Share of the keys that the queries of the busiest rank see.

    Under a causal mask that is half, and for the last of n stretches of the queries ``(n - 1/2) / n``: cutting the sequence
    saves at most half of what cutting heads does. With k stripes on each rank it is near ``(k + 1) / 2k``: the last rank has
    the last stretch of each of the k groups.
    """
    if not argument(p.op, "is_causal", False):
        return 1.0
    if not _is_square(p.op):
        return 0.5
    groups, stripes = _stripes(p)
    return (2 * groups - stripes + 1) / (2 * groups) - queries / (2 * keys * stripes)


def _stripes(p: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Groups that causal queries are cut in, and how many of them a rank has a stretch of."""
    groups, plain = p.cut(_query(p.op), 2)
    return groups, np.maximum(groups // plain, 1)


def _query(op: Op) -> int:
    return int(packet(op.target).endswith("_backward"))


def _is_square(op: Op) -> bool:
    """Whether attention has as many keys as queries."""
    return op.ins[_query(op)].shape[2] == op.ins[_query(op) + 1].shape[2]


def _attention(p: Pieces) -> np.ndarray:
    q, k = p.ins[0], p.ins[1]
    _, stripes = _stripes(p)
    joined = 2 * (stripes > 1) + 3
    return _attention_s(p, q, k, formulas.attention_flops) + _merge_s(p, q, k, joined * _bytes(p.op.ins[0].dtype, q))


def _attention_backward(p: Pieces) -> np.ndarray:
    q, k = p.ins[1], p.ins[2]
    _, stripes = _stripes(p)
    joined = 2 * (stripes > 1) + 3
    traffic = joined * _bytes(p.op.ins[1].dtype, q) + (14 * stripes - 6) * _bytes(p.op.ins[2].dtype, k)
    return _attention_s(p, q, k, formulas.attention_backward_flops) + _merge_s(p, q, k, traffic)


def _merge_s(p: Pieces, q: Local, k: Local, traffic: np.ndarray) -> np.ndarray:
    """Seconds of joining the two calls that a stretch of causal queries takes (see ``passes.local.forms_attention``)."""
    if not (argument(p.op, "is_causal", False) and _is_square(p.op)):
        return np.zeros(len(q))
    merge = traffic / p.device.memory_bytes_per_s + _stripes(p)[1] * MERGE_KERNELS * p.device.kernel_overhead_s
    return np.where(q[:, 2] < k[:, 2], merge, 0.0)


KERNELS: dict[str, Callable[[Pieces], np.ndarray]] = {
    "aten.mm": _mm,
    "aten.addmm": _mm,
    "aten.bmm": _bmm,
    "aten.baddbmm": _bmm,
    "aten.linear": _linear,
    "aten._grouped_mm": _grouped,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
"""Op packet to the seconds of its arithmetic. What is not here, nor attention, only moves memory."""


def kernel_of(op: Op) -> Callable[[Pieces], np.ndarray] | None:
    """The formula of an op's arithmetic; None where memory traffic is all that counts."""
    name = packet(op.target)
    if "scaled_dot_product" in name and len(op.ins) >= 3 and all(len(v.shape) == 4 for v in op.ins[:3]):
        return _attention_backward if name.endswith("_backward") else _attention
    return KERNELS.get(name)


class Columns:
    """What of a cluster has a price: what crosses its border, and what its kernels (of a placeholder: its casts) read and write.

    Args:
        cluster: the cluster.
        rows: rows of it that candidates are made of.

    Attributes:
        at: (op, "ins" or "outs", slot), where op -1 stands for the cluster itself, to the number of the column.
        num_dims: of each column.
        shape: global shapes, int64 [columns, dims].
        cuts: how each row cuts them, [rows, columns].
        read, written: bytes of an element of what counts as memory traffic, else 0, int64 [columns].
        in_part: whether only as much of it is read as is written, bool [columns].
        kernels: ops with arithmetic of their own.
        num_ops, num_working: how many ops there are, and how many that cost anything.
        is_source: whether it is a placeholder's.
    """

    def __init__(self, cluster: Cluster, rows: Sequence[ClusterRow]):
        values, placed = _columns(cluster, rows)
        self.at = {key: v for v, key in enumerate(values)}
        self.num_dims = [len(value.shape) for value in values.values()]
        self.shape = padded([value.shape for value in values.values()])
        self.cuts = cuts_of_columns(list(placed.values()), len(rows))
        self.is_source = cluster.source is not None
        unit = {key: value.dtype.itemsize * (self.is_source or key[0] == -1) for key, value in values.items()}
        tables = {op.ins[0].name for op in cluster.ops if packet(op.target) in SCATTERED}
        self.read = np.array([n * (key[1] == "ins") for key, n in unit.items()], dtype=np.int64)
        self.written = np.array([n * (key[1] == "outs") for key, n in unit.items()], dtype=np.int64)
        self.in_part = np.array([key[:2] == (-1, "ins") and v.name in tables for key, v in values.items()], dtype=bool)
        self.kernels = [(i, kernel) for i, op in enumerate(cluster.ops) if (kernel := kernel_of(op)) is not None]
        self.num_ops, self.num_working = len(cluster.ops), sum(not is_free(op) for op in cluster.ops)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.cuts.dim)

    def and_row(self, cluster: Cluster, row: ClusterRow) -> Columns:
        """The same with one more row of the cluster, behind the others."""
        longer, (_, placed) = copy(self), _columns(cluster, [row])
        longer.cuts = Cuts.stacked([self.cuts, cuts_of_columns(list(placed.values()), 1)])
        return longer


Key = tuple[int, str, int]
"""(op, "ins" or "outs", slot) of a column."""


def _columns(cluster: Cluster, rows: Sequence[ClusterRow]) -> tuple[dict[Key, Value], dict[Key, list[Placement | None]]]:
    """What has a price, and its placement in each row (None where an op makes no such result)."""
    values: dict[Key, Value] = {}
    placed: dict[Key, list[Placement | None]] = {}
    if all(map(is_free, cluster.ops)):
        return values, placed
    if cluster.source is None:
        values.update({(-1, "ins", s): v for s, v in enumerate(cluster.ins)})
        placed.update({(-1, "ins", s): [r.ins[s] for r in rows] for s in range(len(cluster.ins))})
        values.update({(-1, "outs", s): v for s, v in enumerate(cluster.outs)})
        placed.update({(-1, "outs", s): [r.outs[s] for r in rows] for s in range(len(cluster.outs))})
    for i, op in enumerate(cluster.ops):
        if kernel_of(op) is not None or (cluster.source is not None and not is_free(op)):
            members, made = [r.members[i] for r in rows], [(s, v) for s, v in enumerate(op.outs) if v is not None]
            values.update({(i, "ins", s): v for s, v in enumerate(op.ins)})
            placed.update({(i, "ins", s): [m.ins[s] for m in members] for s in range(len(op.ins))})
            values.update({(i, "outs", s): v for s, v in made})
            placed.update({(i, "outs", s): [m.outs[s] for m in members] for s, _ in made})
    return values, placed


class Priced:
    """What of a cluster has a price under some candidates, before any sizes.

    Args:
        columns: what has a price.
        rows: the distinct rows that candidates are made of.
        index: row of each candidate over each axis, int64 [candidates, axes].

    Attributes:
        shape: global shape of every column of every candidate, int64 [candidates * columns, dims].
        cuts: how it is cut, [candidates * columns, axes].
    """

    def __init__(self, columns: Columns, rows: Sequence[ClusterRow], index: np.ndarray):
        self.columns, self.rows, self.index = columns, rows, index
        self.shape = repeated(columns.shape, len(index))
        self.cuts = columns.cuts.of_candidates(index)

    def __len__(self) -> int:
        return len(self.index)

    def local(self, pieces: np.ndarray, key: Key) -> Local:
        """A column's local shapes; ``pieces`` are those of all, int64 [candidates * columns, dims]."""
        v = self.columns.at[key]
        return pieces.reshape(len(self.index), len(self.columns.at), -1)[:, v, : self.columns.num_dims[v]]

    def cut(
        self, placements: Sequence[Placement], dim: int, sizes: tuple[int, ...] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups that ``dim`` is cut in (1: none), and the plain pieces it is cut in before, int [candidates]."""
        on_dim = [p.is_shard and p.dim == dim for p in placements]
        split = np.array([p.split if on else 1 for p, on in zip(placements, on_dim, strict=True)], dtype=np.int64)
        plain = np.array([on and p.split == 1 for p, on in zip(placements, on_dim, strict=True)], dtype=bool)
        return split[self.index].max(axis=1), np.where(plain[self.index], np.array(sizes), 1).prod(axis=1)


def _kernel_s(
    cluster: Cluster, priced: Priced, local: Callable[[Key], Local], sizes: tuple[int, ...] | np.ndarray, device: Device
) -> np.ndarray:
    """Seconds of arithmetic of all ops of a cluster."""
    total = np.zeros(len(priced))
    for i, kernel in priced.columns.kernels:
        op = cluster.ops[i]
        ins = tuple(local((i, "ins", s)) for s in range(len(op.ins)))
        outs = tuple(None if v is None else local((i, "outs", s)) for s, v in enumerate(op.outs))

        def cut(slot: int, dim: int, i: int = i) -> tuple[np.ndarray, np.ndarray]:
            return priced.cut([r.members[i].ins[slot] for r in priced.rows], dim, sizes)

        total += kernel(Pieces(op, ins, outs, device, cut))
    return total


def _bytes(dtype: torch.dtype, local: Local) -> np.ndarray:
    return _numel(local) * dtype.itemsize


def _traffic(parts: Sequence[Priced], numels: np.ndarray) -> np.ndarray:
    """Bytes that clusters read and write: what crosses the border of one; of a placeholder what its casts read and write, as views are free.

    Args:
        parts: what of the clusters has a price.
        numels: elements of all their pieces, int64 [candidates * columns of all].

    Returns:
        int64 [candidates of all].
    """
    of_part, num = np.array([len(p.columns.at) for p in parts]), [len(p) for p in parts]
    num_columns = np.repeat(of_part, num)
    column = np.arange(len(numels)) - np.repeat(np.cumsum(num_columns) - num_columns, num_columns)
    column += np.repeat(np.repeat(np.cumsum(of_part) - of_part, num), num_columns)  # among those of all parts
    each = [[p.columns.read for p in parts], [p.columns.written for p in parts], [p.columns.in_part for p in parts]]
    read, written, in_part = (np.concatenate(a)[column] for a in each)
    put, taken = _sums(numels * written, num_columns), numels * read
    if in_part.any():
        taken = np.where(in_part, np.minimum(taken, np.repeat(put, num_columns)), taken)
    return _sums(taken, num_columns) + put


def _sums(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of stretches of some lengths, int64 [stretches]."""
    found, some = np.zeros(len(lengths), dtype=np.int64), lengths > 0
    if some.any():
        found[some] = np.add.reduceat(flat, (np.cumsum(lengths) - lengths)[some])
    return found


def cluster_seconds(
    cluster: Cluster, rows: Sequence[ClusterRow], index: np.ndarray, sizes: tuple[int, ...], device: Device
) -> np.ndarray:
    """Seconds of a cluster for every candidate, float64 [candidates]; see :func:`clusters_seconds`.

    Args:
        cluster: what runs.
        rows: distinct rows.
        index: row of each candidate over each axis, int [candidates, axes].
        sizes: mesh axis sizes.
        device: on what.
    """
    return clusters_seconds([(cluster, Priced(Columns(cluster, rows), rows, index))], sizes, device)[0]


def clusters_seconds(parts: Sequence[tuple[Cluster, Priced]], sizes: tuple[int, ...], device: Device) -> list[np.ndarray]:
    """Seconds of several clusters, each under some candidates. Clusters that share one :class:`Priced` must be alike.

    A cluster is one kernel: the longer of its arithmetic and its memory traffic, plus a fixed time. Where the device fuses nothing it is
    as many as it has ops. Views and casts to wider types alone cost nothing; a placeholder costs its other casts.

    Args:
        parts: what runs, and what of it has a price.
        sizes: mesh axis sizes.
        device: on what.

    Returns:
        For each float64 [candidates].
    """
    distinct = list({id(priced): (cluster, priced) for cluster, priced in parts}.values())
    if not distinct:
        return []
    shape, cuts = stacked([p.shape for _, p in distinct]), Cuts.stacked([p.cuts for _, p in distinct])
    seconds = split_at(_seconds(distinct, piece_shapes(shape, cuts, sizes), sizes, device), [len(p) for _, p in distinct])
    found = {id(p): s for (_, p), s in zip(distinct, seconds, strict=True)}
    return [found[id(priced)] for _, priced in parts]


def seconds_by_size(cluster: Cluster, priced: Priced, sizes: np.ndarray, device: Device) -> np.ndarray:
    """Seconds of a cluster where every candidate is on a mesh of its own, float64 [candidates]; ``sizes`` of their axes [candidates, axes]."""
    pieces = piece_shapes(priced.shape, priced.cuts, np.repeat(sizes, len(priced.columns.at), axis=0))
    return _seconds([(cluster, priced)], pieces, sizes, device)


def _seconds(
    parts: Sequence[tuple[Cluster, Priced]], pieces: np.ndarray, sizes: tuple[int, ...] | np.ndarray, device: Device
) -> np.ndarray:
    """Seconds of clusters whose pieces lie behind each other, float64 [candidates of all]."""
    columns, num = [p.columns for _, p in parts], [len(p) for _, p in parts]
    border = _traffic([p for _, p in parts], pieces.prod(axis=1))
    moving_s, arithmetic_s = border / device.memory_bytes_per_s, np.zeros(len(border))
    own, end = split_at(pieces, [len(p.shape) for _, p in parts]), 0
    for (cluster, priced), local in zip(parts, own, strict=True):
        if priced.columns.kernels:
            arithmetic_s[end : end + len(priced)] = _kernel_s(cluster, priced, partial(priced.local, local), sizes, device)
        end += len(priced)
    working, is_source = np.repeat([(c.num_working, c.is_source) for c in columns], num, axis=0).T
    rest = moving_s + working * device.kernel_overhead_s
    if device.fuses:
        computing = np.maximum(arithmetic_s, moving_s) + device.kernel_overhead_s
    else:
        computing = _unfused_s(parts, border, np.maximum(arithmetic_s, moving_s), device)
    return np.where(working == 0, 0.0, np.where(is_source, rest, computing))


def _unfused_s(parts: Sequence[tuple[Cluster, Priced]], border: np.ndarray, kernels_s: np.ndarray, device: Device) -> np.ndarray:
    """Seconds where every op is a kernel of its own; ``kernels_s``: of those with arithmetic, from what crosses the border in bytes."""
    beside_s, overhead_s, has_kernel = [], [], []
    for cluster, priced in parts:
        light = [op for op in cluster.ops if kernel_of(op) is None]
        more = beside(cluster, light)
        functions_s = more.functions / device.functions_per_s if device.functions_per_s else 0.0
        beside_s.append(more.bytes / device.memory_bytes_per_s + functions_s)
        overhead_s.append(priced.columns.num_ops * device.kernel_overhead_s)
        has_kernel.append(len(light) < len(cluster.ops))
    num = [len(p) for _, p in parts]
    kernels_s = np.where(np.repeat(has_kernel, num), kernels_s, 0.0)
    return kernels_s + border * np.repeat(beside_s, num) + np.repeat(overhead_s, num)
