"""Legal plans without a solver: replicated, greedy and random ones.

A random legal plan is adversarial: whatever placements it chooses, loss and gradients must come out the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.planner.ir.graph import Capture, GraphInput, GraphOutput, Op, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Collective, OpSpec, Plan, Prediction
from meshwright.planner.ir.redistribute import default_path, step_axis, step_kind
from meshwright.planner.ir.spec import Placements, R, Row, S, divides, local_numel
from meshwright.planner.ir.verify import planned_steps
from meshwright.planner.rules import rows_for

Choose = Callable[[Op, Sequence[OpSpec], Mapping[str, Placements]], OpSpec]


def replicated_plan(capture: Capture, mesh: MeshShape) -> Plan:
    """Everything everywhere: no collectives."""
    return plan_by(capture, mesh, lambda op, specs, made: specs[0])


def greedy_plan(
    capture: Capture, mesh: MeshShape, *, batch_axes: Sequence[int] = (), parameters: Mapping[str, Placements] | None = None
) -> Plan:
    """Each op in turn takes the spec that moves the fewest bytes, then the one that computes the least.

    Args:
        capture: the program.
        mesh: the mesh.
        batch_axes: axes over which batch inputs come in sharded along dim 0.
        parameters: placements at rest by FQN; ``"*"`` stands for all others (a dim that does not exist: replicated).
    """
    rest = parameters or {}
    everywhere = (R,) * mesh.num_axes
    data = tuple(S(0) if a in batch_axes else R for a in range(mesh.num_axes))

    def place(placeholder: GraphInput) -> Placements:
        value = placeholder.value
        if placeholder.role == "input" and value.shape and divides(value.shape, data, mesh.sizes):
            return data
        wanted = rest.get(placeholder.name, rest.get("*", everywhere)) if placeholder.role == "parameter" else everywhere
        return wanted if all(not p.is_shard or p.dim < len(value.shape) for p in wanted) else everywhere

    def choose(op: Op, specs: Sequence[OpSpec], made: Mapping[str, Placements]) -> OpSpec:
        def cost(spec: OpSpec) -> tuple[float, float]:
            moved = sum(_moved_bytes(v, made[v.name], p, mesh.sizes) for v, p in zip(op.ins, spec.ins, strict=True))
            kept = [local_numel(v.shape, p, mesh.sizes) for v, p in zip(op.outs, spec.outs, strict=True) if v and p]
            read = [local_numel(v.shape, p, mesh.sizes) for v, p in zip(op.ins, spec.ins, strict=True)]
            return moved, sum(kept) + sum(read)

        return min(specs, key=cost)

    return plan_by(capture, mesh, choose, place)


def random_plan(capture: Capture, mesh: MeshShape, seed: int, *, replicate: float = 0.1) -> Plan:
    """Any legal placement for every parameter, batch input, result and op.

    Args:
        capture: the program.
        mesh: the mesh.
        seed: equal seeds give equal plans.
        replicate: how often the replicated spec is kept although others exist.
    """
    dice = random.Random(seed)

    def place(placeholder: GraphInput) -> Placements:
        shape, role = placeholder.value.shape, placeholder.role
        if role not in ("parameter", "input"):
            return (R,) * mesh.num_axes
        kinds = [R, *(S(d) for d in range(len(shape)))]
        options = list(itertools.product(kinds, repeat=mesh.num_axes))
        even = [p for p in options if divides(shape, p, mesh.sizes)]
        return dice.choice(options if role == "parameter" else even)

    def choose(op: Op, specs: Sequence[OpSpec], made: Mapping[str, Placements]) -> OpSpec:
        return specs[0] if len(specs) == 1 or dice.random() < replicate else dice.choice(specs[1:])

    return plan_by(capture, mesh, choose, place)


def plan_by(capture: Capture, mesh: MeshShape, choose: Choose, place: Callable[[GraphInput], Placements] | None = None) -> Plan:
    """A plan whose ops take, in execution order, one of their legal specs that can be reached from what was made.

    Args:
        capture: the program.
        mesh: the mesh.
        choose: picks from the reachable specs of an op (the replicated one first), given the placements made so far.
        place: placement of each placeholder; replicated by default.
    """
    everywhere, graph = (R,) * mesh.num_axes, capture.graph
    inputs = {i.value.name: place(i) if place else everywhere for i in graph.inputs}
    made: dict[str, Placements] = dict(inputs)
    specs: dict[str, OpSpec] = {}
    for op in graph.ops:
        legal = [spec for spec in specs_for(op, mesh.sizes) if _reachable(op, spec, made, mesh.sizes)]
        spec = specs[op.name] = choose(op, legal, made)
        made.update((v.name, p) for v, p in zip(op.outs, spec.outs, strict=True) if v is not None and p is not None)
    rest = {i.name: inputs[i.value.name] for i in graph.inputs_of("parameter")}
    has_loss = any(o.value is not None and not o.value.shape and o.differentiable for o in graph.outputs_of("output"))
    outputs = tuple(_final(o, made, rest, everywhere, keep=has_loss) for o in graph.outputs)
    return with_collectives(_blank(capture, mesh, inputs, specs, outputs), capture)


def with_collectives(plan: Plan, capture: Capture) -> Plan:
    """The plan with the collectives that its placements ask for."""
    counts = Counter((s.kind, s.axis) for s in planned_steps(plan, capture.graph) if s.kind != "slice")
    return replace(plan, collectives=tuple(Collective(kind, axis, 0, 0.0, False, n) for (kind, axis), n in counts.items()))


def specs_for(op: Op, sizes: tuple[int, ...]) -> list[OpSpec]:
    """Every spec of ``op`` on a mesh: products of its rows, even pieces only; the replicated one first."""
    rows = rows_for(op)
    if rows is None:
        rows = (Row((R,) * len(op.ins), tuple(None if v is None else R for v in op.outs)),)
    specs = []
    for combination in itertools.product(*(rows if n > 1 else rows[:1] for n in sizes)):
        ins = tuple(tuple(row.ins[i] for row in combination) for i in range(len(op.ins)))
        outs = tuple(None if v is None else tuple(row.outs[i] for row in combination) for i, v in enumerate(op.outs))
        values = [*zip(op.ins, ins, strict=True), *((v, p) for v, p in zip(op.outs, outs, strict=True) if v is not None)]
        if all(divides(v.shape, p, sizes) for v, p in values):
            specs.append(OpSpec(ins, outs))
    return specs


def _reachable(op: Op, spec: OpSpec, made: Mapping[str, Placements], sizes: tuple[int, ...]) -> bool:
    return all(_path(v, made[v.name], p, sizes) is not None for v, p in zip(op.ins, spec.ins, strict=True))


def _path(value: Value, src: Placements, dst: Placements, sizes: tuple[int, ...]) -> tuple[Placements, ...] | None:
    return _path_of_shape(value.shape, src, dst, sizes)


@functools.lru_cache(maxsize=100_000)
def _path_of_shape(
    shape: tuple[int, ...], src: Placements, dst: Placements, sizes: tuple[int, ...]
) -> tuple[Placements, ...] | None:
    uneven = not (divides(shape, src, sizes) and divides(shape, dst, sizes))
    try:
        return default_path(src, dst, shape, sizes, uneven=uneven)
    except ValueError:
        return None


def _moved_bytes(value: Value, src: Placements, dst: Placements, sizes: tuple[int, ...]) -> float:
    path = _path(value, src, dst, sizes)
    assert path is not None
    moved = 0.0
    for here, there in itertools.pairwise(path):
        axis = step_axis(here, there)
        factor = {"slice": 0.0, "all_reduce": 2.0}.get(step_kind(here[axis], there[axis]) or "", 1.0)
        both = max(local_numel(value.shape, p, sizes) for p in (here, there))
        moved += factor * both * value.dtype.itemsize * (sizes[axis] > 1)
    return moved


def _final(
    result: GraphOutput, made: Mapping[str, Placements], rest: Mapping[str, Placements], everywhere: Placements, *, keep: bool
) -> Placements | None:
    if result.value is None:
        return None
    if result.role == "gradient":
        return rest.get(result.name, everywhere)
    found = made[result.value.name]
    complete = not any(p.is_partial for p in found)
    return found if keep and complete and result.role == "output" and result.value.shape else everywhere


def _blank(
    capture: Capture,
    mesh: MeshShape,
    inputs: Mapping[str, Placements],
    ops: Mapping[str, OpSpec],
    outputs: tuple[Placements | None, ...],
) -> Plan:
    return Plan(
        graph_hash=capture.graph.hash,
        model="hand-made",
        mesh=mesh,
        device="CPU",
        links=("none",) * mesh.num_axes,
        memory_limit_bytes=1 << 40,
        strategy="hand-made",
        precision=capture.precision,
        optimizer="adamw",
        training=capture.training,
        inputs=inputs,
        ops=ops,
        outputs=outputs,
        redistributions=(),
        collectives=(),
        predicted=Prediction(0.0, 0.0, 0.0, 0.0, {}),
        objective_s=0.0,
        bound_s=0.0,
        gap=math.inf,
    )
