"""Making the parallel module, now or at the first call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.inputs import Call
from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import format_placements
from meshwright.planner.pipelined import PipelineRequest
from meshwright.planner.repeat import Folded
from meshwright.planning import capture_call, model_name, plan_on_ranks
from meshwright.request import Request, RequestAgain
from meshwright.runtime import module as runtime
from meshwright.runtime.mesh import arranged_ranks
from meshwright.runtime.params import PlacedState, fill_tree
from meshwright.runtime.pipeline import PipelineModule
from meshwright.runtime.programs import Request as RuntimeRequest
from meshwright.target import Target


@dataclass(frozen=True)
class Maker:
    """All that ``autoparallelize`` was asked, ready for a batch.

    Attributes:
        mesh: the running mesh, as the user made it; ``target`` its devices.
        request: what to plan; ``plan``: a plan given by the user instead, or None.
        batch, outputs, compile, timeout_s: as in ``autoparallelize``.
    """

    mesh: DeviceMesh
    target: Target
    request: Request
    plan: Plan | None
    batch: str
    outputs: str
    compile: bool
    timeout_s: float | None = None

    def make(self, model: nn.Module, call: Call, notes: tuple[str, ...] = ()) -> runtime.ParallelModule | PipelineModule:
        """Plan for one call and build the module; the plan also says ``notes``."""
        if self.plan is None:
            capture, plan = plan_on_ranks(model, call, self.mesh, self.target, self.request)
        else:
            plan = self.plan
            capture = self._capture_for(plan, model, call)
        plan = replace(plan, notes=(*plan.notes, *notes)) if notes else plan
        replan = partial(self.replan, plan.mesh.sizes)
        return runtime.build(
            model,
            capture,
            plan,
            self.mesh,
            batch=self.batch,
            outputs=self.outputs,
            compile=self.compile,
            replan=replan,
            timeout_s=self.timeout_s,
        )

    def _capture_for(self, plan: Plan, model: nn.Module, call: Call) -> Capture:
        """Capture for a given plan, and check that it is the program and the mesh that the plan is for."""
        if plan.pipeline is None:
            arranged_ranks(self.mesh, plan.mesh)
        folded, _ = capture_call(model, call, self.request, plan.training)
        capture = program_for(plan, folded)
        if capture is None and folded.repeats:  # the plan may be for a capture without folding
            folded, _ = capture_call(model, call, replace(self.request, fold_capture=False), plan.training)
            capture = program_for(plan, folded)
        if capture is None:
            raise InputError(
                f"the plan is for another program: {plan.model} with graph {plan.graph_hash[:12]}, and this is {model_name(model)} with "
                f"graph {folded.whole.graph.hash[:12]}: model, batch shapes, dtypes, precision and training mode must be those it was "
                "planned with"
            )
        return capture

    def replan(self, sizes: tuple[int, ...], wanted: RuntimeRequest) -> tuple[Capture, Plan]:
        """A program for a call of another form (other shapes, evaluation) on the same logical mesh, its parameters resting where
        they are."""
        request = replace(
            self.request,
            pins={name: format_placements(placements) for name, placements in wanted.pins.items()},
            strategy="auto",
            precision=wanted.precision,
            logical_mesh=sizes,
            degrees=None,
            respect_axis_names=False,
            alternatives=False,
        )
        if wanted.pipeline is not None:
            p = wanted.pipeline
            stages = PipelineRequest(p.degree, p.schedule, p.micro_batches, p.stages_per_rank, wanted.homes)
            request = RequestAgain(**{f.name: getattr(request, f.name) for f in fields(request)}, stages=stages)
        call = (tuple(wanted.args), dict(wanted.kwargs))
        return plan_on_ranks(wanted.module, call, self.mesh, self.target, request, wanted.training)


def program_for(plan: Plan, folded: Folded) -> Capture | None:
    """The captured program with the plan's recomputation, if it is the one that the plan is for."""
    try:
        capture = folded.at(plan.recompute).whole
    except Unlike:
        return None
    return capture if capture.graph.hash == plan.graph_hash else None


