"""Options of the command line that are more than a word or a number."""

from __future__ import annotations

import re

from meshwright.planner.ir.errors import InputError


def read_degrees(text: str, what: str = "degrees") -> dict[str, int]:
    """Read ``"dp=8,tp=8"``; ``what`` it is, for messages.

    Raises:
        InputError: the text has another form.

    >>> read_degrees("dp=8, tp=4")
    {'dp': 8, 'tp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or match[1] in found:
            raise InputError(f"{what} {text!r} is not NAME=DEVICES,... with each name once, for example 'dp=8,tp=8'")
        found[match[1]] = int(match[2])
    return found


def read_logical_mesh(text: str) -> str | tuple[int, ...] | dict[str, int]:
    """Read ``"8x8"`` as sizes, ``"dp=8,tp=8"`` as sizes by name; ``"search"`` and ``"given"`` are words.

    Raises:
        InputError: names and sizes in another form.

    >>> read_logical_mesh("4x2x8"), read_logical_mesh("given"), read_logical_mesh("dp=8,tp=4")
    ((4, 2, 8), 'given', {'dp': 8, 'tp': 4})
    """
    if "=" in text:
        return read_degrees(text, "logical mesh")
    return tuple(map(int, text.split("x"))) if re.fullmatch(r"\d+(x\d+)*", text) else text


def read_counts(text: str) -> tuple[int, ...]:
    """Read ``"8,4,2"``.

    Raises:
        InputError: the text has another form, or a number is zero.

    >>> read_counts("8, 4")
    (8, 4)
    """
    if not re.fullmatch(r"\s*[1-9]\d{0,8}\s*(,\s*[1-9]\d{0,8}\s*)*", text):
        raise InputError(f"numbers of ranks {text!r} are not NUMBER,NUMBER,... of at least 1, for example '8,4,2'")
    return tuple(map(int, text.split(",")))
