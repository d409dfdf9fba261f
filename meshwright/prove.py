"""Prove sharding rules by brute force: run the op on pieces, put the results together, compare with the whole op.

A rule is a claim: cut the inputs like this, run the op on every rank, and the pieces of the result lie like that. The
claim is checked on random numbers, for every rank of small meshes. The same machinery tries placements that no rule
mentions and lists the legal ones::

    >>> import torch
    >>> from meshwright import prove
    >>> op, inputs = prove.op_of_call(torch.ops.aten.mm.default, torch.randn(6, 12), torch.randn(12, 18))
    >>> [str(row) for row in prove.prove_op(op, inputs)]
    ['R,R -> R', 'S(0),R -> S(0)', 'S(1),S(0) -> P', 'R,S(1) -> S(1)', 'P,R -> P', 'R,P -> P']
    >>> prove.missing_rows(op, inputs)
    ()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.passes.local import run_local
from meshwright.planner.ir.errors import NoRuleError, VerifyError
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import OpSpec
from meshwright.planner.ir.spec import P_MAX, P_MIN, P, Placement, Placements, R, Row, S, divides, join_shards, local_slice
from meshwright.planner.rules import rows_for

Tensors = tuple[torch.Tensor, ...]
Pieces = dict[tuple[int, ...], torch.Tensor]

_UNINITIALISED = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Relative and absolute. Inputs are of order 1, so that a wrong row is off by about 1; sums are of some tens of terms."""


def op_of_call(overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> tuple[Op, Tensors]:
    """An :class:`Op` for a call on real tensors, and its tensor inputs."""
    inputs: list[torch.Tensor] = []

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            inputs.append(arg)
            return _value(f"x{len(inputs) - 1}", arg)
        return tuple(map(convert, arg)) if isinstance(arg, list | tuple) else arg

    op_args = tuple(map(convert, args))
    op_kwargs = tuple((k, convert(v)) for k, v in kwargs.items())
    made = overload(*args, **kwargs)
    results = tuple(made) if isinstance(made, list | tuple) else (made,)
    outs = tuple(_value(f"y#{i}", t) if isinstance(t, torch.Tensor) else None for i, t in enumerate(results))
    return Op("y", str(overload), op_args, op_kwargs, tuple(_value(f"x{i}", t) for i, t in enumerate(inputs)), outs), tuple(
        inputs
    )


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(tensor.shape), tensor.dtype)


def prove_op(op: Op, inputs: Sequence[torch.Tensor], sizes: Sequence[int] = (2, 3)) -> tuple[Row, ...]:
    """Prove every row of the op's rule on 1-D meshes.

    Args:
        op: the op.
        inputs: whole tensors, in the order of ``op.ins``.
        sizes: mesh sizes; rows whose shards a size does not divide are skipped for it.

    Returns:
        The rows.

    Raises:
        NoRuleError: the op has no rule.
        VerifyError: a row is wrong; see :func:`prove`.
    """
    rows = rows_for(op)
    if rows is None:
        raise NoRuleError(f"op {op.target} (node {op.name}) has no sharding rule: register one with meshwright.rule")
    for row, n in itertools.product(rows, sizes):
        if fits(op, row, n):
            prove(op, inputs, row, n)
    return rows


def fits(op: Op, row: Row, n: int) -> bool:
    """Whether a mesh axis of ``n`` ranks divides every dim that the row shards (or need not)."""
    return row.uneven or _fits(op, tuple((p,) for p in row.ins), _single(row.outs), (n,))


def _fits(op: Op, ins: Sequence[Placements], outs: Sequence[Placements | None], sizes: tuple[int, ...]) -> bool:
    placed = [*zip(op.ins, ins, strict=True), *zip(op.outs, outs, strict=True)]
    return all(v is None or p is None or divides(v.shape, p, sizes) for v, p in placed)


def prove(op: Op, inputs: Sequence[torch.Tensor], row: Row, n: int) -> None:
    """Prove one row on a mesh of one axis of ``n`` ranks.

    Raises:
        VerifyError: the pieces do not make up the whole op's result; names op, row, result and the largest difference.
    """
    prove_spec(op, inputs, OpSpec(tuple((p,) for p in row.ins), _single(row.outs)), MeshShape.of(n))


