"""Is a plan a legal plan for this program? And which one-axis steps does it ask for?

What holds of a legal plan: it is for this very program; every placeholder, op and result has placements, one per mesh axis,
over dims that exist and that the axes divide (layout ops on parameters at rest may be uneven); nothing comes in or goes out
partial; a gradient ends where its parameter lies; every change of placement is a path of legal steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import GraphInput, GraphOutput, Op, OpGraph, Value
from meshwright.planner.ir.plan import KEPT, Plan
from meshwright.planner.ir.redistribute import default_path, legal_step, step_axis, step_kind
from meshwright.planner.ir.spec import Placements, divides, format_placements


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One one-axis change of placement that a plan asks for.

    Attributes:
        value: what changes.
        phase: phase of the ops or results that need it.
        src: placements before; ``dst`` those after.
        axis: the mesh axis.
        kind: see ``redistribute.step_kind``.
        kept: whether it makes a copy that is kept for the whole step; it is then in the forward.
    """

    value: Value
    phase: str
    src: Placements
    dst: Placements
    axis: int
    kind: str
    kept: bool = False


def result_phase(result: GraphOutput) -> str:
    """The phase in which a result of the graph is brought to its final placement."""
    return "backward" if result.role == "gradient" else "forward"


def made_placements(plan: Plan, graph: OpGraph) -> dict[str, Placements]:
    """Value name to the placements that its readers find it in: those that its producer makes it in, or those it is kept in."""
    made = _produced(plan, graph)
    made.update((name, plan.kept[first]) for name, first in kept_values(plan, graph).items())
    return made


def parameter_behind(graph: OpGraph, value: str) -> str:
    """Value name of the placeholder that a value which is kept is made from."""
    maker = graph.producer[value]
    while isinstance(maker, Op):
        maker = graph.producer[maker.ins[0].name]
    return maker.value.name


def _produced(plan: Plan, graph: OpGraph) -> dict[str, Placements]:
    made = dict(plan.inputs)
    for op in graph.ops:
        for value, placements in zip(op.outs, plan.ops[op.name].outs, strict=True):
            if value is not None and placements is not None:
                made[value.name] = placements
    return made


def kept_values(plan: Plan, graph: OpGraph) -> dict[str, str]:
    """Value name to the value whose kept copy its readers find: itself, or the forward value that it would compute again."""
    found = {name: name for name in plan.kept}
    if found:
        again = ((op.outs[0], op.recompute_of) for op in graph.ops if op.recompute_of in plan.kept and len(op.outs) == 1)
        found.update((value.name, first) for value, first in again if value is not None and first is not None)
    return found


def path_of(plan: Plan, value: Value, phase: str, src: Placements, dst: Placements) -> tuple[Placements, ...]:
    """The placements that ``value`` passes through for its consumers in ``phase``: the plan's path, or the default one.

    Raises:
        ValueError: the plan lists none and none exists.
    """
    listed = plan.paths.get((value.name, phase, dst))
    if listed is not None:
        return listed
    sizes = plan.mesh.sizes
    uneven = not (divides(value.shape, src, sizes) and divides(value.shape, dst, sizes))
    return default_path(src, dst, value.shape, sizes, uneven=uneven)


def needs(plan: Plan, graph: OpGraph) -> Iterator[tuple[Value, str, Placements, str]]:
    """Every (value, phase, placements, who) that an op or a result of the graph needs, in execution order."""
    for op in graph.ops:
        for value, placements in zip(op.ins, plan.ops[op.name].ins, strict=True):
            yield value, op.phase, placements, f"op {op.name}"
    for result, final in zip(graph.outputs, plan.outputs, strict=True):
        if result.value is not None and final is not None:
            yield result.value, result_phase(result), final, f"{result.role} {result.name!r}"


def planned_steps(plan: Plan, graph: OpGraph) -> tuple[PlannedStep, ...]:
    """Every step that the plan asks for, each once per (value, phase, placements); axes of one device take none."""
    made = made_placements(plan, graph)
    steps = list(_kept_steps(plan, graph))
    have: set[tuple[str, str, Placements]] = set()
    for value, phase, wanted, _ in needs(plan, graph):
        if (value.name, phase, wanted) in have:
            continue
        path = path_of(plan, value, phase, made[value.name], wanted)
        for src, dst in itertools.pairwise(path):
            if (value.name, phase, dst) in have:
                continue
            have.add((value.name, phase, dst))
            axis = step_axis(src, dst)
            kind = step_kind(src[axis], dst[axis])
            if plan.mesh.sizes[axis] > 1 and kind is not None:
                steps.append(PlannedStep(value, phase, src, dst, axis, kind))
    return tuple(steps)


