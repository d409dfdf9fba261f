"""Named strategies on real ranks: planned once in the parent by the same search as for users, compared with one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.planner import rules
from meshwright.planner.fuse import trivial_clusters
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.options import Options
from meshwright.planner.pipelined import Lying, PipelineRequest, Uncut
from meshwright.planner.repeat import Folded
from meshwright.planner.search import make_plan
from meshwright.planner.stage_choices import schedules
from meshwright.planning import capture_call, model_name, plan_capture
from meshwright.request import Request
from meshwright.runtime.mesh import make_mesh
from meshwright.target import target_of
from tests.helpers import equality, pipelines
from tests.helpers.equality import Trial
from tests.helpers.models import ALL
from tests.helpers.prepared import reference, toy_hardware


@functools.cache
def folded(name: str) -> tuple[Folded, dict[str, float]]:
    """A model of the zoo, captured as for users."""
    case = ALL[name]
    return capture_call(case.model(), ((), case.batch()), Request(), True)


def strategy_trial(name: str, strategy: str, ranks: int, degrees: Mapping[str, int] | None = None, **options: Any) -> Trial:
    """A strategy for a model of the zoo.

    Args:
        name: of the model.
        strategy: as users write it.
        ranks: how many.
        degrees: as users write them.
        **options: further keywords of ``plan``.
    """
    case, (captured, times) = ALL[name], folded(name)
    mesh = MeshShape.of(ranks)
    request = Request(strategy=strategy, degrees=degrees, alternatives=False, **options)
    plan = plan_capture(captured, target_of(mesh, toy_hardware(mesh)), request, model_name(case.model()), times)
    label = " ".join([f"{name} on {ranks}", strategy, *(f"{k}={v}" for k, v in {**(degrees or {}), **options}.items())])
    return Trial(label, case, case.model(), captured.at(plan.recompute).whole, plan, reference(name))


def mixed_trial(name: str, strategy: str, ranks: int, recompute: Recompute, stages: PipelineRequest | None = None) -> Trial:
    """A strategy with different recomputation in different blocks, which the search alone would choose; cut into ``stages``."""
    case, (captured, _) = ALL[name], folded(name)
    capture = captured.at(recompute).whole
    mesh = MeshShape.of(ranks // (stages.degree if stages is not None else 1))
    hardware = toy_hardware(mesh)
    count = 1 if stages is None else stages.micro_batches or 1
    options = Options(strategy=strategy, alternatives=False, model=name, micro_batches=count)
    plan = replace(make_plan(capture, mesh, hardware, options), recompute=recompute)
    if stages is not None:
        schedule, each = next(schedules(stages.degree, count, stages))
        lying = Lying.of(capture.graph, trivial_clusters(capture.graph, rules.rows_for), count)
        uncut = Uncut(plan, capture.graph, lying, count, hardware, hardware.links[0], plan.memory_limit_bytes)
        plan = uncut.cut(replace(stages, schedule=schedule, stages_per_rank=each))
    return Trial(f"{name} {strategy} {recompute} {stages or ''}", case, case.model(), capture, plan, reference(name))


def try_all(rank: int, trials: Sequence[Trial]) -> dict[str, list[str]]:
    """What differs, by trial; runs on every rank."""
    return {t.label: differences(t) for t in trials}


def differences(trial: Trial) -> list[str]:
    """Loss, gradients, parameters after steps, collectives or leftovers that are not as they should be."""
    if trial.plan.pipeline is not None:
        return pipelines.differences(pipelines.start(trial), trial.case.batch(), trial.reference)
    return equality.differences(trial, make_mesh("cpu", trial.plan.mesh.sizes, trial.plan.mesh.names), adam=False)
