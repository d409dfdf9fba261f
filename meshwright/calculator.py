"""What a model needs in memory: weights by type, training and inference on one device, and how many devices fit it.

Nothing is guessed from parameter counts: the call is captured, and each number is that of a plan. Needs no weights and no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from meshwright.adapters import with_low_rank
from meshwright.inputs import call_of, model_of
from meshwright.planner.cost import device_for
from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import InfeasibleError, InputError
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.recompute import LEVELS
from meshwright.planner.repeat import Folded
from meshwright.planner.solve.memory import usable_bytes
from meshwright.planning import capture_call, model_name, plan_capture
from meshwright.request import Request
from meshwright.target import target_of

WEIGHT_BITS: Mapping[str, int] = {"float32": 32, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
"""Bits of one weight by type; quantised types without their scales."""

PER_NODE = 8
"""Devices of one node, where more than one node is needed."""

MOST_DEVICES = 1 << 14
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Layer:
    """The submodule with the most parameters of its own: the smallest piece that per-use gathering must hold whole.

    Attributes:
        name: its path.
        kind: its class name.
        numel: elements of its parameters, and ``bytes`` in their own types.
    """

    name: str
    kind: str
    numel: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Use:
    """Memory of one device that does all of it, in bytes.

    Attributes:
        mode: ``"training"`` or ``"inference"``.
        recompute: level of recomputation, for training.
        memory_bytes: by category, at the peak.
    """

    mode: str
    recompute: str
    memory_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True)
class Fit:
    """The fewest devices of one kind on which a strategy fits.

    Attributes:
        device: kind of device, ``strategy`` the named strategy.
        devices: how many, a power of two; None where no number was found.
        memory_bytes: per device, with that many.
        recompute: level of recomputation that the plan takes.
        reason: why there is none, or ``""``.
    """

    device: str
    strategy: str
    devices: int | None
    memory_bytes: int | None = None
    recompute: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """What :func:`memory` found.

    Attributes:
        model: class name.
        parameters: elements of all parameters, tied ones once; ``trainable`` those that get a gradient.
        weight_bytes: bytes of all weights by type.
        largest: the largest layer.
        uses: one device doing all of it, per mode and level of recomputation.
        fits: the fewest devices per kind and strategy.
        cache_bytes: keys and values of the whole batch, for a decoder that generates; None for other models.
        assumed: what was assumed, in sentences.
    """

    model: str
    parameters: int
    trainable: int
    weight_bytes: Mapping[str, int]
    largest: Layer
    uses: tuple[Use, ...]
    fits: tuple[Fit, ...]
    cache_bytes: int | None
    assumed: tuple[str, ...]

    def report(self, *, width: int | None = None) -> str:
        """Text tables for people."""
        from meshwright.report.memory import report

        return report(self, width=width)

    def to_json_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data."""
        uses = [{**asdict(u), "memory_bytes": dict(u.memory_bytes), "total_bytes": u.total_bytes} for u in self.uses]
        return {**asdict(self), "weight_bytes": dict(self.weight_bytes), "uses": uses}


