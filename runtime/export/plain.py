"""Frozen records as plain JSON data, and back again with every type checked.

One table per type says how a value is written and read, so that what is written is what can be read:

```
Slot("x", (2, 3), torch.float32)      <->      {"name": "x", "shape": [2, 3], "dtype": "float32"}
```

Reading trusts nothing: another type, a missing or unknown field or a number beyond 64 bits is an :class:`FormatError` that says
where.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from meshwright.planner.ir.errors import FormatError, InputError
from meshwright.planner.ir.spec import Placement, format_placements, parse_placements

MAX_INT = (1 << 63) - 1
_SCALARS = (bool, int, float, str)
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_T = TypeVar("_T")


class Opaque:
    """Stands for an object that cannot be written: it has the ``repr`` that calls are compared by, and nothing else."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Hook:
    """How a type that is no record is written and read.

    Attributes:
        write: from a value to JSON data.
        read: from JSON data and where it stands to a value.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


Hooks = Mapping[Any, Hook]


def fail(where: str, found: Any, needed: str) -> NoReturn:
    """Raise for what stands at ``where``."""
    text = repr(found)
    raise FormatError(f"{where}: found {text if len(text) <= 80 else text[:80] + '...'}, needed {needed}: export again")


# --- writing ------------------------------------------------------------------------------------------------------


def to_plain(kind: Any, value: Any, hooks: Hooks | None = None) -> Any:
    """``value``, an instance of the annotated type ``kind``, as JSON data.

    Raises:
        InputError: it holds something that cannot be written.
    """
    hooks = hooks or {}
    origin, parts = get_origin(kind), get_args(kind)
    if kind in hooks:
        return hooks[kind].write(value)
    if origin in (Union, types.UnionType):
        return None if value is None else to_plain(_but_none(parts), value, hooks)
    if origin is tuple and parts[0] is Placement:
        return format_placements(value)
    if origin is tuple:
        each = [parts[0]] * len(value) if parts[-1] is ... else parts
        return [to_plain(k, v, hooks) for k, v in zip(each, value, strict=True)]
    if origin is not None and issubclass(origin, Mapping):
        return {str(k): to_plain(parts[1], v, hooks) for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return {name: to_plain(k, getattr(value, name), hooks) for name, k in _fields_of(kind).items()}  # type: ignore[arg-type]
    if kind is torch.dtype:
        return str(value).removeprefix("torch.")
    return _leaf(value) if kind is Any else value


def _leaf(value: Any) -> Any:
    """Anything: what is no plain value or collection keeps its ``repr`` alone."""
    if value is None or (type(value) in _SCALARS and json.dumps(value) not in ("NaN", "Infinity", "-Infinity")):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_leaf(v) for v in value]}
    if type(value) is dict and all(type(k) is str for k in value):
        return {"dict": {k: _leaf(v) for k, v in value.items()}}
    return {"repr": repr(value)}


@cache
def _fields_of(kind: type) -> dict[str, Any]:
    """The fields of a record and their types."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _but_none(parts: tuple[Any, ...]) -> Any:
    (kind,) = (p for p in parts if p is not type(None))
    return kind


# --- reading ------------------------------------------------------------------------------------------------------


