"""Which strategy to use: every named one planned for the user's own model and cluster, the best first, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from meshwright.calculator import Layer, largest_layer
from meshwright.debug import Progress
from meshwright.inputs import call_of, model_of
from meshwright.planner import search
from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.mesh import Cluster
from meshwright.planner.ir.plan import Plan
from meshwright.planner.repeat import Folded
from meshwright.planner.solve.memory import OPTIMIZER_BYTES
from meshwright.planner.solve.strategies import IN_STAGES
from meshwright.planning import capture_call, model_name, plan_capture
from meshwright.report.units import format_bytes, format_seconds
from meshwright.request import Request
from meshwright.target import target_of

SIMPLEST = (
    "ddp",
    "data_parallel",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "tp",
    "tp-sp",
    "tp+sp",
    "zero1+tp",
    "pipeline",
    "model_parallel",
    "ddp+pipeline",
    "3d",
    "auto",
)
"""Strategies, those that ask the least of the user and of the network first: they win ties."""

TIE = 0.02
"""Step times closer than this part count as equal."""

_MERITS = {
    "ddp": "every device keeps the whole model and only gradients travel",
    "data_parallel": "one device hands out parameters and batch for every call",
    "zero1": "the optimizer's state is sharded and the parameters are whole while they are used",
    "zero2": "gradients and the optimizer's state are sharded and the parameters are whole while they are used",
    "zero3": "all state is sharded and parameters are gathered for each use",
    "hsdp": "state is sharded inside each node and replicated across nodes",
    "tp": "layers themselves are cut over the devices of a node, and nothing of them is ever gathered",
    "tp+sp": "as tp, with activations sharded along the sequence where layers are not cut",
    "tp-sp": "as tp, with activations whole where layers are not cut",
    "zero1+tp": "layers are cut over the devices of a node, and copies with sharded optimizer state divide the batch",
    "pipeline": "each device keeps only its stage, and only activations between stages travel",
    "model_parallel": "each device keeps only its stage, one at work at a time",
    "ddp+pipeline": "stages divide the model, and copies of each divide the batch",
    "3d": "tensor parallelism divides layers, stages divide the model, and copies with sharded state divide the batch",
    "auto": "each parameter and each operation is laid out on its own",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy on the user's cluster.

    Attributes:
        strategy: its name.
        fits: whether it fits the memory limit.
        step_time_s: predicted; None where it does not fit.
        memory_bytes: per device at the peak; where it does not fit, the least that it needs. None where it cannot be used at all.
        communication_bytes: what one device sends or receives per step, by the larger side of each collective; None likewise.
        mesh: sizes of the logical mesh that suits it best; empty where there is none.
        reason: one sentence.
    """

    strategy: str
    fits: bool
    step_time_s: float | None
    memory_bytes: int | None
    communication_bytes: int | None
    mesh: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What :func:`advise` found.

    Attributes:
        model: class name; ``cluster`` what it was planned for.
        limit_bytes: memory that a plan may use per device.
        options: every strategy, the best first, those that do not fit last.
        largest: the largest layer, and ``largest_fits`` whether one device can hold it with its gradients and optimizer state.
        fits_one: whether the whole model trains on one device with this batch divided over the cluster.
        verdict: what to use, and why, in sentences.
    """

    model: str
    cluster: str
    limit_bytes: int
    options: tuple[Option, ...]
    largest: Layer
    largest_fits: bool
    fits_one: bool
    verdict: str

    @property
    def best(self) -> Option | None:
        """The strategy to use: the first that fits, among those that people know by name; None where none fits."""
        named = [o for o in self.options if o.fits and o.strategy != "auto"]
        return named[0] if named else next((o for o in self.options if o.fits), None)

    def report(self, *, width: int | None = None) -> str:
        """Text tables for people."""
        from meshwright.report.advice import report

        return report(self, width=width)

    def to_json_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data."""
        return {**asdict(self), "best": None if self.best is None else self.best.strategy}