def prove_rows(op: Op, inputs: Sequence[torch.Tensor], rows: Sequence[Row], mesh: MeshShape) -> bool:
    """Prove one row per mesh axis together; False where their shards do not divide.

    Raises:
        VerifyError: as :func:`prove`.
    """
    spec = joined(op, rows)
    if not _fits(op, spec.ins, spec.outs, mesh.sizes):
        return False
    prove_spec(op, inputs, spec, mesh)
    return True


def joined(op: Op, rows: Sequence[Row]) -> OpSpec:
    """The spec of one row per mesh axis."""
    outs: list[Placements | None] = []
    for i in range(len(op.outs)):
        made = tuple(p for r in rows if (p := r.outs[i]) is not None)
        outs.append(made or None)
    return OpSpec(tuple(tuple(r.ins[i] for r in rows) for i in range(len(op.ins))), tuple(outs))


def _single(outs: Sequence[Placement | None]) -> tuple[Placements | None, ...]:
    return tuple(None if p is None else (p,) for p in outs)


def prove_spec(op: Op, inputs: Sequence[torch.Tensor], spec: OpSpec, mesh: MeshShape) -> None:
    """Prove a spec over all mesh axes.

    Raises:
        VerifyError: as :func:`prove`.
    """
    wanted = _run_whole(op, inputs)
    pieces = _run_pieces(op, inputs, spec, mesh)
    for index, (want, placements) in enumerate(zip(wanted, spec.outs, strict=True)):
        if want is None or placements is None:
            continue
        trouble = _compare(op, want, pieces[index], placements, mesh)
        if trouble:
            raise VerifyError(f"{op.target} with {spec} on a mesh of {mesh} is wrong: result {index}: {trouble}")


