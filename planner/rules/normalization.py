"""Normalisations and softmaxes: whatever is not normalised over."""

from __future__ import annotations

from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import Placement, Row, S
from meshwright.planner.rules.factors import Dims, Factors, einsum, factor_rows
from meshwright.planner.rules.reductions import along_dim
from meshwright.planner.rules.registry import Rows, rule


@rule(
    "aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default", "aten.softmax.int", "aten.log_softmax.int"
)
def softmax(op: Op) -> Rows:
    """All dims but the one that sums to 1."""
    return along_dim(op, op.arg(1, -1))


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(op: Op) -> Rows:
    """``(gradient, output)``: all dims but the softmax's; linear in the gradient."""
    shape = op.ins[0].shape
    dim = op.args[2] % max(len(shape), 1)
    dims: Dims = tuple((d,) if d != dim else () for d in range(len(shape)))
    return factor_rows(op, Factors((dims, dims), (dims,), dict(enumerate(shape))), linear=[(0,)])


@rule("aten.native_layer_norm.default")
def row_norm(op: Op) -> Rows:
    """``(x, shape, weight?, bias?) -> y, mean, rstd``: leading dims of ``x``, whole weights."""
    leading = len(op.ins[0].shape) - len(op.args[1])
    return factor_rows(op, _leading(op, leading, weights=op.ins[1:]))


@rule("aten.native_layer_norm_backward.default")
def row_norm_backward(op: Op) -> Rows:
    """``(gy, x, shape, mean, rstd, weight?, bias?) -> gx, gw, gb``: leading dims, ``gw`` and ``gb`` partial; linear in ``gy``."""
    leading = len(op.ins[1].shape) - len(op.args[2])
    return factor_rows(op, _leading(op, leading, weights=op.ins[4:]), linear=[(0,)])


def _leading(op: Op, leading: int, *, weights: tuple[Value, ...]) -> Factors:
    """The first ``leading`` dims of every tensor but the weights and their gradients are factors."""
    x = op.ins[0]

    def dims(v: Value) -> Dims:
        return tuple((d,) if d < leading else () for d in range(len(v.shape)))

    def whole(v: Value) -> Dims:
        return ((),) * len(v.shape)

    num_rows = len(op.ins) - len(weights)
    ins = tuple(dims(v) if i < num_rows else whole(v) for i, v in enumerate(op.ins))
    backward = num_rows > 1
    outs = tuple(None if v is None else whole(v) if backward and i > 0 else dims(v) for i, v in enumerate(op.outs))
    return Factors(ins, outs, {d: x.shape[d] for d in range(leading)})


@rule("aten.native_group_norm.default")
def group_norm(op: Op) -> Rows:
    """``(x [N, C, ...], weight?, bias?) -> y, mean [N, G], rstd [N, G]``: samples, and whole groups of channels."""
    x, weights = f"n_{'_' * (len(op.ins[0].shape) - 2)}", ",_" * (len(op.ins) - 1)
    rows = einsum(op, f"{x}{weights}->{x},n_,n_")
    return [*rows, *_whole_groups(op, [S(1)] + [S(0)] * (len(op.ins) - 1), [S(1)] * 3, num_groups=op.args[6])]


@rule("aten.native_group_norm_backward.default")
def group_norm_backward(op: Op) -> Rows:
    """``(gy, x, mean, rstd, weight?) -> gx, gw, gb``: samples (``gw``, ``gb`` partial), whole groups; linear in ``gy``."""
    x, weights = f"n_{'_' * (len(op.ins[0].shape) - 2)}", ",_" * (len(op.ins) - 4)
    rows = einsum(op, f"{x},{x},n_,n_{weights}->{x},_,_", linear=[(0,)])
    return [*rows, *_whole_groups(op, [S(1)] * 4 + [S(0)] * (len(op.ins) - 4), [S(1), S(0), S(0)], num_groups=op.args[8])]


def _whole_groups(op: Op, ins: list[Placement], outs: list[Placement], *, num_groups: int) -> list[Row]:
    """Channels cut between groups; the statistics' own shards make sure that the axis divides the groups."""
    if num_groups < 2:
        return []
    return [Row(tuple(ins), tuple(None if v is None else p for v, p in zip(op.outs, outs, strict=True)))]
