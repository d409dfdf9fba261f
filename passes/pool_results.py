"""Let reductions that only results of a phase wait for gather before their results are taken further.

```
r0 = all_reduce(g0, dp); q0 = wait(r0); s0 = all_reduce(q0, tp)          r0 = all_reduce(g0, dp)
...                                                                       ...
r1 = all_reduce(g1, dp); q1 = wait(r1); s1 = all_reduce(q1, tp)    ->    r1 = all_reduce(g1, dp)
...                                                                       q0 = wait(r0); q1 = wait(r1)
return wait(s0), wait(s1)                                                 s0 = all_reduce(q0, tp); s1 = all_reduce(q1, tp)
                                                                          return wait(s0), wait(s1)
```

Collectives share a buffer until the result of one is read (see ``bucket``), and the second leg of a hierarchical reduction reads that of
the first: each parameter that is reduced over two axes would end the buffers of all others. Runs between ``overlap``, which puts second
legs close behind first ones, and ``bucket``. Results are taken further when a buffer is full, or at the end of the phase; only where
nothing of a plan hides behind kernels: else second legs are better on their way early.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from meshwright.passes.bucket import SHARED, bucket_key
from meshwright.passes.overlap import Moves, is_wait
from meshwright.passes.split import is_collective
from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.plan import Plan


@dataclass(frozen=True)
class PoolResults:
    """The pass.

    Attributes:
        bucket_bytes: largest buffer, as in ``BucketCollectives``; 0: nothing shares one, and nothing moves.
    """

    bucket_bytes: int = REDUCE_BYTES

    @classmethod
    def of(cls, plan: Plan, bucket_bytes: int) -> PoolResults:
        """The pass for a plan: nothing moves where any of its communication hides."""
        return cls(0 if any(c.hidden for c in plan.collectives) else bucket_bytes)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.bucket_bytes <= 0:
            return gm
        output = next(reversed(gm.graph.nodes))
        for phase in ("forward", "backward"):
            body = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
            for node in _Pools(body, self.bucket_bytes).order():
                output.prepend(node)
        return gm


@dataclass
class _Pool:
    """Collectives that can share a buffer, in execution order, and their bytes."""

    members: list[fx.Node] = field(default_factory=list)
    bytes: int = 0


class _Pools:
    """The collectives of one phase whose results no kernel reads."""

    def __init__(self, body: list[fx.Node], limit: int):
        self.body, self.limit = body, limit
        self.late = _late(body)
        self.behind = _behind(body, self.late)
        self.waiting = {n: sum(a in self.behind for a in n.all_input_nodes) for n in self.behind}
        self.open: dict[tuple[object, ...], _Pool] = {}
        self.placed: list[fx.Node] = []

    def order(self) -> list[fx.Node]:
        """All nodes in their new order."""
        for node in self.body:
            if node not in self.behind:
                self.place(node)
        while self.open:
            now, self.open = list(self.open.values()), {}
            for pool in now:
                self.land(pool)
        return self.placed

    def place(self, node: fx.Node) -> None:
        """Append a node; where its pool is full, what that brought comes first."""
        if node in self.late:
            key, size = bucket_key(node), node.meta["step"].moved_bytes
            if key in self.open and self.open[key].bytes + size > self.limit:
                self.land(self.open.pop(key))
            pool = self.open.setdefault(key, _Pool())
            pool.members.append(node)
            pool.bytes += size
        self.placed.append(node)

    def land(self, pool: _Pool) -> None:
        """Wait for all of a pool, and take its results as far as the next collectives."""
        pending = [wait for member in pool.members for wait in member.users]
        while pending:
            node = pending.pop(0)
            self.place(node)
            for user in node.users if node not in self.late else ():
                if user in self.behind:
                    self.waiting[user] -= 1
                    if not self.waiting[user]:
                        pending.append(user)


def _late(body: list[fx.Node]) -> set[fx.Node]:
    """Collectives that can share a buffer and whose results no kernel of the phase reads."""
    inside, moves = set(body), Moves.of(body)
    urgent = {n for n in body if n not in moves}
    for node in reversed(body):
        if any(u in urgent for u in node.users if u in inside):
            urgent.add(node)
    return {n for n in body if n not in urgent and is_collective(n) and not is_wait(n) and n.meta["step"].kind in SHARED}


def _behind(body: list[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """The waits for such collectives, and all that reads what they bring."""
    found: set[fx.Node] = set()
    for node in body:
        if any(a in found or a in late for a in node.all_input_nodes):
            found.add(node)
    return found
