"""What is planned, prepared once for all meshes: fused, folded, with what bounds it everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwright.planner import blocks, fuse, rules
from meshwright.planner.correspond import Unlike
from meshwright.planner.cost.shared import SharedBuffers
from meshwright.planner.ir.cluster import ClusterGraph
from meshwright.planner.ir.errors import NoRuleError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.micro import TimeSpecs, time_specs
from meshwright.planner.micro_costs import TimeRows
from meshwright.planner.options import Clock, Options
from meshwright.planner.pinned import folded_pins
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.floor import Floors
from meshwright.planner.stage_floor import KernelFloors
from meshwright.planner.weights import weigh


@dataclass(frozen=True)
class Program:
    """What is planned, prepared once for all meshes.

    Attributes:
        capture: the program.
        clusters: fused and folded.
        floors: least compute by mesh sizes.
        kernels: likewise of kernels of the size of a micro-batch.
        options: what to search for.
        clock: seconds per phase.
        limit_bytes: memory limit per device.
        pins: what the user fixes, in the names of the program.
        recompute: what its backward computes again.
        prices: of overlap and memory that were best on the mesh looked at last, by strategy: good ones to try on the next.
    """

    capture: Capture
    clusters: ClusterGraph
    floors: Floors
    kernels: KernelFloors
    options: Options
    clock: Clock
    limit_bytes: int
    pins: Mapping[str, Any]
    recompute: Recompute
    prices: dict[str, Prices] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        capture: Capture,
        hardware: Hardware,
        options: Options,
        clock: Clock | None = None,
        recompute: Recompute | None = None,
        prices: dict[str, Prices] | None = None,
    ) -> Program:
        """Fuse and fold; ``prices``: those of the same program with other recomputation.

        Raises:
            NoRuleError: an op has no rule and ``on_missing_rule="error"``.
            Unlike: a folded program does not stand for the whole one, or the pins do not treat its blocks alike.
        """
        pins = folded_pins(options.pins, capture.graph, capture.repeats)
        if pins is None:
            raise Unlike("pins differ between repeated blocks")
        clock = clock or Clock(options.progress)
        clusters = _clusters(capture, options, clock)
        floors, limit = Floors(clusters, hardware.device), options.memory_limit(hardware)
        recompute, prices = recompute or Recompute(), {} if prices is None else prices
        return cls(
            capture,
            clusters,
            floors,
            KernelFloors(capture.graph, clusters, hardware.device),
            options,
            clock,
            limit,
            pins,
            recompute,
            prices,
        )

    def floor_bytes(self, num_devices: int) -> float:
        """Lower bound of any plan's memory: parameters and saved activations sharded over all devices."""
        graph, times = self.capture.graph, self.clusters.times
        values = [*graph.saved, *(p.value for p in graph.inputs_of("parameter"))]
        return sum(v.size_bytes * times(v.name) for v in values) / num_devices

    @cached_property
    def times(self) -> TimeSpecs:
        """Where everything lies over the axis of micro-batches.

        Raises:
            InputError: the batch cannot be cut so.
        """
        return time_specs(self.capture.graph, self.options.micro_batches)

    @cached_property
    def shared(self) -> SharedBuffers:
        """Which values travel in shared buffers."""
        return SharedBuffers.of(self.capture.graph, self.clusters.times)

    @cached_property
    def time_rows(self) -> TimeRows:
        """The same, ready to be priced."""
        graph = self.capture.graph
        whole = [i.name for i in graph.inputs_of("parameter")] if self.options.whole_gradients else []
        return TimeRows(graph, self.times, self.options.micro_batches, whole)


def _clusters(capture: Capture, options: Options, clock: Clock) -> ClusterGraph:
    """Fused and folded clusters, once per program. Where a kernel would span several copies of a block, values between blocks stay apart."""
    known = _CLUSTERS(capture)
    if options.on_missing_rule not in known:
        known[options.on_missing_rule] = _made_clusters(capture, options, clock)
    return known[options.on_missing_rule]


def _none(_: Capture) -> dict[str, ClusterGraph]:
    return {}


_CLUSTERS: Known[Capture, dict[str, ClusterGraph]] = Known(_none)


def _made_clusters(capture: Capture, options: Options, clock: Clock) -> ClusterGraph:
    apart = frozenset[str]().union(*(r.apart for r in capture.repeats))
    try:
        return _clusters_apart(capture, options, clock, apart)
    except Unlike:
        return _clusters_apart(capture, options, clock, apart.union(*(r.crossing for r in capture.repeats)))


def _clusters_apart(capture: Capture, options: Options, clock: Clock, apart: frozenset[str]) -> ClusterGraph:
    with clock.phase("fuse"):
        clusters = fuse.fuse(capture.graph, rules.rows_for, apart)
    if options.on_missing_rule == "error":
        _require_rules(clusters)
    with clock.phase("fold"):
        return weigh(blocks.fold(clusters), capture.repeats)


def _require_rules(clusters: ClusterGraph) -> None:
    """Raise NoRuleError if an op has no rule."""
    missing = {op.target: op for c in clusters.clusters for op in c.ops if op.target in c.fallback}
    if missing:
        listed = "; ".join(f"{target} ({op.source or op.name})" for target, op in missing.items())
        raise NoRuleError(
            f"no sharding rule for {listed}: add one with meshwright.rule, or use on_missing_rule='replicate' to run these ops replicated"
        )
