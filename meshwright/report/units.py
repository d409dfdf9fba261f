"""Quantities as people read them. Bytes are binary (GiB), as device memory is counted; times have three digits."""

from __future__ import annotations

import re

from meshwright.planner.ir.errors import InputError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_FACTORS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def format_bytes(n: float) -> str:
    """Bytes with a binary unit.

    >>> format_bytes(1536), format_bytes(80 * 1024**3), format_bytes(12)
    ('1.50 KiB', '80.0 GiB', '12 B')
    """
    unit = 0
    while abs(n) >= 1024 and unit < len(_BINARY) - 1:
        n /= 1024
        unit += 1
    return f"{n:.0f} B" if unit == 0 else f"{_digits(n)} {_BINARY[unit]}"


def format_seconds(t: float) -> str:
    """Seconds with a decimal unit.

    >>> format_seconds(1.5), format_seconds(0.0123), format_seconds(4.2e-6), format_seconds(0)
    ('1.50 s', '12.3 ms', '4.20 µs', '0 s')
    """
    if t == 0:
        return "0 s"
    factor, unit = next(((f, u) for f, u in _TIMES if abs(t) >= f), _TIMES[-1])
    return f"{_digits(t / factor)} {unit}"


def format_count(n: int) -> str:
    """A count with thousands separated: ``12,345``."""
    return f"{n:,}"


def parse_bytes(text: str | int) -> int:
    """Read ``"60GB"`` (10**9), ``"60GiB"`` (2**30) or a plain number of bytes.

    >>> parse_bytes("60GB"), parse_bytes("1.5 GiB"), parse_bytes(7)
    (60000000000, 1610612736, 7)

    Raises:
        InputError: neither of these forms, or not positive.
    """
    if isinstance(text, int):
        found, n = True, text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
        found = match is not None
        n = int(float(match[1]) * (1024 if match[3] else 1000) ** _FACTORS[match[2].upper()]) if match else 0
    if not found or n <= 0:
        raise InputError(f"memory {text!r} is not a positive size: write bytes, '60GB' (10^9 bytes) or '60GiB' (2^30 bytes)")
    return n


def _digits(x: float) -> str:
    if abs(x) >= 99.95:
        return f"{x:.0f}"
    return f"{x:.1f}" if abs(x) >= 9.995 else f"{x:.2f}"
