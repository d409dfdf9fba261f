"""Bytes on the ranks of a pipeline: what their stages hold, and what micro-batches in flight keep."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.gradient_sums import GradientSums
from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.graph import GraphInput, OpGraph
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_numel
from meshwright.planner.ir.verify import parameter_behind, value_named
from meshwright.planner.places import Places, places_in_whole
from meshwright.planner.solve.alive import FLYING
from meshwright.planner.solve.memory import optimizer_bytes


@dataclass(frozen=True)
class GradientBytes:
    """What gradients of one parameter take on a device.

    Attributes:
        sums: over micro-batches, from the first backward to the end of the step.
        fresh: of one micro-batch, before it is added to the sums.
        travel: at most beside the sum while it is reduced between devices at the end of the step; 0 where that is done before.
    """

    sums: int = 0
    fresh: int = 0
    travel: int = 0


def gradient_bytes(plan: Plan, graph: OpGraph) -> dict[str, GradientBytes]:
    """Value name of a parameter to what its gradients take, for a plan with a pipeline; whatever its cuts are.

    Sums lie where the runtime takes them: whole where they are reduced whole once per step. They have at least 32 bits. What is made of
    them at the end of the step takes their place: a sum is freed once it is read.
    """
    assert plan.pipeline is not None
    if not plan.training:
        return {}
    sizes, found = plan.mesh.sizes, dict[str, GradientBytes]()
    parameters = {name: i for i in graph.inputs_of("parameter") for name in (i.name, *i.aliases)}
    rest = {
        i.value.name: local_numel(i.value.shape, plan.inputs[i.value.name], sizes) * i.value.dtype.itemsize
        for i in parameters.values()
        if i.trainable
    }
    if plan.pipeline.micro_batches == 1:
        return {name: GradientBytes(size) for name, size in rest.items()}
    for gradient, value, placements in GradientSums(plan, graph).held():
        if gradient not in parameters:
            continue
        name, numel, width = parameters[gradient].value.name, local_numel(value.shape, placements, sizes), value.dtype.itemsize
        before, sums = found.get(name, GradientBytes()), numel * max(width, 4)
        reduced = any(p.is_partial for p in placements)
        travel = 0 if not reduced else sums if sums < REDUCE_BYTES else rest[name] * (sums != rest[name])
        found[name] = GradientBytes(before.sums + sums, before.fresh + numel * width, before.travel + travel)
    return found


@dataclass(frozen=True)
class Resting:
    """What is held for the parameters of the whole program, on the devices of one stage; arrays are [parameters] unless they say otherwise.

    Attributes:
        names: FQNs, as the planned program has them.
        at_rest: bytes of a device's piece.
        state: bytes of its optimizer state.
        accumulated: bytes of its gradients of earlier steps, where the caller adds them up.
        kept: bytes of copies that live the whole step.
        sums, fresh, travel: bytes of its gradients, see :class:`GradientBytes`.
        reader: index of a parameter and ``place`` of a forward op that reads it, int64 [readings].
    """

    names: tuple[str, ...]
    at_rest: np.ndarray
    state: np.ndarray
    accumulated: np.ndarray
    kept: np.ndarray
    sums: np.ndarray
    fresh: np.ndarray
    travel: np.ndarray
    reader: np.ndarray
    place: np.ndarray

    def on_ranks(self, plan: Plan, cuts: Sequence[int]) -> list[np.ndarray]:
        """Per rank, the parameters that its forward ops read; ``cuts``: places behind which stages end."""
        assert plan.pipeline is not None
        rank_of = np.array([plan.pipeline.rank_of(s) for s in range(plan.pipeline.num_stages)])
        rank = rank_of[np.searchsorted(np.asarray(cuts, dtype=np.int64), self.place)]
        return [np.unique(self.reader[rank == r]) for r in range(plan.pipeline.degree)]

    def by_place(self, num_places: int) -> np.ndarray:
        """Bytes that are held whatever runs, at the forward op that reads each parameter first, float64 [forward ops]."""
        return self.at_first(
            self.at_rest + self.state + self.accumulated + self.kept + self.sums + np.maximum(self.fresh, self.travel), num_places
        )

    def at_first(self, of_parameter: np.ndarray, num_places: int) -> np.ndarray:
        """Amounts [parameters], at the forward op that reads each parameter first, float64 [forward ops]."""
        first = np.full(len(self.names), num_places)
        np.minimum.at(first, self.reader, self.place)
        found, is_read = np.zeros(num_places), first < num_places
        np.add.at(found, first[is_read], of_parameter[is_read])
        return found

    def sums_on_ranks(self, plan: Plan, cuts: Sequence[int]) -> list[int]:
        """Bytes of sums of gradients per rank: each stage that reads a parameter has a sum of its own."""
        assert plan.pipeline is not None
        stage = np.searchsorted(np.asarray(cuts, dtype=np.int64), self.place)
        of_stage = [int(self.sums[np.unique(self.reader[stage == s])].sum()) for s in range(plan.pipeline.num_stages)]
        return [sum(of_stage[s] for s in plan.pipeline.stages_of(r)) for r in range(plan.pipeline.degree)]

    def fresh_by_place(self, cuts: Sequence[int], num_places: int) -> np.ndarray:
        """Bytes of a micro-batch's gradients that there are when a stage's backward is at each forward op, float64 [forward ops].

        A gradient is complete behind the backward of the first op of the stage that reads its parameter.
        """
        return read_down_to(self.reader, self.place, self.fresh, cuts, num_places)


def read_down_to(reading: np.ndarray, place: np.ndarray, sizes: np.ndarray, cuts: Sequence[int], num_places: int) -> np.ndarray:
    """For each forward op, the bytes of what no earlier op of its stage reads, but it or a later one; float64 [forward ops].

    Args:
        reading: index of what is read, and ``place`` of the forward op that reads it, int64 [readings].
        sizes: bytes of what is read.
        cuts: places behind which stages end.
        num_places: number of forward ops.
    """
    stage = np.searchsorted(np.asarray(cuts, dtype=np.int64), place)
    firsts = np.full((len(sizes), len(cuts) + 1), num_places)
    np.minimum.at(firsts, (reading, stage), place)
    found = np.zeros(num_places + 1)
    np.add.at(found, firsts, np.asarray(sizes, dtype=float)[:, None])
    edges = [0, *(cut + 1 for cut in cuts), num_places]
    return np.concatenate([found[a:b][::-1].cumsum()[::-1] for a, b in itertools.pairwise(edges)])


def resting_of(plan: Plan, graph: OpGraph, gradients: Mapping[str, GradientBytes], places: Places | None = None) -> Resting:
    """What is held for a program's parameters.

    Args:
        plan: for all of it.
        graph: the program.
        gradients: as :func:`gradient_bytes` finds.
        places: where its ops stand in the whole program; None: it is the whole one.
    """
    spread = places or places_in_whole(graph, ())
    assert spread is not None, "a program without repeats stands for itself"
    forward = [op for op in graph.ops if op.phase == "forward"]
    source: dict[str, GraphInput] = {i.value.name: i for i in graph.inputs_of("parameter")}
    read: dict[str, list[int]] = {}
    for index, op in enumerate(forward):
        if len(op.ins) == 1 and op.ins[0].name in source:  # a view of it: who reads the view holds the parameter
            source.update((v.name, source[op.ins[0].name]) for v in op.outs if v is not None)
            if graph.consumers.get(op.outs[0].name if op.outs[0] is not None else ""):
                continue
        for i in (source[v.name] for v in op.ins if v.name in source):
            read.setdefault(i.value.name, []).append(index)
    kept = _kept_bytes(plan, graph)
    state = optimizer_bytes(int(plan.optimizer) if plan.optimizer.isdigit() else plan.optimizer)
    names, rows, readings = list[str](), list[tuple[int, ...]](), list[tuple[int, int]]()
    for i in graph.inputs_of("parameter"):
        name, made = i.value.name, gradients.get(i.value.name, GradientBytes())
        numel = local_numel(i.value.shape, plan.inputs[name], plan.mesh.sizes)
        size, trained = numel * i.value.dtype.itemsize, i.trainable and plan.training
        held = size, numel * state * trained, size * (trained and plan.accumulate > 1), kept.get(name, 0)
        for column in _readings(spread, name, read.get(name, [])):
            readings += [(len(rows), int(at)) for at in column]
            names.append(i.name)
            rows.append((*held, made.sums, made.fresh, made.travel))
    table = np.array(rows, dtype=np.int64).reshape(-1, 7)
    pairs = np.array(readings, dtype=np.int64).reshape(-1, 2)
    at_rest, states, accumulated, keeps, sums, fresh, travel = table.T
    return Resting(tuple(names), at_rest, states, accumulated, keeps, sums, fresh, travel, pairs[:, 0], pairs[:, 1])


def _readings(spread: Places, name: str, indices: Sequence[int]) -> list[np.ndarray]:
    """For every parameter of the whole program that a planned one stands for, where it is read."""
    if spread.stands_for_itself(None, name):
        return [np.concatenate([spread.all_of(i) for i in indices])] if indices else []
    columns = [spread.spread(None, i, name) for i in indices]
    return list(np.stack(columns, axis=1)) if columns else []


def rank_memory(
    plan: Plan, held: Resting, cuts: Sequence[int], in_flight_bytes: Sequence[float], beside: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Bytes by category on every rank.

    Args:
        plan: with a pipeline.
        held: for its parameters.
        cuts: places of the ops behind which stages end.
        in_flight_bytes: per rank, the most that micro-batches in flight keep at once.
        beside: per rank, what running takes besides, by category: gathered copies of parameters, one op's own values, a micro-batch's
            gradients; ``activations``: less what its backward has freed by then.
    """
    found, sums = [], held.sums_on_ranks(plan, cuts)
    for rank, mine in enumerate(held.on_ranks(plan, cuts)):
        running = {**beside[rank], "activations": int(in_flight_bytes[rank]) + beside[rank].get("activations", 0)}
        largest = int(held.travel[mine].max(initial=REDUCE_BYTES))
        at_the_end = {"activations": 0, "gradients": min(int(held.travel[mine].sum()), FLYING * largest)}
        more = max(running, at_the_end, key=lambda sizes: sum(sizes.values()))
        found.append(
            {
                "parameters": int(held.at_rest[mine].sum()),
                "optimizer": int(held.state[mine].sum()),
                **({"accumulated": int(held.accumulated[mine].sum())} if plan.accumulate > 1 else {}),
                **({"kept": int(held.kept[mine].sum())} if plan.kept else {}),
                **more,
                "gradients": sums[rank] + more.get("gradients", 0),
            }
        )
    return found


def _kept_bytes(plan: Plan, graph: OpGraph) -> dict[str, int]:
    """Value name of a parameter to the bytes of its copies that live the whole step."""
    found: dict[str, int] = {}
    for name, placements in plan.kept.items():
        value, parameter = value_named(graph, name), parameter_behind(graph, name)
        size = local_numel(value.shape, placements, plan.mesh.sizes) * value.dtype.itemsize
        found[parameter] = found.get(parameter, 0) + size
    return found
