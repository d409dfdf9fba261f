"""Micro-batches as one more mesh axis, sharded in time: where every value lies on it, and whether that is legal.

```
ids S(0), labels S(0) -> embedding S(0) -> ... -> logits S(0) -> sum of losses P      adds up over micro-batches
count = sum(labels != -100): P -> R                                                   from inputs alone: known beforehand
loss = sum / count: P -> R;  weight gradients: P -> R                                 results: complete after the last one
x - mean(x over the batch): the mean is P -> R in the middle                          refused
```

Every op takes the row that changes the fewest placements, as computation that simply follows the batch does. Where a value is
needed whole although it differs between micro-batches, three cases are told apart: it comes from inputs alone (then all
micro-batches know it beforehand), it only leads to results (then it is complete when they have all run), or neither. In the
last case micro-batches would change what the model computes, and it is refused with the op that is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner import rules
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Op, OpGraph, Value
from meshwright.planner.ir.known import Known
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.redistribute import step_kind
from meshwright.planner.ir.spec import Placement, R, Row, S, divides
from meshwright.planner.solve.follow import price_of_change
from meshwright.planner.strided import lifted

EXAMPLES = "batch statistics (BatchNorm in training mode) and losses that compare samples of a batch need it so"


@dataclass(frozen=True)
class TimeSpecs:
    """Placements over the axis of micro-batches; what is not listed is replicated.

    Attributes:
        inputs: of batch inputs, by value name.
        ops: of the ops' operands and results, by op name.
    """

    inputs: Mapping[str, Placement]
    ops: Mapping[str, OpSpec]


_Even = dict[tuple[tuple[int, ...], Placement], bool]
"""Whether pieces of a shape are even over an axis of micro-batches: all that their number decides."""


@dataclass(frozen=True)
class _Cuts:
    """What is known of one graph.

    Attributes:
        by_count: of micro-batches, or why there are none.
        alike: of any number for which the same pieces are even.
    """

    by_count: dict[int, TimeSpecs | str]
    alike: list[tuple[_Even, TimeSpecs]]

    def of(self, graph: OpGraph, count: int) -> TimeSpecs | str:
        if count not in self.by_count:
            try:
                self.by_count[count] = self._found(graph, count)
            except InputError as e:
                self.by_count[count] = str(e)
        return self.by_count[count]

    def _found(self, graph: OpGraph, count: int) -> TimeSpecs:
        batch = _batch_to_cut(graph, count)
        for even, found in self.alike:
            if all(divides(shape, (p,), (count,)) == is_even for (shape, p), is_even in even.items()):
                return found
        walk = _Walk(graph, batch, count)
        found = walk.specs()
        self.alike.append((walk.even, found))
        return found


def _nothing(_: OpGraph) -> _Cuts:
    return _Cuts({}, [])


_CUTS: Known[OpGraph, _Cuts] = Known(_nothing)


def time_specs(graph: OpGraph, count: int) -> TimeSpecs:
    """Cut the batch into ``count`` micro-batches.

    Args:
        graph: the captured program of the whole batch.
        count: number of micro-batches.

    Raises:
        InputError: the batch cannot be cut so, or micro-batches would change what the model computes.
    """
    if count == 1:
        return TimeSpecs({}, {})
    found = _CUTS(graph).of(graph, count)
    if isinstance(found, str):
        raise InputError(found)
    return found


def _batch_to_cut(graph: OpGraph, count: int) -> int:
    """Length of the batch.

    Raises:
        InputError: so many micro-batches do not divide it.
    """
    batch = batch_length(graph)
    if batch % count:
        raise InputError(
            f"{count} micro-batches do not divide the batch of {batch} samples: use a batch of a multiple of {count} "
            "(pad it with samples whose labels the loss ignores), or another number of micro-batches"
        )
    return batch


def batch_length(graph: OpGraph) -> int:
    """Length of dim 0 of the first batch input that has dims.

    Raises:
        InputError: there is none.
    """
    for given in graph.inputs_of("input"):
        if given.value.shape:
            return given.value.shape[0]
    raise InputError(
        "the model takes no batch tensor with dims, so there is nothing to cut into micro-batches: use micro_batches=1"
    )


class _Walk:
    """Placements of one graph over the axis of micro-batches."""

    def __init__(self, graph: OpGraph, batch: int, count: int):
        self.graph, self.count = graph, count
        self.inputs = {
            i.value.name: S(0) if i.role == "input" and i.value.shape and i.value.shape[0] == batch else R for i in graph.inputs
        }
        self.parameters = {i.value.name for i in graph.inputs_of("parameter")}
        self.known = lifted(graph, rules.rows_for).rows
        self.rows: dict[str, Row] = {}
        self.even: _Even = {}
        self.made: dict[str, Placement] = dict(self.inputs)

    def specs(self) -> TimeSpecs:
        """What is found.

        Raises:
            InputError: micro-batches would change what the model computes.
        """
        self.forth()
        self.back()
        self.refuse_illegal()
        listed = {name: row for name, row in self.rows.items() if any(p not in (None, R) for p in (*row.ins, *row.outs))}
        specs = {
            name: OpSpec(tuple((p,) for p in r.ins), tuple(None if p is None else (p,) for p in r.outs))
            for name, r in listed.items()
        }
        return TimeSpecs({name: p for name, p in self.inputs.items() if p != R}, specs)

    def forth(self) -> None:
        """Every op takes the cheapest row, in execution order."""
        for op in self.graph.ops:
            self.take(op, min(self.legal(op), key=lambda row: self.price(op, row)))

    def take(self, op: Op, row: Row) -> None:
        self.rows[op.name] = row
        self.made.update((v.name, p) for v, p in zip(op.outs, row.outs, strict=True) if v is not None and p is not None)

    def legal(self, op: Op) -> list[Row]:
        rows = self.known[op.name] or (Row((R,) * len(op.ins), tuple(None if v is None else R for v in op.outs)),)
        return [row for row in rows if self.is_even(op, row)]

    def is_even(self, op: Op, row: Row) -> bool:
        values = [*zip(op.ins, row.ins, strict=True), *zip(op.outs, row.outs, strict=True)]
        return all(v is None or p is None or p is R or self._divides(v.shape, p) for v, p in values)

    def _divides(self, shape: tuple[int, ...], p: Placement) -> bool:
        found = self.even.get((shape, p))
        if found is None:
            found = self.even[shape, p] = divides(shape, (p,), (self.count,))
        return found

    def price(self, op: Op, row: Row) -> float:
        whole = frozenset((R,))
        return sum(
            price_of_change(v, self.made[v.name], p, whole if v.name in self.parameters else None)
            for v, p in zip(op.ins, row.ins, strict=True)
        )

    def only_slices(self, op: Op, row: Row) -> bool:
        pairs = [(self.made[v.name], p, v.name) for v, p in zip(op.ins, row.ins, strict=True)]
        return all(src == dst or (src == R and dst.is_shard and name not in self.parameters) for src, dst, name in pairs)

    def back(self) -> None:
        """Make a value in the piece that all its readers take of it, so that nothing depends on which micro-batch it is.

        ``mask = expand(m): R; attention(q S(0), mask S(0))`` becomes ``mask = expand(m): S(0)``.
        """
        wanted: dict[str, set[Placement]] = {}
        for result in self.graph.outputs:
            if result.value is not None:
                wanted.setdefault(result.value.name, set()).add(R)
        for op in reversed(self.graph.ops):
            value = op.outs[0]
            asked = wanted.get(value.name, set()) if value is not None and len(op.outs) == 1 else set()
            if len(asked) == 1 and value is not None and self.made[value.name] == R and (p := next(iter(asked))).is_shard:
                fitting = [row for row in self.legal(op) if row.outs == (p,) and self.only_slices(op, row)]
                if fitting and self.rows[op.name].outs == (R,):
                    self.take(op, min(fitting, key=lambda row: self.price(op, row)))
            for v, p in zip(op.ins, self.rows[op.name].ins, strict=True):
                wanted.setdefault(v.name, set()).add(p)

    # --- legality ---

    def refuse_illegal(self) -> None:
        """Raise InputError where a value is needed whole that no pre-pass can know and that leads back into micro-batches."""
        known = {i.value.name for i in self.graph.inputs if i.role in ("input", "buffer", "constant")}
        complete: dict[str, Value] = {}  # known only when all micro-batches have run: by the value that was reduced
        for op in self.graph.ops:
            row, late = self.rows[op.name], None
            for v, p in zip(op.ins, row.ins, strict=True):
                late = late or complete.get(v.name)
                kind = step_kind(self.made[v.name], p)
                if kind in (None, "slice"):
                    continue
                if v.name not in known:
                    late = v
                if kind not in ("all_reduce", "all_gather") or (v.name not in known and not self.adds_up(v)):
                    raise self.refusal(f"op {op.name} ({op.target})", v)
            if all(v.name in known for v in op.ins):
                known.update(v.name for v in op.outs if v is not None)
            if late is None:
                continue
            if any(p is not None and p != R for p in row.outs):
                raise self.refusal(f"op {op.name} ({op.target})", late)
            complete.update((v.name, late) for v in op.outs if v is not None)
        for result in self.graph.outputs:
            value = result.value
            if value is None or value.name in known or (result.role == "output" and value.shape):
                continue
            if self.made[value.name] != R and not self.adds_up(value):
                raise self.refusal(f"{result.role} {result.name!r}", value)

    def adds_up(self, value: Value) -> bool:
        """Whether a value is a sum over micro-batches, which may be complete when all have run; pieces and maxima may not."""
        made = self.made[value.name]
        return made.is_partial and made.op == "sum"

    def refusal(self, who: str, value: Value) -> InputError:
        maker = self.graph.producer[value.name]
        made_by = f"input {maker.name!r} has"
        if isinstance(maker, Op):
            where = f", from {maker.source}" if maker.source else ""
            module = f" in {maker.module_path}" if maker.module_path else ""
            made_by = f"{maker.name} ({maker.target}{module}{where}) makes"
        return InputError(
            f"the model cannot run in {self.count} micro-batches: {who} needs {value} of the whole batch, which "
            f"{made_by} only piece by piece; {EXAMPLES}. Use micro_batches=1, or a model without it"
        )
