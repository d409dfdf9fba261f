"""Which stage each node of one rank's joint graph belongs to.

```
h = embedding(w, ids); m = mask(ids); a = attn(h, m) | b = attn(a, m); l = loss(b)     stage 0 | stage 1
gb = attn_backward(l', b, m) ; ga = attn_backward(gb, a, m); gw = ...                  stage 1 ; stage 0
```

Dataflow alone decides, nothing knows models:

* What derives only from inputs (masks, positions, shifted labels), views and gathers of one parameter, and what the backward
  computes from forward values alone (recomputation) belong to no stage: each stage that needs one makes its own copy.
* A forward node's stage is where it stands against the cuts; one that only the backward reads goes where its operands are.
* A backward node goes to the stage of the forward op that it differentiates, but not before a forward value that it reads and not
  behind a backward value that it reads. The sum of a value's gradients thus lies on the first stage that contributes to it, so
  that one gradient crosses a boundary for each value that crosses it the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from meshwright.passes.views import is_collective
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.pipeline import AGAIN_ON_EACH_STAGE, stage_of_op

COPIED = "copied"
"""Kind of a node that belongs to no stage."""


@dataclass(frozen=True)
class Stages:
    """Where the nodes of a joint graph belong.

    Attributes:
        count: number of stages.
        of: stage of every node that belongs to one.
        kind: ``"placeholder"``, ``"copied"``, ``"forward"`` or ``"backward"``, for every node but the output.
        free: the nodes that derive from inputs, buffers and constants alone.
    """

    count: int
    of: dict[fx.Node, int]
    kind: dict[fx.Node, str]
    free: set[fx.Node]


def assign_stages(gm: fx.GraphModule, graph: OpGraph, cuts: Sequence[str]) -> Stages:
    """Give every node its stage.

    Args:
        gm: joint graph of one rank.
        graph: the captured program.
        cuts: names of the forward ops behind which a stage ends, in execution order.
    """
    at = {op.name: i for i, op in enumerate(graph.ops)}
    return _Assigner(gm, graph, tuple(at[name] for name in cuts)).run()


class _Assigner:
    def __init__(self, gm: fx.GraphModule, graph: OpGraph, cuts: tuple[int, ...]):
        self.nodes = [n for n in gm.graph.nodes if n.op != "output"]
        self.returned = set(next(reversed(gm.graph.nodes)).all_input_nodes)
        self.last = len(cuts)
        self.of_op = {op.name: stage_of_op(i, cuts) for i, op in enumerate(graph.ops) if op.phase == "forward"}
        self.stages = Stages(len(cuts) + 1, {}, {}, set())
        self.least: dict[fx.Node, int] = {}

    def run(self) -> Stages:
        self.classify()
        self.forward()
        self.backward()
        return self.stages

    # --- kinds ---

    def classify(self) -> None:
        kind, free = self.stages.kind, self.stages.free
        of_parameter: set[fx.Node] = set()
        real: set[fx.Node] = set()  # depends on a gradient
        for node in self.nodes:
            operands = node.all_input_nodes
            if node.op == "placeholder":
                kind[node] = "placeholder"
                role = node.meta["role"]
                (free if role in ("input", "buffer", "constant") else set()).add(node)
                (of_parameter if role == "parameter" else set()).add(node)
                (real if role == "tangent" else set()).add(node)
                continue
            if all(a in free for a in operands):
                free.add(node)
                kind[node] = COPIED
            elif len(operands) == 1 and operands[0] in of_parameter and _again(node):
                of_parameter.add(node)
                kind[node] = COPIED
            elif any(a in real for a in operands):
                real.add(node)
                kind[node] = "backward"
            else:
                kind[node] = "forward" if node.meta["phase"] == "forward" else COPIED

    # --- stages ---

    def forward(self) -> None:
        mine = [n for n in self.nodes if self.stages.kind[n] == "forward"]
        late = self._for_the_backward(mine)
        wanted: dict[fx.Node, int] = {}
        for node in reversed(mine):
            if "op" in node.meta:
                wanted[node] = self.of_op[node.meta["op"]]
            else:
                wanted[node] = min((wanted[u] for u in node.users if u in wanted and u not in late), default=self.last)
        for node in mine:
            made = [self.stages.of[a] for a in node.all_input_nodes if a in self.stages.of]
            early = "op" not in node.meta and (not _readers(node, late) or _shrinks(node))
            if made and (node in late or early):
                self.stages.of[node] = max(made)
            else:
                self.stages.of[node] = max([wanted[node], *made])

    def _for_the_backward(self, mine: list[fx.Node]) -> set[fx.Node]:
        """Forward nodes that no forward node reads, directly or through such nodes, and that the graph does not return."""
        late: set[fx.Node] = set()
        for node in reversed(mine):
            if node not in self.returned and all(u in late or self.stages.kind.get(u) != "forward" for u in node.users):
                late.add(node)
        return late

    def backward(self) -> None:
        of, kind = self.stages.of, self.stages.kind
        self._find_least()
        for node in self.nodes:
            if _is_tangent(node):
                of[node] = self.last
            if kind[node] != "backward":
                continue
            highest = min((of[a] for a in node.all_input_nodes if kind[a] == "backward" or _is_tangent(a)), default=self.last)
            preferred = self._of_differentiated(node)
            of[node] = min(max(highest if preferred is None else preferred, self.least[node]), highest)

    def _find_least(self) -> None:
        """The first stage where each backward node can be: forward values that it, or what is computed from it, reads are there."""
        for node in self.nodes:
            if node.op != "placeholder" and self.stages.kind[node] in ("backward", COPIED):
                self.least[node] = max((self._least(a) for a in node.all_input_nodes), default=0)
        for node in reversed(self.nodes):
            if self.stages.kind[node] == "backward":
                self.least[node] = max([self.least[node], *(self.least[u] for u in node.users if u in self.least)])

    def _least(self, operand: fx.Node) -> int:
        """The first stage that has ``operand``, for a reader of the backward."""
        if self.stages.kind[operand] == "forward":
            return self.stages.of[operand]
        return self.least[operand] if self.stages.kind[operand] == COPIED else 0

    def _of_differentiated(self, node: fx.Node) -> int | None:
        name = node.meta.get("forward_op")
        return None if name is None or name not in self.staged else self.of_op[name]

    @property
    def staged(self) -> Mapping[str, int]:
        """Forward ops that belong to a stage."""
        if not hasattr(self, "_staged"):
            named = {n.meta["op"] for n in self.stages.of if "op" in n.meta and self.stages.kind[n] == "forward"}
            self._staged = {name: self.of_op[name] for name in named if name in self.of_op}
        return self._staged


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] == "tangent"


def _again(node: fx.Node) -> bool:
    return is_collective(node) or str(node.target) in AGAIN_ON_EACH_STAGE


def _readers(node: fx.Node, late: set[fx.Node]) -> list[fx.Node]:
    return [u for u in node.users if u.op != "output" and u.meta["phase"] == "forward" and u not in late]


def _shrinks(node: fx.Node) -> bool:
    """Whether it belongs to a change of placement that leaves less than it took: better before a boundary than behind it."""
    step = node.meta.get("step")
    return step is not None and step.kind in ("reduce_scatter", "slice")
