"""The programs of one parallel module, found by what a call looks like, and made when a call needs a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import InputError, MeshwrightError, VerifyError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, format_placements
from meshwright.runtime.checks import agree
from meshwright.runtime.inputs import Call, CallBinder, difference, dtype_differences, key_of
from meshwright.runtime.mesh import mesh_shape
from meshwright.runtime.params import class_name, skeleton
from meshwright.runtime.programs import (
    BoundProgram,
    RankProgram,
    Replan,
    Request,
    bind_program,
    captured_program,
)


@dataclass(frozen=True)
class Demand:
    """What a call demands of a program.

    Attributes:
        call: its leaves.
        modes: training mode of every module, in the order of ``modules()``.
        trainable: FQNs of the parameters that require a gradient now.
        wants_grad: whether a backward may follow.
    """

    call: Call
    modes: tuple[bool, ...]
    trainable: frozenset[str]
    wants_grad: bool

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return key_of(self.call), self.modes, self.trainable, self.wants_grad

    def is_met_by(self, program: BoundProgram) -> bool:
        if program.modes != self.modes or difference(program.call, self.call):
            return False
        return not self.wants_grad or (program.differentiates and self.trainable <= program.trainable)

    def unmet_by(self, program: BoundProgram) -> str:
        """Why ``program`` does not serve."""
        reasons = [difference(program.call, self.call)]
        if program.modes != self.modes:
            reasons.append(f"it is in {_mode(self.modes)} mode, planned in {_mode(program.modes)} mode")
        if self.wants_grad and not program.differentiates:
            reasons.append("a gradient is wanted, planned for inference (call it under torch.no_grad())")
        elif self.wants_grad and not self.trainable <= program.trainable:
            reasons.append(f"{', '.join(sorted(self.trainable - program.trainable))} requires a gradient now but was frozen")
        return "; ".join(r for r in reasons if r)


def _mode(modes: tuple[bool, ...]) -> str:
    return "training" if all(modes) else "evaluation" if not any(modes) else "mixed"


class ProgramLibrary:
    """Bound programs of one model on one mesh.

    A program serves a call with the same leaves (paths, shapes, dtypes, plain values) and the same training mode of every
    module. A call that differs in shapes or plain values, or comes in evaluation mode, gets a program of its own, planned
    with every parameter pinned where it rests, so that nothing moves; it is kept. Another dtype is an error.

    Attributes:
        mesh: where the programs run.
        rests: where every parameter rests, by FQN.
        binder: flattens calls.
        batch: ``"global"`` or ``"local"``.
        model_name: class name of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        rests: Mapping[str, Placements],
        *,
        batch: str,
        compile: bool,
        replan: Replan | None,
    ):
        self.mesh, self.rests, self.batch = mesh, dict(rests), batch
        self.binder = CallBinder(model.forward)
        self.model_name = class_name(model)
        self._compile, self._replan = compile, replan
        self._skeleton = skeleton(model) if replan is not None else None
        self._programs: list[BoundProgram] = []
        self._found: dict[Any, BoundProgram] = {}
        self._unreduced: dict[BoundProgram, BoundProgram] = {}

    @property
    def programs(self) -> tuple[BoundProgram, ...]:
        """All programs, the first one first."""
        return tuple(self._programs)

    def add(self, capture: Capture, plan: Plan, modes: tuple[bool, ...]) -> BoundProgram:
        """Lower and keep a program. Collective.

        Raises:
            InputError: the plan is for something else.
            VerifyError: the plan moves a parameter.
            RuntimeMismatchError: the ranks lowered it differently.
        """
        return self.add_program(captured_program(capture, plan, self.mesh, self.binder, modes))

    def add_program(self, program: RankProgram) -> BoundProgram:
        """Bind and keep a program. Collective; raises as :meth:`add`."""
        for name, rest in program.interface.rests.items():
            if name in self.rests and self.rests[name] != rest:
                raise VerifyError(
                    f"the plan of a further program rests {name} in {format_placements(rest)}, "
                    f"but it lies in {format_placements(self.rests[name])}"
                )
        bound = bind_program(program, self.mesh, batch=self.batch, compile=self._compile)
        agree({"plan": bound.plan.hash[:16], "collectives": bound.local.sequence_hash[:16]}, self.mesh, "after lowering")
        self._programs.append(bound)
        return bound

    def unreduced(self, program: BoundProgram) -> BoundProgram:
        """The program whose gradients wait to be reduced, where some can. Collective at its first call."""
        if program not in self._unreduced:
            twin = bind_program(program.source, self.mesh, batch=self.batch, compile=self._compile, reduces=False)
            agree({"collectives": twin.local.sequence_hash[:16]}, self.mesh, "after lowering without reductions")
            self._unreduced[program] = twin
        return self._unreduced[program]

    @property
    def bound(self) -> tuple[BoundProgram, ...]:
        """All programs, those without reductions too."""
        return (*self._programs, *self._unreduced.values())

    def find(
        self, demand: Demand, leaves: Mapping[str, Any], raw: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[BoundProgram, bool]:
        """The program for a call, and whether this is its first call.

        Args:
            demand: what the call demands.
            leaves: the call's leaves by path.
            raw: its arguments as the caller passed them.

        Raises:
            InputError: no program is for it, and none may be or can be made.
        """
        known = self._found.get(demand.key)
        if known is not None:
            return known, False
        wrong = dtype_differences(self._programs[0].call, demand.call)
        if wrong:
            raise InputError(f"{self.model_name} was planned for another call: {wrong}; cast the batch, or plan again for it")
        fitting = sorted(filter(demand.is_met_by, self._programs), key=lambda p: p.differentiates != demand.wants_grad)
        program = fitting[0] if fitting else self._make(demand, leaves, raw)
        is_first = all(program is not p for p in self._found.values())
        self._found[demand.key] = program
        return program, is_first

    def _make(self, demand: Demand, leaves: Mapping[str, Any], raw: tuple[tuple[Any, ...], dict[str, Any]]) -> BoundProgram:
        why = demand.unmet_by(self._programs[0])
        if self._replan is None:
            raise InputError(
                f"{self.model_name} was planned for another call: {why}; pass a batch like the example inputs, "
                "or plan for this call too"
            )
        text = ", ".join(f"{path}: {leaf}" for path, leaf in demand.call.items())
        agree({"call": f"{text}; {_mode(demand.modes)}; gradient {demand.wants_grad}"}, self.mesh, "planning for a new call")
        try:
            capture, plan = self._replan(self._request(demand, leaves, raw))
        except MeshwrightError as error:
            error.add_note(f"while planning {self.model_name} for another call than the first: {why}")
            raise
        return self.add(capture, plan, demand.modes)

    def _request(self, demand: Demand, leaves: Mapping[str, Any], raw: tuple[tuple[Any, ...], dict[str, Any]]) -> Request:
        assert self._skeleton is not None
        for module, training in zip(self._skeleton.modules(), demand.modes, strict=True):
            module.training = training
        for name, p in self._skeleton.named_parameters():
            p.requires_grad_(name in demand.trainable)
        examples = {
            id(leaf): self._example(path, leaf, demand.wants_grad)
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor)
        }
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda leaf: examples[id(leaf)], raw)
        return Request(self._skeleton, args, kwargs, demand.wants_grad, self._programs[0].plan.precision, self.rests)

    def _example(self, path: str, leaf: torch.Tensor, wants_grad: bool) -> torch.Tensor:
        """A tensor of the global batch, on the meta device."""
        shape = list(leaf.shape)
        if self.batch == "local":
            first = self._programs[0]
            if path not in first.inputs:
                raise InputError(
                    f"{path} was not in the first call, so with batch='local' its whole shape is unknown: pass batch='global', "
                    "or plan with a batch that has it"
                )
            for p, n in zip(first.placements[first.inputs[path]], mesh_shape(self.mesh).sizes, strict=True):
                if p.is_shard:
                    shape[p.dim] *= n
        return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(wants_grad and leaf.requires_grad)
