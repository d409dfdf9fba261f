"""Compare a parallel module with the same model in one process: loss, gradients, parameters after steps, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.passes import count_collectives
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.redistribute import COLLECTIVES
from meshwright.runtime.gather import gather_whole
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import ParallelModule, build
from tests.helpers.counting import CountCollectives
from tests.helpers.models import Case, loss_of

STEPS = 5
SGD_LR, ADAMW_LR = 1e-2, 1e-3
RTOL = 1e-5
"""Of the largest element of each tensor."""
FLOOR = 5e-7
"""Of the largest gradient of the model: gradients that vanish by mathematics (a bias before a normalisation, the key bias
of attention) are rounding noise of that size in any order of summation."""

MASKED = 1e-4
"""Of the largest gradient of the model: elements below it are left out after AdamW, which divides a gradient by its own
size, so that rounding noise of 1e-7 moves them by more than the tolerance of 1e-2 times the learning rate."""

Optimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=SGD_LR, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=ADAMW_LR)


@dataclass(frozen=True)
class Reference:
    """One process's numbers.

    Attributes:
        loss: of the first batch.
        gradients: by name; None where there is none.
        after_sgd: parameters and buffers after :data:`STEPS` steps of SGD with momentum.
        after_adamw: likewise of AdamW.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    after_sgd: dict[str, torch.Tensor]
    after_adamw: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """A plan to try against the reference; the model is made once, since seeding is not safe where ranks are threads."""

    label: str
    case: Case
    model: nn.Module
    capture: Capture
    plan: Plan
    reference: Reference


def scalar_of(output: Any) -> torch.Tensor:
    """The model's loss, or for outputs without one the mean square of the first tensor."""
    loss = loss_of(output)
    return loss if loss.dim() == 0 else loss.square().mean()


def reference_of(case: Case) -> Reference:
    """Run the model in this process, uncaptured."""
    model, batch = case.model(), case.batch()
    loss = scalar_of(model(**batch))
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Reference(loss.detach(), gradients, train(case.model(), batch, sgd), train(case.model(), batch, adamw))


def train(model: nn.Module, batch: dict[str, Any], optimizer: Optimizer, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """State after ``steps`` steps on one batch."""
    take_steps(model, batch, optimizer(list(model.parameters())), steps)
    return {n: t.detach().clone() for n, t in whole_state(model).items()}


def take_steps(model: nn.Module, batch: dict[str, Any], opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        scalar_of(model(**batch)).backward()
        opt.step()


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return gather_whole(tensor) if isinstance(tensor, DTensor) else tensor


# --- on each rank -------------------------------------------------------------------------------------------------


def try_all(rank: int, trials: Sequence[Trial], *, adam: bool = True) -> dict[str, list[str]]:
    """What differs, by trial; runs on every rank."""
    meshes: dict[tuple[int, ...], Any] = {}
    found = {}
    for trial in trials:
        sizes = trial.plan.mesh.sizes
        if sizes not in meshes:
            meshes[sizes] = make_mesh("cpu", sizes, trial.plan.mesh.names)
        found[trial.label] = differences(trial, meshes[sizes], adam=adam)
    return found


def differences(trial: Trial, mesh: Any, *, adam: bool = True) -> list[str]:
    """Loss, gradients, collectives, and parameters after steps that are not as they should be."""
    pm = build(trial.model, trial.capture, trial.plan, mesh)
    batch, reference = trial.case.batch(), trial.reference
    start = pm.full_state_dict() if adam else {}
    largest = max((float(g.abs().max()) for g in reference.gradients.values() if g is not None), default=0.0)
    opt = sgd(list(pm.parameters()))
    loss = scalar_of(pm(**batch))
    loss.backward()
    wrong = compare({"loss": whole(loss).detach()}, {"loss": reference.loss}, RTOL, 0.0)
    gradients = {n: None if p.grad is None else gathered(p.grad) for n, p in pm.named_parameters()}
    wrong += compare(gradients, reference.gradients, RTOL, FLOOR * largest, "gradient of ")
    opt.step()
    with CountCollectives() as ran_in:  # not in the first step, in which the ranks also compare their batches
        take_steps(pm, batch, opt, 1)
    wrong += count_differences(pm, trial.plan, ran_in.counts)
    after = train(pm, batch, lambda _: opt, STEPS - 2)
    wrong += compare(after, reference.after_sgd, RTOL, STEPS**2 * SGD_LR * FLOOR * largest, "after SGD, ")
    if adam:
        pm.load_state_dict(start)
        noise = {n: g.abs() < MASKED * largest for n, g in reference.gradients.items() if g is not None}
        wrong += compare(*_where_adam_tells(train(pm, batch, adamw), reference, noise), RTOL, 1e-2 * ADAMW_LR, "after AdamW, ")
    return wrong


def _where_adam_tells(
    found: dict[str, torch.Tensor], reference: Reference, noise: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters without the elements whose gradient is rounding noise, which Adam scales up to a whole step; no buffers
    (a running mean follows such a bias)."""
    names = [n for n in reference.after_adamw if n in noise]
    zeroed = [{n: state[n].masked_fill(noise[n], 0.0) for n in names} for state in (found, reference.after_adamw)]
    return zeroed[0], zeroed[1]


def compare(found: dict[str, Any], wanted: dict[str, Any], rtol: float, atol: float, what: str = "") -> list[str]:
    """Names of tensors that differ by more than ``rtol`` of their largest element plus ``atol``."""
    wrong = [f"{what}{name} is missing" for name in wanted if name not in found]
    for name, a in found.items():
        b = wanted[name]
        if (a is None) != (b is None):
            wrong.append(f"{what}{name} is {'None' if a is None else 'a tensor'}")
        elif a is not None and b.numel():
            off, limit = float((a.double() - b.double()).abs().max()), rtol * float(b.double().abs().max()) + atol
            if not off <= limit:
                wrong.append(f"{what}{name} is off by {off:.2e} (allowed {limit:.2e}, largest {float(b.abs().max()):.2e})")
    return wrong


def count_differences(pm: ParallelModule, plan: Plan, ran: Counter[str]) -> list[str]:
    """Whether the collectives that ran are those of the lowered program, and its are those of the plan."""
    program = pm._library.programs[0].local
    emitted: Counter[str] = Counter()
    for (_, _, kind), n in count_collectives(program, logical=False).items():
        emitted[kind] += n
    planned: Counter[tuple[int, str]] = Counter()
    for c in plan.collectives:
        if c.kind in COLLECTIVES:  # not what one controller hands out around the program
            planned[c.axis, c.kind] += c.count
    logical: Counter[tuple[int, str]] = Counter()
    for (_, axis, kind), n in count_collectives(program).items():
        logical[axis, kind] += n
    wrong = [] if ran == emitted else [f"collectives that ran {dict(ran)} are not those of the program {dict(emitted)}"]
    return wrong + ([] if logical == planned else [f"collectives emitted {dict(logical)} are not the plan's {dict(planned)}"])
