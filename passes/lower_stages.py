"""From a capture and a plan with stages to the programs of one rank's stages: the list of passes.

The whole program is rewritten first and cut afterwards, so that both sides of a boundary agree on the pieces that cross it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import fx

from meshwright.passes.base import dump, run_passes
from meshwright.passes.bucket import BucketCollectives
from meshwright.passes.cut_stages import COPIED, Stages, assign_stages
from meshwright.passes.issue_first import IssueFirst
from meshwright.passes.land_early import LandEarly
from meshwright.passes.micro_batches import PrePass, pre_pass, time_nodes
from meshwright.passes.overlap import OverlapCollectives
from meshwright.passes.pool_results import PoolResults
from meshwright.passes.program import LocalProgram
from meshwright.passes.rewrite import RewriteForRank
from meshwright.passes.split import split
from meshwright.passes.stage_graphs import Cutter, Finish, Root, Slot, StageGraph
from meshwright.passes.tied import terms_by_stage
from meshwright.passes.time_axis import with_time_axis
from meshwright.passes.verify import VerifyProgram, collectives_of, sequence_hash
from meshwright.planner.ir.buffers import REDUCE_BYTES
from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.graph import Capture, GraphOutput, OpGraph, Value, loss_of
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.verify import verify_plan


@dataclass(frozen=True)
class StageProgram:
    """One stage of one rank.

    Attributes:
        index: number of the stage.
        local: its forward and backward for one micro-batch. Its outputs are ``outputs``, then ``sends``; its gradients end with
            ``upstream``.
        outputs: names of results that are summed over micro-batches (``"sum:..."``) or are final after one (``"once:..."``, or there is
            only one); likewise ``local.gradients``.
        receives: forward values from the stage before; they are inputs of ``local`` by name. ``sends``: to the next one.
        downstream: gradients from the next stage, tangents of ``local`` by name; ``upstream``: to the one before.
        parameters: FQNs of the parameters that it reads or makes gradients of.
        known: names of the inputs of ``local`` that the pre-pass finds.
        finishes: what is done to the sums once per step.
    """

    index: int
    local: LocalProgram
    outputs: tuple[str, ...]
    receives: tuple[Slot, ...]
    sends: tuple[Slot, ...]
    downstream: tuple[Slot, ...]
    upstream: tuple[Slot, ...]
    parameters: tuple[str, ...]
    known: tuple[str, ...]
    finishes: tuple[Finish, ...]


@dataclass(frozen=True)
class PipelineProgram:
    """What one rank runs.

    Attributes:
        stages: per micro-batch, or once where all micro-batches run the same: the rank's stages by number.
        before: finds what all micro-batches must know beforehand; None if there is nothing.
        holders: for every parameter, the stages that hold it, ascending.
        mutated_on: for every buffer that one stage alone makes a new value of, the pipeline rank that runs the stage.
        loss: name of the output that is the loss.
        sequence_hash: sha256 of the collectives of every stage of the model, by number: ranks that run the stage compare it.
    """

    stages: tuple[dict[int, StageProgram], ...]
    before: PrePass | None
    holders: dict[str, tuple[int, ...]]
    mutated_on: dict[str, int]
    loss: str
    sequence_hash: dict[int, str]

    def stage(self, index: int, micro_batch: int) -> StageProgram:
        """Stage ``index`` as ``micro_batch`` runs it."""
        return self.stages[micro_batch if len(self.stages) > 1 else 0][index]


def lower_stages(
    capture: Capture,
    plan: Plan,
    coordinate: Sequence[int],
    group_names: Sequence[str],
    stages: Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    bucket_bytes: int = REDUCE_BYTES,
) -> PipelineProgram:
    """Lower ``capture`` as ``plan`` says, for the stages of the rank at ``coordinate`` inside its stage. No process group needed.

    Args:
        capture: the program; left as it is.
        plan: with a pipeline.
        coordinate: the rank's coordinate on the plan's mesh.
        group_names: name of the rank's process group along each axis of the plan's mesh.
        stages: the stages to build; None: all.
        device: where the program will run; None: as captured.
        bucket_bytes: as for ``lower``.

    Raises:
        VerifyError: the plan is illegal for the program, or a pass broke an invariant.
        InputError: the program has no loss.
    """
    if plan.pipeline is None:
        raise VerifyError("the plan has no pipeline: lower it with lower()")
    verify_plan(plan, capture.graph)
    wanted = tuple(range(plan.pipeline.num_stages) if stages is None else stages)
    work = _Lowering(capture, plan, tuple(coordinate), tuple(group_names), wanted, device, bucket_bytes)
    count = plan.pipeline.micro_batches
    first = work.rewritten(0)
    alike = count == 1 or _text(work.rewritten(count - 1)) == _text(first)  # before cutting, which changes the graph
    program = work.cut(first, 0)
    if alike:
        return program
    others = [work.cut(work.rewritten(i), i) for i in range(1, count)]
    return replace(program, stages=(*program.stages, *(o.stages[0] for o in others)))


def _text(gm: fx.GraphModule) -> str:
    """What a graph computes: micro-batches may differ in constants (where their piece lies), which grow from first to last."""
    return "\n".join(f"{n.target} {n.args} {n.kwargs}" for n in gm.graph.nodes)


@dataclass(frozen=True)
class _Lowering:
    capture: Capture
    plan: Plan
    coordinate: tuple[int, ...]
    group_names: tuple[str, ...]
    wanted: tuple[int, ...]
    device: torch.device | None
    bucket_bytes: int

    @cached_property
    def full(self) -> Plan:
        """The plan with micro-batches as an axis, without stages."""
        assert self.plan.pipeline is not None
        if self.plan.pipeline.micro_batches == 1:
            return replace(self.plan, pipeline=None)
        full = with_time_axis(self.plan, self.capture.graph)
        verify_plan(full, self.capture.graph)
        return full

    def rewritten(self, micro_batch: int) -> fx.GraphModule:
        """The joint graph of this rank in one micro-batch."""
        several = self.full.mesh.num_axes > len(self.coordinate)
        at = (micro_batch, *self.coordinate) if several else self.coordinate
        groups = ("time", *self.group_names) if several else self.group_names
        passes = (RewriteForRank(self.capture, self.full, at, groups, self.device), VerifyProgram(self.full, self.capture.graph))
        return run_passes(passes, self.capture.gm, self.label(micro_batch))

    def label(self, micro_batch: int) -> str:
        return f"rank-{'-'.join(map(str, self.coordinate))}-micro-{micro_batch}"

    def cut(self, joint: fx.GraphModule, micro_batch: int) -> PipelineProgram:
        """The programs of the rank's stages as ``micro_batch`` runs them."""
        pipeline, label = self.plan.pipeline, self.label(micro_batch)
        assert pipeline is not None
        stages = assign_stages(joint, self.capture.graph, pipeline.cuts)
        roots = self.roots(joint, stages)
        times = time_nodes(joint, stages, pipeline.micro_batches)
        cutter = Cutter(joint, stages, times, roots)
        graphs = [cutter.build(k, pipeline.num_stages - 1) for k in range(pipeline.num_stages)]
        mine = {k: self.stage(graphs[k], f"{label}-stage-{k}") for k in self.wanted}
        known = dict.fromkeys(n for k in self.wanted for n in graphs[k].known)
        known.update(dict.fromkeys(n for k in self.wanted for n in graphs[k].finish_known))
        holders: dict[str, tuple[int, ...]] = {}
        for g in graphs:
            for name in dict.fromkeys((*g.parameters, *g.gradients)):
                holders[name] = (*holders.get(name, ()), g.index)
        return PipelineProgram(
            stages=(mine,),
            before=pre_pass(joint, times, sorted(known)) if known else None,
            holders=holders,
            mutated_on={
                r.name: pipeline.rank_of(r.stage) for r in roots if r.role == "mutation" and stages.kind[r.node] == "forward"
            },
            loss=loss_of(self.capture.graph).name,
            sequence_hash={k: p.local.sequence_hash for k, p in mine.items()},
        )

    def roots(self, joint: fx.GraphModule, stages: Stages) -> list[Root]:
        """The results of a training step: new buffers, the loss, gradients of parameters."""
        pipeline, graph = self.plan.pipeline, self.capture.graph
        assert pipeline is not None
        loss, last = loss_of(graph), pipeline.num_stages - 1
        trained = {i.name for i in graph.inputs_of("parameter")}
        firsts = {pipeline.stages_of(rank)[0] for rank in range(pipeline.degree)}
        returned = next(reversed(joint.graph.nodes))
        found: list[Root] = []
        for result, node in zip(graph.outputs, returned.args[0], strict=True):  # type: ignore[arg-type]
            if node is None:
                continue
            assert isinstance(node, fx.Node)
            if result.role == "mutation":
                homes = firsts if node.op == "placeholder" or stages.kind[node] == COPIED else {stages.of[node]}
                found += [Root("mutation", result.name, node, k) for k in sorted(homes)]
            elif result is loss:
                found.append(Root("output", result.name, node, last))
            elif result.role == "gradient" and result.name in trained:
                terms = terms_by_stage(joint, stages, node)
                found += [Root("gradient", result.name, term, stages.of.get(term, last)) for term in terms]
        return found

    def stage(self, cut: StageGraph, label: str) -> StageProgram:
        """One stage's joint graph through the passes that every rank's graph goes through."""
        passes = (OverlapCollectives(), PoolResults.of(self.plan, self.bucket_bytes), BucketCollectives(self.bucket_bytes))
        joint = run_passes(passes, cut.gm, label)
        view = _view(cut, joint)
        shapes = {n.meta["value"]: tuple(n.meta["val"].shape) for n in joint.graph.nodes if n.op == "placeholder"}
        halves = split(joint, view, training=self.capture.training)
        graphs = [g for g in (halves.forward, halves.backward) if g is not None]
        for gm, name in zip(graphs, ("forward", "backward"), strict=False):
            dump(gm, label, f"99_{name}")
        collectives = tuple(c for g in graphs for c in collectives_of(g.graph.nodes))
        linked = {f.name: getattr(halves, f.name) for f in fields(halves)}
        local = LocalProgram(**linked, input_shapes=shapes, collectives=collectives, sequence_hash=sequence_hash(collectives))
        return StageProgram(
            index=cut.index,
            local=local,
            outputs=tuple(name for role, name in cut.results if role == "output"),
            receives=cut.receives,
            sends=cut.sends,
            downstream=cut.downstream,
            upstream=cut.upstream,
            parameters=cut.parameters,
            known=tuple(n.name for n in cut.known),
            finishes=tuple(self.finish(f, label) for f in cut.finishes),
        )

    def finish(self, given: Finish, label: str) -> Finish:
        passes = (IssueFirst(), BucketCollectives(self.bucket_bytes), LandEarly())
        program = run_passes(passes, given.program, f"{label}-{given.role}s")
        program.recompile()
        return replace(given, program=program)


def _view(cut: StageGraph, joint: fx.GraphModule) -> OpGraph:
    """Just enough of a typed view for ``split``: the results, by role."""
    returned = list(next(reversed(joint.graph.nodes)).args[0])  # type: ignore[arg-type]
    named = [*(r for r in cut.results if r[0] != "gradient"), *(("output", slot.name) for slot in cut.sends)]
    named += [*(r for r in cut.results if r[0] == "gradient"), *(("gradient", slot.name) for slot in cut.upstream)]
    outputs = []
    for (role, name), node in zip(named, returned, strict=True):
        val = node.meta["val"]
        outputs.append(GraphOutput(Value(name, tuple(val.shape), val.dtype), role, name))
    return OpGraph((), (), tuple(outputs))