def from_plain(kind: type[_T] | Any, data: Any, where: str, hooks: Hooks | None = None) -> Any:
    """The inverse of :func:`to_plain`.

    Args:
        kind: the annotated type to read.
        data: JSON data.
        where: file and place, for the message.
        hooks: for types that are no records.

    Raises:
        FormatError: ``data`` is not what :func:`to_plain` writes.
    """
    hooks = hooks or {}
    origin, parts = get_origin(kind), get_args(kind)
    if kind in hooks:
        return hooks[kind].read(data, where)
    if origin in (Union, types.UnionType):
        return None if data is None else from_plain(_but_none(parts), data, where, hooks)
    if origin is tuple:
        return _tuple(parts, data, where, hooks)
    if origin is not None and issubclass(origin, Mapping):
        _check(type(data) is dict, where, data, "an object")
        return {_key(parts[0], k, where): from_plain(parts[1], v, f"{where}.{k}", hooks) for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _record(kind, data, where, hooks)
    if kind is torch.dtype:
        _check(type(data) is str and data in _DTYPES, where, data, "the name of an element type")
        return _DTYPES[data]
    return _scalar(kind, data, where)


def _record(kind: Any, data: Any, where: str, hooks: Hooks) -> Any:
    _check(type(data) is dict, where, data, "an object")
    wanted = _fields_of(kind)
    if set(data) != set(wanted):
        odd = sorted({str(k) for k in set(data) ^ set(wanted)})
        fail(where, ", ".join(odd), f"exactly the fields {', '.join(wanted)}")
    values = {name: from_plain(k, data[name], f"{where}.{name}", hooks) for name, k in wanted.items()}
    try:
        return kind(**values)
    except InputError as error:
        raise FormatError(f"{where}: {error}") from None


def _tuple(parts: tuple[Any, ...], data: Any, where: str, hooks: Hooks) -> tuple[Any, ...]:
    if parts[0] is Placement:
        _check(type(data) is str, where, data, "placements as 'S(0)R'")
        try:
            return parse_placements(data)
        except ValueError:
            fail(where, data, "placements as 'S(0)R'")
    _check(type(data) is list, where, data, "a list")
    if parts[-1] is not ... and len(parts) != len(data):
        fail(where, data, f"a list of {len(parts)}")
    each = [parts[0]] * len(data) if parts[-1] is ... else parts
    return tuple(from_plain(k, v, f"{where}[{i}]", hooks) for i, (k, v) in enumerate(zip(each, data, strict=True)))


def _key(kind: Any, key: str, where: str) -> Any:
    if kind is not int:
        return key
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        fail(where, key, "a small number")
    return int(key)


def _scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return _anything(data, where)
    _check(type(data) is kind, where, data, f"a value of type {getattr(kind, '__name__', kind)}")
    if kind is int and not -MAX_INT <= data <= MAX_INT:
        fail(where, data, "a number of 64 bits")
    return data


def _anything(data: Any, where: str) -> Any:
    """The inverse of :func:`_leaf`."""
    if data is None or type(data) in _SCALARS:
        return data
    ((tag, value),) = data.items() if type(data) is dict and len(data) == 1 else (("", None),)
    if tag == "repr" and type(value) is str:
        return Opaque(value)
    if tag in ("list", "tuple") and type(value) is list:
        found = [_anything(v, where) for v in value]
        return found if tag == "list" else tuple(found)
    if tag == "dict" and type(value) is dict:
        return {k: _anything(v, where) for k, v in value.items()}
    return fail(where, data, "a plain value, or an object with 'repr', 'list', 'tuple' or 'dict'")


def _check(holds: bool, where: str, found: Any, needed: str) -> None:
    if not holds:
        fail(where, found, needed)


# --- files --------------------------------------------------------------------------------------------------------


def pretty(data: Any, width: int = 150, indent: str = "") -> str:
    """JSON text for people: what fits on a line stands on one."""
    text = json.dumps(data, allow_nan=False)
    if len(text) <= width or not isinstance(data, dict | list):
        return text
    deeper = indent + " "
    if isinstance(data, dict):
        lines = [f"{deeper}{json.dumps(k)}: {pretty(v, width, deeper)}" for k, v in data.items()]
    else:
        lines = [f"{deeper}{pretty(v, width, deeper)}" for v in data]
    first, last = "{}" if isinstance(data, dict) else "[]"
    return f"{first}\n" + ",\n".join(lines) + f"\n{indent}{last}"


def read_record(kind: type[_T], data: Any, where: str, hooks: Hooks | None = None) -> _T:
    """As :func:`from_plain`, for a whole file: however deep it is nested."""
    try:
        return from_plain(kind, data, where, hooks)
    except RecursionError:
        raise FormatError(f"{where} is nested too deep: not a file of an export") from None