def advise(
    model: nn.Module | Callable[[], nn.Module],
    cluster: Cluster | str,
    example_inputs: Any,
    *,
    optimizer: str = "adamw",
    precision: str | None = None,
    memory_limit: int | str | None = None,
    recompute: str | None = None,
    strategies: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Plan every named strategy and say which to use.

    Args:
        model: the module, or a callable that makes it on the meta device.
        cluster: ``"8x8xH100"``, or ``"4x8xA100-80@25Gbit"`` with the network's rate per node.
        example_inputs: the *global* batch, as ``plan`` takes it.
        optimizer, precision, memory_limit, recompute: as ``plan`` takes them.
        strategies: names of strategies; None: all.
        progress: called with the name of each phase as it begins.

    Raises:
        InputError: an argument that cannot be used.
        TraceError: the model cannot be captured.
    """
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    module = model_of(model)
    request = Request(
        optimizer=optimizer, precision=precision, memory_limit=memory_limit, recompute=recompute, alternatives=False
    )
    names = _known() if strategies is None else tuple(strategies)
    for name in names:
        replace(request, strategy=name)
    with collector.paused():
        captured, _ = capture_call(module, call_of(example_inputs), request, True, progress)
        planner = _Planner(captured, where, request, model_name(module), progress)
        tried = {name: planner.attempt(name) for name in names}
    return _advice(module, where, request, tried)


def _known() -> tuple[str, ...]:
    found = dict.fromkeys((*(s.name for s in search.STRATEGIES.values()), *IN_STAGES))
    return tuple(sorted(found, key=_rank))


def _rank(strategy: str) -> int:
    return SIMPLEST.index(strategy) if strategy in SIMPLEST else len(SIMPLEST)


Tried = Plan | InfeasibleError | InputError


@dataclass(frozen=True)
class _Planner:
    captured: Folded
    where: Cluster
    request: Request
    model: str
    progress: Progress | None

    def attempt(self, strategy: str) -> Tried:
        """A strategy's plan, or why there is none."""
        if self.progress is not None:
            self.progress(strategy)
        try:
            return plan_capture(self.captured, target_of(self.where), replace(self.request, strategy=strategy), self.model, {})
        except (InfeasibleError, InputError) as e:
            return e


# --- from plans to sentences --------------------------------------------------------------------------------------


def _advice(module: nn.Module, where: Cluster, request: Request, tried: Mapping[str, Tried]) -> Advice:
    topology = target_of(where).topology
    limit = request.options("", None).memory_limit(topology.hardware(where.mesh))
    plans = {name: found for name, found in tried.items() if isinstance(found, Plan)}
    fastest_s = min((p.predicted.step_time_s for p in plans.values()), default=0.0)
    options = [_option(name, found, limit, fastest_s) for name, found in tried.items()]
    options.sort(key=lambda o: (not o.fits, *_order(o, fastest_s)))
    largest = largest_layer(module)
    per_parameter = 4 + 4 + OPTIMIZER_BYTES.get(request.optimizer, 0)
    advice = Advice(
        model_name(module),
        str(where),
        limit,
        tuple(options),
        largest,
        largest.numel * per_parameter <= limit,
        "ddp" in plans,
        "",
    )
    return replace(advice, verdict=_verdict(advice, where))


def _order(option: Option, fastest_s: float) -> tuple[float, int]:
    """Faster first; what is as fast within a tie, simpler first; what does not fit, the least over first."""
    if option.step_time_s is None:
        return (float(option.memory_bytes or 1 << 62), _rank(option.strategy))
    steps = int((option.step_time_s / fastest_s - 1) / TIE) if fastest_s else 0
    return (float(steps), _rank(option.strategy))


def _option(name: str, found: Tried, limit: int, fastest_s: float) -> Option:
    if isinstance(found, InputError):
        return Option(name, False, None, None, None, (), f"cannot be used: {found}")
    if isinstance(found, InfeasibleError):
        return Option(name, False, None, found.needed_bytes, None, (), _too_much(found, limit))
    predicted = found.predicted
    moved = predicted.moved_bytes or sum(c.count * c.bytes for c in found.collectives)
    return Option(name, True, predicted.step_time_s, predicted.peak_memory_bytes, moved, found.mesh.sizes, _why(found, fastest_s))


def _too_much(error: InfeasibleError, limit: int) -> str:
    if error.needed_bytes is None:
        return f"contradicts itself: {error}"
    over = error.needed_bytes - limit
    return (
        f"does not fit: it needs at least {format_bytes(error.needed_bytes)} per device, {format_bytes(over)} more than there is"
    )


def _why(plan: Plan, fastest_s: float) -> str:
    p = plan.predicted
    waiting = p.step_time_s - p.compute_s
    parts = f"{format_seconds(p.compute_s)} of kernels and {format_seconds(max(waiting, 0.0))} beside them"
    kinds: dict[str, float] = {}
    for c in plan.collectives:
        kinds[f"{c.kind} over {plan.links[c.axis]}"] = kinds.get(f"{c.kind} over {plan.links[c.axis]}", 0.0) + c.count * c.time_s
    busiest = max(kinds, key=kinds.__getitem__) if kinds else ""
    told = f", most communication {busiest} ({format_seconds(kinds[busiest])})" if busiest else ""
    if not busiest:
        told = f", {format_bytes(p.moved_bytes)} moved by the busiest device" if p.moved_bytes else ", no communication"
    if p.step_time_s <= (1 + TIE) * fastest_s:
        return f"as fast as any: {parts}{told}"
    return f"{p.step_time_s / fastest_s - 1:.0%} slower than the fastest: {parts}{told}"


def _verdict(advice: Advice, where: Cluster) -> str:
    """What to use, said for the user's own situation."""
    nodes = "one node" if where.nodes == 1 else f"{where.nodes} nodes of {where.devices_per_node}"
    held = "fits" if advice.fits_one else "does not fit"
    told = [f"{nodes}; a whole copy of the model, its gradients and optimizer state {held} one device"]
    if not advice.largest_fits:
        told.append(f"not even the largest layer ({advice.largest.name}) does, with its gradients and optimizer state")
    best = advice.best
    if best is None:
        nearest = min((o for o in advice.options if o.memory_bytes), key=lambda o: o.memory_bytes or 0, default=None)
        told.append("no strategy fits this cluster" + (f"; the nearest, {nearest.strategy}, {nearest.reason}" if nearest else ""))
        return ". ".join(map(_sentence, told)) + "."
    told.append(f"use {best.strategy}: {_MERITS.get(best.strategy, 'it is the fastest that fits')}")
    if best.strategy == "ddp":
        told.append("data parallelism is all that this model needs: nothing else is faster")
    auto = next((o for o in advice.options if o.strategy == "auto" and o.fits), None)
    if auto is not None and best is not auto and best.step_time_s and auto.step_time_s:
        gain = best.step_time_s / auto.step_time_s - 1
        if gain > TIE:
            told.append(f"strategy 'auto' mixes strategies and is {gain:.0%} faster still")
    return ". ".join(map(_sentence, told)) + "."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
