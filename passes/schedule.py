"""Place every collective and every wait by the clock: what the plan calls hidden must be under way while kernels run.

The kernels keep their order. Before each of them, with the seconds that the plan predicts:

1. results that have arrived are waited for, which costs nothing then and lets what follows them go on its way: the second
   leg of a hierarchical reduction starts when the first has arrived, without stopping the kernels;
2. reductions, and whatever the kernels just made, are issued at once;
3. gathers of what is there since the phase began are issued just in time, the earliest needed first, and never more ahead
   of their use than the plan counts memory for.

```
kernels         [mm      ][mm      ][mm      ]            the gather of w2 is issued while the first mm runs,
communication      [gather w2][reduce g0 ][gather w3]     and g0 is waited for when it is there
```

All ranks place by the same numbers, so the order of collectives is the same on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from meshwright.passes.overlap import Moves, is_wait
from meshwright.passes.redistribute import Step
from meshwright.passes.views import is_collective
from meshwright.planner.ir.heavy import HEAVY
from meshwright.planner.ir.plan import Plan

SLACK = (2.0, 4.0)
"""Gathers are given at least and at most this many times their own seconds to arrive: reductions travel between them."""

COPIES = 2
"""Largest gathered copies that there is memory for: what is in use and what is ahead."""

FLYING = 2
"""Largest buffers of shrinking reductions that may be under way: their operands are held until they have arrived."""


@dataclass(frozen=True)
class ScheduleCollectives:
    """The pass.

    Attributes:
        plan: gives the seconds of kernels and collectives; without them a big op takes one unit, a collective a quarter.
    """

    plan: Plan

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        output = next(reversed(gm.graph.nodes))
        clock = Clock(self.plan)
        for phase in ("forward", "backward"):
            body = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
            for node in _Schedule(body, clock).run():
                output.prepend(node)
        return gm


class Clock:
    """Seconds of nodes, as a plan predicts them."""

    def __init__(self, plan: Plan):
        self._kernel_s = plan.kernel_s
        self._known: dict[tuple[str, int], list[tuple[int, float]]] = {}
        sums: dict[tuple[str, int, int], tuple[int, float]] = {}
        for c in plan.collectives:
            count, seconds = sums.get((c.kind, c.axis, c.bytes), (0, 0.0))
            sums[c.kind, c.axis, c.bytes] = count + c.count, seconds + c.count * c.time_s
        for (kind, axis, size), (count, seconds) in sums.items():
            self._known.setdefault((kind, axis), []).append((size, seconds / count))

    def kernels(self, body: Iterable[fx.Node]) -> dict[fx.Node, float]:
        """Seconds by node of all kernels; each stands at the last node of its last op."""
        last = {n.meta["op"]: n for n in body if "op" in n.meta}
        return {node: self._kernel(node) for node in last.values()}

    def _kernel(self, node: fx.Node) -> float:
        if not self._kernel_s:
            return float(str(node.target) in HEAVY)
        return self._kernel_s.get(node.meta.get("op", ""), 0.0)

    def collective_s(self, node: fx.Node) -> float:
        """Of a collective, or of all that share its buffer."""
        return sum(map(self._step_s, steps_of(node)))

    def _step_s(self, step: Step) -> float:
        known = self._known.get((step.kind, step.axis)) if self._kernel_s else None
        if not known:
            return 0.25
        size = step.moved_bytes
        nearest, seconds = min(known, key=lambda k: abs(k[0] - size))
        return seconds * size / nearest if nearest else seconds


def steps_of(node: fx.Node) -> tuple[Step, ...]:
    """The steps that share a collective's buffer."""
    return node.meta.get("steps") or (node.meta["step"],)


@dataclass(eq=False)
class _Flight:
    """A collective on its way.

    Attributes:
        node: the collective.
        seconds: that it takes.
        bytes: of the larger of operand and result.
        due: index of the first kernel that reads its result; the length of the body where only the phase's results do.
        latest_s: seconds of kernels after which it must be issued to arrive in time; None: as soon as it can be.
        missing: kernels and arrivals that it still waits for.
    """

    node: fx.Node
    seconds: float
    bytes: int
    due: int
    latest_s: float | None = None
    missing: set[fx.Node] = field(default_factory=set)


