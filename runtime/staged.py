"""A program in stages bound to one rank: which calls it is for, and a run of all its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.passes.lower_stages import PipelineProgram, lower_stages
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Capture
from meshwright.planner.ir.pipeline import Pipeline, schedule_named
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import Placements, local_slice
from meshwright.runtime.checks import agree
from meshwright.runtime.dtensor import local_of
from meshwright.runtime.engine import Engine, EngineStage
from meshwright.runtime.inputs import Call, CallBinder, difference, without_gradients
from meshwright.runtime.interface import Interface, interface_of
from meshwright.runtime.journal import Journal
from meshwright.runtime.mesh import coordinate_of, device_of, group_names, mesh_shape
from meshwright.runtime.params import skeleton
from meshwright.runtime.programs import LOWERING, Replan, Request, check_plan, constants_of
from meshwright.runtime.random import SeedSequence
from meshwright.runtime.stage import StageRun, bind_stage
from meshwright.runtime.stage_mesh import StageMesh


@dataclass(frozen=True, eq=False)
class RankStages:
    """One rank's stages before they are made callable, whether they were captured here or read from files.

    Attributes:
        interface: what goes in and out of the whole program.
        plan: where everything lies.
        constants: values of the constant placeholders by value name, on the rank's device.
        lowered: the programs of the stages of the rank at a coordinate along the pipeline axis, over process groups of the given
            names; new ones at each call.
        fake_mode: that the graphs' fake values belong to.
        structure: the form of the model's output, for those who want to write it.
    """

    interface: Interface
    plan: Plan
    constants: Mapping[str, torch.Tensor]
    lowered: Callable[[Sequence[str]], PipelineProgram]
    fake_mode: Any
    structure: Any

    @property
    def pipeline(self) -> Pipeline:
        assert self.plan.pipeline is not None
        return self.plan.pipeline


def captured_stages(capture: Capture, plan: Plan, mesh: StageMesh, binder: CallBinder, modes: tuple[bool, ...]) -> RankStages:
    """The stages of this rank, of a capture.

    Raises:
        InputError: the plan is for something else.
    """
    check_plan(capture, plan, mesh_shape(mesh.inside))
    assert plan.pipeline is not None
    mine = plan.pipeline.stages_of(mesh.rank)

    def lowered(groups: Sequence[str]) -> PipelineProgram:
        with LOWERING:
            return lower_stages(capture, plan, coordinate_of(mesh.inside), groups, mine, device=device_of(mesh.whole))

    interface = interface_of(capture, plan, binder, modes)
    return RankStages(interface, plan, constants_of(capture, mesh.whole), lowered, capture.fake_mode, capture.out_spec)


def bound_groups(stages: RankStages, mesh: StageMesh) -> PipelineProgram:
    """The programs over this rank's process groups. Collective inside each stage.

    Raises:
        RuntimeMismatchError: the ranks of a stage lowered them differently.
    """
    program = stages.lowered(group_names(mesh.inside))
    agree({"collectives": program.sequence_hash}, mesh.inside, "after lowering")
    return program


class StagedProgram:
    """One program in stages that this rank can run.

    Attributes:
        source: what it was made from; ``plan`` where everything lies, ``pipeline`` its stages.
        interface: what goes in and out.
        program: this rank's stages.
        modes: training mode of every module, in the order of ``modules()``.
        inputs: path of each tensor of a call to its value name.
        call: the call that it is for.
        runs: this rank's stages by number.
        engine: the schedule over them.
        was_called: whether it has run.
    """

    def __init__(self, source: RankStages, program: PipelineProgram, mesh: StageMesh, journal: Journal, *, compile: bool):
        self.source, self.interface, self.program = source, source.interface, program
        self.plan, self.pipeline, self.modes = source.plan, source.pipeline, source.interface.modes
        self.was_called = False
        self._inside, self._device, self._journal = mesh.inside, device_of(mesh.whole), journal
        self._placements = self.interface.placements
        self.inputs: Mapping[str, str] = self.interface.call
        self.call: Call = without_gradients(self.interface.planned_call("global", mesh_shape(mesh.inside).sizes))
        splits = schedule_named(self.pipeline.schedule).splits_backward and self.interface.training
        self.runs: dict[int, StageRun] = {}
        for k in program.stages[0]:
            variants = [programs[k] for programs in program.stages]
            bound = [bind_stage(p, source.fake_mode, self._device, splits=splits, compile=compile) for p in variants]
            self.runs[k] = StageRun(bound)
        stages = [
            EngineStage(run, self.pipeline.num_stages, self.pipeline.rank_of, self._device, mesh.along, journal)
            for run in self.runs.values()
        ]
        self.engine = Engine(self.pipeline.schedule, stages, self.pipeline.micro_batches)

    def unmet(self, call: Call, modes: tuple[bool, ...], *, training: bool) -> str:
        """Why this program does not serve a call; "" where it does."""
        reasons = [difference(self.call, call)]
        if modes != self.modes:
            reasons.append(f"it was planned in {mode_text(self.modes)} mode, the model is in {mode_text(modes)} mode now")
        if training and not self.interface.training:
            reasons.append("it was planned for inference and has no backward")
        return "; ".join(r for r in reasons if r)

    def given(
        self, leaves: Mapping[str, Any], parameters: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], seeds: SeedSequence
    ) -> list[dict[str, torch.Tensor]]:
        """Per micro-batch, every input of the programs by value name."""
        shared = self._shared(parameters, buffers, seeds)
        return [
            {**shared, **{value: self._piece(leaves[path], value, j) for path, value in self.inputs.items()}}
            for j in range(self.pipeline.micro_batches)
        ]

    def _piece(self, whole: torch.Tensor, value: str, micro_batch: int) -> torch.Tensor:
        """This rank's piece of one micro-batch of a batch input."""
        cut, piece = self.pipeline.inputs.get(value), whole.detach()
        if cut is not None:
            piece = local_slice(piece, (cut,), (self.pipeline.micro_batches,), (micro_batch,))
        piece = local_slice(piece, self._placements[value], mesh_shape(self._inside).sizes, coordinate_of(self._inside))
        return piece.to(self._device).contiguous()

    def _shared(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], seeds: SeedSequence
    ) -> dict[str, torch.Tensor]:
        """What all micro-batches are given."""
        found, seed = dict(self.source.constants), None
        for i in self.interface.inputs:
            if i.role == "parameter" and i.name in parameters:
                found[i.value] = local_of(parameters[i.name]).detach()
            elif i.role == "buffer":
                found[i.value] = buffers[i.name]
            elif i.role == "seed":
                seed = seeds.draw() if seed is None else seed
                found[i.value] = torch.tensor(seed, dtype=torch.int64, device=self._device)
        return found

    def run(
        self, given: list[dict[str, torch.Tensor]], *, training: bool
    ) -> tuple[torch.Tensor | None, dict[str, list[torch.Tensor]]]:
        """All micro-batches; the loss where this rank has the last stage, and the terms of gradients by parameter."""
        self._journal.doing("computing what all micro-batches must know")
        known = self.program.before(given) if self.program.before is not None else {}
        given = [{**piece, **known} for piece in given]
        tangents = self._tangents()
        for run in self.runs.values():
            run.begin(given, tangents)
        self.engine.run(training=training)
        self._journal.doing("finishing the step")
        made: dict[str, list[torch.Tensor]] = {}
        for run in self.runs.values():
            for name, value in run.finish(known, {**given[0], **tangents}, training=training).items():
                made.setdefault(name, []).append(value)
        return made.pop(self.program.loss, [None])[0], made

    def _tangents(self) -> dict[str, torch.Tensor]:
        """One for the loss, zero for other outputs."""
        return {
            i.value: torch.full(i.shape, float(i.name == self.program.loss), dtype=i.dtype, device=self._device)
            for i in self.interface.of("tangent")
        }

    @property
    def loss_dtype(self) -> torch.dtype:
        (loss,) = (o for o in self.interface.outputs if o.name == self.program.loss)
        assert loss.dtype is not None
        return loss.dtype

    def forget(self) -> None:
        """Drop everything of a step."""
        for run in self.runs.values():
            run.forget()