_NO_CHECKPOINTS = "checkpoints are saved and loaded by ranks that know their pieces, and there is no plan yet: pass example_inputs to autoparallelize"


class LazyParallelModule(runtime.ParallelModule):
    """Stands for the parallel module until the first call brings a batch to plan for; then it *becomes* that module.

    Until then its parameters are replicated DTensors under the original names, which share the model's storage, so that
    an optimizer can be made and a checkpoint loaded. At the first call each of them is swapped in place for its sharded
    form: the optimizer keeps its objects. Source: ``torch.nn.modules.lazy`` changes its class in the same way.
    """

    _source: nn.Module
    _maker: Maker

    def __init__(self, model: nn.Module, maker: Maker):
        nn.Module.__init__(self)  # the programs and seeds of a ParallelModule come when it becomes one
        self.__dict__["_source"] = model
        self.__dict__["_maker"] = maker
        self.training = model.training
        named = dict(model.named_parameters(remove_duplicate=False))
        whole = {id(p): _replicated(p, maker.mesh) for p in named.values()}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        fill_tree(self, model, PlacedState({name: whole[id(p)] for name, p in named.items()}, buffers, frozenset()))

    def _get_name(self) -> str:
        return f"LazyParallelModule({model_name(self._source)} on {self._maker.target.mesh}, planned at the first call)"

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan, once there is one.

        Raises:
            InputError: before the first call.
        """
        raise InputError(
            "there is no plan yet: it is made at the first call; pass example_inputs to autoparallelize to plan at once"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._become((args, kwargs))
        return self(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a single-device checkpoint into the model, whose storage the parameters here share.

        Raises:
            InputError: the model is on the meta device and has no storage yet, or ``assign=True``.
        """
        if assign or any(p.is_meta for p in self._source.parameters()):
            raise InputError(
                "a model on the meta device, or assign=True, cannot load before there is a plan: pass example_inputs to autoparallelize"
            )
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state_dict.items()}
        return self._source.load_state_dict(whole, strict=strict)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Refused before there is a plan.

        Raises:
            InputError: always.
        """
        raise InputError(_NO_CHECKPOINTS)

    def save_safetensors(self, *args: Any, **kwargs: Any) -> Any:
        """Refused before there is a plan.

        Raises:
            InputError: always.
        """
        raise InputError(_NO_CHECKPOINTS)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Refused before there is a plan.

        Raises:
            InputError: always.
        """
        raise InputError(_NO_CHECKPOINTS)

    def _become(self, call: Call) -> None:
        """Plan and build for ``call``, move what was built into the objects that others hold, and turn into the built module."""
        self._bring_up_to_date()
        built = self._maker.make(self._source, call)
        if not isinstance(built, runtime.ParallelModule):
            raise InputError(
                "this model fits these devices only in pipeline stages, and which rank then holds which parameter is known only with a "
                "plan: pass example_inputs to autoparallelize, and train with pm.step(batch)"
            )
        held = dict(self.named_parameters(remove_duplicate=False))
        for name, mine in self.named_parameters():
            torch.utils.swap_tensors(mine, built.get_parameter(name))
        for name, mine in held.items():
            parent, _, leaf = name.rpartition(".")
            built.get_submodule(parent)._parameters[leaf] = mine
        built._reduces = self._reduces
        self.__dict__ = built.__dict__
        self.__class__ = type(built)  # type: ignore[assignment]

    def _bring_up_to_date(self) -> None:
        """Give the model the training modes and ``requires_grad`` flags set on this module since."""
        for mine, theirs in zip(self.modules(), self._source.modules(), strict=True):
            theirs.training = mine.training
        for name, p in self._source.named_parameters():
            p.requires_grad_(self.get_parameter(name).requires_grad)


def _replicated(p: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """``p`` as a DTensor that every rank has whole, on the same storage."""
    whole = DTensor.from_local(p.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(whole, requires_grad=p.requires_grad)
