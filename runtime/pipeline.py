"""The parallel module of a plan with stages: each rank holds its stages' parameters and runs its part of a schedule."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.passes.lower_stages import PipelineProgram, lower_stages
from meshwright.planner.ir.errors import InputError, MeshwrightError, StepError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.pipeline import Pipeline, check_schedule, schedule_named
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import local_slice
from meshwright.runtime.checks import agree, batch_fingerprint
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.engine import Engine, EngineStage
from meshwright.runtime.gradients import GradientBook
from meshwright.runtime.inputs import CallBinder, PlainLeaf, TensorLeaf, call_of_batch, describe_call, difference
from meshwright.runtime.journal import Journal, culprit
from meshwright.runtime.mesh import broadcast_object, check_mesh, coordinate_of, device_of, group_names, mesh_shape
from meshwright.runtime.params import fill_tree, place_state, resting_placements
from meshwright.runtime.programs import LOWERING, check_plan, constants_of
from meshwright.runtime.random import SeedSequence, initial_seed
from meshwright.runtime.stage import StageRun, bind_stage
from meshwright.runtime.stage_mesh import StageMesh
from meshwright.runtime.stage_state import full_state_dict, load_state_dict
from meshwright.runtime.state import Tree


class PipelineModule(nn.Module):
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

    def __init__(self, model: nn.Module, capture: Capture, plan: Plan, mesh: StageMesh, program: PipelineProgram, compile: bool):
        super().__init__()
        assert plan.pipeline is not None
        self.plan, self.device_mesh, self.stage_mesh = plan, mesh.whole, mesh.inside
        self._mesh, self._capture, self._program, self._pipeline = mesh, capture, program, plan.pipeline
        self._name, self._meta = type(model).__name__, {k: (v.shape, v.dtype) for k, v in model.state_dict().items()}
        names = {i.name: (i.name, *i.aliases) for i in capture.graph.inputs_of("parameter")}
        rests = resting_placements(capture.graph, plan)
        self._holders = {alias: mesh.ranks_of(program.holders.get(name, (0,))) for name, all_ in names.items() for alias in all_}
        held = {name for name, ranks in self._holders.items() if mesh.rank in ranks}
        state = place_state(model, rests, mesh.inside, held=held, everyone=mesh.whole)
        fill_tree(self, model, state)
        self.training = model.training
        self._tree = Tree(self, state, {name: rests[name] for name in held})
        self._modes = tuple(m.training for m in model.modules())
        self._seeds = SeedSequence(broadcast_object(initial_seed(), mesh.whole))
        self._binder = CallBinder(model.forward)
        self._book = GradientBook(capture.graph, self._holders, mesh)
        self._journal = Journal(mesh.new_name(), mesh.whole.mesh.flatten().tolist())
        self._constants = constants_of(capture, mesh.whole)
        self._called = False
        self._start_engine(compile)

    def _start_engine(self, compile: bool) -> None:
        pipeline, device = self._pipeline, device_of(self.device_mesh)
        splits = schedule_named(pipeline.schedule).splits_backward
        self._runs: dict[int, StageRun] = {}
        for k in self._program.stages[0]:
            variants = [programs[k] for programs in self._program.stages]
            self._runs[k] = StageRun([bind_stage(p, self._capture, device, splits=splits, compile=compile) for p in variants])
        stages = [
            EngineStage(run, pipeline.num_stages, pipeline.rank_of, device, self._mesh.along, self._journal)
            for run in self._runs.values()
        ]
        self._engine = Engine(pipeline.schedule, stages, pipeline.micro_batches)

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
        if not self._capture.training:
            raise InputError("the plan is for inference and has no backward: plan with training=True, or use eval_step")
        return self._run(batch, training=True)

    @torch.no_grad()
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The loss of the whole batch without a backward, on every rank. Collective; see :meth:`step`."""
        return self._run(batch, training=False)

    def _run(self, batch: Any, *, training: bool) -> torch.Tensor:
        if not hasattr(self, "_engine"):
            raise StepError("an earlier step failed and ended the process group: restart the job from a checkpoint")
        parameters = self._tree.parameters()
        given = self._given(batch, parameters)
        try:
            return self._run_schedule(given, training=training)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            for run in self._runs.values():
                run.forget()

    def _run_schedule(self, given: list[dict[str, torch.Tensor]], *, training: bool) -> torch.Tensor:
        self._journal.watch()
        self._journal.doing("computing what all micro-batches must know")
        known = self._program.before(given) if self._program.before is not None else {}
        given = [{**piece, **known} for piece in given]
        tangents = self._tangents()
        for run in self._runs.values():
            run.begin(given, tangents)
        self._engine.run(training=training)
        self._journal.doing("finishing the step")
        made: dict[str, list[torch.Tensor]] = {}
        for run in self._runs.values():
            for name, value in run.finish(known, given[0], training=training).items():
                made.setdefault(name, []).append(value)
        loss = self._shared_loss(made.pop(self._program.loss, [None])[0])
        if training:
            self._book.give(made, self._tree.parameters())
        self._write_buffers()
        self._journal.doing("idle")
        return loss

    def _tangents(self) -> dict[str, torch.Tensor]:
        """One for the loss, zero for other outputs."""
        device = device_of(self.device_mesh)
        return {
            i.value.name: torch.full(i.value.shape, float(i.name == self._program.loss), dtype=i.value.dtype, device=device)
            for i in self._capture.graph.inputs_of("tangent")
        }

    def _shared_loss(self, mine: torch.Tensor | None) -> torch.Tensor:
        """The last stage's loss on every rank."""
        (output,) = (o for o in self._capture.graph.outputs_of("output") if o.name == self._program.loss)
        assert output.value is not None
        loss = torch.empty((), dtype=output.value.dtype, device=device_of(self.device_mesh)) if mine is None else mine.clone()
        self._mesh.broadcast(loss, self._pipeline.rank_of(self._pipeline.num_stages - 1))
        return loss

    def _write_buffers(self) -> None:
        """New values of buffers, on every rank."""
        buffers = self._tree.buffers()
        with torch.no_grad():
            for run in self._runs.values():
                for name, new in run.mutations.items():
                    buffers[name].copy_(new)
            for name, rank in self._program.mutated_on.items():
                self._mesh.broadcast(buffers[name], rank)

    # --- inputs ---------------------------------------------------------------------------------------------------

    def _given(self, batch: Any, parameters: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Per micro-batch, every input of the programs by value name."""
        args, kwargs = call_of_batch(batch)
        leaves = self._binder.leaves(args, kwargs)
        placeholders, plain = self._binder.captured(self._capture)
        planned: dict[str, TensorLeaf | PlainLeaf] = {
            p: TensorLeaf(i.value.shape, i.value.dtype) for p, i in placeholders.items()
        }
        planned.update((path, PlainLeaf(repr(value))) for path, value in plain.items())
        wrong = difference(planned, describe_call(leaves, grad=False))
        if wrong:
            raise InputError(f"{self._name} was planned for another batch: {wrong}; pad the batch, or plan for this one")
        if self._tree.modes(self) != self._modes:
            raise InputError(
                f"{self._name} was planned in {'training' if self._modes[0] else 'evaluation'} mode and is in another now: set the "
                "mode that it was planned in, or plan for this one"
            )
        if not self._called:
            agree({f"batch {path}": batch_fingerprint(leaves[path]) for path in placeholders}, self.device_mesh, "first call")
            self._called = True
        shared = self._shared_inputs(parameters)
        return [
            {**shared, **{i.value.name: self._piece(leaves[path], i.value.name, j) for path, i in placeholders.items()}}
            for j in range(self._pipeline.micro_batches)
        ]

    def _piece(self, whole: torch.Tensor, value: str, micro_batch: int) -> torch.Tensor:
        """This rank's piece of one micro-batch of a batch input."""
        pipeline, placements = self._pipeline, self.plan.inputs[value]
        cut = pipeline.inputs.get(value)
        piece = whole.detach()
        if cut is not None:
            piece = local_slice(piece, (cut,), (pipeline.micro_batches,), (micro_batch,))
        piece = local_slice(piece, placements, mesh_shape(self.stage_mesh).sizes, coordinate_of(self.stage_mesh))
        return piece.to(device_of(self.device_mesh)).contiguous()

    def _shared_inputs(self, parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        buffers, found = self._tree.buffers(), dict(self._constants)
        seed = None
        for i in self._capture.graph.inputs:
            if i.role == "parameter" and i.name in parameters:
                found[i.value.name] = local_of(parameters[i.name]).detach()
            elif i.role == "buffer":
                found[i.value.name] = buffers[i.name]
            elif i.role == "seed":
                seed = self._seeds.draw() if seed is None else seed
                found[i.value.name] = torch.tensor(seed, dtype=torch.int64, device=device_of(self.device_mesh))
        return found

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
        del self._engine, self._book, self._mesh
        self._runs.clear()
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    # --- gradients and state --------------------------------------------------------------------------------------

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
) -> PipelineModule:
    """Place a model in stages on a mesh with a ``pp`` axis. Collective: every rank calls it with equal arguments.

    ``timeout_s`` is how long a rank waits for its neighbours in a step; None: as long as the process group was made to.

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
    shape = mesh_shape(mesh.inside)
    facts = {
        "world size": dist.get_world_size(),
        "torch": torch.__version__,
        "mesh": (tuple(device_mesh.shape), device_mesh.mesh.flatten().tolist(), device_mesh.device_type),
        "graph": capture.graph.hash[:16],
        "plan": plan.hash[:16],
    }
    agree(facts, mesh.whole, "start-up")
    check_plan(capture, plan, shape)
    with LOWERING:
        program = lower_stages(
            capture,
            plan,
            coordinate_of(mesh.inside),
            group_names(mesh.inside),
            pipeline.stages_of(mesh.rank),
            device=device_of(device_mesh),
        )
    agree({"collectives": program.sequence_hash}, mesh.inside, "after lowering")
    return PipelineModule(model, capture, plan, mesh, program, compile)
