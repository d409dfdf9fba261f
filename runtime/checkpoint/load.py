"""Loading: check everything, then read each rank's slices, then put back what is no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.checkpoint.catalogue import MANIFEST, MODEL, Catalogue
from meshwright.runtime.checkpoint.contents import RANDOM, Held, set_generators
from meshwright.runtime.checkpoint.folder import newest, of_step
from meshwright.runtime.checkpoint.optimizer_state import PREFIX, Restoring, decoded
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.plain import whole
from meshwright.runtime.checkpoint.together import Group
from meshwright.runtime.state import some


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: from where; None where there was nothing and that was allowed.
        step: its step; None for plain safetensors.
        extra: what was saved with it.
        missing: names of the model that it does not have, and which were left as they are.
        unexpected: names that it has and the model does not.
        cast: parameters of another dtype there.
        generators: whether torch's random generators were put back: not where it was saved by another number of ranks whose
            generators differed.
    """

    path: Path | None
    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    generators: bool = False


def find(path: Path, step: int | None, optional: bool) -> Path | None:
    """The checkpoint that is meant: ``path`` itself, or one of the run's folder ``path``.

    Raises:
        InputError: there is none.
        FormatError: ``latest`` is wrong.
    """
    if step is not None:
        return of_step(path, step)
    if path.is_file() or (path / MANIFEST).exists() or (path.is_dir() and any(path.glob("*.safetensors"))):
        return path
    found = newest(path)
    if found is None and not optional:
        raise InputError(f"{path} holds no checkpoint: neither one itself, nor step-... directories, nor safetensors files")
    return found


@dataclass(frozen=True)
class Wanted:
    """The module's tensors, with where each is in the checkpoint."""

    pieces: Mapping[str, Piece]
    missing: tuple[str, ...]
    cast: tuple[str, ...]


def wanted_of(held: Held, catalogue: Catalogue) -> Wanted:
    """Which of this rank's tensors the checkpoint has.

    A tied parameter needs only one of its names, there as here.

    Raises:
        InputError: one has another shape.
    """
    names: dict[str, list[str]] = {name: [name] for name in held.tensors}
    for alias, first in held.aliases.items():
        names[first].append(alias)
    pieces: dict[str, Piece] = {}
    missing, cast = [], []
    for first, all_ in names.items():
        there = [*all_, *(catalogue.aliases[n] for n in all_ if n in catalogue.aliases)]
        source = next((MODEL + n for n in there if MODEL + n in catalogue.tensors), None)
        if source is None:
            missing.append(first)
            continue
        tensor, saved = held.tensors[first], catalogue.tensors[source]
        if tuple(tensor.shape) != saved.shape:
            raise InputError(
                f"checkpoint tensor {first} has shape {list(saved.shape)}, the model needs {list(tensor.shape)}: load a checkpoint of "
                "the same model"
            )
        cast += [first] if tensor.dtype != saved.dtype else []
        if source in pieces:  # tied there and not here: read twice
            raise InputError(f"{first} and another parameter are tied in the checkpoint and not in the model: tie them")
        pieces[source] = Piece.of(tensor)
    return Wanted(pieces, tuple(missing), tuple(cast))


def unexpected_in(catalogue: Catalogue, known: Iterable[str]) -> tuple[str, ...]:
    """Names of parameters and buffers that no rank has."""
    names = {n.removeprefix(MODEL) for n in catalogue.tensors if n.startswith(MODEL)}
    return tuple(sorted(names - set(known)))


def check_names(path: Path, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        InputError: names are missing or unexpected.
    """
    if missing or unexpected:
        texts = [f"{what} {some(list(names))}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise InputError(f"{path} does not match the model: {'; '.join(texts)}; pass strict=False to load what matches")


def restoring(optimizer: torch.optim.Optimizer, held: Held, catalogue: Catalogue) -> Restoring:
    """The optimizer's state to be.

    Raises:
        InputError: the checkpoint has none, or one of another kind.
    """
    saved = catalogue.state.get("optimizer")
    if saved is None:
        raise InputError(f"{catalogue.folder} holds no optimizer: load it without optimizer=")
    shapes = {n: (t.shape, t.dtype) for n, t in catalogue.tensors.items() if n.startswith(PREFIX)}
    found = Restoring(optimizer, held.names, saved, shapes)
    found.check_groups()
    return found


def put_generators(group: Group, catalogue: Catalogue) -> bool:
    """Put torch's generators back where that has a meaning; whether it had.

    Raises:
        FormatError: a state is none.
    """
    saved: dict[str, dict[int, str]] = {}
    for name in catalogue.tensors:
        match = re.fullmatch(re.escape(RANDOM) + r"(cpu|cuda)\.([0-9]{1,9})", name)
        if match:
            saved.setdefault(match[1], {})[int(match[2])] = name
    states = {}
    for kind, names in saved.items():
        if len(names) == group.size and group.rank in names:
            states[kind] = whole(catalogue, names[group.rank])
            continue
        first, *others = (whole(catalogue, name) for name in names.values())
        if any(not torch.equal(first, other) for other in others):
            return False
        states[kind] = first
    try:
        set_generators(states)
    except (RuntimeError, TypeError) as error:
        raise FormatError(
            f"{catalogue.folder} has a malformed state of a random generator: {str(error).splitlines()[0]}"
        ) from None
    return bool(states)


def random_state(catalogue: Catalogue) -> dict[str, int] | None:
    """The state of the module's random ops.

    Raises:
        FormatError: it is malformed.
    """
    found = catalogue.state.get("random")
    if found is None:
        return None
    if not isinstance(found, dict) or any(not isinstance(found.get(k), int) for k in ("base", "count")):
        raise FormatError(f"{catalogue.folder} has a malformed random state")
    return {k: found[k] for k in ("base", "count")}


def step_of(catalogue: Catalogue) -> int | None:
    """Its step; None for plain safetensors.

    Raises:
        FormatError: it is no number.
    """
    step = catalogue.state.get("step")
    if not catalogue.is_plain and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise FormatError(f"{catalogue.folder} has no step")
    return step


def extra_of(catalogue: Catalogue) -> dict[str, Any]:
    """What the user added.

    Raises:
        FormatError: it is no table.
    """
    extra = catalogue.state.get("extra", {})
    if not isinstance(extra, dict):
        raise FormatError(f"{catalogue.folder} has malformed extras")
    return decoded(extra)