class _Schedule:
    """List scheduling of one phase: the kernels in their order, everything else by the clock."""

    def __init__(self, body: list[fx.Node], clock: Clock):
        self.body, self.moves = body, Moves.of(body)
        self.index = {n: i for i, n in enumerate(body)}
        self.kernel_s = clock.kernels(body)
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        self.now_s = self.free_s = self.ran_s = 0.0
        self.arrives_s: dict[fx.Node, float] = {}
        self.ahead = self.in_use = 0
        self.arrived: list[_Flight] = []
        self.unread: dict[int, list[int]] = {}
        self._flights(clock)

    # --- what there is to place ---

    def _flights(self, clock: Clock) -> None:
        due = self._due()
        self.flights: dict[fx.Node, _Flight] = {}
        self.blocks: dict[fx.Node, list[_Flight]] = {}
        for node in self.body:
            if not is_collective(node) or is_wait(node):
                continue
            flight = _Flight(node, clock.collective_s(node), sum(s.moved_bytes for s in steps_of(node)), due[node])
            flight.missing = self._needed(node)
            for needed in flight.missing:
                self.blocks.setdefault(needed, []).append(flight)
            self.flights[node] = flight
        self._set_latest()
        self.timed = deque(sorted((f for f in self.flights.values() if f.latest_s is not None), key=lambda f: f.due))
        self.ready = {f: None for f in self.flights.values() if f.latest_s is None and not f.missing}
        self.under_way: dict[_Flight, None] = {}
        self.largest_ahead = max((f.bytes for f in self.timed), default=0)
        self.most_flying = FLYING * max((f.bytes for f in self.flights.values() if _shrinks(f)), default=0)

    def _due(self) -> dict[fx.Node, int]:
        """Index of the first kernel that needs each node."""
        due: dict[fx.Node, int] = {}
        for node in reversed(self.body):
            fixed = self.index[node] if node not in self.moves else len(self.body)
            due[node] = min((due[u] for u in node.users if u in due), default=len(self.body))
            due[node] = min(due[node], fixed)
        return due

    def _needed(self, node: fx.Node) -> set[fx.Node]:
        """Kernels and arrivals that a collective's operands are made from."""
        found: set[fx.Node] = set()
        pending, seen = list(node.all_input_nodes), set[fx.Node]()
        while pending:
            operand = pending.pop()
            if operand in seen or operand not in self.index:
                continue
            seen.add(operand)
            if operand in self.moves.before or operand in self.moves.free:
                pending += operand.all_input_nodes
            else:
                found.add(operand)
        return found

    def _set_latest(self) -> None:
        """Gathers arrive just in time: packed backwards from their dues, with slack for what travels between them.

        A gather of several legs goes on only between kernels, hence the margin.
        """
        margin = 2 * max(self.kernel_s.values(), default=0.0)
        ran, starts = 0.0, []
        for node in self.body:
            starts.append(ran)
            ran += self.kernel_s.get(node, 0.0) if node not in self.moves else 0.0
        timed = [f for f in self.flights.values() if steps_of(f.node)[0].kind == "all_gather" and f.due < len(self.body)]
        mine, all_ = sum(f.seconds for f in timed), sum(f.seconds for f in self.flights.values())
        slack = min(max(all_ / mine, SLACK[0]), SLACK[1]) if mine else 1.0
        free = ran
        for flight in sorted(timed, key=lambda f: f.due, reverse=True):
            free = min(free, starts[flight.due]) - slack * flight.seconds
            flight.latest_s = free - margin

    # --- placing ---

    def run(self) -> list[fx.Node]:
        """All nodes in their new order."""
        for i, node in enumerate(self.body):
            if node in self.moves:
                continue
            self.settle()
            self.issue_before(i, self.kernel_s.get(node, 0.0))
            self.relieve()
            self.emit(node)
        while len(self.order) < len(self.body) and (self.ready or self.timed or self.under_way):
            for flight in [*self.ready, *(f for f in self.timed if not f.missing)]:
                self.emit(flight.node)
            self.now_s = max(self.now_s, min((self.arrives_s[f.node] for f in self.under_way), default=self.now_s))
            self.settle()
        for node in self.body:
            self.emit(node)
        return self.order

    def settle(self) -> None:
        """Wait for what has arrived, and lay all of it out: other collectives may need what no kernel has asked for yet."""
        for flight in [f for f in self.under_way if self.arrives_s[f.node] <= self.now_s] + self.arrived:
            self.land(flight)
        self.arrived = []

    def land(self, flight: _Flight) -> None:
        """Wait for a flight, and lay out what it brings."""
        self.under_way.pop(flight, None)
        pending = list(flight.node.users)
        while pending:
            node = pending.pop()
            if node in self.moves.after and all(a in self.done or a not in self.index for a in node.all_input_nodes):
                self.emit(node)
                pending += node.users

    def issue_before(self, due: int, kernel_s: float) -> None:
        """Keep the communication stream busy while the next kernel runs, the earliest needed first."""
        while self.free_s <= self.now_s + kernel_s:
            waiting = [f for f in (min(self.ready, key=lambda f: f.due, default=None), self.next_timed(due)) if f is not None]
            if not waiting:
                return
            self.emit(min(waiting, key=lambda f: f.due).node)

    def next_timed(self, due: int) -> _Flight | None:
        """The gather to issue now, if it is time for one and there is room ahead of its use."""
        for flight in self.timed:
            assert flight.latest_s is not None
            if flight.latest_s > self.ran_s:
                return None
            room = flight.due <= due or self.in_use + self.ahead + flight.bytes <= COPIES * self.largest_ahead
            if not flight.missing and room:
                return flight
        return None

    def relieve(self) -> None:
        """Wait for the oldest reductions while more memory is held for them than the plan counts."""
        held = [f for f in (*self.under_way, *self.ready) if _shrinks(f)]
        size = sum(f.bytes for f in held)
        for flight in held:
            if size <= self.most_flying:
                return
            self.emit(flight.node)
            self.now_s = max(self.now_s, self.arrives_s[flight.node])
            self.land(flight)
            size -= flight.bytes

    def emit(self, node: fx.Node) -> None:
        """Place a node, and first whatever it reads."""
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [a for a in top.all_input_nodes if a in self.index and a not in self.done]
            if top in self.done or not missing:
                pending.pop()
                if top not in self.done:
                    self.place(top)
            else:
                pending += reversed(missing)

    def place(self, node: fx.Node) -> None:
        """Append a node and move the clocks on."""
        self.order.append(node)
        self.done.add(node)
        if node in self.flights:
            self._take_off(self.flights[node])
        elif is_wait(node):
            self._arrive(self.flights[node.all_input_nodes[0]])
        elif node in self.kernel_s:
            self.now_s += self.kernel_s[node]
            self.ran_s += self.kernel_s[node]
        for flight in self.blocks.pop(node, ()):
            flight.missing.discard(node)
            if not flight.missing and flight.latest_s is None and flight.node not in self.done:
                self.ready[flight] = None
        if node not in self.moves:
            self._use(node)

    def _take_off(self, flight: _Flight) -> None:
        self.free_s = max(self.free_s, self.now_s) + flight.seconds
        self.arrives_s[flight.node] = self.free_s
        self.under_way[flight] = None
        self.ready.pop(flight, None)
        if flight.latest_s is not None:
            self.timed.remove(flight)
            self.ahead += flight.bytes
            self.unread.setdefault(flight.due, []).append(flight.bytes)

    def _arrive(self, flight: _Flight) -> None:
        self.under_way.pop(flight, None)
        self.arrived.append(flight)
        self.now_s = max(self.now_s, self.arrives_s[flight.node])

    def _use(self, kernel: fx.Node) -> None:
        """What was gathered ahead for this kernel is in use now."""
        gathered = sum(self.unread.pop(self.index[kernel], ()))
        if gathered:
            self.ahead, self.in_use = self.ahead - gathered, gathered


def _shrinks(flight: _Flight) -> bool:
    """Whether less remains than was sent: the operand is worth being freed."""
    return steps_of(flight.node)[0].kind == "reduce_scatter"
