"""Where to cut a program into stages: balanced work, few bytes over the boundaries.

The candidates are the places behind a forward op where fewer bytes are alive than on either side of it. Among all cuts whose slowest
stage is within a percent of the best possible, those are taken that send the fewest bytes. A stage's time counts its forward
and backward and what it sends and receives; exact, by dynamic programming over the candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.planner import rules
from meshwright.planner.cost import CostModel
from meshwright.planner.fuse import trivial_clusters
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_numel
from meshwright.planner.ir.verify import made_placements, planned_steps
from meshwright.planner.kinds import kind_of
from meshwright.planner.micro_costs import MicroCosts
from meshwright.planner.places import Places, places_in_whole
from meshwright.planner.solve.evaluate import evaluate
from meshwright.planner.solve.memory import Trained
from meshwright.planner.solve.segments import hidden_values

SLACK = 0.01
"""How much longer than the best possible the slowest stage may take, to send fewer bytes."""

_ROUNDED = 1 + 1e-9
"""Windows of places are that much wider than sums of work say."""

_VIEWS = frozenset(f"aten.{n}.default" for n in ("permute", "reshape", "expand", "_to_copy", "clone", "unsqueeze"))


@dataclass(frozen=True)
class Profile:
    """A program along its forward ops, for the whole batch on one device of a stage; float64 [forward ops] each.

    Seconds are those of kernels and of the communication that they cannot hide.

    Attributes:
        names: of the forward ops, in order.
        forward_s: seconds of each op.
        backward_s: seconds of its backward, that of weights included.
        weight_s: seconds of the part of its backward that leads to gradients of parameters only.
        alive_bytes: bytes that cross a cut behind each op, forwards; gradients are as many.
        saved: for every storage that the forward keeps for the backward, its bytes, the forward ops whose backward reads it, and
            those of whose backward the part for weights does.
        stash_bytes: bytes of gradients that the backward of weights reads.
        once_s: seconds of what is done once per step, before and after all micro-batches: gathers of kept copies, sums of gradients.
    """

    names: tuple[str, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    alive_bytes: np.ndarray
    saved: tuple[tuple[float, frozenset[int], frozenset[int]], ...]
    stash_bytes: np.ndarray
    once_s: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @cached_property
    def readings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of :attr:`saved`: index of a storage, place of an op whose backward reads it, and whether its part for weights does."""
        rows = [(k, place, place in later) for k, (_, places, later) in enumerate(self.saved) for place in sorted(places)]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2].astype(bool)

    @property
    def work_s(self) -> np.ndarray:
        """Seconds of each op, its backward included."""
        return self.forward_s + self.backward_s


def profile(
    graph: OpGraph,
    plan: Plan,
    costs: CostModel | MicroCosts,
    hides: frozenset[tuple[str, str]] | None = None,
    places: Places | None = None,
) -> Profile:
    """Work and bytes of a planned program.

    Args:
        graph: the program.
        plan: for the whole of it, on the devices of one stage.
        costs: prices of a step.
        hides: (value, phase) whose redistribution can hide; None: looked for.
        places: where its ops stand in the whole program; None: it is the whole one.
    """
    if hides is None:
        hides = hidden_values(graph, trivial_clusters(graph, rules.rows_for))
    forward = [op for op in graph.ops if op.phase == "forward"]
    spread = places or places_in_whole(graph, ())
    assert spread is not None, "a program without repeats stands for itself"
    place = places_of(graph)
    late = _weights_only(graph, forward, place)
    copied = _copied(graph)
    kernel_s = plan.kernel_s or _kernels_alone(graph, plan, costs)
    work = {phase: np.zeros(len(spread.names)) for phase in ("forward", "backward", "weight")}
    for name, s in kernel_s.items():
        ran = graph.by_name.get(name)
        if ran is not None:
            op = _reader(graph, ran, copied)
            there = spread.spread(ran, place[op.name])
            np.add.at(work[op.phase], there, s)
            np.add.at(work["weight"], there, s * late.get(op.name, 0.0))
    once = _with_communication(graph, plan, costs, place, work, hides, spread)
    made, stash = made_placements(plan, graph), np.zeros(len(spread.names))
    for op in (op for op in graph.ops if op.phase == "backward" and late[op.name] < 1.0):
        for v in (v for v in op.outs if v is not None):
            if any(late[r.name] > 0.0 for r in graph.consumers.get(v.name, ())):
                size = local_numel(v.shape, made[v.name], plan.mesh.sizes) * v.dtype.itemsize
                np.add.at(stash, spread.spread(op, place[op.name]), size)
    return Profile(
        names=spread.names,
        forward_s=work["forward"],
        backward_s=work["backward"],
        weight_s=work["weight"],
        alive_bytes=_alive(graph, plan, forward, spread),
        saved=_saved(graph, plan, place, late, spread),
        stash_bytes=stash,
        once_s=once,
    )


