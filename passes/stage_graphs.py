"""Build each stage's own joint graph out of one rank's joint graph.

```
stage 0:  a = attn(h, m)            sends a ;  ga received  -> gradients of its parameters
stage 1:  a received; b = attn(a, m'); l = loss(b) ;  ga = ...  sends ga -> gradients of its parameters
```

A value of a later use travels from neighbour to neighbour: forward values downstream, gradients upstream. What belongs to no
stage is copied into every one that needs it. A value that the backward would compute again from values of an earlier stage is
taken from what that stage sent, where it was sent as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from meshwright.passes.cut_stages import COPIED, Stages
from meshwright.passes.micro_batches import TimeNodes
from meshwright.planner.ir.errors import VerifyError

SUM, ONCE = "sum:", "once:"
"""What the names of results begin with that are added up over micro-batches, and of those that any one of them makes whole."""


@dataclass(frozen=True)
class Root:
    """A result of the step, on its stage.

    Attributes:
        role: ``"mutation"``, ``"output"`` or ``"gradient"``.
        name: FQN of the buffer or parameter; path of the output.
        node: the node of the joint graph that makes it.
        stage: where it is wanted.
    """

    role: str
    name: str
    node: fx.Node
    stage: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that crosses a stage boundary.

    Attributes:
        name: of the value.
        shape: local shape.
        dtype: element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> Slot:
        val = node.meta["val"]
        return cls(node.name, tuple(val.shape), val.dtype)


@dataclass(frozen=True)
class Finish:
    """What is done once per step to the sums over micro-batches.

    Attributes:
        role: of its results: ``"output"`` or ``"gradient"``.
        program: plain function of ``inputs``, returns a tuple.
        inputs: (role, name) of its arguments: ``"sum"`` (name of a result of the micro-batches), ``"known"`` or ``"input"``.
        results: paths of outputs or FQNs of parameters.
    """

    role: str
    program: fx.GraphModule
    inputs: tuple[tuple[str, str], ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class StageGraph:
    """One stage's joint graph for one micro-batch, and what is done after the last.

    Attributes:
        index: number of the stage.
        gm: the graph; it returns mutations, outputs, ``sends``, gradients, ``upstream``. An output or gradient that must be summed
            over micro-batches is returned as the addend.
        results: role and name of the mutations, outputs and gradients; addends are named ``"sum:..."``, what every micro-batch makes
            whole ``"once:..."``.
        receives: forward values from the stage before; ``sends``: to the next one.
        downstream: gradients from the next stage; ``upstream``: to the one before.
        known: values of the pre-pass that ``gm`` reads; ``finish_known``: that ``finishes`` read.
        finishes: computes outputs and gradients from the sums, once per step.
        parameters: FQNs of the parameters that the stage and its ``finishes`` read; ``gradients``: of those that it makes a gradient (term) of.
    """

    index: int
    gm: fx.GraphModule
    results: tuple[tuple[str, str], ...]
    receives: tuple[Slot, ...]
    sends: tuple[Slot, ...]
    downstream: tuple[Slot, ...]
    upstream: tuple[Slot, ...]
    known: tuple[fx.Node, ...]
    finish_known: tuple[fx.Node, ...]
    finishes: tuple[Finish, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]


class Cutter:
    """Finds what every stage computes, receives and sends for the roots, and builds the graphs."""

    def __init__(self, gm: fx.GraphModule, stages: Stages, times: TimeNodes, roots: Iterable[Root]):
        self.gm, self.stages, self.times, self.roots = gm, stages, times, tuple(roots)
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.local: dict[int, set[fx.Node]] = defaultdict(set)
        self.forward_in: dict[int, set[fx.Node]] = defaultdict(set)
        self.backward_in: dict[int, set[fx.Node]] = defaultdict(set)
        self.known: dict[int, set[fx.Node]] = defaultdict(set)
        self.alias: dict[tuple[fx.Node, int], fx.Node] = {}
        self.finish: dict[tuple[int, str], dict[fx.Node, None]] = defaultdict(dict)
        self.made = self._forward_values()
        for root in self.roots:
            if root.node in times.complete:
                self._need_complete(root.node, root.stage, root.role)
            else:
                self._need(root.node, root.stage)

    def _forward_values(self) -> dict[tuple[object, object], fx.Node]:
        """(name, placements) of a value to the node of the forward that makes it."""
        found: dict[tuple[object, object], fx.Node] = {}
        for n in self.order:
            if self.stages.kind.get(n) == "forward" and "value" in n.meta and "placements" in n.meta:
                found[n.meta["value"], n.meta["placements"]] = n
        return found

    # --- what is needed where ---

    def _need_complete(self, node: fx.Node, stage: int, role: str) -> None:
        """``node`` is computed after all micro-batches, from sums and from what is known beforehand."""
        found, todo = self.finish[stage, role], [node]
        while todo:
            n = todo.pop()
            if n in found:
                continue
            found[n] = None
            if n in self.times.after:
                self._need(self.times.after[n].operand, stage)
            elif n not in self.times.known:
                todo.extend(n.all_input_nodes)

    def _need(self, node: fx.Node, stage: int) -> None:
        todo = [(node, stage)]
        while todo:
            n, t = todo.pop()
            if n.op == "placeholder" or n in self.times.known:
                (self.local if n.op == "placeholder" else self.known)[t].add(n)
                continue
            kind, home = self.stages.kind[n], self.stages.of.get(n, t)
            if kind == COPIED:
                substitute = self._sent_already(n, t)
                if substitute is not None:
                    self.alias[n, t] = substitute
                    todo.append((substitute, t))
                    continue
            elif home != t:
                self._travel(n, kind, home, t)
                todo.append((n, home))
                continue
            if n not in self.local[t]:
                self.local[t].add(n)
                todo.extend((a, t) for a in n.all_input_nodes)

    def _travel(self, n: fx.Node, kind: str, home: int, t: int) -> None:
        if (kind == "forward") != (home < t):
            raise VerifyError(f"{kind} node {n.name} of stage {home} is needed on stage {t}, against the direction of its phase")
        if kind == "forward":
            for k in range(home + 1, t + 1):
                self.forward_in[k].add(n)
        else:
            for k in range(t, home):
                self.backward_in[k].add(n)

    def _sent_already(self, n: fx.Node, t: int) -> fx.Node | None:
        """The forward value of an earlier stage that ``n`` would compute again."""
        again = n.meta.get("recompute_of")
        if again is None or "placements" not in n.meta or "value" not in n.meta:
            return None
        _, mark, slot = n.meta["value"].partition("#")
        original = self.made.get((again + mark + slot, n.meta["placements"]))
        return original if original is not None and self.stages.of[original] < t else None

    # --- building ---

    def build(self, stage: int, last: int) -> StageGraph:
        """The graph of one stage.

        Args:
            stage: its number.
            last: the last stage's.
        """
        results = self._results(stage)
        sends = self._sorted(self.forward_in[stage + 1]) if stage < last else []
        upstream = self._sorted(self.backward_in[stage - 1]) if stage else []
        forward = [r for r in results if r[0] in ("mutation", "output")]
        gradients = [r for r in results if r[0] == "gradient"]
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        self._place(stage, graph, new)
        for node in self._sorted(n for n in self.local[stage] if n.op != "placeholder"):
            new[node] = graph.node_copy(node, lambda a: self._resolved(a, stage, new))
        returned = [*(n for *_, n in forward), *sends, *(n for *_, n in gradients), *upstream]
        output = graph.output(tuple(self._resolved(n, stage, new) for n in returned))
        output.meta["val"] = None
        return StageGraph(
            index=stage,
            gm=fx.GraphModule(self.gm, graph),
            results=tuple((role, name) for role, name, _ in (*forward, *gradients)),
            receives=tuple(map(Slot.of, self._sorted(self.forward_in[stage]))),
            sends=tuple(map(Slot.of, sends)),
            downstream=tuple(map(Slot.of, self._sorted(self.backward_in[stage]))),
            upstream=tuple(map(Slot.of, upstream)),
            known=tuple(self._sorted(self.known[stage])),
            finish_known=tuple(
                self._sorted(n for role in ("output", "gradient") for n in self.finish[stage, role] if n in self.times.known)
            ),
            finishes=tuple(f for role in ("output", "gradient") if (f := self._finish(stage, role)) is not None),
            parameters=tuple(n.meta["fqn"] for n in self._sorted(self._read(stage)) if n.meta.get("role") == "parameter"),
            gradients=tuple(r.name for r in self.roots if r.stage == stage and r.role == "gradient"),
        )

    def _read(self, stage: int) -> set[fx.Node]:
        """What the stage's graph and its finishes read."""
        return self.local[stage].union(*(self.finish[stage, role] for role in ("output", "gradient")))

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def _resolved(self, node: fx.Node, stage: int, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        return new[self.alias.get((node, stage), node)]

    def _results(self, stage: int) -> list[tuple[str, str, fx.Node]]:
        """(role, name, node) of what a micro-batch makes: mutations, outputs, gradients; sums by the names of their nodes."""
        mine = [r for r in self.roots if r.stage == stage]
        found = [(r.role, self._named(r), r.node) for r in mine if r.node not in self.times.complete]
        for role in ("output", "gradient"):
            operands = dict.fromkeys(self.times.after[n].operand for n in self.finish[stage, role] if n in self.times.after)
            found += [(role, SUM + operand.name, operand) for operand in operands]
        rank = {"mutation": 0, "output": 1, "gradient": 2}
        return sorted(found, key=lambda r: rank[r[0]])

    def _named(self, root: Root) -> str:
        return ONCE + root.name if root.role != "mutation" and self.times.is_once(root.node) else root.name

    def _place(self, stage: int, graph: fx.Graph, new: dict[fx.Node, fx.Node]) -> None:
        """Placeholders: inputs of the program, of the pre-pass, from the stage before; tangents, from the stage behind."""
        held = self._sorted(n for n in self.local[stage] if n.op == "placeholder")
        inputs = [n for n in held if n.meta["phase"] == "forward"]
        tangents = [n for n in held if n.meta["phase"] == "backward"]
        groups = (
            ("", "forward", inputs),
            ("known", "forward", self._sorted(self.known[stage])),
            ("received", "forward", self._sorted(self.forward_in[stage])),
            ("", "backward", tangents),
            ("gradient", "backward", self._sorted(self.backward_in[stage])),
        )
        for role, phase, nodes in groups:
            for node in nodes:
                new[node] = graph.placeholder(node.name)
                new[node].meta.update(node.meta if not role else _received(node, role, phase))

    def _finish(self, stage: int, role: str) -> Finish | None:
        """What is done to the sums for results of one role."""
        ends = [r for r in self.roots if r.stage == stage and r.role == role and r.node in self.times.complete]
        if not ends:
            return None
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs: list[tuple[str, str]] = []
        body: list[fx.Node] = []
        for node in self._sorted(self.finish[stage, role]):
            if node in self.times.after:
                inputs.append(("sum", SUM + self.times.after[node].operand.name))
            elif node in self.times.known:
                inputs.append(("known", node.name))
            elif node.op == "placeholder":
                inputs.append(("input", node.meta["value"]))
            else:
                body.append(node)
                continue
            new[node] = graph.placeholder(node.name)
            new[node].meta.update(_received(node, inputs[-1][0], "backward"))
        for node in body:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta["phase"] = "backward"
        graph.output(tuple(new[r.node] for r in ends)).meta["val"] = None
        return Finish(role, fx.GraphModule(self.gm, graph), tuple(inputs), tuple(r.name for r in ends))


def _received(node: fx.Node, role: str, phase: str) -> dict[str, object]:
    return {"val": node.meta["val"], "role": role, "phase": phase, "value": node.name, "fqn": node.name, "placements": None}
