"""Generated code that takes its arguments in a list and empties it: what it has read for the last time is freed.

```
def forward(self, saved, tangent): ...      ->      def forward(self, arguments): saved, tangent = arguments; arguments.clear(); ...
```

Called the ordinary way, all arguments live until the call returns, for the caller's frame holds them: for a backward, everything
that was saved for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class _OneList(fx.graph.CodeGen):
    """Writes the function's head for one list of arguments."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [v.partition(":")[0].partition("=")[0].strip() for v in free_vars if v != "self"]
        lines = [f"def {self._func_name}(self, arguments){maybe_return_annotation}:"]
        if names:
            lines += [f"    ({', '.join(names)},) = arguments", "    arguments.clear()"]
        return "\n".join(lines)


def boxed(module: fx.GraphModule) -> Boxed:
    """A function like ``module.forward`` that takes its arguments in a list, which it empties."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_OneList())
    return fx.GraphModule(module, graph).forward


def in_a_list(function: Callable[..., Sequence[torch.Tensor]]) -> Boxed:
    """The same calling convention for a function that takes its arguments one by one."""

    def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(arguments)
        arguments.clear()
        return function(*given)

    return run