class Replanner:
    """Plans further programs for a model that lies in stages: every parameter stays where it is.

    Args:
        model: the model.
        replan: the planner.
        plan: the first program's.
        rests: where every parameter rests, by FQN.
        homes: the stages that hold it.
    """

    def __init__(
        self,
        model: nn.Module,
        replan: Replan,
        plan: Plan,
        rests: Mapping[str, Placements],
        homes: Mapping[str, tuple[int, ...]],
    ):
        self._skeleton, self._replan = skeleton(model), replan
        self._plan, self._rests, self._homes = plan, rests, homes

    def plan(
        self, modes: tuple[bool, ...], raw: tuple[tuple[Any, ...], dict[str, Any]], *, training: bool
    ) -> tuple[Capture, Plan]:
        """A program for a call.

        Args:
            modes: training mode of every module.
            raw: positional and keyword arguments, the whole batch.
            training: whether it needs a backward.
        """
        for module, mode in zip(self._skeleton.modules(), modes, strict=True):
            module.training = mode
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), raw)
        plan = self._plan
        return self._replan(
            Request(self._skeleton, args, kwargs, training, plan.precision, self._rests, plan.pipeline, self._homes)
        )


def mode_text(modes: tuple[bool, ...]) -> str:
    return "training" if all(modes) else "evaluation" if not any(modes) else "mixed"


def check_homes(program: PipelineProgram, holders: Mapping[str, tuple[int, ...]], mesh: StageMesh) -> None:
    """Refuse a further program whose stages read parameters that other ranks hold.

    Args:
        program: the further program.
        holders: by FQN, the coordinates along the pipeline axis of the ranks that hold a parameter.
        mesh: this rank's place.

    Raises:
        InputError: it does.
    """
    for name, stages in program.holders.items():
        missing = sorted(set(mesh.ranks_of(stages)) - set(holders[name]))
        if missing:
            raise InputError(
                f"a further program for this model needs parameter {name} on pipeline rank {missing[0]}, which does not hold it: the "
                "model uses its parameters in another order in this mode; make a module of its own for it"
            )
