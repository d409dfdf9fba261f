"""What a lowered program is predicted to do over time: kernels on one stream, collectives on another, waits between.

The planner prices a phase as ``exposed + max(compute, hidden)``: it assumes that what can be issued ahead is issued early
enough. This walks the program as it will run and says what the order of its nodes really hides:

```
node                    compute stream          communication stream
g = all_gather(w1)      |                       [ all_gather w1 ]
h = mm(x, w0)           [ mm ]                  [      ...      ]
w = wait(g)             |  waits until  ------> ]
y = mm(h, w)            [ mm ]
```

Kernels and collectives take the seconds of the cost model; a collective starts when the one issued before it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.passes.overlap import is_wait
from meshwright.passes.program import LocalProgram
from meshwright.passes.schedule import Clock
from meshwright.passes.views import is_collective
from meshwright.planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel, collective or wait.

    Attributes:
        name: of the node.
        what: ``"compute"``, ``"collective"`` or ``"wait"``.
        phase: ``"forward"`` or ``"backward"``.
        start_s: seconds since the step began; ``end_s`` likewise. A wait that does not block takes none.
    """

    name: str
    what: str
    phase: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one step, in the order in which they are issued."""

    events: tuple[Event, ...]

    def seconds_of(self, what: str) -> float:
        """Seconds of all events of one kind; those of ``"wait"`` are what communication adds to compute."""
        return sum(e.seconds for e in self.events if e.what == what)

    @property
    def step_time_s(self) -> float:
        """When both streams are done."""
        return max((e.end_s for e in self.events), default=0.0)


def timeline(program: LocalProgram, plan: Plan) -> Timeline:
    """Walk a lowered program in the order of its nodes, with the seconds that ``plan`` predicts."""
    walk = _Walk(Clock(plan))
    for graph in (program.forward, program.backward):
        if graph is not None:
            walk.run(graph.graph)
    return Timeline(tuple(walk.events))


class _Walk:
    """Both streams' clocks, moved on node by node."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.now_s = self.free_s = 0.0
        self.arrives_s: dict[str, float] = {}
        self.events: list[Event] = []

    def run(self, graph: fx.Graph) -> None:
        body = [n for n in graph.nodes if n.op == "call_function"]
        kernels = self.clock.kernels(body)
        for node in body:
            if is_wait(node):
                self._add(node, "wait", self.arrives_s[node.all_input_nodes[0].name] - self.now_s)
            elif is_collective(node):
                self._collective(node)
            else:
                self._add(node, "compute", kernels.get(node, 0.0))

    def _add(self, node: fx.Node, what: str, seconds: float) -> None:
        if seconds > 0:
            self.events.append(Event(node.name, what, node.meta["phase"], self.now_s, self.now_s + seconds))
            self.now_s += seconds

    def _collective(self, node: fx.Node) -> None:
        start = max(self.now_s, self.free_s)
        self.free_s = self.arrives_s[node.name] = start + self.clock.collective_s(node)
        self.events.append(Event(node.name, "collective", node.meta["phase"], start, self.free_s))
