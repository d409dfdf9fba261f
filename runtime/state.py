"""The state of a parallel module: its parameters and buffers as they are now, checked; loading and gathering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.spec import Placements, local_slice
from meshwright.runtime.checks import changed, check_parameter
from meshwright.runtime.dtensor import Layout, local_of, wrap_like
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.mesh import coordinate_of, mesh_shape, our_placements
from meshwright.runtime.params import PlacedState


class IncompatibleKeys(NamedTuple):
    """What ``load_state_dict(strict=False)`` could not match."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Tree:
    """Reads parameters, buffers and training modes off a module tree at every call, and notices what was replaced.

    Attributes:
        rests: where every parameter rests, by FQN.
    """

    def __init__(self, root: nn.Module, state: PlacedState, rests: Mapping[str, Placements]):
        self.rests = dict(rests)
        self._layouts = {name: Layout.of(p) for name, p in state.parameters.items()}
        self._first_name: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, p in state.parameters.items():
            self._first_name[name] = first.setdefault(id(p), name)
        self._modules = dict(_children(root))
        self._parameters = [(name, *_slot(root, name, "_parameters")) for name in state.parameters]
        self._buffers = [(name, *_slot(root, name, "_buffers")) for name in state.buffers]
        unloaded = {**state.parameters, **state.buffers}
        self._unloaded = {name: _versions(unloaded[name]) for name in state.unloaded}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by every FQN, as the module holds them now.

        Raises:
            RuntimeMismatchError: one was changed so that the plan no longer applies.
            InputError: one has no values yet.
        """
        found: dict[str, Any] = {}
        for name, slots, leaf in self._parameters:
            p = slots.get(leaf)
            check_parameter(name, p, self._layouts[name])
            found[name] = p
            if p is not found[self._first_name[name]]:
                raise changed(name, "is another object than", f"it tied to {self._first_name[name]}")
        if self._unloaded:
            self._check_loaded({**found, **self.buffers()})
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by every FQN, as the module holds them now."""
        return {name: slots[leaf] for name, slots, leaf in self._buffers}

    def modes(self, root: nn.Module) -> tuple[bool, ...]:
        """Training mode of every module, in the order of ``modules()``.

        Raises:
            RuntimeMismatchError: a submodule was replaced.
        """
        modes = [root.training]
        for path, module in _children(root):
            if self._modules.get(path) is not module:
                raise changed(path, "is a submodule that was replaced", "the one that was planned")
            modes.append(module.training)
        return tuple(modes)

    def spoil(self) -> None:
        """Values cannot be relied on until they are written again: a checkpoint turned out to be damaged while it was read."""
        now = {**{name: slots[leaf] for name, slots, leaf in self._parameters}, **self.buffers()}
        self._unloaded = {name: _versions(t) for name, t in now.items()}

    def _check_loaded(self, now: Mapping[str, torch.Tensor]) -> None:
        self._unloaded = {name: version for name, version in self._unloaded.items() if _versions(now[name]) == version}
        if self._unloaded:
            names = sorted(self._unloaded)
            raise InputError(
                f"{len(names)} parameters or buffers have no values, since the model was on the meta device or a damaged checkpoint was "
                f"read ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): load a checkpoint, or write them in place"
            )


def _children(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules with their first paths, as ``named_modules()`` does without the root; three times faster."""
    seen = {id(root)}
    stack = [("", root)]
    while stack:
        prefix, module = stack.pop()
        if module is not root:
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield prefix, module
        below = [(f"{prefix}.{name}" if prefix else name, m) for name, m in module._modules.items() if m is not None]
        stack.extend(reversed(below))


def _slot(root: nn.Module, name: str, kind: str) -> tuple[dict[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    return getattr(root.get_submodule(path), kind), leaf


def _versions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Version counters: they move at every write in place that goes through one tensor op."""
    return (tensor._version, local_of(tensor)._version) if isinstance(tensor, DTensor) else (tensor._version,)


# --- checkpoints --------------------------------------------------------------------------------------------------


def load_state(module: nn.Module, given: Mapping[str, Any], strict: bool) -> IncompatibleKeys:
    """Copy a checkpoint's values into a parallel module's parameters and buffers.

    A tied parameter needs only one of its names. See :meth:`ParallelModule.load_state_dict`.

    Raises:
        InputError: under ``strict`` a key is missing or unexpected; always, a tensor has another shape.
    """
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    present = {id(own[name]) for name in given if name in own}
    missing = [name for name, t in own.items() if name not in given and id(t) not in present]
    unexpected = [name for name in given if name not in own]
    if strict and (missing or unexpected):
        raise InputError(
            "the checkpoint does not match the model: "
            + "; ".join(f"{what} {some(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names)
            + "; pass strict=False to load what matches"
        )
    for name in own:
        if name in given and tuple(given[name].shape) != tuple(own[name].shape):
            raise InputError(
                f"checkpoint tensor {name} has shape {list(given[name].shape)}, the model needs {list(own[name].shape)}: "
                "load whole (unsharded) tensors of the same model"
            )
    with torch.no_grad():
        for name, target in own.items():
            if name in given:
                copy_into(target, given[name])
    return IncompatibleKeys(missing, unexpected)


def some(names: list[str], limit: int = 5) -> str:
    """The first few names, for a message."""
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(gather_whole(value) if isinstance(value, DTensor) else value)
        return
    if isinstance(value, DTensor):
        if value.placements == target.placements and value.device_mesh == target.device_mesh:
            target.copy_(value)
            return
        value = gather_whole(value)
    piece = _piece_like(target, value)
    target.copy_(wrap_like(piece.to(local_of(target).device, local_of(target).dtype), target))


def _piece_like(target: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's piece of ``whole``, placed as ``target``: DTensor's own placements read back as ours."""
    mesh, sizes = target.device_mesh, mesh_shape(target.device_mesh).sizes
    return local_slice(whole, our_placements(target.placements, sizes), sizes, coordinate_of(mesh))


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole plain tensors by name; one gather per mesh axis and parameter that is sharded."""
    return {
        name: gather_whole(value) if isinstance(value, DTensor) else value.clone() for name, value in module.state_dict().items()
    }
