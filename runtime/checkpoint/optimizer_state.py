"""An optimizer as tensors and scalars by parameter name, and back, whichever parameters it has on this rank.

Tensors are called ``optim.<key>.<parameter>``: ``optim.exp_avg.h.0.up.weight``. Everything else is JSON: the groups' settings, each
with the names of its parameters, and per parameter what is no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.dtensor import local_of, wrap_like
from meshwright.runtime.params import StandIn

PREFIX = "optim."
OF_THE_RUN = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of how an optimizer runs, not of what it computes: they stay those of the optimizer that is loaded into."""

Names = Mapping[int, str]
"""``id`` of a parameter to its name."""


def parameters_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name.

    Raises:
        InputError: one is not of the module.
    """
    found = {}
    for group in optimizer.param_groups:
        for p in _named(group):
            if id(p) not in names:
                raise InputError(
                    f"the optimizer has a parameter of shape {list(p.shape)} that is not the module's: make it from pm.parameters()"
                )
            found[names[id(p)]] = p
    return found


def _named(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group but for the stand-in of a rank that has none."""
    return [p for p in group["params"] if not isinstance(p, StandIn)]


def tensors_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The tensors of its state by full name."""
    return {
        f"{PREFIX}{key}.{name}": value
        for name, p in parameters_of(optimizer, names).items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }


def scalars_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Groups, and what is no tensor in its state; JSON.

    ``plain`` lists the keys of tensors that every rank has whole although they are no bigger or smaller than others: those that are
    no DTensors, such as ``step``.

    Raises:
        InputError: something that JSON cannot hold.
    """
    groups = [
        {
            "params": [names[id(p)] for p in _named(group)],
            "settings": {key: encoded(v, f"setting {key!r} of the optimizer") for key, v in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    state: dict[str, dict[str, Any]] = {}
    plain: set[str] = set()
    for name, p in parameters_of(optimizer, names).items():
        values = optimizer.state.get(p, {})
        plain.update(k for k, v in values.items() if isinstance(v, torch.Tensor) and not isinstance(v, DTensor))
        others = {k: encoded(v, f"state {k!r} of {name}") for k, v in values.items() if not isinstance(v, torch.Tensor)}
        if others:
            state[name] = others
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state, "plain": sorted(plain)}


def merged(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """One record from those of all ranks, each of which knows its own parameters.

    Raises:
        InputError: ranks' optimizers are of different kinds or settings.
    """
    first = parts[0]
    if first is None:
        return None
    groups = [{"params": list(g["params"]), "settings": g["settings"]} for g in first["groups"]]
    for rank, part in enumerate(parts):
        same = part is not None and part["kind"] == first["kind"] and len(part["groups"]) == len(groups)
        if not same or any(a["settings"] != b["settings"] for a, b in zip(part["groups"], groups, strict=True)):  # type: ignore[index]
            raise InputError(f"the optimizer of rank {rank} has other groups or settings than that of the first rank")
        assert part is not None
        for mine, whole in zip(part["groups"], groups, strict=True):
            whole["params"] = list(dict.fromkeys([*whole["params"], *mine["params"]]))
    known = [p for p in parts if p is not None]
    state = {name: values for part in known for name, values in part["state"].items()}
    return {**first, "groups": groups, "state": state, "plain": sorted({k for part in known for k in part["plain"]})}


# --- JSON ---------------------------------------------------------------------------------------------------------


def encoded(value: Any, what: str) -> Any:
    """A setting as JSON: numbers, texts, None, lists, tables; tuples and 0-dim tensors are marked.

    Raises:
        InputError: anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, tuple):
        return {"tuple": [encoded(v, what) for v in value]}
    if isinstance(value, list):
        return [encoded(v, what) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value) and not {"tensor", "tuple"} & set(value):
        return {k: encoded(v, what) for k, v in value.items()}
    raise InputError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: numbers, texts, lists and 0-dim tensors can"
    )


def decoded(value: Any) -> Any:
    """The inverse of :func:`encoded`.

    Raises:
        FormatError: nothing that it makes.
    """
    try:
        return _decoded(value)
    except (RecursionError, RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise FormatError(f"a checkpoint's state has a malformed value: {type(error).__name__}: {str(value)[:80]}") from None


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(_decoded, value["tuple"]))
    if "tensor" in value:
        dtype, number = getattr(torch, str(value["tensor"]), None), value.get("value")
        if not isinstance(dtype, torch.dtype) or not isinstance(number, bool | int | float):
            raise TypeError
        return torch.tensor(number, dtype=dtype)
    return {k: _decoded(v) for k, v in value.items()}


# --- back ---------------------------------------------------------------------------------------------------------


class Restoring:
    """What an optimizer becomes: made first, filled from the checkpoint, then given to the optimizer.

    Args:
        optimizer: where to.
        names: names of the module's parameters.
        saved: the record that :func:`merged` made.
        tensors: shapes and dtypes of the checkpoint's optimizer tensors, by full name.

    Raises:
        InputError: another kind of optimizer, or parameters that the checkpoint's had not.
        FormatError: the record is malformed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        saved: Any,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ):
        self.optimizer, self._saved = optimizer, _checked(saved)
        if self._saved["kind"] != type(optimizer).__name__:
            raise InputError(f"the checkpoint is of {self._saved['kind']}, and this optimizer is {type(optimizer).__name__}")
        self._group_of = {name: i for i, g in enumerate(self._saved["groups"]) for name in g["params"]}
        self._parameters = parameters_of(optimizer, names)
        missing = [name for name in self._parameters if name not in self._group_of]
        if missing:
            raise InputError(f"the checkpoint's optimizer did not train {missing[0]!r} and {len(missing) - 1} others of this one")
        keys: dict[str, list[str]] = {name: [] for name in self._parameters}
        for full in tensors:
            key, _, name = full.removeprefix(PREFIX).partition(".")
            keys.get(name, []).append(key)
        self.state = {
            name: {key: self._made(p, name, key, *tensors[f"{PREFIX}{key}.{name}"]) for key in keys[name]}
            for name, p in self._parameters.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is to be filled, by full name."""
        return {f"{PREFIX}{key}.{name}": t for name, values in self.state.items() for key, t in values.items()}

    def _made(self, p: torch.Tensor, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor like the saved one, placed as this optimizer needs it; the one that is there, where it fits."""
        there = self.optimizer.state.get(p, {}).get(key)
        if isinstance(there, torch.Tensor) and tuple(there.shape) == shape and there.dtype == dtype:
            return there
        if isinstance(p, DTensor) and shape == tuple(p.shape) and (shape or key not in self._saved["plain"]):
            local = local_of(p)
            return wrap_like(torch.empty_like(local, dtype=dtype), p)
        group = next(g for g in self.optimizer.param_groups if any(q is p for q in g["params"]))
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        plain = torch.empty(shape, dtype=dtype, device=local_of(p).device if isinstance(p, DTensor) and on_device else "cpu")
        if key in self._saved["plain"] or not isinstance(p, DTensor):
            return plain
        return DTensor.from_local(plain, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)

    def finish(self) -> None:
        """Give the optimizer its state and its groups' settings."""
        for name, p in self._parameters.items():
            others = {k: decoded(v) for k, v in self._saved["state"].get(name, {}).items()}
            values = {**self.state[name], **others}
            if values:
                self.optimizer.state[p] = values
            else:
                self.optimizer.state.pop(p, None)
        by_tensor = {id(p): name for name, p in self._parameters.items()}
        for group in self.optimizer.param_groups:
            for name in (by_tensor[id(p)] for p in _named(group)):
                settings = self._saved["groups"][self._group_of[name]]["settings"]
                group.update({k: decoded(v) for k, v in settings.items() if k not in OF_THE_RUN and k != "params"})
                break

    def check_groups(self) -> None:
        """Refuse groups that mix parameters of several saved groups with different settings."""
        by_tensor = {id(p): name for name, p in self._parameters.items()}
        for group in self.optimizer.param_groups:
            settings = [self._saved["groups"][i]["settings"] for i in {self._group_of[by_tensor[id(p)]] for p in _named(group)}]
            if settings and any(s != settings[0] for s in settings):
                raise InputError(
                    "a group of the optimizer holds parameters of several groups of the checkpoint: make the same groups"
                )


def _checked(saved: Any) -> dict[str, Any]:
    fine = (
        isinstance(saved, dict)
        and isinstance(saved.get("kind"), str)
        and isinstance(saved.get("groups"), list)
        and isinstance(saved.get("state"), dict)
        and all(isinstance(v, dict) for v in saved["state"].values())
        and isinstance(saved.get("plain"), list)
        and all(_is_group(g) for g in saved["groups"])
    )
    if not fine:
        raise FormatError("the checkpoint's record of the optimizer is malformed")
    return saved


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(n, str) for n in group["params"])
        and isinstance(group.get("settings"), dict)
    )