def _reader(graph: OpGraph, op: Op, copied: Set[str]) -> Op:
    """Who needs an op that is run again wherever it is needed; any other op itself."""
    while op.outs and op.outs[0] is not None and op.outs[0].name in copied and graph.consumers.get(op.outs[0].name):
        op = graph.consumers[op.outs[0].name][0]
    return op


def _kernels_alone(graph: OpGraph, plan: Plan, costs: CostModel | MicroCosts) -> dict[str, float]:
    """Seconds of every op as a kernel of its own, for a plan that does not say what its kernels take."""
    clusters = trivial_clusters(graph, rules.rows_for)
    seconds = evaluate(plan, graph, clusters, costs, Trained(0)).cluster_s
    return {c.ops[-1].name: s for c, s in zip(clusters.clusters, seconds, strict=True) if c.source is None and c.ops}


def _with_communication(
    graph: OpGraph,
    plan: Plan,
    costs: CostModel | MicroCosts,
    place: Mapping[str, int],
    work: dict[str, np.ndarray],
    hides: frozenset[tuple[str, str]],
    spread: Places,
) -> np.ndarray:
    """Add what kernels cannot hide to ``work``; the seconds of what is done once per step.

    Where a phase's hidden communication takes longer than its kernels, all of them are as much longer.
    """
    once, exposed = np.zeros(len(spread.names)), {p: np.zeros(len(spread.names)) for p in ("forward", "backward")}
    hidden_s = dict.fromkeys(exposed, 0.0)
    for step in planned_steps(plan, graph):
        model = costs.once if step.kept else costs
        kind, _, seconds = model.step_s(step.value, step.src, step.axis, step.dst[step.axis])
        maker = step.value.name.partition("#")[0]
        at = spread.spread(graph.by_name.get(maker), _place_of_step(graph, step.value.name, step.phase, place), maker)
        if step.kept or (isinstance(costs, MicroCosts) and costs.runs_of(step.value, kind) == 1):
            np.add.at(once, at, seconds)
        elif costs.overlaps and (step.value.name, step.phase) in hides:
            hidden_s[step.phase] += seconds * len(at)
        else:
            np.add.at(exposed[step.phase], at, seconds)
    for phase, waits in exposed.items():
        kernels = float(work[phase].sum())
        work[phase] = work[phase] * max(1.0, hidden_s[phase] / kernels if kernels else 1.0) + waits
    return once


def _place_of_step(graph: OpGraph, value: str, phase: str, place: Mapping[str, int]) -> int:
    """Where a value is brought to another placement: at its first reader in the phase, or where it is made."""
    readers = [op.name for op in graph.consumers.get(value, ()) if op.phase == phase]
    maker = graph.producer[value]
    return place.get(readers[0] if readers else maker.name, 0)


def places_of(graph: OpGraph) -> dict[str, int]:
    """For every op, the index of the forward op that it is or differentiates; sums of gradients are with the op before them."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    at, here, found = {op.name: i for i, op in enumerate(forward)}, 0, {}
    for op in graph.ops:
        here = at.get(op.name, at.get(op.recompute_of or op.forward_op or "", here))
        found[op.name] = here
    return found


def _saved(
    graph: OpGraph, plan: Plan, place: Mapping[str, int], late: Mapping[str, float], spread: Places
) -> tuple[tuple[float, frozenset[int], frozenset[int]], ...]:
    """The storages kept for the backward: views share that of what they are taken of, those of inputs and parameters are there."""
    made, root = made_placements(plan, graph), {i.value.name: i.value for i in graph.inputs}
    outside = set(root)
    read: dict[str, set[int]] = {}
    by_weights: dict[str, set[int]] = {}
    used = _used_at(graph, place)
    for op in graph.ops:
        for v in op.outs:
            if v is not None:
                root[v.name] = root[op.ins[0].name] if kind_of(op) == "view" and len(op.ins) == 1 else v
        for v in op.ins if op.phase == "backward" else ():
            if graph.phase_of[v.name] == "forward" and root[v.name].name not in outside:
                read.setdefault(root[v.name].name, set()).update(used[op.name])
                by_weights.setdefault(root[v.name].name, set()).update(used[op.name] if late[op.name] > 0.0 else ())
    values = {v.name: v for v in root.values()}
    found: list[tuple[float, frozenset[int], frozenset[int]]] = []
    for n, places in read.items():
        size = local_numel(values[n].shape, made[n], plan.mesh.sizes) * values[n].dtype.itemsize
        for places_there, weights_there in zip(
            _each(graph, n, places, spread), _each(graph, n, by_weights[n], spread), strict=True
        ):
            found.append((size, places_there, weights_there))
    return tuple(found)


def _each(graph: OpGraph, value: str, places: Set[int], spread: Places) -> list[frozenset[int]]:
    """For every value of the whole program that a planned one stands for, where ``places`` are."""
    maker = graph.producer[value]
    assert isinstance(maker, Op), "what is saved was made by an op"
    if spread.stands_for_itself(maker):
        return [frozenset(int(i) for p in places for i in spread.all_of(p, backward=True))]
    columns = [spread.spread(maker, p) for p in sorted(places)]
    if not columns:
        return [frozenset()] * len(spread.spread(maker, 0))
    return [frozenset(map(int, row)) for row in np.stack(columns, axis=1)]


def _used_at(graph: OpGraph, place: Mapping[str, int]) -> dict[str, set[int]]:
    """Where a backward op's results are used; what computes forward values again is there for its readers."""
    used: dict[str, set[int]] = {}
    for op in reversed(graph.ops):
        if op.phase == "backward":
            readers = [r for v in op.outs if v is not None for r in graph.consumers.get(v.name, ())]
            again = op.recompute_of is not None and readers
            used[op.name] = set().union(*(used[r.name] for r in readers)) if again else {place[op.name]}
    return used