def _kept_steps(plan: Plan, graph: OpGraph) -> Iterator[PlannedStep]:
    """The steps that make the copies that are kept, each once however often it is read or computed again."""
    produced = _produced(plan, graph) if plan.kept else {}
    for name, final in plan.kept.items():
        value = value_named(graph, name)
        for src, dst in itertools.pairwise(path_of(plan, value, KEPT, produced[name], final)):
            axis = step_axis(src, dst)
            kind = step_kind(src[axis], dst[axis])
            if plan.mesh.sizes[axis] > 1 and kind is not None:
                yield PlannedStep(value, "forward", src, dst, axis, kind, kept=True)


def value_named(graph: OpGraph, name: str) -> Value:
    maker = graph.producer[name]
    if isinstance(maker, GraphInput):
        return maker.value
    return next(v for v in maker.outs if v is not None and v.name == name)


def verify_plan(plan: Plan, graph: OpGraph) -> None:
    """Check that ``plan`` is legal for ``graph``.

    Raises:
        VerifyError: it is not; the message names the op, value or result, and what is wrong.
    """
    if plan.graph_hash != graph.hash:
        raise VerifyError(
            f"the plan is for program {plan.graph_hash[:12]}, this one is {graph.hash[:12]}: plan again for this model and batch"
        )
    _same_names("placeholder", plan.inputs, [i.value.name for i in graph.inputs])
    _same_names("op", plan.ops, [op.name for op in graph.ops])
    if len(plan.outputs) != len(graph.outputs):
        raise VerifyError(f"the plan has {len(plan.outputs)} outputs, the program {len(graph.outputs)}")
    for placeholder in graph.inputs:
        _verify_input(plan, placeholder)
    for op in graph.ops:
        _verify_op(plan, op)
    for result, final in zip(graph.outputs, plan.outputs, strict=True):
        _verify_result(plan, graph, result, final)
    _verify_kept(plan, graph)
    _verify_paths(plan, graph)
    _verify_pipeline(plan, graph)


def _verify_pipeline(plan: Plan, graph: OpGraph) -> None:
    if plan.pipeline is None:
        return
    order = {op.name: i for i, op in enumerate(graph.ops) if op.phase == "forward"}
    unknown = [name for name in plan.pipeline.cuts if name not in order]
    if unknown:
        raise VerifyError(f"the plan cuts stages behind op {unknown[0]}, which is no forward op of the program")
    places = [order[name] for name in plan.pipeline.cuts]
    if places != sorted(set(places)):
        raise VerifyError(f"the plan's cuts {', '.join(plan.pipeline.cuts)} are not in execution order")
    for what, found, known in (
        ("placeholder", plan.pipeline.inputs, {i.value.name for i in graph.inputs}),
        ("op", plan.pipeline.ops, {op.name for op in graph.ops}),
    ):
        for name in found:
            if name not in known:
                raise VerifyError(f"the plan cuts {what} {name} into micro-batches, which the program does not have")


def _same_names(what: str, found: object, wanted: list[str]) -> None:
    have = set(found)  # type: ignore[call-overload]
    missing, unknown = [n for n in wanted if n not in have], sorted(have - set(wanted))
    if missing:
        raise VerifyError(f"the plan says nothing about {what} {missing[0]} ({len(missing)} missing)")
    if unknown:
        raise VerifyError(f"the plan names {what} {unknown[0]}, which the program does not have ({len(unknown)} unknown)")


def _verify_placements(plan: Plan, where: str, value: Value, placements: Placements, *, uneven: bool) -> None:
    sizes, shards = plan.mesh.sizes, [p for p in placements if p.is_shard]
    if len(placements) == len(sizes) and not shards:
        return
    text = format_placements(placements)
    if len(placements) != len(sizes):
        raise VerifyError(f"{where}: {value} has placements {text}, one for each of the {len(sizes)} mesh axes is needed")
    for p in shards:
        if not 0 <= p.dim < len(value.shape):
            raise VerifyError(f"{where}: {value} has placements {text}, but it has {len(value.shape)} dims")
    grouped = any(p.split > 1 for p in shards)
    if not divides(value.shape, placements, sizes) and (grouped or not uneven):
        raise VerifyError(f"{where}: {value} cannot be {text} on mesh {plan.mesh}: a sharded dim is not divided evenly")


def _verify_input(plan: Plan, placeholder: GraphInput) -> None:
    placements, where = plan.inputs[placeholder.value.name], f"{placeholder.role} {placeholder.name!r}"
    _verify_placements(plan, where, placeholder.value, placements, uneven=placeholder.role == "parameter")
    if any(p.is_partial for p in placements):
        raise VerifyError(f"{where} comes in as {format_placements(placements)}: nothing outside the program makes addends")
    if placeholder.role in ("buffer", "constant", "seed") and not all(p.is_replicate for p in placements):
        raise VerifyError(f"{where} comes in as {format_placements(placements)}: it must be replicated")


