"""The parallel module of a plan with stages: each rank holds its stages' parameters and runs its part of a schedule."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.passes.lower_stages import PipelineProgram
from meshwright.planner.ir.errors import InputError, MeshwrightError, StepError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.pipeline import Pipeline, check_schedule
from meshwright.planner.ir.plan import Plan
from meshwright.runtime.checks import agree, batch_fingerprint
from meshwright.runtime.export.manifest import MeshRecord
from meshwright.runtime.export.methods import Exported
from meshwright.runtime.export.model_tree import ModelRecord, model_record
from meshwright.runtime.gradients import GradientBook
from meshwright.runtime.inputs import Call, CallBinder, call_of_batch, describe_call, dtype_differences
from meshwright.runtime.journal import Journal, culprit
from meshwright.runtime.mesh import broadcast_object, check_mesh, device_of, mesh_shape
from meshwright.runtime.params import StandIn, class_name, fill_tree, place_state
from meshwright.runtime.programs import Replan
from meshwright.runtime.random import SeedSequence, initial_seed
from meshwright.runtime.stage_mesh import StageMesh
from meshwright.runtime.stage_state import full_state_dict, load_state_dict
from meshwright.runtime.staged import (
    RankStages,
    Replanner,
    StagedProgram,
    bound_groups,
    captured_stages,
    check_homes,
    mode_text,
)
from meshwright.runtime.state import Tree


class PipelineModule(Exported):
    """A model in stages on a mesh with a ``pp`` axis; train it with :meth:`step`.

    It has the module tree of the original. This rank's parameters are DTensors under the original names, on the mesh inside
    its stage; those of other ranks are None here. Buffers are whole on every rank.

    Attributes:
        plan: what it runs.
        device_mesh: the whole mesh; ``stage_mesh`` the part inside this rank's stage.
    """

    plan: Plan
    device_mesh: DeviceMesh
    stage_mesh: DeviceMesh

    def __init__(
        self,
        model: nn.Module,
        source: RankStages,
        mesh: StageMesh,
        given: MeshRecord,
        *,
        compile: bool,
        replan: Replan | None,
    ):
        super().__init__()
        program, plan = bound_groups(source, mesh), source.plan
        self.plan, self.device_mesh, self.stage_mesh = plan, mesh.whole, mesh.inside
        self._mesh, self._pipeline, self._given_mesh = mesh, source.pipeline, given
        self._name, self._meta = class_name(model), {k: (v.shape, v.dtype) for k, v in model.state_dict().items()}
        names = {i.name: (i.name, *i.aliases) for i in source.interface.of("parameter")}
        self._rests = source.interface.rests
        self._holders = {alias: mesh.ranks_of(program.holders.get(name, (0,))) for name, all_ in names.items() for alias in all_}
        self._homes = {alias: program.holders.get(name, (0,)) for name, all_ in names.items() for alias in all_}
        held = {name for name, ranks in self._holders.items() if mesh.rank in ranks}
        state = place_state(model, self._rests, mesh.inside, held=held, everyone=mesh.whole)
        fill_tree(self, model, state)
        self.training = model.training
        self._tree = Tree(self, state, {name: self._rests[name] for name in held})
        self._seeds = SeedSequence(broadcast_object(initial_seed(), mesh.whole))
        self._binder = CallBinder(model.forward)
        self._book = GradientBook(source.interface.gradients, self._holders, mesh)
        self._journal = Journal(mesh.new_name(), mesh.whole.mesh.flatten().tolist())
        self._compile = compile
        self._replanner = None if replan is None else Replanner(model, replan, self.plan, self._rests, self._homes)
        self._programs = [self._bound(source, program)]

    def _bound(self, source: RankStages, program: PipelineProgram) -> StagedProgram:
        return StagedProgram(source, program, self._mesh, self._journal, compile=self._compile)

    def add_program(self, source: RankStages) -> StagedProgram:
        """Keep a further program. Collective.

        Raises:
            InputError: it needs parameters on ranks that do not hold them.
        """
        program = bound_groups(source, self._mesh)
        check_homes(program, self._holders, self._mesh)
        self._programs.append(self._bound(source, program))
        return self._programs[-1]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As of every module; where this rank's stages have none, one empty stand-in, so that an optimizer can be made on every rank."""
        found = list(super().parameters(recurse))
        yield from found or [StandIn(torch.empty(0, device=device_of(self.device_mesh)), requires_grad=False)]

    def _get_name(self) -> str:
        p = self._pipeline
        inside = mesh_shape(self.stage_mesh)
        return f"PipelineModule({self._name}, stages {list(p.stages_of(self._mesh.rank))} of {p.num_stages}, {p.schedule}, on {inside})"

    # --- steps ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "a model in pipeline stages has no output on most ranks and cannot be called: use loss = pm.step(batch), which runs forward "
            "and backward of all micro-batches, or pm.eval_step(batch) without a backward"
        )

    def step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of the whole batch, in micro-batches; gradients are added to ``.grad``. Collective.

        Args:
            batch: what the model takes: a dict of keyword arguments, a tuple of positional ones, or one tensor; the global batch.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            InputError: the batch is not one that was planned for.
            StepError: this or another rank failed; the process group is gone then.
        """
        return self._run(batch, training=True)

    @torch.no_grad()
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The loss of the whole batch without a backward, on every rank. Collective; see :meth:`step`."""
        return self._run(batch, training=False)

    def _run(self, batch: Any, *, training: bool) -> torch.Tensor:
        if not self._programs:
            raise StepError("an earlier step failed and ended the process group: restart the job from a checkpoint")
        parameters = self._tree.parameters()
        args, kwargs = call_of_batch(batch)
        leaves = self._binder.leaves(args, kwargs)
        program = self._program_for(leaves, (args, kwargs), training=training)
        given = program.given(leaves, parameters, self._tree.buffers(), self._seeds)
        try:
            return self._run_schedule(program, given, training=training)
        except Exception as error:
            del program, given  # connections close with the last reference
            raise self._failed(error) from error
        finally:
            for kept in self._programs:
                kept.forget()

    def _run_schedule(self, program: StagedProgram, given: list[dict[str, torch.Tensor]], *, training: bool) -> torch.Tensor:
        self._journal.watch()
        mine, made = program.run(given, training=training)
        loss = torch.empty((), dtype=program.loss_dtype, device=device_of(self.device_mesh)) if mine is None else mine.clone()
        self._mesh.broadcast(loss, self._pipeline.rank_of(self._pipeline.num_stages - 1))
        if training:
            self._book.give(made, self._tree.parameters())
        self._write_buffers(program)
        self._journal.doing("idle")
        return loss

    def _write_buffers(self, program: StagedProgram) -> None:
        """New values of buffers, on every rank."""
        buffers = self._tree.buffers()
        with torch.no_grad():
            for run in program.runs.values():
                for name, new in run.mutations.items():
                    buffers[name].copy_(new)
            for name, rank in program.program.mutated_on.items():
                self._mesh.broadcast(buffers[name], rank)

    # --- programs -------------------------------------------------------------------------------------------------

    def _program_for(
        self, leaves: Mapping[str, Any], raw: tuple[tuple[Any, ...], dict[str, Any]], *, training: bool
    ) -> StagedProgram:
        """The program for a batch in the present mode, made where there is none."""
        call, modes = describe_call(leaves, grad=False), self._tree.modes(self)
        program = next((p for p in self._programs if not p.unmet(call, modes, training=training)), None)
        if program is None:
            program = self._further(call, modes, raw, training=training)
        if not program.was_called:
            agree({f"batch {path}": batch_fingerprint(leaves[path]) for path in program.inputs}, self.device_mesh, "first call")
            program.was_called = True
        return program

    def _further(
        self, call: Call, modes: tuple[bool, ...], raw: tuple[tuple[Any, ...], dict[str, Any]], *, training: bool
    ) -> StagedProgram:
        """Plan and lower for another mode or another batch, with every parameter where it lies. Collective."""
        why = self._programs[0].unmet(call, modes, training=training)
        wrong = dtype_differences(self._programs[0].call, call)
        if self._replanner is None or wrong:
            raise InputError(
                f"{self._name} was planned for another call: {wrong or why}; pad or cast the batch, or plan for this one"
            )
        text = ", ".join(f"{path}: {leaf}" for path, leaf in call.items())
        agree({"call": f"{text}; {mode_text(modes)}; gradient {training}"}, self.device_mesh, "planning for a new call")
        try:
            capture, plan = self._replanner.plan(modes, raw, training=training)
            return self.add_program(captured_stages(capture, plan, self._mesh, self._binder, modes))
        except MeshwrightError as error:
            error.add_note(f"while planning {self._name} for another call than the first: {why}")
            raise

    # --- export ---------------------------------------------------------------------------------------------------

    def _sources(self) -> tuple[RankStages, ...]:
        return tuple(p.source for p in self._programs)

    def _record(self) -> ModelRecord:
        return model_record(self, self._name, self._binder.signature)

    @torch.no_grad()
    def _prepare(self, batch: Any) -> None:
        args, kwargs = call_of_batch(batch)
        with self._evaluating():
            self._program_for(self._binder.leaves(args, kwargs), (args, kwargs), training=False)

    def _num_places(self) -> int:
        return self._mesh.degree

    def _axes_inside(self) -> int:
        return self.stage_mesh.ndim

    # --- failures -------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> MeshwrightError:
        """End the process group, so that nobody waits for this rank, and say whose fault it was."""
        action, rank, place = self._journal.action, dist.get_rank(), self._mesh.rank
        own = not _is_of_communication(error)
        self._journal.fail(error, own=own)
        self._end_groups(error)
        reports = self._journal.collect(wait=not own)
        where = f"rank {rank} (pipeline rank {place})"
        if own:
            text = f"{where} failed while {action}: {type(error).__name__}: {error}"
            return StepError(f"{text}; the process group is destroyed, so that the other ranks end too", rank=rank, action=action)
        guilty = culprit([r for r in reports if r.rank != rank])
        others = (
            "; ".join(str(r) for r in reports if r.rank != rank) or "the store is gone, so nothing is known of the other ranks"
        )
        blame = f"{guilty}" if guilty is not None else "who failed is not known"
        return StepError(
            f"{blame}. {where} noticed it while {action} ({str(error).splitlines()[0][:200]}). All ranks: {others}. Restart the job "
            "from a checkpoint",
            rank=None if guilty is None else guilty.rank,
            action="" if guilty is None else guilty.action,
        )

    def _end_groups(self, error: BaseException) -> None:
        """Destroy the process groups. Connections close with the last reference, and work under way holds some, in the frames of
        the failed step: until they close, ranks further away go on waiting."""
        self._mesh.forget_groups()
        del self._book, self._mesh
        self._programs.clear()
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    # --- gradients and state --------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Refused: a step reduces what it sums up once, after all its micro-batches.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a module in stages or micro-batches reduces gradients once per step(): instead of no_sync(), plan for the whole batch with "
            "as many more micro_batches"
        )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients of all stages so that their norm is at most ``max_norm``; collective.

        ``torch.nn.utils.clip_grad_norm_`` would see this rank's parameters only.

        Returns:
            The norm before, over all parameters of the model, each counted once.
        """
        return self._book.clip(dict(self.named_parameters(remove_duplicate=False)), max_norm)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a single-device checkpoint (whole plain tensors), or one of this rank's own DTensors.

        Args:
            state_dict: tensors by name; those of other ranks' parameters are passed over.
            strict: whether names must match the model's exactly.
            assign: not supported: parameters keep their objects and values are copied.

        Raises:
            InputError: a key is missing, unexpected or of another shape; or ``assign`` was asked for.
        """
        if assign:
            raise InputError("load_state_dict(assign=True) would replace the sharded parameters: load without assign")
        return load_state_dict(self, state_dict, set(self._meta), strict)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole plain tensors by name on every rank, of all stages, for a single-device checkpoint; collective."""
        return full_state_dict(self, self._meta, self._holders, self._mesh)

    def random_state(self) -> dict[str, int]:
        """State of the random ops (dropout): save it beside the ``state_dict``, which keeps the model's own keys."""
        return self._seeds.state()

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Continue the random ops where :meth:`random_state` was taken."""
        self._seeds.load_state(dict(state))


def _is_of_communication(error: Exception) -> bool:
    """Whether gloo or NCCL raised it: they have no type of their own for a lost peer."""
    text = str(error)
    marks = ("Connection closed by peer", "Timed out waiting", "gloo", "NCCL", "Connection reset", "Broken pipe", "process group")
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(m in text for m in marks))


def build_pipeline(
    model: nn.Module,
    capture: Capture,
    plan: Plan,
    device_mesh: DeviceMesh,
    *,
    batch: str,
    compile: bool,
    timeout_s: float | None = None,
    replan: Replan | None = None,
) -> PipelineModule:
    """Place a model in stages on a mesh with a ``pp`` axis. Collective: every rank calls it with equal arguments.

    ``timeout_s`` is how long a rank waits for its neighbours in a step; None: as long as the process group was made to. ``replan`` makes
    programs for evaluation and for batches of other shapes; without it they are errors.

    Raises:
        InputError: a wrong option, mesh, plan or model.
        RuntimeMismatchError: the ranks do not agree.
    """
    pipeline = plan.pipeline
    assert isinstance(pipeline, Pipeline)
    check_mesh(device_mesh)
    check_schedule(pipeline.schedule, pipeline.degree, pipeline.num_stages, pipeline.micro_batches)
    mesh = StageMesh.of(device_mesh, pipeline, plan.mesh, timeout_s)
    if batch != "global":
        raise InputError("a plan with stages takes the global batch on every rank: batch='local' is for plans without stages")
    facts = {
        "world size": dist.get_world_size(),
        "torch": torch.__version__,
        "mesh": (tuple(device_mesh.shape), device_mesh.mesh.flatten().tolist(), device_mesh.device_type),
        "graph": capture.graph.hash[:16],
        "plan": plan.hash[:16],
    }
    agree(facts, mesh.whole, "start-up")
    modes = tuple(m.training for m in model.modules())
    source = captured_stages(capture, plan, mesh, CallBinder(model.forward), modes)
    shape = mesh_shape(device_mesh)
    given = MeshRecord(shape.sizes, shape.names)
    return PipelineModule(model, source, mesh, given, compile=compile, replan=replan)
