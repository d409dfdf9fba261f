"""A model without its source: the names of its modules, parameters and buffers, and how it is called.

What is read is a tree of :class:`~meshwright.runtime.params.Part` on the meta device, from which a parallel module is built as from the
model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.export.plain import fail
from meshwright.runtime.params import Part

MAX_ELEMENTS = 1 << 60


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module: its path, class name and training mode; ``same_as`` is the first path of a module that occurs under several."""

    path: str
    kind: str
    training: bool
    same_as: str | None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A parameter or buffer.

    Attributes:
        name: FQN.
        shape, dtype: of the whole.
        requires_grad: of a parameter.
        persistent: of a buffer: whether it is part of the ``state_dict``.
        same_as: first name of a tensor that has several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    same_as: str | None


@dataclass(frozen=True, slots=True)
class ArgumentRecord:
    """A parameter of ``forward``: its name, kind (``"POSITIONAL_OR_KEYWORD"``) and default, where it has one."""

    name: str
    kind: str
    has_default: bool
    default: Any


@dataclass(frozen=True)
class ModelRecord:
    """A model.

    Attributes:
        name: of its class.
        modules: all but the root, parents first.
        parameters, buffers: by every name.
        training: mode of the root.
        arguments: of ``forward``.
    """

    name: str
    training: bool
    modules: tuple[ModuleRecord, ...]
    parameters: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...]
    arguments: tuple[ArgumentRecord, ...]


# --- writing ------------------------------------------------------------------------------------------------------


def model_record(module: nn.Module, name: str, signature: inspect.Signature) -> ModelRecord:
    """Describe a module, or a parallel module as this rank holds it.

    Raises:
        InputError: an argument of ``forward`` has a tensor as its default.
    """
    first_path: dict[int, str] = {}
    modules = []
    for path, part in module.named_modules(remove_duplicate=False):
        first = first_path.setdefault(id(part), path)
        kind = part.original if isinstance(part, Part) else type(part).__name__
        if path:
            modules.append(ModuleRecord(path, kind, part.training, None if first == path else first))
    return ModelRecord(
        name=name,
        training=module.training,
        modules=tuple(modules),
        parameters=_tensors(dict(module.named_parameters(remove_duplicate=False)), set()),
        buffers=_tensors(dict(module.named_buffers(remove_duplicate=False)), _not_persistent(module)),
        arguments=tuple(_argument(p) for p in signature.parameters.values()),
    )


def _tensors(named: Mapping[str, torch.Tensor], not_persistent: set[str]) -> tuple[TensorRecord, ...]:
    first: dict[int, str] = {}
    return tuple(
        TensorRecord(
            name=name,
            shape=tuple(t.shape),
            dtype=t.dtype,
            requires_grad=t.requires_grad,
            persistent=name not in not_persistent,
            same_as=None if first.setdefault(id(t), name) == name else first[id(t)],
        )
        for name, t in named.items()
    )


def _not_persistent(module: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def _argument(p: inspect.Parameter) -> ArgumentRecord:
    has_default = p.default is not inspect.Parameter.empty
    if has_default and isinstance(p.default, torch.Tensor):
        raise InputError(f"forward's argument {p.name} has a tensor as its default, which cannot be written: pass it in the call")
    return ArgumentRecord(p.name, p.kind.name, has_default, p.default if has_default else None)


def united(records: list[ModelRecord]) -> ModelRecord:
    """The whole model, of which each rank of a pipeline holds some parameters."""
    first = records[0]
    parameters: dict[str, TensorRecord] = {}
    for record in records:
        for p in record.parameters:
            known = parameters.get(p.name)
            parameters[p.name] = p if known is None or known.same_as is None else known
    return ModelRecord(first.name, first.training, first.modules, tuple(parameters.values()), first.buffers, first.arguments)


# --- reading ------------------------------------------------------------------------------------------------------


class _Forward:
    """Stands for ``forward``: it can be asked for its signature."""

    def __init__(self, signature: inspect.Signature):
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a model that was read from an export runs as a parallel module only: see load")


class Model(Part):
    """The root of a tree that was read."""

    def __init__(self, record: ModelRecord, where: str):
        super().__init__(record.name)
        self.forward = _Forward(_signature(record, where))  # type: ignore[method-assign]
        self.training = record.training
        for m in record.modules:
            parent, _, leaf = m.path.rpartition(".")
            holder = self._holder(parent, leaf, where)
            if leaf in holder._modules:
                fail(where, m.path, "each module once")
            part = self._holder(m.same_as, "", where) if m.same_as is not None else Part(m.kind)
            if part is holder or part is self:
                fail(where, m.path, "a module that does not contain itself")
            part.training = m.training
            holder._modules[leaf] = part
        self._fill(record, where)

    def _holder(self, path: str, leaf: str, where: str) -> nn.Module:
        """The module at ``path``; ``leaf`` is a name in it."""
        found: Any = self
        for name in path.split(".") if path else ():
            found = found._modules.get(name)
            if found is None:
                fail(where, path, "the path of a module that was listed before")
        if leaf and (not leaf.isprintable() or len(leaf) > 1000):
            fail(where, leaf, "a name")
        return found

    def _fill(self, record: ModelRecord, where: str) -> None:
        made: dict[str, torch.Tensor] = {}
        for kind, tensors in (("_parameters", record.parameters), ("_buffers", record.buffers)):
            for t in tensors:
                path, _, leaf = t.name.rpartition(".")
                holder = self._holder(path, leaf, where)
                if t.same_as is not None and t.same_as not in made:
                    fail(where, t.same_as, "the name of a tensor that was listed before")
                made[t.name] = made[t.same_as] if t.same_as is not None else _empty(t, kind == "_parameters", where)
                # the same tensor stands there already where its module has several names
                others = [table[leaf] for table in (holder._parameters, holder._buffers, holder._modules) if leaf in table]
                if not leaf or any(other is not made[t.name] for other in others):
                    fail(where, t.name, "each tensor once, under a name of its own")
                getattr(holder, kind)[leaf] = made[t.name]
                if not t.persistent:
                    holder._non_persistent_buffers_set.add(leaf)


def _empty(t: TensorRecord, is_parameter: bool, where: str) -> torch.Tensor:
    count = 1
    for n in t.shape:
        count *= n
    if any(n < 0 for n in t.shape) or count > MAX_ELEMENTS or len(t.shape) > 32:
        fail(where, list(t.shape), "the shape of a tensor")
    meta = torch.empty(t.shape, dtype=t.dtype, device="meta")
    try:
        return nn.Parameter(meta, t.requires_grad) if is_parameter else meta
    except RuntimeError as error:
        raise FormatError(f"{where}: {t.name} cannot be a parameter: {error}") from None


def _signature(record: ModelRecord, where: str) -> inspect.Signature:
    """How the model is called; defaults that could not be written have their ``repr`` alone."""
    found = []
    for a in record.arguments:
        kind = {k.name: k for k in _KINDS}.get(a.kind)
        if kind is None or not a.name.isidentifier():
            fail(where, a.name, "an argument's name and kind")
        default = a.default if a.has_default else inspect.Parameter.empty
        found.append(inspect.Parameter(a.name, kind, default=default))
    try:
        return inspect.Signature(found)
    except ValueError as error:
        raise FormatError(f"{where}: arguments of forward are impossible: {error}: export again") from None


_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)
