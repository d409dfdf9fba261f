"""How the records of programs are written and read: graphs inside them by :mod:`~meshwright.runtime.export.graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from meshwright.runtime.export.graphs import GraphReader, write_graph
from meshwright.runtime.export.plain import Hook, Hooks


def hooks(reader: GraphReader | None, extra: Sequence[str] = ()) -> Hooks:
    """For :func:`~meshwright.runtime.export.plain.to_plain` and its inverse.

    Args:
        reader: reads graphs; None where records are only written.
        extra: operators besides those of the list that may be written.
    """

    def read(data: Any, where: str) -> fx.GraphModule:
        assert reader is not None, "these hooks only write"
        return reader.read(data, where)

    return {fx.GraphModule: Hook(write=lambda gm: write_graph(gm, extra), read=read)}
