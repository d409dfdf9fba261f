"""JSON of large tables, a line for each entry.

The indentation of ``json.dumps`` is made in Python, at a tenth of the speed; here the lines are put together from what the C encoder
writes at once: a flat table, or a string or shape of which many entries say the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_ENTRIES = json.JSONEncoder(separators=(",\n  ", ": "))
"""Writes a line for each entry of a flat dictionary."""

_TOLD_APART = frozenset({int, str, bool})
"""Types of which equal values are written alike."""


def json_lines(data: Mapping[str, Any]) -> str:
    """JSON of a dictionary: a line for every entry, and for every entry of a dictionary or list in it."""
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {_table(v)}" for k, v in data.items()) + "\n}"


def _table(value: Any) -> str:
    if isinstance(value, dict) and value:
        if not any(isinstance(v, dict | list | tuple) for v in value.values()):
            return "{\n  " + _ENTRIES.encode(value)[1:-1] + "\n }"
        return "{\n" + ",\n".join([f"  {_string(k)}: {_entry(v)}" for k, v in value.items()]) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join([f"  {_entry(v)}" for v in value]) + "\n ]"
    return json.dumps(value)


def _entry(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join([f"{_string(k)}: {_field(v)}" for k, v in value.items()]) + "}"
    return _field(value)


def _field(value: Any) -> str:
    if type(value) is str:
        return _string(value)
    if type(value) is tuple and _TOLD_APART.issuperset(types := tuple(map(type, value))):
        return _several(value, types)
    return json.dumps(value)


@lru_cache(maxsize=1 << 16)
def _string(value: str) -> str:
    return json.dumps(value)


@lru_cache(maxsize=1 << 12)
def _several(values: tuple[Any, ...], types: tuple[type, ...]) -> str:
    """``types`` tells apart what is equal but written otherwise: 1 and True."""
    return json.dumps(values)
