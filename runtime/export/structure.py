"""The form of a model's output without its classes: tuples, lists, dictionaries, and records with named fields.

``CausalLMOutput(loss=..., logits=...)`` comes back as an :class:`OutputRecord` of the same name: ``out.loss``, ``out["loss"]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.runtime.export.plain import fail


@dataclass(frozen=True)
class Structure:
    """A node of an output's structure.

    Attributes:
        kind: ``"leaf"``, ``"tuple"``, ``"list"``, ``"dict"`` or ``"record"``.
        name: class name of a record; ``""`` otherwise.
        keys: of a dictionary, or fields of a record; empty otherwise.
        children: in order.
    """

    kind: str
    name: str
    keys: tuple[str, ...]
    children: tuple[Structure, ...]


_LEAF = Structure("leaf", "", (), ())


class OutputRecord(dict[str, Any]):
    """An output with named fields, of a class that is not there: fields are items and attributes."""

    name: str

    def __init__(self, name: str, fields: Any):
        super().__init__(fields)
        self.__dict__["name"] = name

    def __getattr__(self, field: str) -> Any:
        if field not in self:
            raise AttributeError(f"{self.__dict__['name']} has no field {field!r}; it has {', '.join(self)}")
        return self[field]

    def __repr__(self) -> str:
        return f"{self.__dict__['name']}({', '.join(f'{k}={v!r}' for k, v in self.items())})"


pytree.register_pytree_node(
    OutputRecord,
    lambda record: (list(record.values()), (record.__dict__["name"], tuple(record))),
    lambda values, context: OutputRecord(context[0], zip(context[1], values, strict=True)),
    serialized_type_name="meshwright.OutputRecord",
)


# --- writing ------------------------------------------------------------------------------------------------------


def structure_of(spec: Any) -> Structure:
    """The structure of a tree spec, or the structure itself.

    Raises:
        InputError: keys of a dictionary are no texts.
    """
    if isinstance(spec, Structure):
        return spec
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))[0]
    return _node(spec, [path for path, _ in paths], 0)


def _node(spec: Any, paths: Sequence[tuple[Any, ...]], depth: int) -> Structure:
    """The node of ``spec``, whose leaves have ``paths``, of which ``depth`` keys lead here."""
    if spec.is_leaf():
        return _LEAF
    children, keys, at = [], [], 0
    for child in spec.children():
        if child.num_leaves:
            keys.append(_key(paths[at][depth]))
        else:
            keys.append(str(len(keys)))
        children.append(_node(child, paths[at : at + child.num_leaves], depth + 1))
        at += child.num_leaves
    kind = {tuple: "tuple", list: "list", dict: "dict"}.get(spec.type, "record")
    if kind in ("tuple", "list"):
        return Structure(kind, "", (), tuple(children))
    return Structure(kind, spec.type.__name__ if kind == "record" else "", tuple(keys), tuple(children))


def _key(key: Any) -> str:
    found = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
    if not isinstance(found, str | int):
        raise InputError(f"the model's output has the key {found!r} of type {type(found).__name__}: use texts")
    return str(found)


# --- reading ------------------------------------------------------------------------------------------------------


def count_leaves(structure: Structure, where: str) -> int:
    """How many leaves it has, checked.

    Raises:
        FormatError: a node is of no kind, or its keys are not those of its children.
    """
    named = structure.kind in ("dict", "record")
    if structure.kind == "leaf":
        if structure.children or structure.keys:
            fail(where, structure.kind, "a leaf without children")
        return 1
    if structure.kind not in ("tuple", "list", "dict", "record"):
        fail(where, structure.kind, "leaf, tuple, list, dict or record")
    if named and (len(structure.keys) != len(structure.children) or len(set(structure.keys)) != len(structure.keys)):
        raise FormatError(f"{where}: an output has {len(structure.keys)} keys and {len(structure.children)} values: export again")
    return sum(count_leaves(c, where) for c in structure.children)


def restored(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The output of the leaves."""
    return _restored(structure, iter(leaves))


def _restored(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    values = [_restored(c, leaves) for c in structure.children]
    if structure.kind == "tuple":
        return tuple(values)
    if structure.kind == "list":
        return values
    items = zip(structure.keys, values, strict=True)
    return dict(items) if structure.kind == "dict" else OutputRecord(structure.name, items)
