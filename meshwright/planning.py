"""From a model and a call of it to a plan: capture, recomputation, search; and the same once for many ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright import debug
from meshwright.inputs import Call
from meshwright.planner import search
from meshwright.planner.correspond import Unlike
from meshwright.planner.expand import expanded, planned_names
from meshwright.planner.ir import collector, errors
from meshwright.planner.ir.errors import InfeasibleError, InputError, MeshwrightError, RuntimeMismatchError
from meshwright.planner.ir.graph import Capture, OpGraph
from meshwright.planner.ir.hardware import Link
from meshwright.planner.ir.plan import Plan
from meshwright.planner.meshes import LogicalMesh, finer, logical_meshes, meshes_in_roles
from meshwright.planner.one_controller import controlled
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.repeat import Folded, capture_folded
from meshwright.planner.solve.results import has_loss
from meshwright.planner.solve.strategies import IN_STAGES, strategy_named
from meshwright.planner.stage_space import Devices
from meshwright.planner.staging import StageSearch
from meshwright.request import Request
from meshwright.target import Target

WORTH_STAGES = 0.02
"""Stages are taken by themselves only where they make a step shorter by more than this part: they train with ``pm.step`` alone."""

CLEARLY = 0.2
"""Where memory makes all plans without stages slower, plans with stages that are faster than the bound of the others by more than this
part are looked for first. The part is what a third axis may bring beside: the bound speaks of one and two."""

MOST_STAGES = 64
"""Pipeline ranks that are looked at where nobody says how many."""


class _Phases:
    """Seconds of phases that are told as they begin."""

    def __init__(self, tell: debug.Progress):
        self._tell, self._now, self._since = tell, "", time.perf_counter()
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str) -> None:
        self.end()
        self._tell(phase)
        self._now = phase

    def end(self) -> None:
        now = time.perf_counter()
        if self._now:
            self.seconds[self._now] = self.seconds.get(self._now, 0.0) + now - self._since
        self._now, self._since = "", now


def capture_call(
    model: torch.nn.Module, call: Call, request: Request, training: bool | None = None, progress: debug.Progress | None = None
) -> tuple[Folded, dict[str, float]]:
    """Capture one call and choose what the backward computes again; the capture, and the seconds each part took."""
    phases = _Phases(debug.watched(progress))
    args, kwargs = call
    captured = capture_folded(
        model, args, kwargs, precision=request.precision, training=training, fold=request.fold_capture, progress=phases
    )
    phases.end()
    return captured, {"trace_s": phases.seconds["capture"], "recompute_s": phases.seconds["recompute"]}


def plan_capture(
    captured: Folded,
    target: Target,
    request: Request,
    model: str,
    times: Mapping[str, float],
    progress: debug.Progress | None = None,
    *,
    stages_if_faster: bool = False,
) -> Plan:
    """Search a plan for a captured call: on the folded program where that says all, else on the whole one.

    Strategy ``auto`` takes pipeline stages where nothing else fits, and with ``stages_if_faster`` where they are clearly faster.
    """
    tell = debug.watched(progress)
    stages = request.in_stages(target)
    if stages is None:
        plan = _plan_with_or_without_stages(captured, target, request, model, tell, stages_if_faster)
    else:
        plan = _plan_in_enough_stages(captured, target, request, stages, model, tell)
    if strategy_named(IN_STAGES.get(request.strategy, request.strategy)).one_controller:
        plan = controlled(plan, captured.at(plan.recompute).whole_view, target.topology.hardware(plan.mesh))
    started = time.perf_counter()
    plan = plan.described(captured.at(plan.recompute).whole_view)
    recompute_s = times.get("recompute_s", 0.0) + plan.solver.get("recompute_s", 0.0)
    solver = {**times, **plan.solver, "recompute_s": recompute_s, "describe_s": time.perf_counter() - started}
    plan = replace(plan, solver=solver)
    debug.show_plan(plan)
    return plan


def _plan_with_or_without_stages(
    captured: Folded, target: Target, request: Request, model: str, tell: debug.Progress, stages_if_faster: bool
) -> Plan:
    """The plan of the whole program on all devices, or one in stages: where that alone fits, or is faster by more than a margin."""
    degrees, searches = _degrees_to_try(captured, target, request), dict[bool, StageSearch]()

    def in_stages(bar_s: float, is_hurt: bool) -> Plan | None:
        if not stages_if_faster or not degrees:
            return None
        asked = PipelineRequest(degrees[0], at_once=is_hurt)
        try:
            return _search_in_stages(captured, target, request, asked, model, tell, degrees, bar_s, searches)
        except (InfeasibleError, InputError):
            return None

    early: list[Plan | None] = []

    def beats(about_s: float) -> float:
        early.append(staged := in_stages(about_s * (1 - CLEARLY), is_hurt=True))
        return math.inf if staged is None else staged.predicted.step_time_s / (1 - CLEARLY)

    try:
        plan = _plan_whole(captured, target, request, model, tell, beats)
    except InfeasibleError as e:
        if not degrees or e.binding != "memory":
            raise
        try:
            return _plan_in_stages(captured, target, request, PipelineRequest(degrees[0]), model, tell, degrees=degrees)
        except (InfeasibleError, InputError) as in_no_stages:
            e.add_note(f"in pipeline stages: {in_no_stages}")
            raise e from None
    found = early[0] if early else None
    if isinstance(plan, search.Beaten):
        assert found is not None, "only a plan in stages beats all others"
        note = f"without pipeline stages: at least {plan.bound_s:.4g} s per step on any mesh of one or two axes"
        return replace(found, notes=(*found.notes, note), alternatives=plan.alternatives)
    bar_s = plan.predicted.step_time_s * (1 - WORTH_STAGES)
    found = found or in_stages(bar_s, is_hurt=bool(early) or plan.solver["limit_binds"])
    if found is None or found.predicted.step_time_s >= bar_s:
        return plan
    note = f"without pipeline stages: {plan.predicted.step_time_s:.4g} s per step on mesh {plan.mesh}"
    return replace(found, notes=(*found.notes, note), alternatives=plan.alternatives)


def _degrees_to_try(captured: Folded, target: Target, request: Request) -> tuple[int, ...]:
    """Numbers of pipeline ranks that strategy ``auto`` may look at; none where the user says where everything is."""
    said = request.pins or request.degrees or request.respect_axis_names or request.logical_mesh not in (None, "search")
    view = captured.plannable.graph
    if request.strategy != "auto" or said or not target.searched or not view.outputs_of("gradient") or not has_loss(view):
        return ()
    devices, most = target.mesh.num_devices, min(MOST_STAGES, max(captured.num_parts, 2))
    return tuple(n for n in range(2, most + 1) if devices % n == 0)


def _plan_whole(
    captured: Folded,
    target: Target,
    request: Request,
    model: str,
    tell: debug.Progress,
    beats: Callable[[float], float] = lambda bound_s: math.inf,
) -> Plan | search.Beaten:
    """The plan of the whole program on all devices of ``target``, unless all are beaten."""
    options = request.options(model, tell)
    meshes = logical_meshes(target.topology, request.mesh_request(), search=target.searched)
    split = partial(finer, target.topology) if len(meshes) > 1 else None
    found, notes = _folded_plan(captured, meshes, options, split, tell, beats)
    if found is None:
        found = search.search_unless_beaten(captured.unfolded, meshes, options, split, beats)
    return found if isinstance(found, search.Beaten) else replace(found, notes=(*found.notes, *captured.notes, *notes))


def _plan_in_enough_stages(
    captured: Folded, target: Target, request: Request, stages: PipelineRequest, model: str, tell: debug.Progress
) -> Plan:
    """With more stages than asked for where nobody asked for a number and the strategy does not fit: the first that does."""
    devices, found = target.mesh.num_devices, list[InfeasibleError]()
    is_free = request.strategy in IN_STAGES and target.pipeline_axis is None and "pp" not in (request.degrees or {})
    others = math.prod((request.degrees or {}).values())
    more = [n for n in range(stages.degree + 1, devices // others + 1) if devices % (n * others) == 0] if is_free else []
    for degree in (stages.degree, *more):
        try:
            return _plan_in_stages(captured, target, request, replace(stages, degree=degree), model, tell)
        except InfeasibleError as e:
            found.append(e)
    raise min(found, key=lambda e: e.needed_bytes or math.inf)


def _usual_degrees(request: Request, inside: Target) -> Request:
    """``3d`` has tensor parallelism over as many devices of a node as leave two for the batch, unless degrees say otherwise."""
    devices, said = inside.mesh.num_devices, {k: n for k, n in (request.degrees or {}).items() if k != "pp"}
    if (
        request.strategy != "3d"
        or said
        or request.logical_mesh not in (None, "search")
        or request.respect_axis_names
        or devices == 1
    ):
        return request
    fitting = [t for t in range(2, devices) if devices % t == 0 and inside.topology.inside((devices // t, t), 1)]
    return replace(request, degrees={"dp": devices // max(fitting), "tp": max(fitting)}) if fitting else request


def _plan_in_stages(
    captured: Folded,
    target: Target,
    request: Request,
    stages: PipelineRequest,
    model: str,
    tell: debug.Progress,
    degrees: Sequence[int] = (),
) -> Plan:
    """The best plan in stages; ``degrees``: how many to look at, those of ``stages`` by default."""
    plan = _search_in_stages(captured, target, request, stages, model, tell, degrees or (stages.degree,), math.inf)
    assert plan is not None
    return plan


def _search_in_stages(
    captured: Folded,
    target: Target,
    request: Request,
    stages: PipelineRequest,
    model: str,
    tell: debug.Progress,
    degrees: Sequence[int],
    bar_s: float,
    known: dict[bool, StageSearch] | None = None,
) -> Plan | None:
    """The best plan in stages, on the folded program where that stands for the whole one; None: none is faster than ``bar_s``. ``known``: the
    searches for the same stages with other bars, by whether the program is folded."""
    options = replace(request.options(model, tell), alternatives=False)
    tell("stages")

    def inside(degree: int) -> tuple[Sequence[LogicalMesh], Link]:
        of_stage, link = target.stage(degree)
        asked = _usual_degrees(request, of_stage).mesh_request()
        if options.strategy == "auto" and asked.searches(of_stage.searched) and asked.pinned_axes is None:
            return meshes_in_roles(of_stage.topology, asked), link
        return logical_meshes(of_stage.topology, asked, search=of_stage.searched), link

    devices = Devices(target.mesh.num_devices, inside)
    known = {} if known is None else known
    notes, plan, folds = captured.notes, None, bool(captured.repeats)

    def searching(folds: bool) -> StageSearch:
        if folds not in known:
            source, whole = (captured, _expanded) if folds else (captured.unfolded, _as_it_is)
            known[folds] = StageSearch(source, devices, partial(whole, captured), options, stages, degrees)
        return known[folds]

    if folds:
        try:
            plan = searching(True).plan(bar_s)
        except Unlike as e:
            folds, notes = False, (*notes, f"planned whole: {e}")
    if not folds:
        plan = searching(False).plan(bar_s)
    if plan is None:
        return None
    if folds:
        plan = replace(plan, folded={**plan.folded, "captured": captured.summary()})
    strategy = request.strategy if request.strategy in IN_STAGES else plan.strategy
    return replace(plan, strategy=strategy, notes=(*plan.notes, *notes))


def _expanded(captured: Folded, plan: Plan) -> tuple[Plan, OpGraph, Mapping[str, str]]:
    """A plan of the folded program said of the whole one, and where its names come from."""
    program = captured.at(plan.recompute)
    planned, whole = program.plannable.graph, program.whole_view
    return expanded(plan, planned, whole, program.repeats), whole, planned_names(planned, whole, program.repeats)


def _as_it_is(captured: Folded, plan: Plan) -> tuple[Plan, OpGraph, None]:
    return plan, captured.at(plan.recompute).whole_view, None


def _folded_plan(
    captured: Folded,
    meshes: Sequence[LogicalMesh],
    options: search.Options,
    split: search.Finer | None,
    tell: debug.Progress,
    beats: Callable[[float], float],
) -> tuple[Plan | search.Beaten | None, tuple[str, ...]]:
    """The plan of the folded program said of the whole one; None, and why, where it does not stand for it."""
    if not captured.repeats:
        return None, ()
    try:
        found = search.search_unless_beaten(captured, meshes, options, split, beats)
    except Unlike as e:
        return None, (f"planned whole: {e}",)
    if isinstance(found, search.Beaten):
        return found, ()
    tell("expand")
    started = time.perf_counter()
    program = captured.at(found.recompute)
    plan = expanded(found, program.plannable.graph, program.whole_view, program.repeats)
    solver = {**found.solver, "expand_s": time.perf_counter() - started}
    return replace(plan, solver=solver, folded={**found.folded, "captured": captured.summary()}), ()


def plan_on_ranks(
    model: torch.nn.Module, call: Call, mesh: DeviceMesh, target: Target, request: Request, training: bool | None = None
) -> tuple[Capture, Plan]:
    """Capture on every rank; plan on the mesh's first rank alone and give the plan to the others.

    Raises:
        MeshwrightError: the planning rank's own error, on every rank.
        RuntimeMismatchError: the planning rank failed in another way.
    """
    from meshwright.runtime.mesh import broadcast_text

    with collector.paused():
        captured, times = capture_call(model, call, request, training)
    text, failure = None, None
    if is_first(mesh):
        try:
            with collector.paused():
                text = plan_capture(captured, target, request, model_name(model), times).to_json()
        except Exception as e:
            failure, text = e, _error_text(e)
    text = broadcast_text(text, mesh)
    if failure is not None:
        raise failure
    _raise_error_text(text)
    plan = Plan.from_json(text)
    return captured.at(plan.recompute).whole, plan


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this rank is the one that plans: the first of the mesh."""
    return not any(mesh.get_coordinate() or [1])


def model_name(model: torch.nn.Module) -> str:
    return type(model).__name__


# --- errors that travel ------------------------------------------------------------------------------------------


def _error_text(e: Exception) -> str:
    return json.dumps(
        {"error": type(e).__name__, "message": str(e), **{k: getattr(e, k, None) for k in ("binding", "needed_bytes")}}
    )


def _raise_error_text(text: str) -> None:
    if not text.startswith('{"error"'):
        return
    data = json.loads(text)
    kind = getattr(errors, data["error"], None)
    if kind is errors.InfeasibleError:
        raise kind(data["message"], binding=data["binding"], needed_bytes=data["needed_bytes"])
    if isinstance(kind, type) and issubclass(kind, MeshwrightError):
        raise kind(data["message"])
    raise RuntimeMismatchError(f"the mesh's first rank failed to plan: {data['error']}: {data['message']}; see its own traceback")
