"""A plan checked without its cluster: :func:`verify`.

Three checks, each of which names what is wrong:

1. the plan is legal for the program (:mod:`~meshwright.planner.ir.verify`);
2. every op that it shards gives, on the pieces of a small mesh, what the whole op gives; an op is made small first
   (:mod:`~meshwright.small_ops`), and equal ops with equal placements are run once, so that neither the size nor the depth of a
   model costs anything;
3. an op that cannot be made small is sharded by its rule;
4. where a small model of the same structure is known (Hugging Face's, or one that is passed), the plan is carried over to it, and loss,
   outputs and every gradient of all simulated ranks are compared with one process (:mod:`~meshwright.scaled`).
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright import prove
from meshwright.debug import Progress
from meshwright.exporting import capture_for
from meshwright.inputs import Call, call_of, model_of
from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import InputError, VerifyError
from meshwright.planner.ir.graph import Op, OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec, Plan
from meshwright.planner.ir.spec import Row
from meshwright.planner.ir.verify import verify_plan
from meshwright.planner.rules import rows_for
from meshwright.planner.rules.registry import replicated as whole_row, signature
from meshwright.scaled import run_small, small_model
from meshwright.small_ops import shrink, small_mesh


@dataclass(frozen=True)
class Verified:
    """What was checked of a plan, all of it right.

    Attributes:
        model: name of the model.
        mesh: the plan's mesh; ``small_mesh`` the one that was simulated.
        ops: ops of the program; all are legal.
        replicated: those that every rank runs whole: nothing to run.
        run: those that were run on pieces; ``cases`` how many different ones.
        by_rule: overload name to number of ops that were not run on pieces but are sharded as their rule says.
        results: losses, outputs, gradients and buffers of the small model that all ranks together gave as one process does.
        not_whole: why there was no small model to run; ``""`` where it was run.
        seconds: CPU seconds of it all.
    """

    model: str
    mesh: MeshShape
    small_mesh: MeshShape
    ops: int
    replicated: int
    run: int
    cases: int
    by_rule: Mapping[str, int] = field(default_factory=dict)
    results: int = 0
    not_whole: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.model or 'plan'} on {self.mesh}: right, simulated on {self.small_mesh}",
            f"  {self.ops} ops are legal; {self.replicated} of them run whole on every rank",
            f"  {self.run} ops ({self.cases} different ones) give on pieces what they give whole",
        ]
        if self.by_rule:
            listed = ", ".join(f"{n} {target}" for target, n in self.by_rule.items())
            lines.append(f"  {sum(self.by_rule.values())} ops follow their rule but were not run on pieces: {listed}")
        if self.not_whole:
            lines.append(f"  loss and gradients of a small model were not compared: {self.not_whole}")
        else:
            lines.append(f"  {self.results} results of a small model, loss and gradients among them, are those of one process")
        return "\n".join([*lines, f"  {self.seconds:.1f} CPU seconds"])


def verify(
    plan: Plan,
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    example_inputs: Any = None,
    *,
    small: tuple[torch.nn.Module, Any] | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check a plan on this machine alone, whatever the size of its cluster and of the model.

    Args:
        plan: the plan.
        model: the module that it is for (the meta device will do), or a callable that makes it.
        example_inputs: as for ``plan``. None: made up from what the plan says of its batch.
        small: a model of the same structure, with as many layers and real values, and inputs for it: its sizes must be divided by what
            the plan shards, on axes of two ranks. None: made from the model's ``config``, where it has one of transformers.
        progress: called with the name of each phase as it begins.

    Raises:
        VerifyError: the plan is wrong; names the op, value or result, and what was found and needed.
        InputError: the plan is for another model or batch.
    """
    started, tell = time.process_time(), progress or (lambda phase: None)
    with collector.paused():
        tell("capture")
        module = model_of(model)
        call = call_of(inputs_of(plan) if example_inputs is None else example_inputs)
        graph, mode = _captured(module, call, plan)
        tell("check")
        found = _verify_all(plan, graph)
        tell("run small")
        try:
            chosen = small or small_model(module, call, math.prod(found.small_mesh.sizes))
            found = replace(found, results=run_small(plan, graph, found.small_mesh, chosen[0].train(mode), chosen[1]))
        except InputError as e:
            if small is not None:
                raise
            found = replace(found, not_whole=str(e))
    return replace(found, seconds=time.process_time() - started)


def _captured(module: torch.nn.Module, call: Call, plan: Plan) -> tuple[OpGraph, bool]:
    """The program that the plan is for, and whether it is that of the model in training mode: as the model is, else in the other mode.

    Raises:
        InputError: it is for another.
    """
    modes = {m: m.training for m in module.modules()}
    try:
        return capture_for(module, call, plan).graph, module.training
    except InputError:
        other = not module.training
        return capture_for(module.train(other), call, plan).graph, other
    finally:
        for m, mode in modes.items():
            m.training = mode