def _run_whole(op: Op, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    replicated = OpSpec(((R,),) * len(op.ins), tuple(None if v is None else (R,) for v in op.outs))
    return run_local(op, replicated, MeshShape.of(1), (0,), inputs, _call)


def _call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _run_pieces(op: Op, inputs: Sequence[torch.Tensor], spec: OpSpec, mesh: MeshShape) -> list[Pieces]:
    """Per result, the piece of every coordinate."""
    generator = torch.Generator().manual_seed(0)
    cut = [cut_tensor(x, p, mesh.sizes, generator) for x, p in zip(inputs, spec.ins, strict=True)]
    made: list[Pieces] = [{} for _ in op.outs]
    for rank in range(mesh.num_devices):
        at = mesh.coordinate(rank)
        results = run_local(op, spec, mesh, at, [pieces[at] for pieces in cut], _call)
        for pieces, result in zip(made, results, strict=True):
            if result is not None:
                pieces[at] = result
    return made


def cut_tensor(whole: torch.Tensor, placements: Placements, sizes: Sequence[int], generator: torch.Generator) -> Pieces:
    """Every coordinate's piece of a tensor; partial placements get random addends, every other piece a reversed layout."""
    addends: Pieces = {(): whole}
    for p, n in zip(placements, sizes, strict=True):
        ways = n if p.is_partial else 1
        addends = {(*at, i): x for at, y in addends.items() for i, x in enumerate(_addends(y, p, ways, generator))}
    pieces: Pieces = {}
    for at in itertools.product(*map(range, sizes)):
        addend = addends[tuple(i if p.is_partial else 0 for i, p in zip(at, placements, strict=True))]
        piece = local_slice(addend, placements, sizes, at)
        pieces[at] = _reversed_layout(piece) if sum(at) % 2 else piece.contiguous()
    return pieces


def _reversed_layout(x: torch.Tensor) -> torch.Tensor:
    """Equal numbers, the first dim fastest in memory: kernels must not rely on how a redistribution lays out a piece."""
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def _addends(whole: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """``n`` tensors that sum to ``whole``, or whose maximum or minimum it is."""
    if n == 1:
        return [whole]
    noise = [_random(whole.shape, whole.dtype, generator) for _ in range(n)]
    if placement.op == "sum":
        return [*noise[1:], whole - sum(noise[1:], torch.zeros_like(whole))]
    owner = torch.randint(n, whole.shape, generator=generator)
    sign = -1 if placement.op == "max" else 1
    return [torch.where(owner == i, whole, whole + sign * noise[i].abs()) for i in range(n)]


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def _compare(op: Op, want: torch.Tensor, pieces: Pieces, placements: Placements, mesh: MeshShape) -> str:
    """What is wrong with the pieces of one result, or ``""``."""
    try:
        whole = join_shards(pieces, placements, mesh.sizes)
    except (RuntimeError, IndexError) as e:
        return f"the pieces do not fit together: {e}"
    if whole.shape != want.shape or whole.dtype != want.dtype:
        return f"{whole.dtype}{list(whole.shape)} instead of {want.dtype}{list(want.shape)}"
    if op.target in _UNINITIALISED:
        return ""
    for axis, p in enumerate(placements):
        for at, piece in pieces.items():
            first = pieces[(*at[:axis], 0, *at[axis + 1 :])]
            if p.is_replicate and not _close(piece, first):
                return f"replicas differ by {_distance(piece, first)}"
    return "" if _close(whole, want) else f"differs by {_distance(whole, want)}"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    tolerance = _TOLERANCE.get(a.dtype, 1e-4)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{(a.double() - b.double()).abs().max().item():.3g}"


# --- rows that no rule has ----------------------------------------------------------------------------------------


def missing_rows(op: Op, *draws: Sequence[torch.Tensor], n: int = 2, max_trials: int = 4096) -> tuple[Row, ...]:
    """Legal rows that the op's rule lacks, found by trying every combination of placements.

    Where a result comes out replicated, ``P(max)`` of it is true but says nothing, and is left out; so is a replicated
    run whose result is then called a maximum.

    Args:
        op: the op; shapes should be small, different and divisible by ``n``.
        draws: whole inputs, in the order of ``op.ins``; several sets leave less to chance.
        n: ranks.
        max_trials: combinations of input placements to try at most.

    Returns:
        Rows that pass :func:`prove` for all draws and are not in ``rows_for(op)``, in the order tried.

    Raises:
        ValueError: there are more combinations than ``max_trials``.
    """
    known = {Row(row.ins, row.outs) for row in rows_for(op) or ()}
    choices = [_choices(v, n, partial=(P,)) for v in op.ins]
    if (trials := math.prod(map(len, choices))) > max_trials:
        raise ValueError(
            f"{op.target}: {trials} combinations of input placements, more than max_trials={max_trials}: use fewer inputs"
        )
    found: list[Row] = []
    for ins in itertools.product(*choices):
        outs = [[None] if v is None else _choices(v, n, partial=(P, P_MAX, P_MIN)) for v in op.outs]
        held = [Row(ins, made) for made in itertools.product(*outs) if _holds(op, draws, Row(ins, made), n)]
        found += [row for row in held if row not in known and not _says_less(row, held)]
    return tuple(found)


def _says_less(row: Row, held: Sequence[Row]) -> bool:
    """Whether another row promises more of the same run: a replicated result where this one says maximum."""
    weak = (P_MAX, P_MIN)
    return any(
        other != row
        and all(p == q or (q is not None and q.is_replicate and p in weak) for p, q in zip(row.outs, other.outs, strict=True))
        for other in held
        if other.ins == row.ins
    )


def _choices(value: Value, n: int, partial: tuple[Placement, ...]) -> list[Placement]:
    shards = [S(d) for d, size in enumerate(value.shape) if size > 1 and size % n == 0]
    return [R, *shards, *(partial if value.dtype != torch.bool and value.numel else ())]


def _holds(op: Op, draws: Sequence[Sequence[torch.Tensor]], row: Row, n: int) -> bool:
    try:
        for inputs in draws:
            prove(op, inputs, row, n)
    except (VerifyError, RuntimeError, IndexError, ValueError, AssertionError):
        return False
    return True
