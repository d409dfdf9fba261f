"""Factors: the index names of an op, from which all its rows follow.

An op is described as an einsum describes a matmul: ``"mk,kn->mn"`` names the index (*factor*) behind each dim of each
tensor. Sharding one factor over a mesh axis shards every tensor that has it; a result that lacks it is a sum over it,
hence partial::

    mk,kn->mn      m:  S(0),R    -> S(0)
                   k:  S(1),S(0) -> P
                   n:  R,S(1)    -> S(1)

Grammar of one term (one tensor): a letter is a factor; ``_`` is a dim that must stay whole; ``(bs)`` is one dim merged
from several factors, outermost first; ``...`` are the leading dims, aligned from the right among all terms. A dim of
size 1 facing a larger factor is broadcast: it stays whole.

A factor that is not outermost in a merged dim shards it in groups: sharding ``s`` of ``(bs)`` is ``S(d;b)``, with ``b``
the factor's size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.spec import P, Placement, R, Row, S

Dim = tuple[Any, ...]
"""The factors of one tensor dim, outermost first; ``()`` for a dim that stays whole."""
Dims = tuple[Dim, ...]

WHOLE: Dim = ()


@dataclass(frozen=True)
class Factors:
    """Factors of every dim of an op's tensors.

    Attributes:
        ins: per tensor input, in the order of ``Op.ins``.
        outs: per result; None where the op does not make it.
        sizes: size of each factor.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims | None, ...]
    sizes: Mapping[Any, int]


def factor_rows(
    op: Op,
    factors: Factors,
    *,
    contract: str | None = "sum",
    linear: Iterable[Sequence[int]] = (),
    uneven: bool = False,
    whole: Iterable[Hashable] = (),
) -> list[Row]:
    """All rows of an op that factors describe, except the replicated one.

    Args:
        op: the op.
        factors: its factors.
        contract: reduction that completes a result lacking a sharded factor; None if such a factor must stay whole.
        linear: groups of input indices in which the op is jointly linear: partial inputs there make partial results
            (``add``: ``[(0, 1)]``; ``mul``: ``[(0,), (1,)]``).
        uneven: mark the shard rows as holding for uneven pieces too.
        whole: factors that must stay whole.
    """
    rows: list[Row] = []
    skip = set(whole)
    for name, size in factors.sizes.items():
        if size < 2 or name in skip:
            continue
        ins = tuple(_placement(dims, name, factors.sizes) for dims in factors.ins)
        lacking = R if not any(p.is_shard for p in ins) else None if contract is None else Placement("P", op=contract)
        outs = _out_placements(factors.outs, name, factors.sizes, lacking)
        if outs is not None:
            rows.append(Row(ins, outs, uneven))
    return rows + linear_rows(op, linear)


def _placement(dims: Dims, name: Hashable, sizes: Mapping[Any, int]) -> Placement:
    for d, dim in enumerate(dims):
        if name in dim:
            return S(d, math.prod(sizes[f] for f in dim[: dim.index(name)]))
    return R


def _out_placements(
    outs: Sequence[Dims | None], name: Hashable, sizes: Mapping[Any, int], lacking: Placement | None
) -> tuple[Placement | None, ...] | None:
    """Placements of the results; None if one lacks the factor and nothing completes it."""
    found: list[Placement | None] = []
    for dims in outs:
        p = None if dims is None else _placement(dims, name, sizes)
        if p is not None and p.is_replicate:
            if lacking is None:
                return None
            p = lacking
        found.append(p)
    return tuple(found)


def linear_rows(op: Op, groups: Iterable[Sequence[int]]) -> list[Row]:
    """Rows that carry partial sums through: inputs of a group are partial, the others replicated, all results partial.

    >>> [str(r) for r in linear_rows(add, [(0, 1)])]  # doctest: +SKIP
    ['P,P -> P']
    """
    rows: list[Row] = []
    for group in groups:
        partial = [op.ins[i] for i in group] + [v for v in op.outs if v is not None]
        if all(summable(v) for v in partial):
            ins = tuple(P if i in group else R for i in range(len(op.ins)))
            rows.append(Row(ins, tuple(None if v is None else P for v in op.outs)))
    return rows


def summable(value: Value) -> bool:
    """Whether addends of this element type sum to the value (not so for booleans)."""
    return value.dtype != torch.bool


# --- strings ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\.\.\.|_|[A-Za-z]|\(([A-Za-z]+)\)|(\S)")


