"""Issue collectives early and wait for them late.

```
h = mm(x, w0)                                    h = mm(x, w0)
g = all_gather(w1); w = wait(g); y = mm(h, w)    g = all_gather(w1)        one big op ahead of its use
                                            ->   ...
p = mm(a, b); r = all_reduce(p); q = wait(r)     w = wait(g); y = mm(h, w)
...                                              p = mm(a, b); r = all_reduce(p); ...
return q                                         q = wait(r); return q
```

A wait, and the layout ops that follow it, stand just before their first reader: the waits for gradients at the end of the
backward. A collective stands as soon as its operand exists, but at most ``ahead`` big ops before its result is read, so
that gathered copies do not pile up. A second reduction of the same value is issued a little later than its operand could be
had, so that waiting for the first does not block.

Nodes are only moved, within their phase, by positions and sizes that are equal on all ranks: so is the order of collectives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from torch import fx

from meshwright.passes.views import is_collective
from meshwright.planner.ir.heavy import HEAVY


@dataclass(frozen=True)
class OverlapCollectives:
    """The pass.

    Attributes:
        ahead: how many big ops before its first reader a collective may be issued.
        ahead_bytes: largest sum of results that may be in flight early, per issue point; what exceeds it is not hoisted.
    """

    ahead: int = 2
    ahead_bytes: int = 512 << 20

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        output = next(reversed(gm.graph.nodes))
        for phase in ("forward", "backward"):
            body = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
            for node in _Order(body, self).sorted():
                output.prepend(node)
        return gm


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return str(node.target) == "_c10d_functional.wait_tensor.default"


@dataclass(frozen=True)
class Moves:
    """Which nodes of a phase may move. All others are kernels, and keep their order.

    Attributes:
        after: waits, and the layout ops that follow them.
        before: collectives, and the layout ops that prepare them.
        free: cheap ops on inputs alone, which move with the collective that reads them.
    """

    after: frozenset[fx.Node]
    before: frozenset[fx.Node]
    free: frozenset[fx.Node]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.after or node in self.before or node in self.free

    @classmethod
    def of(cls, body: list[fx.Node]) -> Moves:
        """Sort the nodes of one phase, which stand in a legal order."""
        inside = set(body)
        after, before, free = set[fx.Node](), set[fx.Node](), set[fx.Node]()
        for node in body:
            operands = [a for a in node.all_input_nodes if a in inside]
            if _is_late(node, operands, after):
                after.add(node)
            elif "step" in node.meta and node.meta["step"].kind != "slice":
                before.add(node)
            elif not is_collective(node) and str(node.target) not in HEAVY and all(a in free for a in operands):
                free.add(node)
        return cls(frozenset(after), frozenset(before), frozenset(free))


def _is_late(node: fx.Node, operands: list[fx.Node], after: set[fx.Node]) -> bool:
    """Whether it is a wait, or only rearranges or slices what was waited for."""
    if is_wait(node):
        return True
    step = node.meta.get("step")
    waited = [a for a in operands if a in after]
    return step is not None and any(step.kind == "slice" or a.meta["step"] is step for a in waited)


class _Order:
    """Where each node of one phase goes: a key per node, by which a stable sort orders them.

    A node that does not move has its index as key.
    """

    def __init__(self, body: list[fx.Node], options: OverlapCollectives):
        self.body, self.options = body, options
        self.index = {n: i for i, n in enumerate(body)}
        self.big = [i for i, n in enumerate(body) if str(n.target) in HEAVY]
        moves = Moves.of(body)
        self.after, self.before, self.free = moves.after, moves.before, moves.free
        self.earliest: dict[fx.Node, int] = {}
        self.in_flight: Counter[int] = Counter()
        for node in body:
            read = [self.earliest[a] for a in node.all_input_nodes if a in self.index]
            self.earliest[node] = max(read, default=-1) if node in moves else self.index[node]

    def sorted(self) -> list[fx.Node]:
        end = len(self.body)
        key: dict[fx.Node, int] = {}
        for node in reversed(self.body):
            read = min((key[u] for u in node.users if u in self.index), default=end)
            key[node] = max(self.earliest[node], self.wanted(node, read))
        return sorted(self.body, key=lambda n: (key[n], self.index[n]))

    def wanted(self, node: fx.Node, read: int) -> int:
        """Where ``node`` should go if its first reader is at ``read``."""
        here = self.index[node]
        if node in self.after:
            return read
        if node in self.before:
            return self.issue(node, read) if is_collective(node) else min(read, len(self.body))
        return min(here, read) if node in self.free else here

    def issue(self, node: fx.Node, read: int) -> int:
        """Where a collective is issued: at most ``ahead`` big ops before its result is read."""
        latest = self.index[node]
        if any(a in self.after for a in node.all_input_nodes) or any(
            b in self.after for a in node.all_input_nodes if a in self.before for b in a.all_input_nodes
        ):
            latest = self.big_before(latest, -self.options.ahead)
        early = self.big_before(read, self.options.ahead)
        if early < latest:
            size = node.meta["step"].result_bytes
            if self.in_flight[early] + size > self.options.ahead_bytes:
                return min(latest, read)
            self.in_flight[early] += size
        return min(latest, early, read)

    def big_before(self, index: int, count: int) -> int:
        """Index of the big op behind which one must stand to be ``count`` of them ahead of ``index`` (negative: later)."""
        at = bisect_left(self.big, index) - count - 1
        if at < 0:
            return -1
        return self.big[at] if at < len(self.big) else len(self.body)
