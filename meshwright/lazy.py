"""Making the parallel module, now or at the first call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.inputs import Call
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import format_placements
from meshwright.planning import Request, capture_call, model_name, plan_on_ranks
from meshwright.runtime import module as runtime
from meshwright.runtime.programs import Request as RuntimeRequest
from meshwright.target import Target


@dataclass(frozen=True)
class Maker:
    """All that ``autoparallelize`` was asked, ready for a batch.

    Attributes:
        mesh: the running mesh; ``target`` its shape and hardware.
        request: what to plan; ``plan``: a plan given by the user instead, or None.
        batch, outputs, compile: as in ``autoparallelize``.
    """

    mesh: DeviceMesh
    target: Target
    request: Request
    plan: Plan | None
    batch: str
    outputs: str
    compile: bool

    def make(self, model: nn.Module, call: Call) -> nn.Module:
        """Plan for one call and build the module."""
        if self.plan is None:
            capture, plan = plan_on_ranks(model, call, self.mesh, self.target, self.request)
        else:
            plan = self.plan
            capture = self._capture_for(plan, model, call)
        return runtime.build(
            model, capture, plan, self.mesh, batch=self.batch, outputs=self.outputs, compile=self.compile, replan=self.replan
        )

    def _capture_for(self, plan: Plan, model: nn.Module, call: Call) -> Capture:
        """Capture for a given plan, and check that it is the program and the mesh that the plan is for."""
        if plan.mesh.sizes != self.target.mesh.sizes:
            raise InputError(
                f"the plan is for a mesh of {plan.mesh} and this mesh is {self.target.mesh}: plan again for this mesh"
            )
        capture, _ = capture_call(model, call, self.request, plan.training)
        if capture.graph.hash != plan.graph_hash:
            raise InputError(
                f"the plan is for another program: {plan.model} with graph {plan.graph_hash[:12]}, and this is {model_name(model)} with "
                f"graph {capture.graph.hash[:12]}: model, batch shapes, dtypes, precision and training mode must be those it was planned with"
            )
        return capture

    def replan(self, wanted: RuntimeRequest) -> tuple[Capture, Plan]:
        """A program for a call of another form (other shapes, evaluation), its parameters resting where they are."""
        pins = {name: format_placements(placements) for name, placements in wanted.pins.items()}
        request = replace(self.request, pins=pins, strategy="auto", precision=wanted.precision)
        call = (tuple(wanted.args), dict(wanted.kwargs))
        return plan_on_ranks(wanted.module, call, self.mesh, self.target, request, wanted.training)


class LazyParallelModule(nn.Module):
    """Stands for the parallel module until the first call brings a batch to plan for; then it *becomes* that module.

    Until then its parameters are replicated DTensors under the original names, which share the model's storage, so that
    an optimizer can be made and a checkpoint loaded. At the first call each of them is swapped in place for its sharded
    form: the optimizer keeps its objects. Source: ``torch.nn.modules.lazy`` changes its class in the same way.
    """

    def __init__(self, model: nn.Module, maker: Maker):
        super().__init__()
        self.__dict__["_source"] = model
        self.__dict__["_maker"] = maker
        self.train(model.training)
        shared: dict[int, nn.Parameter] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) not in shared:
                whole = DTensor.from_local(p.detach(), maker.mesh, [Replicate()] * maker.mesh.ndim, run_check=False)
                shared[id(p)] = nn.Parameter(whole, requires_grad=p.requires_grad)
            _parent(self, name).register_parameter(name.rpartition(".")[2], shared[id(p)])
        persistent = model.state_dict(keep_vars=True)
        for name, b in model.named_buffers(remove_duplicate=False):
            _parent(self, name).register_buffer(name.rpartition(".")[2], b, persistent=name in persistent)

    @property
    def plan(self) -> Plan:
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

    def _become(self, call: Call) -> None:
        """Plan and build for ``call``, put the built parameters into the objects that others hold, and turn into the built module."""
        source: nn.Module = self._source
        for name, p in source.named_parameters():
            p.requires_grad_(self.get_parameter(name).requires_grad)
        for name, m in self.named_modules():
            if name and (theirs := dict(source.named_modules()).get(name)) is not None:
                theirs.training = m.training
        source.training = self.training
        built = self._maker.make(source, call)
        done: set[int] = set()
        for name, mine in list(self.named_parameters(remove_duplicate=False)):
            theirs_p = built.get_parameter(name)
            if id(mine) not in done:
                done.add(id(mine))
                torch.utils.swap_tensors(mine, theirs_p)
        for name, mine in list(self.named_parameters(remove_duplicate=False)):
            _parent(built, name).register_parameter(name.rpartition(".")[2], mine)
        self.__dict__ = built.__dict__
        self.__class__ = type(built)  # type: ignore[assignment]


def _parent(root: nn.Module, name: str) -> nn.Module:
    """The module that holds ``name`` (a dotted path), making empty modules on the way."""
    here = root
    for part in _steps(name):
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = here._modules[part]  # type: ignore[assignment]
    return here


def _steps(name: str) -> Iterator[str]:
    yield from name.split(".")[:-1]
