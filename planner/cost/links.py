"""The links we know, and the algorithms that a library runs over them.

A collective over a link costs, by the best of its algorithms,

    latency_s * (base + hop * hops) + volume / (fraction * bytes_per_s)

with the link's ``latency_s`` as the unit of the first term. All constants were fitted to published measurements
(the sources stand at each table; ``tests/test_cost.py`` prints the errors).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.ir.hardware import Link

_ANY = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_RING = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run a collective.

    Attributes:
        name: as the library calls it.
        kinds: the collectives it implements.
        base: fixed part of the latency, in units of the link's.
        hop: latency per hop, likewise.
        hops: ``"ring"`` (n - 1, twice that for all_reduce), ``"tree"`` (log2 n) or ``"none"``.
        fraction: share of the link's bandwidth that it reaches.
        once: the volume is the buffer itself, whatever the group (in-network reduction).
        min_group: smallest group it is used for.
    """

    name: str
    kinds: tuple[str, ...]
    base: float
    hop: float
    hops: str
    fraction: float
    once: bool = False
    min_group: int = 2


NVLINK4 = Link(
    "NVLink4",
    360e9,
    4e-6,
    "fitted to nccl-tests on 8x H100 (NVIDIA dgxc-benchmarking; AG/RS 345, AR 480 GB/s bus) and 8x H200 (ring AR 365 GB/s)",
)
NVLINK3 = Link("NVLink3", 230e9, 4e-6, "fitted to nccl-tests on 8x A100 (vTrain trace: AR 229 GB/s bus at 1 GiB)")
NDR = Link(
    "InfiniBand NDR 400",
    48e9,
    8.5e-6,
    "NCCL 2.27 tuning log, H100 nodes with one rank each: 48 GB/s, 14 us + 8.5 us per hop; one 400 Gb/s NIC per device",
)
HDR = Link("InfiniBand HDR 200", 24e9, 8.5e-6, "one 200 Gb/s NIC per device: 24 GB/s expected (nccl doctor); latency as NDR")
GLOO = Link(
    "gloo",
    1.2e9,
    1e-4,
    "measured: 2 gloo ranks of one otherwise idle 2-core machine, torch 2.13, 64 B to 64 MB; more ranks than cores are slower; kinds and "
    "groups relative to each other: CPU seconds of 2 and 4 such ranks, each held to one core, 64 B to 16 MB",
)

LINKS = {link.name: link for link in (NVLINK4, NVLINK3, NDR, HDR, GLOO)}

_INFINIBAND = (
    Algorithm("ring/LL128", _RING, 1.65, 1.0, "ring", 0.92),
    Algorithm("ring/simple", _RING, 1.0, 1.65, "ring", 1.0),
    Algorithm("tree/LL128", ("all_reduce",), 1.65, 2.0, "tree", 0.73),
    Algorithm("tree/simple", ("all_reduce",), 1.0, 3.3, "tree", 0.78),
    Algorithm("pairwise", ("all_to_all",), 3.8, 0.5, "ring", 0.9),
)
"""Source: NCCL 2.27 tuning log (collectives.csv, nccl_internal_tuning_table) at one rank per node; all_to_all:
latencies fitted to the published 37, 42, 60, 98 us for 2, 4, 8, 16 nodes."""

ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "NVLink4": (
        Algorithm("tree/LL128", ("all_reduce",), 2.0, 0.6, "tree", 0.55),
        Algorithm("ring/simple", _RING, 1.0, 1.0, "ring", 1.0),
        Algorithm("NVLS", ("all_reduce",), 15.0, 0.0, "none", 0.745, once=True, min_group=5),
        Algorithm("pairwise", ("all_to_all",), 5.0, 0.0, "none", 0.9),
    ),
    "NVLink3": (
        Algorithm("ring", _RING, 7.0, 1.0, "ring", 1.0),
        Algorithm("pairwise", ("all_to_all",), 7.0, 0.0, "none", 0.91),
    ),
    "InfiniBand NDR 400": _INFINIBAND,
    "InfiniBand HDR 200": _INFINIBAND,
    "gloo": (
        Algorithm("ring", ("all_reduce",), 2.0, 1.0, "ring", 1.0),
        Algorithm("ring", ("all_gather",), 2.0, 1.0, "ring", 0.5),
        Algorithm("reduce, then scatter", ("reduce_scatter",), 2.5, 2.0, "ring", 0.4),
        Algorithm("pairwise", ("all_to_all",), 0.0, 1.0, "ring", 0.9),
    ),
}
_UNKNOWN_LINK = (Algorithm("ring", _ANY, 0.0, 1.0, "ring", 1.0),)


def algorithms_of(link: Link) -> tuple[Algorithm, ...]:
    """The algorithms run over a link; a plain ring where the link is none of ours (measured, or given by the user)."""
    return ALGORITHMS.get(link.name.rpartition("x ")[2], _UNKNOWN_LINK)


def network_link(node_bytes_per_s: float, devices_per_node: int) -> Link:
    """The share of one device in a node's network of a stated rate; a plain ring runs over it."""
    return Link(
        f"network of {node_bytes_per_s * 8 / 1e9:g} Gbit/s per node",
        0.9 * node_bytes_per_s / devices_per_node,
        3e-5,
        "the rate that was given, shared by the node's devices; 90 % of it and 30 us per message (TCP) are assumed",
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """How a kind of device is wired: the links inside a node and between nodes, and the usual node."""

    inside: Link
    between: Link
    per_node: int


MACHINES = {
    "H100": Machine(NVLINK4, NDR, 8),
    "H200": Machine(NVLINK4, NDR, 8),
    "A100-80": Machine(NVLINK3, HDR, 8),
    "CPU": Machine(GLOO, GLOO, 1 << 30),
}