UNEVEN_OPS = frozenset(
    f"aten.{n}.default" for n in ("permute", "unsqueeze", "_to_copy", "clone", "contiguous", "alias", "detach")
)
"""Right on uneven pieces too: what may stand between a parameter at rest and its gather."""


def _verify_op(plan: Plan, op: Op) -> None:
    spec, where = plan.ops[op.name], f"op {op.name} ({op.target})"
    if len(spec.ins) != len(op.ins) or len(spec.outs) != len(op.outs):
        raise VerifyError(
            f"{where}: spec {spec} has {len(spec.ins)} inputs and {len(spec.outs)} results, the op {len(op.ins)} and {len(op.outs)}"
        )
    uneven = op.target in UNEVEN_OPS
    for value, placements in zip(op.ins, spec.ins, strict=True):
        _verify_placements(plan, where, value, placements, uneven=uneven)
    for result, made in zip(op.outs, spec.outs, strict=True):
        if (result is None) != (made is None):
            raise VerifyError(f"{where}: spec {spec} and the op disagree on which results exist")
        if result is not None and made is not None:
            _verify_placements(plan, where, result, made, uneven=uneven)


def _verify_result(plan: Plan, graph: OpGraph, result: GraphOutput, final: Placements | None) -> None:
    where = f"{result.role} {result.name!r}"
    if (result.value is None) != (final is None):
        raise VerifyError(f"{where}: the plan and the program disagree on whether it is a tensor")
    if result.value is None or final is None:
        return
    _verify_placements(plan, where, result.value, final, uneven=result.role == "gradient")
    if any(p.is_partial for p in final):
        raise VerifyError(f"{where} ends as {format_placements(final)}: a result must be complete")
    if result.role == "mutation" and not all(p.is_replicate for p in final):
        raise VerifyError(f"{where} ends as {format_placements(final)}: a buffer must be replicated")
    if result.role == "gradient":
        rest = {i.name: plan.inputs[i.value.name] for i in graph.inputs_of("parameter")}.get(result.name, final)
        if final != rest:
            raise VerifyError(
                f"{where} ends as {format_placements(final)}, but its parameter lies as {format_placements(rest)}: they must agree"
            )


def _verify_kept(plan: Plan, graph: OpGraph) -> None:
    """What is kept is made in the forward, from one parameter alone, and complete."""
    for name, placements in plan.kept.items():
        if name not in graph.producer:
            raise VerifyError(f"the plan keeps {name}, which the program does not have")
        value, maker = value_named(graph, name), graph.producer[name]
        while isinstance(maker, Op):
            if len(set(maker.ins)) != 1 or len(maker.outs) != 1 or maker.phase != "forward":
                raise VerifyError(
                    f"the plan keeps {value}, but op {maker.name} ({maker.target}) does not make it in the forward from one value"
                )
            maker = graph.producer[maker.ins[0].name]
        if maker.role != "parameter":
            raise VerifyError(
                f"the plan keeps {value}, which is made from {maker.role} {maker.name!r}: only parameters stay for a step"
            )
        _verify_placements(plan, f"kept {name}", value, placements, uneven=True)
        if any(p.is_partial for p in placements):
            raise VerifyError(f"the plan keeps {value} as {format_placements(placements)}: it must be complete")


def _verify_paths(plan: Plan, graph: OpGraph) -> None:
    made, produced = made_placements(plan, graph), _produced(plan, graph)
    kept = ((value_named(graph, name), KEPT, final, f"kept {name}") for name, final in plan.kept.items())
    seen: set[tuple[str, str, Placements]] = set()
    for value, phase, wanted, who in itertools.chain(kept, needs(plan, graph)):
        src = (produced if phase == KEPT else made)[value.name]
        key = (value.name, phase, wanted)
        if key in seen or (src == wanted and key not in plan.paths):
            continue
        seen.add(key)
        _verify_path(plan, value, phase, src, wanted, who)


def _verify_path(plan: Plan, value: Value, phase: str, src: Placements, wanted: Placements, who: str) -> None:
    text = f"{format_placements(src)} -> {format_placements(wanted)}"
    try:
        path = path_of(plan, value, phase, src, wanted)
    except ValueError:
        raise VerifyError(f"{who} needs {value} as {text} in {phase}: no path of legal steps leads there") from None
    if path[0] != src:
        raise VerifyError(f"{who}: the path of {value} starts at {format_placements(path[0])}, made as {format_placements(src)}")
    for here, there in itertools.pairwise(path):
        changed = [a for a, (p, q) in enumerate(zip(here, there, strict=True)) if p != q]
        if len(changed) != 1 or not legal_step(here, changed[0], there[changed[0]]):
            raise VerifyError(
                f"{who}: the path of {value} ({text}) has the step {format_placements(here)} -> {format_placements(there)}, "
                "which is not a legal change of one axis"
            )