def memory(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    optimizer: str = "adamw",
    precision: str | None = None,
    recompute: str | None = None,
    low_rank: int | None = None,
    training: bool = True,
    devices: Sequence[str] = ("H100",),
    strategies: Sequence[str] = ("ddp", "zero3", "tp", "auto"),
) -> Memory:
    """Count what a model needs.

    Args:
        model: the module, or a callable that makes it on the meta device. Parameters that do not require a gradient are frozen.
        example_inputs: the *global* batch, as ``plan`` takes it.
        optimizer: whose state is counted.
        precision: None (as the model is), or ``"bf16-mixed"``.
        recompute: level of recomputation; None: all levels, and for ``fits`` the fastest that fits.
        low_rank: train only low-rank adapters of this rank beside every linear layer; the model itself is frozen.
        training: whether training is counted too, not inference alone.
        devices: kinds of devices to fit it on; none: no ``fits``.
        strategies: strategies to fit it with.

    Raises:
        InputError: an argument that cannot be used.
        TraceError: the model cannot be captured.
    """
    if recompute not in (None, *LEVELS):
        raise InputError(f"recompute={recompute!r} is not known; known are None, {', '.join(map(repr, LEVELS))}")
    module, call = model_of(model), call_of(example_inputs)
    if low_rank is not None:
        module = with_low_rank(module, low_rank)
    request = Request(optimizer=optimizer, precision=precision, recompute=recompute, alternatives=False)
    counted = _Count(module, call, request)
    with collector.paused():
        captured = counted.captured(training)
        uses = [*(counted.use(captured, "training", level) for level in _levels(recompute) if training)]
        infers = counted.captured(False) if training else captured
        uses.append(counted.use(infers, "inference", LEVELS[0]))
        fits = tuple(counted.fit(captured, d, s) for d in devices for s in strategies)
    own = list(module.parameters())
    return Memory(
        model_name(module),
        sum(p.numel() for p in own),
        sum(p.numel() for p in own if p.requires_grad),
        {name: sum(p.numel() for p in own) * bits // 8 for name, bits in WEIGHT_BITS.items()},
        largest_layer(module),
        tuple(uses),
        fits,
        cache_bytes(module, call, precision),
        counted.assumed(training),
    )


def _levels(recompute: str | None) -> tuple[str, ...]:
    return LEVELS if recompute is None else (recompute,)


def largest_layer(model: nn.Module) -> Layer:
    """The submodule with the most parameters of its own (not its children's)."""
    found = [
        Layer(name, type(module).__name__, sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own))
        for name, module in model.named_modules()
        if (own := list(module.parameters(recurse=False)))
    ]
    if not found:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to count")
    return max(found, key=lambda layer: layer.bytes)


def cache_bytes(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], precision: str | None) -> int | None:
    """Bytes of the keys and values that a Hugging Face decoder keeps for a batch of whole sequences.

    Two tensors ``[batch, kv_heads, seq, head_dim]`` per layer. None for models whose config does not say these sizes.
    """
    config, ids = getattr(model, "config", None), call[1].get("input_ids")
    layers, heads = (getattr(config, n, None) for n in ("num_hidden_layers", "num_attention_heads"))
    if config is None or ids is None or not layers or not heads or getattr(config, "is_encoder_decoder", False):
        return None
    if not hasattr(config, "use_cache"):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = 2 if precision == "bf16-mixed" else next(model.parameters()).element_size()
    return 2 * layers * ids.numel() * kv_heads * width * size


class _Count:
    """One model, one call, planned again and again."""

    def __init__(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], request: Request):
        self.model, self.call, self.request = model, call, request

    def captured(self, training: bool) -> Folded:
        """The call in training or in evaluation mode; the model's own modes are left as they are."""
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            self.model.train(training)
            return capture_call(self.model, self.call, self.request, training)[0]
        finally:
            for module, mode in modes:
                module.training = mode

    def plan(self, captured: Folded, where: str, **options: Any) -> Plan:
        request = replace(self.request, **options)
        return plan_capture(captured, target_of(where), request, model_name(self.model), {})

    def use(self, captured: Folded, mode: str, level: str) -> Use:
        """All of it on one device."""
        plan = self.plan(captured, "1x1xH100", recompute=level, memory_limit=_NO_LIMIT)
        return Use(mode, level, dict(plan.predicted.memory_bytes))

    def fit(self, captured: Folded, device: str, strategy: str) -> Fit:
        """The fewest devices: numbers are doubled, and skipped where even a perfect division would not fit."""
        n, reason = 1, ""
        while n <= MOST_DEVICES:
            where = f"{max(1, n // PER_NODE)}x{min(n, PER_NODE)}x{device}"
            limit = usable_bytes(device_for(device))
            try:
                plan = self.plan(captured, where, strategy=strategy)
                return Fit(device, strategy, n, plan.predicted.peak_memory_bytes, str(plan.recompute))
            except InputError as e:
                return Fit(device, strategy, None, reason=reason or str(e))
            except InfeasibleError as e:
                if e.needed_bytes is None:
                    return Fit(device, strategy, None, reason=str(e))
                reason = f"still too much on {n}: {e}"
                share = e.needed_bytes / limit
            n *= 2 ** max(1, math.ceil(math.log2(share)) if share > 1 else 1)
        return Fit(device, strategy, None, reason=reason)

    def assumed(self, training: bool) -> tuple[str, ...]:
        told = [f"nodes of {PER_NODE} devices", "the batch given is the global one and stays the same on any number of devices"]
        if training:
            told.append(
                f"optimizer {self.request.optimizer}, {'mixed bf16' if self.request.precision else 'the model’s own types'}"
            )
        return tuple(told)
