"""Put small collectives that travel together into one buffer.

```
r0 = all_reduce(g0); r1 = all_reduce(g1)         b = cat([flatten(g0), flatten(g1)]); r = all_reduce(b)
...                                         ->   ...
q0 = wait(r0); q1 = wait(r1)                     q = wait(r); q0, q1 = split(q)
```

Two collectives of the same kind, group, reduction and element type share a buffer if neither result is read before the
later one is issued. Runs after ``overlap`` and ``pool_results``, which put the waits as late as possible. The buffer is issued where its last
member stood.

Gathers of what lies at rest (their operands come from inputs alone) can be issued at any time. Their buffers are issued where
the first member stood, or as soon as the buffer before it has arrived, whichever is earlier: one is in use, one under way.

The plan counts the members (*logical* collectives); ``step_values`` of the new node names them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.passes.emit import Emitter
from meshwright.passes.overlap import is_wait
from meshwright.passes.redistribute import Step
from meshwright.passes.views import is_collective
from meshwright.planner.ir.buffers import GATHER_BYTES, REDUCE_BYTES
from meshwright.planner.ir.heavy import HEAVY

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

SHARED = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds that can share a buffer."""


@dataclass(frozen=True)
class BucketCollectives:
    """The pass.

    Attributes:
        bucket_bytes: largest buffer, in bytes of the larger of input and result; 0: no buckets.
        gather_bytes: likewise for gathers of what lies at rest.
        window: big ops within which other gathers may join: the first of them must not come too late.
    """

    bucket_bytes: int = REDUCE_BYTES
    gather_bytes: int = GATHER_BYTES
    window: int = 1

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.bucket_bytes <= 0:
            return gm
        before: dict[tuple[Any, ...], fx.Node] = {}
        for number, bucket in enumerate(list(self.buckets(gm.graph))):
            key = bucket_key(bucket.members[0])
            if bucket.rests and bucket.bytes <= self.gather_bytes:
                _hoist(bucket, before.get(key))
            issued = _merge(gm, bucket, f"bucket_{number}") if len(bucket.members) > 1 else bucket.members[0]
            if bucket.rests:
                before[key] = next(iter(issued.users))
        return gm

    def buckets(self, graph: fx.Graph) -> Iterator[_Bucket]:
        """Groups of collectives in execution order; a group ends where a member's result is read."""
        open_: dict[tuple[Any, ...], _Bucket] = {}
        big = 0
        for node in graph.nodes:
            big += str(node.target) in HEAVY
            if is_wait(node):
                for key in [k for k, b in open_.items() if not b.rests and node.all_input_nodes[0] in b.members]:
                    yield open_.pop(key)
            elif is_collective(node) and node.meta["step"].kind in SHARED:
                key, size = (*bucket_key(node), _rests(node)), node.meta["step"].moved_bytes
                bucket = open_.get(key)
                if bucket is not None and (bucket.bytes + size > self.limit(bucket) or self.is_late(bucket, node, big)):
                    yield open_.pop(key)
                open_.setdefault(key, _Bucket(big, rests=key[-1])).add(node, size)
        yield from open_.values()

    def limit(self, bucket: _Bucket) -> int:
        """Largest size of a bucket, in bytes."""
        return self.gather_bytes if bucket.rests else self.bucket_bytes

    def is_late(self, bucket: _Bucket, node: fx.Node, big: int) -> bool:
        """Whether waiting for ``node`` would issue the bucket's gathers too late."""
        return not bucket.rests and node.meta["step"].kind == "all_gather" and big - bucket.opened > self.window


@dataclass
class _Bucket:
    """Collectives that will share a buffer.

    Attributes:
        opened: number of big ops before the first member.
        rests: whether the members gather what lies at rest.
        members: in execution order.
        bytes: of all members.
    """

    opened: int
    rests: bool = False
    members: list[fx.Node] = field(default_factory=list)
    bytes: int = 0

    def add(self, node: fx.Node, size: int) -> None:
        self.members.append(node)
        self.bytes += size