def einsum(op: Op, text: str, **options: object) -> list[Row]:
    """Rows of an op from factor text; see the module docstring and :func:`factor_rows` for ``options``.

    >>> [str(r) for r in einsum(mm, "mk,kn->mn")]  # doctest: +SKIP
    ['S(0),R -> S(0)', 'S(1),S(0) -> P', 'R,S(1) -> S(1)']

    Raises:
        InputError: the text is malformed, or does not fit the op's tensors.
    """
    return factor_rows(op, parse_factors(op, text), **options)  # type: ignore[arg-type]


def parse_factors(op: Op, text: str) -> Factors:
    """Factor text applied to one op's shapes.

    Raises:
        InputError: the text is malformed, names a wrong number of tensors or dims, or sizes disagree.
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    in_terms = left.split(",") if left else []
    out_terms = right.split(",")
    if not arrow or len(in_terms) != len(op.ins) or len(out_terms) != len(op.outs):
        raise InputError(
            f"factors {text!r} name {len(in_terms)} inputs and {len(out_terms)} results, but {op.target} (node {op.name}) has "
            f"{len(op.ins)} tensor inputs and {len(op.outs)} results: write one term for each, separated by commas"
        )
    values = [*op.ins, *op.outs]
    dims = [None if v is None else _term(op, text, t, len(v.shape)) for t, v in zip([*in_terms, *out_terms], values, strict=True)]
    shapes = [() if v is None else v.shape for v in values]
    sizes = _sizes(op, text, dims, shapes)
    fitted = [None if d is None else _drop_broadcast(d, s, sizes) for d, s in zip(dims, shapes, strict=True)]
    return Factors(tuple(d or () for d in fitted[: len(op.ins)]), tuple(fitted[len(op.ins) :]), sizes)


def _term(op: Op, text: str, term: str, ndim: int) -> Dims:
    """The dims of one term: ``"...(ab)_"`` of a 4-dim tensor is ``((-2,), (-1,), ("a", "b"), ())``."""
    tokens = list(_TOKEN.finditer(term))
    if any(t.group(2) for t in tokens):
        raise InputError(
            f"factors {text!r}: {term!r} holds {next(t.group(2) for t in tokens if t.group(2))!r}, which means nothing here"
        )
    leading = ndim - sum(t.group(0) != "..." for t in tokens)
    dims: list[Dim] = []
    for t in tokens:
        if t.group(0) == "...":
            dims += [(i,) for i in range(-max(leading, 0), 0)]
        elif t.group(1):
            dims.append(tuple(t.group(1)))
        else:
            dims.append(WHOLE if t.group(0) == "_" else (t.group(0),))
    if len(dims) != ndim:
        raise InputError(
            f"factors {text!r}: {term!r} names {len(dims)} dims, but that tensor of {op.target} (node {op.name}) has {ndim}"
        )
    return tuple(dims)


def _sizes(op: Op, text: str, dims: Sequence[Dims | None], shapes: Sequence[tuple[int, ...]]) -> dict[Any, int]:
    """Every factor's size: from dims that it has alone, then from merged dims with one unknown."""
    sizes: dict[Any, int] = {}
    pairs = [
        (d, n) for ds, shape in zip(dims, shapes, strict=True) if ds is not None for d, n in zip(ds, shape, strict=True) if d
    ]
    for dim, n in pairs:
        if len(dim) == 1:
            sizes[dim[0]] = max(n, sizes.get(dim[0], 1))
    merged = [(d, n) for d, n in pairs if len(d) > 1]
    for _ in range(len(merged)):
        for dim, n in merged:
            unknown = [f for f in dim if f not in sizes]
            known = math.prod(sizes[f] for f in dim if f in sizes)
            if len(unknown) == 1 and known and n % known == 0:
                sizes[unknown[0]] = n // known
    for dim, n in pairs:
        if any(f not in sizes for f in dim):
            raise InputError(
                f"factors {text!r}: the sizes of {dim} cannot be told from the shapes of {op.target} (node {op.name})"
            )
        if n not in (1, math.prod(sizes[f] for f in dim)):
            raise InputError(
                f"factors {text!r}: {''.join(map(str, dim))} is {math.prod(sizes[f] for f in dim)} in one tensor and {n} in another of "
                f"{op.target} (node {op.name})"
            )
    return sizes


def _drop_broadcast(dims: Dims, shape: tuple[int, ...], sizes: Mapping[Any, int]) -> Dims:
    return tuple(d if n > 1 or all(sizes[f] == 1 for f in d) else WHOLE for d, n in zip(dims, shape, strict=True))
