"""One text for all ranks: their programs differ in integers alone, and these stand side by side.

```
rank 0: ["slice.Tensor", ["%w", 0, 0, 48]]     rank 1: ["slice.Tensor", ["%w", 0, 48, 96]]
both:   ["slice.Tensor", ["%w", 0, {"by_rank": [0, 48]}, {"by_rank": [48, 96]}]]
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.planner.ir.errors import VerifyError
from meshwright.runtime.export.plain import fail

KEY = "by_rank"


def merged(programs: Sequence[Any], where: str = "program") -> Any:
    """The JSON data of all ranks' programs as one.

    Args:
        programs: one per rank, in row-major order of the mesh.
        where: what they are, for the message.

    Raises:
        VerifyError: they differ in more than integers.
    """
    first = programs[0]
    if all(p is first for p in programs) or len(programs) == 1:
        return first
    kinds = {type(p) for p in programs}
    if kinds == {dict} and all(p.keys() == first.keys() for p in programs):
        return {k: merged([p[k] for p in programs], f"{where}.{k}") for k in first}
    if kinds == {list} and all(len(p) == len(first) for p in programs):
        return [merged(items, f"{where}[{i}]") for i, items in enumerate(zip(*programs, strict=True))]
    if len(kinds) == 1 and all(p == first for p in programs):
        return first
    if kinds == {int}:
        return {KEY: list(programs)}
    other = next(i for i, p in enumerate(programs) if type(p) is not type(first) or p != first)
    raise VerifyError(
        f"{where} differs between ranks in more than integers: rank 0 has {str(first)[:80]}, rank {other} {str(programs[other])[:80]}; "
        "please report it"
    )


def picked(data: Any, rank: int, ranks: int, where: str) -> Any:
    """One rank's program out of :func:`merged`.

    Raises:
        FormatError: integers of another number of ranks, or what is no integer.
    """
    if type(data) is list:
        return [picked(item, rank, ranks, where) for item in data]
    if type(data) is not dict:
        return data
    if set(data) != {KEY}:
        return {k: picked(v, rank, ranks, where) for k, v in data.items()}
    values = data[KEY]
    if type(values) is not list or len(values) != ranks or any(type(v) is not int for v in values):
        fail(where, data, f"{ranks} integers, one per rank")
    return values[rank]