def bucket_key(node: fx.Node) -> tuple[Any, ...]:
    """What members of one bucket have in common."""
    step: Step = node.meta["step"]
    return node.meta["phase"], step.kind, step.axis, node.meta["val"].dtype, step.reduce_op, node.meta.get("keeps", False)


def _prepared(node: fx.Node) -> list[fx.Node] | None:
    """What must run before a gather of what lies at rest, in order; None where it reads what the phase computes."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        operand = pending.pop()
        if operand in found or operand.meta["phase"] != node.meta["phase"]:
            continue
        if operand.op == "placeholder" and operand.meta["role"] != "tangent":
            continue
        if operand.op == "placeholder" or is_collective(operand) or str(operand.target) in HEAVY:
            return None
        found.add(operand)
        pending += operand.all_input_nodes
    return sorted(found)


def _rests(node: fx.Node) -> bool:
    return node.meta["step"].kind == "all_gather" and _prepared(node) is not None


def _hoist(bucket: _Bucket, before: fx.Node | None) -> None:
    """Move the members, and what prepares them, to where the first stands or behind ``before``, whichever is earlier."""
    moved = sorted({n for member in bucket.members for n in (*(_prepared(member) or ()), member)})
    first = min(bucket.members)
    place = before if before is not None and before < first else first.prev
    for node in moved:
        if node <= place:
            continue
        place.append(node)
        place = node


def _merge(gm: fx.GraphModule, bucket: _Bucket, name: str) -> fx.Node:
    """Replace the members and their waits by one collective and the pieces of its result; the collective."""
    graph, first, last = gm.graph, bucket.members[0], bucket.members[-1]
    step: Step = first.meta["step"]
    rows = 1 if step.kind == "all_reduce" else step.parts
    waits = {m: next(iter(m.users)) for m in bucket.members}
    emit = Emitter(graph, gm)
    emit.hint = name
    kept = {"keeps": True} if first.meta.get("keeps") else {}
    shared = {**kept, "phase": first.meta["phase"], "step": step, "steps": tuple(m.meta["step"] for m in bucket.members)}
    emit.meta = {**shared, "step_values": tuple(m.meta["step_value"] for m in bucket.members)}
    with first.meta["val"].fake_mode, torch.no_grad():
        with graph.inserting_before(last):
            issued = _issue(emit, bucket.members, step, rows)
        with graph.inserting_before(min(waits.values())):
            received, widths = _receive(emit, issued, bucket.members, step, rows)
            parts = emit(aten.split_with_sizes.default, received, widths, 1)
        for i, (member, wait) in enumerate(waits.items()):
            with graph.inserting_before(wait):
                part = emit(operator.getitem, parts, i)
                whole = emit(aten.reshape.default, part, list(wait.meta["val"].shape))
            kept = {k: whole.meta[k] for k in ("val", "alias")}
            whole.meta.update({**wait.meta, **kept, "step": step})
            wait.replace_all_uses_with(whole)
            graph.erase_node(wait)
            graph.erase_node(member)
    return issued


def _issue(emit: Emitter, members: list[fx.Node], step: Step, rows: int) -> fx.Node:
    """One collective of ``[rows, total]`` (all_gather: ``[1, total]``) in place of the members'."""
    lead = rows if step.kind == "reduce_scatter" else 1
    operands = [m.all_input_nodes[0] for m in members]
    flat = [emit(aten.reshape.default, x, [lead, x.meta["val"].numel() // lead]) for x in operands]
    buffer = emit(aten.cat.default, flat, 1)
    return emit(members[0].target, buffer, *members[0].args[1:])


def _receive(emit: Emitter, issued: fx.Node, members: list[fx.Node], step: Step, rows: int) -> tuple[fx.Node, list[int]]:
    """The result as ``[rows, total]`` (reduced: ``[1, total]``), and each member's share of the columns."""
    lead = rows if step.kind == "all_gather" else 1
    return emit(c10d.wait_tensor.default, issued), [m.meta["val"].numel() // lead for m in members]
