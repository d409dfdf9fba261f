"""Add a bias in the product that it follows.

```
m = mm(x, w); y = add(m, b)                ->      y = addmm(b, x, w)
```

Captured graphs have the two apart, since a product of pieces must be summed before its bias is added. Where the product was not cut,
one kernel does both, as in the model itself: one pass over the result less. Compiled graphs stay as they are.
"""

from __future__ import annotations

import torch
from torch import fx

from meshwright.passes.program import LocalProgram

_aten = torch.ops.aten


def fuse_biases(program: LocalProgram) -> LocalProgram:
    """Rewrite in place every sum of a product that nobody else reads and a vector along its rows.

    Returns:
        ``program``.
    """
    for module in program.graphs:
        for node in list(module.graph.nodes):
            if node.target is _aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
                product = next((a for a in node.args if _is_product_for(a, node)), None)
                if product is not None:
                    _fuse(node, product)
        module.recompile()
    return program


def _is_product_for(product: object, reader: fx.Node) -> bool:
    if not isinstance(product, fx.Node) or product.target is not _aten.mm.default or list(product.users) != [reader]:
        return False
    bias = next((a for a in reader.args if a is not product), None)
    if not isinstance(bias, fx.Node):
        return False
    made, added = product.meta["val"], bias.meta["val"]
    return tuple(added.shape) == (made.shape[1],) and added.dtype == made.dtype == reader.meta["val"].dtype


def _fuse(node: fx.Node, product: fx.Node) -> None:
    bias = next(a for a in node.args if a is not product)
    node.target, node.args = _aten.addmm.default, (bias, *product.args)
    product.graph.erase_node(product)
