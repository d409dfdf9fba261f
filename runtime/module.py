"""The parallel module: the original model's names, calls and outputs over programs that run on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.plan import Plan
from meshwright.runtime.checks import agree, batch_fingerprint
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.export.manifest import MeshRecord
from meshwright.runtime.export.methods import Exported
from meshwright.runtime.export.model_tree import ModelRecord, model_record
from meshwright.runtime.inputs import call_of_batch, describe_call
from meshwright.runtime.library import Demand, ProgramLibrary
from meshwright.runtime.mesh import broadcast_object, check_mesh, device_of, logical_mesh, mesh_shape
from meshwright.runtime.no_sync import (
    add_to_waiting,
    reduce_waiting,
    refuse_waiting,
    return_waiting,
    settle_waiting,
    waits,
    watch_optimizers,
)
from meshwright.runtime.one_controller import OneController
from meshwright.runtime.params import fill_tree, place_state, resting_placements
from meshwright.runtime.pipeline import PipelineModule, build_pipeline
from meshwright.runtime.programs import BoundProgram, RankProgram, Replan, check_plan
from meshwright.runtime.random import SeedSequence, initial_seed
from meshwright.runtime.state import Tree, full_state_dict, load_state
from meshwright.runtime.step import Made, Return, Step, return_to_input, return_to_parameter


class ParallelModule(Exported):
    """A model on a mesh; train it as the original.

    Its parameters are DTensors under the original names; buffers are whole on every rank. ``forward`` takes what the
    original takes (the global batch, or this rank's piece with ``batch="local"``) and returns what it returns: a loss is
    a plain scalar that is equal on all ranks; where there is a loss, other tensor outputs are DTensors in the placement
    that the plan gives them (plain with ``outputs="full"``); where there is none, all are plain and whole.

    Attributes:
        plan: the plan of the first program.
        device_mesh: the plan's logical mesh, on which the parameters lie.
    """

    plan: Plan
    device_mesh: DeviceMesh
    _reduces = True

    def __init__(self, model: nn.Module, library: ProgramLibrary, plan: Plan, outputs: str, given: MeshRecord):
        super().__init__()
        self.plan, self.device_mesh = plan, library.mesh
        self._library, self._outputs, self._given_mesh = library, outputs, given
        self._controller = OneController(library.mesh) if plan.one_controller else None
        rests = library.rests
        state = place_state(model, rests, library.mesh)
        fill_tree(self, model, state)
        self.training = model.training
        self._tree = Tree(self, state, rests)
        self._seeds = SeedSequence(broadcast_object(initial_seed(), library.mesh))
        self._added_up = self._has_waited = False

    def _get_name(self) -> str:
        return f"ParallelModule({self._library.model_name} on {mesh_shape(self.device_mesh)})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            InputError: the call is not one that the model takes or that was planned for, or a parameter has no values.
            RuntimeMismatchError: ranks differ at the first call of a program, or a parameter was changed outside.
        """
        leaves = self._library.binder.leaves(args, kwargs)
        parameters = self._tree.parameters()
        demand = self._demand(leaves, parameters)
        program, is_new = self._library.find(demand, leaves, (args, kwargs))
        if is_new:
            self._check_first_call(program, leaves)
        if self._controller is not None:
            self._controller.hand_out_parameters(parameters.values())
        if demand.wants_grad and self._waits(parameters):
            program = self._library.unreduced(program)
        results = self._run(program, leaves, parameters, demand.wants_grad)
        output = program.structure(results, whole=self._outputs == "full")
        return output if self._controller is None else self._controller.collect(output)

    def _demand(self, leaves: Mapping[str, Any], parameters: Mapping[str, Any]) -> Demand:
        """What a call demands of a program."""
        grad = torch.is_grad_enabled()
        call = describe_call(leaves, grad=grad)
        trainable = frozenset(name for name, p in parameters.items() if p.requires_grad)
        wants_grad = grad and (bool(trainable) or any(getattr(leaf, "requires_grad", False) for leaf in call.values()))
        return Demand(call, self._tree.modes(self), trainable, wants_grad)

    def step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to ``.grad``. The same call trains a model in pipeline stages.

        Args:
            batch: what the model takes: a dict of keyword arguments, a tuple of positional ones, or one tensor.

        Returns:
            The loss, detached, equal on all ranks.

        Raises:
            InputError: as :meth:`forward`, or the model returns no loss.
        """
        loss = self._loss_of(batch)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The loss of one batch without a backward; see :meth:`step`."""
        return self._loss_of(batch)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        index = self._library.programs[0].interface.loss_index
        args, kwargs = call_of_batch(batch)
        return pytree.tree_leaves(self(*args, **kwargs))[index]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here belong to passes whose gradients wait for later ones, as ``DistributedDataParallel.no_sync``:

            for micro in batches[:-1]:
                with pm.no_sync():
                    (pm(**micro).loss / n).backward()
            (pm(**batches[-1]).loss / n).backward()      # outside: all are reduced here, once

        What waits is what the plan sums up whole (DDP; it takes the memory that ``accumulate=`` counts); gradients that it scatters are
        scattered in every pass. An optimizer refuses to step while gradients wait.

        Raises:
            InputError: the module was loaded from an export.
        """
        library = self.__dict__.get("_library")
        if library is not None and library.programs[0].source.waiting is None:
            raise InputError(
                "no_sync() needs programs that are lowered here: an exported module reduces gradients in every backward"
            )
        watch_optimizers()
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def _waits(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a pass adds to gradients that wait, or ends with some that do."""
        if not self._reduces:
            self._added_up = self._has_waited = True
        elif self._added_up:
            self._added_up = any(waits(p.grad) for p in parameters.values())
        return self._added_up

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of this module, for loops that also train models in pipeline stages.

        Returns:
            The norm before, as a plain tensor.

        Raises:
            InputError: gradients wait to be reduced, see :meth:`no_sync`.
        """
        refuse_waiting(self.parameters())
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _check_first_call(self, program: BoundProgram, leaves: Mapping[str, Any]) -> None:
        """Compare the first batch of a program on all ranks; collective."""
        facts: dict[str, Any] = {"call": {path: str(leaf) for path, leaf in program.call.items()}}
        if self._library.batch == "global" and self._controller is None:
            facts.update((f"batch {path}", batch_fingerprint(leaves[path])) for path in program.inputs)
        agree(facts, self.device_mesh, "first call")

    def _run(
        self, program: BoundProgram, leaves: Mapping[str, Any], parameters: Mapping[str, Any], wants_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        given = {value: self._given(program, value, leaves[path]) for path, value in program.inputs.items()}
        buffers = self._tree.buffers()
        flat = [self._argument(program, name, given, parameters, buffers) for name in program.local.inputs]
        count = len(program.local.mutations)
        run = partial(program.run_forward, parameters=parameters)
        for other in self._library.bound if program.local.kept else ():
            if other is not program:
                other.copies.forget()
        if wants_grad:
            returns, tensors = self._returns(program, leaves, parameters)
            results = Step.apply(program, flat, run, self._finish(program, parameters), returns, *tensors)
        else:
            with torch.no_grad():
                results = tuple(run(flat))
        with torch.no_grad():
            for name, new in zip(program.local.mutations, results[:count], strict=True):
                buffers[name].copy_(new)
        return results

    def _finish(self, program: BoundProgram, parameters: Mapping[str, Any]) -> Callable[[Made], Made] | None:
        """What happens to local gradients before autograd gets them."""
        if not program.waiting:
            return partial(settle_waiting, parameters=parameters) if self._has_waited else None
        return partial(reduce_waiting if self._reduces else add_to_waiting, parameters=parameters, paths=program.waiting)

    def _given(self, program: BoundProgram, value: str, leaf: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a batch input."""
        if self._controller is not None:
            return self._controller.hand_out(leaf, program.placements[value])
        if self._library.batch == "global":
            return program.piece(value, leaf.detach())
        return leaf.detach().to(device_of(self.device_mesh)).contiguous()

    def _argument(
        self,
        program: BoundProgram,
        value: str,
        given: Mapping[str, torch.Tensor],
        parameters: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        role, name = program.roles[value]
        if role == "parameter":
            return local_of(parameters[name]).detach()
        if role == "buffer":
            mutated_and_saved = name in program.local.mutations and value in program.local.saved_inputs
            return buffers[name].clone() if mutated_and_saved else buffers[name]
        if role == "input":
            return given[value]
        if role == "seed":
            return torch.tensor(self._seeds.draw(), dtype=torch.int64, device=device_of(self.device_mesh))
        return program.source.constants[value]

    def _returns(
        self, program: BoundProgram, leaves: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> tuple[list[Return], list[torch.Tensor]]:
        returns, tensors = [], []
        for name in program.trained:
            if parameters[name].requires_grad:
                waits_at = None if self._reduces else program.waiting.get(name)
                given = return_to_parameter if waits_at is None else partial(return_waiting, start=waits_at[0])
                returns.append(given(name, parameters[name]))
                tensors.append(parameters[name])
        for path, value in program.inputs.items():
            name = program.roles[value][1]
            if leaves[path].requires_grad and name in program.interface.gradients:
                returns.append(return_to_input(program, name, value, whole=self._library.batch == "global"))
                tensors.append(leaves[path])
        return returns, tensors

    # --- export ---------------------------------------------------------------------------------------------------

    def _sources(self) -> tuple[RankProgram, ...]:
        return tuple(p.source for p in self._library.programs)

    def _record(self) -> ModelRecord:
        return model_record(self, self._library.model_name, self._library.binder.signature)

    @torch.no_grad()
    def _prepare(self, batch: Any) -> None:
        args, kwargs = call_of_batch(batch)
        leaves = self._library.binder.leaves(args, kwargs)
        with self._evaluating():
            self._library.find(self._demand(leaves, self._tree.parameters()), leaves, (args, kwargs))

    def _num_places(self) -> int:
        return 1

    def _axes_inside(self) -> int:
        return self.device_mesh.ndim

    # --- state ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a single-device checkpoint (whole plain tensors, sliced here) or one of DTensors.

        Args:
            state_dict: tensors by name; every rank passes the whole checkpoint.
            strict: whether names must match exactly.
            assign: not supported: parameters keep their objects and values are copied.

        Returns:
            The missing and unexpected keys, as ``nn.Module.load_state_dict``.

        Raises:
            InputError: a key is missing, unexpected or of another shape; or ``assign`` was asked for.
        """
        if assign:
            raise InputError("load_state_dict(assign=True) would replace the sharded parameters: load without assign")
        self.forget_kept()
        return load_state(self, state_dict, strict)

    def forget_kept(self) -> None:
        """Free the gathered copies of parameters that live for a step; the next forward gathers again.

        Needed only by code that changes parameters with ``torch._foreach_*`` ops of its own, which nothing shows: optimizers,
        ``load_state_dict`` and single ops in place are seen.
        """
        for program in self._library.bound:
            program.copies.forget()

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``; evaluation frees the gathered copies of parameters that live for a step."""
        if not mode and "_library" in self.__dict__:
            self.forget_kept()
        return super().train(mode)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole plain tensors by name on every rank, for a single-device checkpoint; collective."""
        return full_state_dict(self)

    def random_state(self) -> dict[str, int]:
        """State of the random ops (dropout): save it beside the ``state_dict``, which keeps the model's own keys."""
        return self._seeds.state()

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Continue the random ops where :meth:`random_state` was taken."""
        self._seeds.load_state(dict(state))


def build(
    model: nn.Module,
    capture: Capture,
    plan: Plan,
    device_mesh: DeviceMesh,
    *,
    batch: str = "global",
    outputs: str | None = None,
    compile: bool = False,
    replan: Replan | None = None,
    timeout_s: float | None = None,
) -> ParallelModule | PipelineModule:
    """Place a model on a mesh as a plan says. Collective: every rank of the mesh calls it with equal arguments.

    Args:
        model: the model that was captured, on a real or the meta device; it is left untouched.
        capture: its program.
        plan: for that program and as many devices.
        device_mesh: torch's mesh; its device type decides between gloo and NCCL. Its ranks are arranged in the axes of the
            plan's mesh.
        batch: ``"global"``: every rank is given the whole batch; ``"local"``: its own piece (``plan.inputs``).
        outputs: ``"auto"`` (default) or ``"full"``, see :class:`ParallelModule`.
        compile: whether the graphs go through Inductor.
        timeout_s: how long a rank waits for others in a step over pipeline stages; None: as the process group was made with.
        replan: makes programs for further calls (other shapes, evaluation mode); without it such calls are errors.

    Raises:
        InputError: a wrong option, mesh, plan or model.
        RuntimeMismatchError: the ranks do not agree, or the plan is for another number of devices.
    """
    _check_option("batch", batch, ("global", "local"))
    _check_option("outputs", outputs or "auto", ("auto", "full"))
    if plan.one_controller and batch != "global":
        raise InputError(
            "one controller hands out the whole batch: strategy 'data_parallel' takes batch='global', use 'ddp' for pieces"
        )
    if plan.pipeline is not None:
        return build_pipeline(model, capture, plan, device_mesh, batch=batch, compile=compile, timeout_s=timeout_s, replan=replan)
    check_mesh(device_mesh)
    shape = mesh_shape(device_mesh)
    facts = {
        "world size": dist.get_world_size(),
        "torch": torch.__version__,
        "mesh": (shape.sizes, device_mesh.mesh.flatten().tolist(), device_mesh.device_type),
        "batch mode": batch,
        "graph": capture.graph.hash[:16],
        "plan": plan.hash[:16],
    }
    agree(facts, device_mesh, "start-up")
    given = MeshRecord(shape.sizes, shape.names)
    device_mesh = logical_mesh(device_mesh, plan.mesh)
    check_plan(capture, plan, mesh_shape(device_mesh))
    library = ProgramLibrary(
        model, device_mesh, resting_placements(capture.graph, plan), batch=batch, compile=compile, replan=replan
    )
    module = ParallelModule(model, library, plan, outputs or "auto", given)
    library.add(capture, plan, tuple(m.training for m in model.modules()))
    return module


def _check_option(name: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise InputError(f"{name} is {found!r}, must be one of {', '.join(map(repr, allowed))}")
