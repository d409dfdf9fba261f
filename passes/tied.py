"""Split the gradient of a parameter that several stages use into one term per stage.

```
ga (stage 0), gb (stage 1);  s = add(ga, gb);  r = cast(s)  -> gradient of w
                                                                 r0 = cast(ga) -> term of stage 0;  r1 = cast(gb) -> term of stage 1
```

Otherwise the term of the later stage, as large as the parameter, would cross every boundary for every micro-batch. The terms
are summed over the ranks once per step. What is done to the sum must be linear, so that it may be done to each term.
"""

from __future__ import annotations

import torch
from torch import fx

from meshwright.passes.cut_stages import Stages
from meshwright.passes.views import is_collective

aten = torch.ops.aten

_LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "permute.default",
        "reshape.default",
        "_to_copy.default",
        "contiguous.default",
        "clone.default",
        "slice.Tensor",
        "constant_pad_nd.default",
        "neg.default",
        "mul.Scalar",
        "div.Scalar",
    )
)


def terms_by_stage(gm: fx.GraphModule, stages: Stages, gradient: fx.Node) -> list[fx.Node]:
    """The gradient as terms, each on another stage; ``[gradient]`` where one stage makes it all.

    Args:
        gm: the joint graph; nodes for the terms are added.
        stages: extended by the nodes that are added.
        gradient: a result of the graph.
    """
    chain: list[fx.Node] = []
    total = gradient
    while _is_linear(total):
        chain.append(total)
        total = total.all_input_nodes[0]
    if not _is_sum(total, stages):
        return [gradient]
    groups: dict[int, list[fx.Node]] = {}
    for term in _terms(total, stages):
        groups.setdefault(stages.of[term], []).append(term)
    if len(groups) == 1:
        return [gradient]
    return [_rebuilt(gm, stages, total, terms, chain, stage) for stage, terms in sorted(groups.items())]


def _is_linear(node: fx.Node) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    step = node.meta.get("step")
    if is_collective(node):
        return step is not None and (step.kind not in ("all_reduce", "reduce_scatter") or step.reduce_op == "sum")
    return str(node.target) in _LINEAR


def _is_sum(node: fx.Node, stages: Stages) -> bool:
    operands = node.args[:2]
    both = len(node.args) == 2 and all(isinstance(a, fx.Node) and stages.kind.get(a) == "backward" for a in operands)
    return node.op == "call_function" and node.target is aten.add.Tensor and both and not node.kwargs


def _terms(total: fx.Node, stages: Stages) -> list[fx.Node]:
    """What ``total`` is the sum of, down to sums that one stage makes alone."""
    found: list[fx.Node] = []
    for operand in total.args[:2]:
        assert isinstance(operand, fx.Node)
        found += _terms(operand, stages) if _is_sum(operand, stages) else [operand]
    return found if len({stages.of[t] for t in found}) > 1 else [total]


def _rebuilt(
    gm: fx.GraphModule, stages: Stages, total: fx.Node, terms: list[fx.Node], chain: list[fx.Node], stage: int
) -> fx.Node:
    """The sum of ``terms`` with ``chain`` (last op first) done to it, on ``stage``."""
    place, made = total, terms[0]

    def add(node: fx.Node) -> fx.Node:
        nonlocal place
        stages.of[node], stages.kind[node], place = stage, "backward", node
        return node

    for term in terms[1:]:
        with gm.graph.inserting_after(place):
            summed = add(gm.graph.call_function(aten.add.Tensor, (made, term)))
        summed.meta.update({k: v for k, v in total.meta.items() if k != "value"}, alias=None)
        made = summed
    for op in reversed(chain):
        operand = op.all_input_nodes[0]
        with gm.graph.inserting_after(place):
            copied = add(gm.graph.node_copy(op, lambda a, operand=operand, made=made: made if a is operand else a))  # type: ignore[misc]
        made = copied
    return made
