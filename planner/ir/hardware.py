"""Devices and links as records, each number with its source. Rates are SI: FLOP/s, bytes/s, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one CPU rank).

    Attributes:
        name: as in ``Cluster.device``.
        memory_bytes: usable capacity.
        memory_bytes_per_s: peak memory bandwidth.
        peak_flops_per_s: dense peak by dtype name (``"float32"``, ``"bfloat16"``, ...).
        matmul_efficiency: measured ceiling of large matmuls as a fraction of peak, by dtype name.
        kernel_overhead_s: fixed cost of one kernel (launch or dispatch).
        source: where the numbers are from.
        moves_data: whether communication takes the device's own time, as on a core that runs gloo: nothing hides behind kernels then,
            and a send takes the time of both ranks.
        fuses: whether what one kernel could do is one: else every op is a kernel of its own, as in eager mode.
        action_overhead_s: what starting one action of a pipeline stage takes of the device's time besides its kernels; nothing where
            the host runs ahead of the device.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    matmul_efficiency: dict[str, float]
    kernel_overhead_s: float
    source: str
    moves_data: bool = False
    fuses: bool = True
    action_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What one mesh axis communicates over.

    Attributes:
        name: ``"NVLink4"``, ``"InfiniBand NDR 400"``, ``"gloo"``.
        bytes_per_s: bandwidth of one direction, per device.
        latency_s: time of one message of no bytes (alpha).
        source: where the numbers are from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and the link of each mesh axis.

    Attributes:
        device: the device at every mesh position.
        links: one link per mesh axis, in axis order.
        source: a sentence for the report: datasheet, or measured when and where.
    """

    device: Device
    links: tuple[Link, ...]
    source: str = field(default="datasheet")
