"""Options of the command line that are more than a word or a number."""

from __future__ import annotations

import re

from meshwright.planner.ir.errors import InputError


def read_degrees(text: str) -> dict[str, int]:
    """Read ``"dp=8,tp=8"``.

    Raises:
        InputError: the text has another form.

    >>> read_degrees("dp=8, tp=4")
    {'dp': 8, 'tp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or match[1] in found:
            raise InputError(f"degrees {text!r} is not NAME=DEVICES,... with each name once, for example 'dp=8,tp=8'")
        found[match[1]] = int(match[2])
    return found


def read_logical_mesh(text: str) -> str | tuple[int, ...]:
    """Read ``"8x8"`` as sizes; ``"search"`` and ``"given"`` are words.

    >>> read_logical_mesh("4x2x8"), read_logical_mesh("given")
    ((4, 2, 8), 'given')
    """
    return tuple(map(int, text.split("x"))) if re.fullmatch(r"\d+(x\d+)*", text) else text
