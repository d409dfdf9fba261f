"""Devices and links as records, each number with its source. Rates are SI: FLOP/s, bytes/s, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.planner.ir.errors import InputError


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
        functions_per_s: values per second of what costs more to work out than to move, beyond its traffic: exponentials, error functions,
            normalisations; 0: such ops cost their traffic alone, as where a kernel's arithmetic hides behind it.
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
    functions_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Collectives of one kind in groups of one size, measured over a link.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``; also what one controller does (``broadcast``,
            ``scatter``, ``gather``).
        group: ranks of a group.
        sizes_bytes: the larger of a rank's input and output, ascending.
        seconds: of one collective of each size; a larger one takes no less.

    Raises:
        InputError: nothing was measured, or sizes or seconds go down.
    """

    kind: str
    group: int
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.sizes_bytes, self.seconds, strict=True))
        if self.group < 2 or not pairs or sorted(pairs) != pairs or sorted(self.seconds) != list(self.seconds):
            raise InputError(
                f"measured {self.kind} of groups of {self.group}: found {pairs}; needed are groups of 2 or more, ascending sizes, and "
                "seconds that do not go down with the size: sort the measurements and take for each the most of those before it"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """What one mesh axis communicates over.

    Attributes:
        name: ``"NVLink4"``, ``"InfiniBand NDR 400"``, ``"gloo"``.
        bytes_per_s: bandwidth of one direction, per device.
        latency_s: time of one message of no bytes (alpha).
        source: where the numbers are from.
        measured: collectives that were measured over this link; kinds that were not cost what rate, latency and the library's
            algorithms say.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    measured: tuple[Measured, ...] = ()


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
