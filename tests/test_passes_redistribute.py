"""Every one-axis step, by brute force: cut a tensor, run the emitted ops on simulated ranks, put the result together."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.passes.redistribute import Step, emit_step
from meshwright.planner.ir.redistribute import legal_step
from meshwright.planner.ir.spec import (
    P_MAX,
    P_MIN,
    P,
    Placement,
    Placements,
    R,
    S,
    divides,
    format_placements,
    join_shards,
    local_shape,
    parse_placements,
)
from tests.helpers.pieces import coordinates, cut
from tests.helpers.ranks import run_ranks
from tests.helpers.threads import run_threads


@dataclass(frozen=True)
class Change:
    shape: tuple[int, ...]
    src: Placements
    dst: Placements
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{format_placements(self.src)} -> {format_placements(self.dst)} of {self.dtype}{list(self.shape)}"


def _whole(change: Change) -> torch.Tensor:
    n = math.prod(change.shape)
    if change.dtype == torch.bool:
        return (torch.arange(n) % 3 == 0).reshape(change.shape)
    return (torch.arange(n).reshape(change.shape) % 101).to(change.dtype)


def _run(rank: int, sizes: tuple[int, ...], changes: list[Change]) -> list[tuple[torch.Tensor, list[str]]]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"a{i}" for i in range(len(sizes))))
    coordinate = coordinates(sizes)[rank]
    groups = [mesh.get_group(axis).group_name for axis in range(len(sizes))]
    results = []
    for change in changes:
        axis = next(i for i, (p, q) in enumerate(zip(change.src, change.dst, strict=True)) if p != q)
        step = Step(change.shape, change.dtype, change.src, change.dst, sizes, coordinate, groups[axis])
        text: list[str] = []

        def call(op, *args, text=text, **kwargs):
            text.append(str(op))
            return op(*args, **kwargs)

        piece = cut(_whole(change), change.src, sizes)[coordinate]
        results.append((emit_step(step, piece, call).clone(), text))
    return results


def check(sizes: tuple[int, ...], changes: list[Change], run=run_threads) -> None:
    """Run all ``changes`` on simulated ranks and compare every result with the whole tensor."""
    assert changes
    by_rank = run(math.prod(sizes), _run, sizes, changes)
    for k, change in enumerate(changes):
        pieces = {c: by_rank[r][k][0] for r, c in enumerate(coordinates(sizes))}
        for c, piece in pieces.items():
            assert tuple(piece.shape) == local_shape(change.shape, change.dst, sizes, c), f"{change} at {c}"
            if not any(p.is_partial for p in change.dst):
                for other, q in pieces.items():
                    if all(i == j or p.is_replicate for i, j, p in zip(c, other, change.dst, strict=True)):
                        assert torch.equal(piece, q), f"{change}: replicas {c} and {other} differ"
        whole = join_shards(pieces, change.dst, sizes)
        assert whole.dtype == change.dtype and torch.equal(whole, _whole(change)), str(change)
        texts = {tuple(result[k][1]) for result in by_rank}
        assert len(texts) == 1, f"{change}: ranks emit different ops"


def _placements_of(shape: tuple[int, ...], splits: tuple[int, ...]) -> list[Placement]:
    return [R, P, *(S(d, k) for d in range(len(shape)) for k in (1, *splits))]


def _legal(shape: tuple[int, ...], sizes: tuple[int, ...], splits: tuple[int, ...], *, uneven: bool) -> list[Change]:
    """Every legal step between placements of ``shape`` (even pieces only, or plain shards of any length)."""
    found = []
    for src in itertools.product(_placements_of(shape, splits), repeat=len(sizes)):
        for axis in range(len(sizes)):
            for to in _placements_of(shape, splits):
                dst = (*src[:axis], to, *src[axis + 1 :])
                if legal_step(src, axis, to) and (uneven or (divides(shape, src, sizes) and divides(shape, dst, sizes))):
                    found.append(Change(shape, src, dst))
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_even_step_on_one_axis_is_right(n: int) -> None:
    changes = _legal((n * n * 2, 3, n * 6, n), (n,), (2, 3, 6, n, 2 * n), uneven=False)
    check((n,), changes)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_uneven_step_on_one_axis_is_right(n: int) -> None:
    lengths = [(5, 7), (1, 3, 2), (n * 2, n + 1)]
    check((n,), [c for shape in lengths for c in _legal(shape, (n,), (), uneven=True)])


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)])
def test_every_even_step_on_two_axes_is_right(sizes: tuple[int, int]) -> None:
    a, b = sizes
    check(sizes, _legal((a * b * a * b, a * b), sizes, (2, 3, a * b), uneven=False))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_every_uneven_step_on_two_axes_is_right(sizes: tuple[int, int]) -> None:
    check(sizes, _legal((9, 5), sizes, (), uneven=True))


def test_step_on_three_axes_is_right() -> None:
    sizes, shape = (2, 2, 2), (16, 8)
    rows = [
        "S(0)S(0)S(0)->S(0)S(0)R",
        "S(0)S(0)R->S(0)RR",
        "PPP->PS(0)P",
        "S(0;4)S(0)S(1)->S(0;4)S(0)R",
        "S(0;4)S(0)S(1)->RS(0)S(1)",
    ]
    check(sizes, [Change(shape, *map(parse_placements, row.split("->"))) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool])
def test_every_dtype_is_redistributed(dtype: torch.dtype) -> None:
    changes = [c for c in _legal((6, 4), (2,), (3,), uneven=False) if not (dtype == torch.bool and c.src == (P,))]
    check((2,), [Change(c.shape, c.src, c.dst, dtype) for c in changes])


def test_maximum_and_minimum_are_completed() -> None:
    changes = [Change((6, 5), (p,), (to,)) for p in (P_MAX, P_MIN) for to in (R, S(0), S(1), S(0, 2))]
    check((3,), changes)
    check((3,), changes, run_ranks)


def test_gloo_agrees_on_every_dtype() -> None:
    changes = _legal((4, 6), (2,), (3,), uneven=False)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    kept = [Change(c.shape, c.src, c.dst, t) for t in dtypes for c in changes if not (t == torch.bool and c.src == (P,))]
    check((2,), kept, run_ranks)


def test_a_scalar_is_all_reduced() -> None:
    check((2, 2), [Change((), (P, R), (R, R)), Change((), (P, P), (P, R))])


def test_an_axis_of_one_rank_emits_nothing() -> None:
    step = Step((4,), torch.float32, (S(0),), (R,), (1,), (0,), "none")
    assert emit_step(step, "x", lambda *_: pytest.fail("emitted an op")) == "x"