def _weights_only(graph: OpGraph, forward: Sequence[Op], place: Mapping[str, int]) -> dict[str, float]:
    """Share of each backward op's work that no backward of an earlier op waits for; a convolution's backward does both.

    Views of parameters stand before the op that reads them and do not count as earlier ops; nor do sums of gradients.
    """
    copied = _copied(graph)
    staged = {i for i, op in enumerate(forward) if any(v is not None and v.name not in copied for v in op.outs)}
    earliest: dict[str, int] = {}
    later: dict[str, float] = {}
    for op in reversed(graph.ops):
        if op.phase != "backward":
            continue
        by_result = [
            min((earliest[r.name] for r in graph.consumers.get(v.name, ())), default=len(forward))
            for v in op.outs
            if v is not None
        ]
        here = place[op.name]
        ends = [least >= here for least in by_result]
        both = op.target == "aten.convolution_backward.default" and any(ends) and not all(ends)
        later[op.name] = 0.5 if both else float(bool(ends) and all(ends))
        counts = here in staged and (op.forward_op is not None or op.recompute_of is not None)
        earliest[op.name] = min([*by_result, *([here] if counts else [])])
    return later


def _alive(graph: OpGraph, plan: Plan, forward: Sequence[Op], spread: Places) -> np.ndarray:
    made, copied = made_placements(plan, graph), _copied(graph)
    at = {op.name: i for i, op in enumerate(forward)}
    change = np.zeros(len(spread.names) + 1)
    for i, op in enumerate(forward):
        for value in op.outs:
            if value is None or value.name in copied:
                continue
            last = max((at[r.name] for r in graph.consumers.get(value.name, ()) if r.name in at), default=i)
            size = local_numel(value.shape, made[value.name], plan.mesh.sizes) * value.dtype.itemsize
            np.add.at(change, spread.spread(op, i), size)
            np.add.at(change, spread.spread(op, last), -size)
    return np.cumsum(change)[:-1]


def _copied(graph: OpGraph) -> set[str]:
    """Values that every stage makes for itself: from inputs alone, or views of one parameter."""
    free = {i.value.name for i in graph.inputs if i.role in ("input", "buffer", "constant")}
    views = {i.value.name for i in graph.inputs_of("parameter")}
    for op in graph.ops:
        made = {v.name for v in op.outs if v is not None}
        if all(v.name in free for v in op.ins):
            free |= made
        elif len(op.ins) == 1 and op.ins[0].name in views and op.target in _VIEWS:
            views |= made
    return free | views


def choose_cuts(found: Profile, stages: int, link: Link, micro_batches: int) -> tuple[str, ...]:
    """The ops behind which ``stages`` stages end, but the last.

    Args:
        found: the program.
        stages: how many.
        link: between neighbouring stages.
        micro_batches: how often each boundary is crossed per step, in both directions.

    Raises:
        InputError: the program has fewer places to cut.
    """
    if stages == 1:
        return ()
    places = _different(found, cut_places(found, stages), stages)
    total = np.concatenate([[0.0], np.cumsum(found.work_s)[places], [found.work_s.sum()]])
    sizes = np.concatenate([[0.0], found.alive_bytes[places], [0.0]])
    sent = np.where(sizes > 0, 2 * (sizes / link.bytes_per_s + micro_batches * link.latency_s), 0.0)
    chain = Loads(total, sent)
    best = chain.least_maximum(stages)
    chosen = chain.fewest_bytes(sizes, stages, best * (1 + SLACK))
    return tuple(found.names[places[j - 1]] for j in chosen)


