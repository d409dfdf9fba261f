"""Named strategies on real ranks: planned once in the parent by the same search as for users, compared with one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.repeat import Folded
from meshwright.planning import Request, capture_call, model_name, plan_capture
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
    label = " ".join([name, strategy, *(f"{k}={v}" for k, v in {**(degrees or {}), **options}.items())])
    return Trial(label, case, case.model(), captured.at(plan.recompute).whole, plan, reference(name))


def try_all(rank: int, trials: Sequence[Trial]) -> dict[str, list[str]]:
    """What differs, by trial; runs on every rank."""
    return {t.label: differences(t) for t in trials}


def differences(trial: Trial) -> list[str]:
    """Loss, gradients, parameters after steps, collectives or leftovers that are not as they should be."""
    if trial.plan.pipeline is not None:
        return pipelines.differences(pipelines.start(trial), trial.case.batch(), trial.reference)
    return equality.differences(trial, make_mesh("cpu", trial.plan.mesh.sizes, trial.plan.mesh.names), adam=False)
