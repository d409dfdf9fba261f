"""Where each op of a captured graph comes from: source line, module, and the forward op that it differentiates."""

from __future__ import annotations

import os
import re
import traceback
from functools import lru_cache
from types import TracebackType

import torch
from torch import fx
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)')
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


@lru_cache(maxsize=4096)
def is_users(path: str) -> bool:
    """Whether a file is neither torch's nor of the planner."""
    return not path.startswith("<") and not os.path.abspath(path).startswith(_NOT_THE_USERS)


def _line(path: str, number: int | str, function: str, text: str) -> str:
    return f"{os.path.basename(path)}:{number}, in {function}: {text.strip()}"


@lru_cache(maxsize=4096)
def source_of_stack(stack_trace: str) -> str:
    """The innermost line outside torch: ``"model.py:12, in forward: x = self.up(x)"``; ``""`` if there is none."""
    for path, number, function, text in reversed(_FRAME.findall(stack_trace.replace(GRADIENT_ACC_SPECIAL_STACK, ""))):
        if is_users(path):
            return _line(path, number, function, text)
    return ""


def source_of_error(where: TracebackType | None) -> str:
    """The innermost line outside torch and the planner in an exception's traceback; ``""`` if there is none."""
    for frame in reversed(traceback.extract_tb(where)):
        if is_users(frame.filename):
            return _line(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
    return ""


def source_of(node: fx.Node) -> str:
    """The user's line that made a captured node."""
    return source_of_stack(node.meta.get("stack_trace") or "")


def _module_path(node: fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return path.removeprefix(prefix).lstrip(".")


def annotate(graph: fx.Graph, prefix: str) -> None:
    """Sets ``source``, ``module_path`` and ``forward_op`` of every op, then drops what they were read from.

    Args:
        graph: the arranged graph, phases set.
        prefix: leading module path to leave out.
    """
    first_forward: dict[int, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        meta = node.meta
        meta["source"] = source_of(node)
        meta["module_path"] = _module_path(node, prefix)
        number = meta.get("seq_nr")
        if number is not None and meta["phase"] == "forward":
            first_forward.setdefault(number, node.name)
        elif number is not None and meta.get("fwd_nn_module_stack"):
            # A sum of gradients has no module stack and the number of another op.
            meta["forward_op"] = first_forward.get(number)
        for key in ("seq_nr", "nn_module_stack", "fwd_nn_module_stack", "stack_trace"):
            meta.pop(key, None)