def cut_places(found: Profile, stages: int) -> np.ndarray:
    """Places where no neighbour has fewer bytes alive; all places where those are too few."""
    alive = found.alive_bytes
    inner = np.flatnonzero((alive > 0) & (np.cumsum(found.work_s) > 0))
    before, after = np.concatenate([[np.inf], alive[:-1]]), np.concatenate([alive[1:], [np.inf]])
    least = inner[(alive[inner] < before[inner]) | (alive[inner] < after[inner])]
    places = least[(alive[least] <= before[least]) & (alive[least] <= after[least])]
    places = places if len(places) >= stages - 1 else inner
    if len(places) < stages - 1:
        raise InputError(
            f"the program has {len(places)} places where it can be cut, which makes at most {len(places) + 1} stages; {stages} are "
            "asked for: use fewer stages"
        )
    return places


def _different(found: Profile, places: np.ndarray, stages: int) -> np.ndarray:
    """The first of places between which nothing is done, and as much is alive; all where those are too few."""
    work, alive = np.cumsum(found.work_s)[places], found.alive_bytes[places]
    first = np.append(True, (np.diff(work) > 0) | (np.diff(alive) != 0))
    return places[first] if int(first.sum()) >= stages - 1 else places


class Loads:
    """What stages from one place to another have to do; the first place is the start of the program, the last its end.

    Args:
        total: work before each place, float64 [places].
        sent: what a stage that begins or ends there sends and receives, float64 [places].
    """

    def __init__(self, total: np.ndarray, sent: np.ndarray):
        self._total, self._sent = total, sent
        self._end, self._begin = total + sent, total - sent

    def _between(self, before: slice, behind: slice) -> np.ndarray:
        """Load of the stage from each place to each other, infinite where it does not come behind it."""
        load = self._end[None, behind] - self._begin[before, None]
        if before.stop > behind.start:
            later = np.arange(before.start, before.stop)[:, None] < np.arange(behind.start, behind.stop)[None, :]
            load[~later] = np.inf
        return load

    def _windows(self, stages: int, limit: float) -> list[slice]:
        """Where the first ``k`` stages can end if none has more than ``limit`` of work; at the last place in the end."""
        total, number = self._total, np.arange(1, stages)
        most = np.searchsorted(total, number * limit * _ROUNDED, side="right")
        least = np.searchsorted(total, total[-1] - (stages - number) * limit * _ROUNDED, side="left")
        inner = [slice(max(int(a), k), min(int(b), len(total) - stages + k)) for k, a, b in zip(number, least, most, strict=True)]
        return [slice(0, 1), *inner, slice(len(total) - 1, len(total))]

    def least_maximum(self, stages: int) -> float:
        """Least possible load of the most loaded stage."""
        reach, windows = np.zeros(1), self._windows(stages, self._near_equal(stages))
        for before, behind in itertools.pairwise(windows):
            reach = np.maximum(reach[:, None], self._between(before, behind)).min(axis=0)
        return float(reach[-1])

    def _near_equal(self, stages: int) -> float:
        """The most loaded of stages that end near equal parts of the work."""
        total, number = self._total, np.arange(1, stages)
        ends = np.searchsorted(total, total[-1] * number / stages)
        ends = np.maximum.accumulate(ends - number) + number  # one place each
        ends = np.minimum(ends, len(total) - 1 - stages + number)
        at = np.array([0, *ends, len(total) - 1])
        return float((np.diff(total[at]) + self._sent[at[1:]] + self._sent[at[:-1]]).max())

    def fewest_bytes(self, sizes: np.ndarray, stages: int, limit: float) -> list[int]:
        """Cuts whose stages all stay within ``limit`` and that send the fewest bytes; places by number from 1."""
        windows, cost, behind = self._windows(stages, limit), np.zeros(1), list[np.ndarray]()
        for before, after in itertools.pairwise(windows):
            legal = self._between(before, after) <= limit
            step = np.where(legal, cost[:, None] + sizes[None, after], np.inf)
            behind.append(step.argmin(axis=0))
            cost = step.min(axis=0)
        at, chosen = 0, []
        for previous, window in zip(reversed(behind[1:]), reversed(windows[1:-1]), strict=True):
            at = int(previous[at])
            chosen.append(window.start + at)
        return chosen[::-1]
