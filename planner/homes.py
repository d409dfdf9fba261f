"""Cut a further program of a model, for evaluation or another batch, so that each stage reads the parameters that it holds.

```
training: e(wte) d=dropout | a(w1) | l(wte)      homes: wte 0 2, w1 1
now:      e(wte)           | a(w1) | l(wte)      every reader on the first home that does not lie before the stage it is behind
```

Between the last reader that must be before a cut and the first that must be behind it, the cut is where the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.ir.pipeline import AGAIN_ON_EACH_STAGE


def cuts_at_homes(graph: OpGraph, homes: Mapping[str, Sequence[int]], stages: int, alive_bytes: np.ndarray) -> tuple[str, ...]:
    """The forward ops behind which stages end.

    Args:
        graph: the program.
        homes: the stages that hold each parameter, by FQN; one that is not listed may be read anywhere.
        stages: how many.
        alive_bytes: what crosses a cut behind each forward op, float64 [forward ops].

    Raises:
        InputError: the program reads its parameters in another order than the stages hold them in.
    """
    forward = [op for op in graph.ops if op.phase == "forward"]
    need = _needed_stages(graph, forward, homes)
    cuts: list[int] = []
    for stage in range(stages - 1):
        low = max([i for i, s in need.items() if s <= stage] + [c + 1 for c in cuts[-1:]], default=0)
        high = min([i for i, s in need.items() if s > stage] + [len(forward) - (stages - 1 - stage)])
        if low >= high:
            raise InputError(f"the program has too few ops between its parameters for {stages} stages: use fewer stages")
        crossing = np.where(alive_bytes[low:high] > 0, alive_bytes[low:high], np.inf)
        cuts.append(low + int(np.argmin(crossing)))
    return tuple(forward[i].name for i in cuts)


def _needed_stages(graph: OpGraph, forward: Sequence[Op], homes: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Index of each forward op that reads parameters to the first stage where it can be."""
    root = {i.value.name: i.name for i in graph.inputs_of("parameter")}
    found: dict[int, int] = {}
    here = 0
    for index, op in enumerate(forward):
        if len(op.ins) == 1 and op.ins[0].name in root and op.target in AGAIN_ON_EACH_STAGE:
            root.update((v.name, root[op.ins[0].name]) for v in op.outs if v is not None)
            continue
        read = [homes[root[v.name]] for v in op.ins if root.get(v.name) in homes]
        common = set(read[0]).intersection(*read[1:]) if read else set()
        if not read:
            continue
        later = [s for s in common if s >= here]
        if not later:
            raise InputError(
                f"op {op.name} ({op.target}) reads {', '.join(root[v.name] for v in op.ins if v.name in root)}, which lies on stages "
                f"{sorted(common)}, behind what stage {here} holds: in this mode the model uses its parameters in another order than "
                "the one it was cut for; make a module of its own for it"
            )
        here = found[index] = min(later)
    return found