def _verify_all(plan: Plan, graph: OpGraph) -> Verified:
    """Both checks; of a plan that is not even legal, the op that is wrong by itself is named before what it does to its readers."""
    try:
        verify_plan(plan, graph)
    except VerifyError as illegal:
        try:
            _verify_ops(plan, graph)
        except VerifyError as wrong:
            if str(illegal) not in str(wrong):
                wrong.add_note(str(illegal))
            raise wrong from None
        except (KeyError, IndexError, ValueError, TypeError):
            pass  # so malformed that no op can be run: the first error says how
        raise
    return _verify_ops(plan, graph)


def inputs_of(plan: Plan) -> tuple[Any, ...] | dict[str, Any]:
    """A meta batch as the plan says it: positional or by keyword.

    Raises:
        InputError: the plan says nothing of its batch, or the batch is nested.
    """
    named = {i.name: _meta(i.shape, i.dtype) for i in plan.input_info.values() if i.role == "input"}
    positions = {name: re.fullmatch(r"args\[(\d+)\]", name) for name in named}
    at = {int(m.group(1)): named[name] for name, m in positions.items() if m}
    if named and len(at) == len(named) and sorted(at) == list(range(len(at))):
        return tuple(at[i] for i in range(len(at)))
    if not named or at or not all(name.isidentifier() for name in named):
        raise InputError(
            f"the plan does not say how the model is called (inputs {', '.join(named) or 'none'}): pass example_inputs"
        )
    return named


def batch_of(plan: Plan) -> tuple[int, int]:
    """Batch size and sequence length: the first two sizes of the first batch input; 1 where there are none."""
    shapes = [i.shape for i in plan.input_info.values() if i.role == "input"]
    first = (*shapes[0], 1, 1) if shapes else (1, 1)
    return first[0], first[1]


def _meta(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


# --- ops ----------------------------------------------------------------------------------------------------------


def _verify_ops(plan: Plan, graph: OpGraph) -> Verified:
    """Run every different sharded op on the pieces of a small mesh.

    Raises:
        VerifyError: the first that is wrong.
    """
    small = small_mesh(plan.mesh)
    known: dict[Any, bool] = {}
    run, replicated, by_rule = 0, 0, Counter[str]()
    for op in graph.ops:
        spec = plan.ops[op.name]
        if is_whole(spec):
            replicated += 1
            continue
        case = (signature(op), spec)
        if case not in known:
            known[case] = _verify_op(op, spec, small)
        if known[case]:
            run += 1
        else:
            by_rule[op.target] += 1
    cases = sum(known.values())
    return Verified(plan.model, plan.mesh, small, len(graph.ops), replicated, run, cases, dict(by_rule))


def is_whole(spec: OpSpec) -> bool:
    """Whether every rank runs the whole op."""
    return all(p.is_replicate for ps in (*spec.ins, *spec.outs) if ps is not None for p in ps)


def _verify_op(op: Op, spec: OpSpec, mesh: MeshShape) -> bool:
    """Whether the op was run; False where it is sharded by its rule and cannot be run.

    Raises:
        VerifyError: it is wrong.
    """
    where = f"op {op.name} ({op.target})" + (f" of {op.module_path}" if op.module_path else "")
    small = shrink(op, spec, mesh)
    if small is None:
        unknown = [row for row in _rows_of(spec) if row not in _known_rows(op)]
        if unknown:
            raise VerifyError(f"{where}: the plan has {spec}, whose {unknown[0]} is no way to shard it: known are {_listed(op)}")
        return False
    try:
        prove.prove_spec(small.op, small.inputs, small.spec, mesh)
    except VerifyError as e:
        raise VerifyError(
            f"{where}: the plan has {spec}, and its pieces are not those of the whole: {e}; {_needed(op, spec)}"
        ) from None
    except (RuntimeError, IndexError, ValueError, TypeError) as e:
        raise VerifyError(
            f"{where}: the plan has {spec}, and it does not run on pieces: {_one_line(e)}; {_needed(op, spec)}"
        ) from None
    return True


def _rows_of(spec: OpSpec) -> Iterator[Row]:
    """What the spec says of each mesh axis."""
    placed = [ps for ps in (*spec.ins, *spec.outs) if ps is not None]
    for axis in range(len(placed[0]) if placed else 0):
        yield Row(tuple(ps[axis] for ps in spec.ins), tuple(None if ps is None else ps[axis] for ps in spec.outs))


def _known_rows(op: Op) -> set[Row]:
    return {Row(row.ins, row.outs) for row in rows_for(op) or ()} | {whole_row(op)}


def _needed(op: Op, spec: OpSpec) -> str:
    """What the results must be for these inputs, as far as the op's rule knows."""
    rows = rows_for(op) or ()
    wrong = [(axis, row) for axis, row in enumerate(_rows_of(spec)) if row not in _known_rows(op)]
    if not wrong:
        return "each axis by itself is as the rule says"
    axis, row = wrong[0]
    fitting = [str(r) for r in rows if r.ins == row.ins]
    return f"axis {axis} has {row}, needed is {' or '.join(fitting) if fitting else 'one of ' + _listed(op)}"


def _listed(op: Op) -> str:
    return "; ".join(map(str, rows_for(op) or ())) or "no rule"


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())[:300]
