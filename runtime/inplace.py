"""Let a reduction write into its operand where nobody else reads that operand.

```
b = cat([g0, g1]); r = all_reduce(b)       ->      b = cat([g0, g1]); r = all_reduce_(b)
```

The functional op copies its operand first: for the gradients of a data-parallel step that is one copy of all gradients
into memory that is touched for the first time. Compiled graphs stay functional: Inductor does the same by itself.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from meshwright.passes.program import LocalProgram

_FUNCTIONAL = torch.ops._c10d_functional.all_reduce.default
_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default


def reduce_in_place(program: LocalProgram) -> LocalProgram:
    """Rewrite in place every all-reduce whose operand is dead after it.

    Returns:
        ``program``.
    """
    for module in program.graphs:
        reduce_in(module)
    return program


def reduce_in(module: fx.GraphModule, given: Container[fx.Node] = ()) -> None:
    """The same for one graph.

    Args:
        module: the graph; rewritten in place.
        given: placeholders whose tensors the caller gives away.
    """
    for node in module.graph.nodes:
        if node.target is _FUNCTIONAL and _is_last_reader(node, node.all_input_nodes[0], given):
            node.target = _IN_PLACE
    module.recompile()


def _is_last_reader(reader: fx.Node, value: fx.Node, given: Container[fx.Node]) -> bool:
    """Whether ``value`` is dense, made by an op of this graph or given away, and neither it nor what it is a view of is read elsewhere."""
    if not value.meta["val"].is_contiguous():
        return False
    while list(value.users) == [reader] and (value.op == "call_function" or value in given):
        if str(value.target).startswith("_c10d_functional."):
            return False
        if value.op == "placeholder" or value.meta.get("alias") is None:
            return True
        reader, value = value, value.all_input_nodes[value.meta["alias"]]
    return False
