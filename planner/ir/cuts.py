"""Placements of many values at once, as arrays: what :mod:`.spec` says of one value, said of thousands.

```
[1024, 512]  S(0)R            dim [[ 0, -1],     split [[1, 1],     on 2x4:  pieces [[512, 512],
[1024]       RS(0;8)               [-1,  0]]            [1, 8]]                      [256,   1]]
```

Shapes are padded with ones. All counts are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.ir.spec import Placement, Placements


@dataclass(frozen=True, slots=True)
class Cuts:
    """How placements cut; what is replicated or partial is not cut.

    Attributes:
        dim: the tensor dim that each mesh axis cuts, -1 where it cuts none, int64 [..., axes].
        split: number of groups of which each is cut, 1 where there is no cut, int64 [..., axes].
    """

    dim: np.ndarray
    split: np.ndarray

    @classmethod
    def of(cls, placements: Sequence[Placements], num_axes: int) -> Cuts:
        """Those of vectors of placements, [vectors, axes]."""
        flat = [p for vector in placements for p in vector]
        dim, split = _cut(flat)
        return cls(dim.reshape(-1, num_axes), split.reshape(-1, num_axes))

    @classmethod
    def stacked(cls, parts: Sequence[Cuts]) -> Cuts:
        """Several behind each other."""
        return cls(np.concatenate([p.dim for p in parts]), np.concatenate([p.split for p in parts]))

    def __getitem__(self, index: np.ndarray) -> Cuts:
        return Cuts(self.dim[index], self.split[index])

    def of_candidates(self, index: np.ndarray) -> Cuts:
        """From how rows cut columns ([rows, columns]) to how candidates, made of one row per axis, do: [candidates * columns, axes].

        Args:
            index: row of each candidate over each axis, int64 [candidates, axes].
        """
        flat = (len(index) * self.dim.shape[1], index.shape[1])
        return Cuts(self.dim[index].swapaxes(1, 2).reshape(flat), self.split[index].swapaxes(1, 2).reshape(flat))

    @property
    def num_axes(self) -> int:
        return self.dim.shape[-1]

    def parts(self, sizes: Sequence[int] | np.ndarray, num_dims: int) -> np.ndarray:
        """In how many parts each dim is cut, int64 [..., dims]."""
        return _product(self.dim, sizes, num_dims)


def _cut(placements: Sequence[Placement | None]) -> tuple[np.ndarray, np.ndarray]:
    """Dim and split of single placements, int64 [placements]; None cuts nothing."""
    shards = [p is not None and p.is_shard for p in placements]
    dim = np.array([p.dim if s and p is not None else -1 for p, s in zip(placements, shards, strict=True)], dtype=np.int64)
    split = np.array([p.split if s and p is not None else 1 for p, s in zip(placements, shards, strict=True)], dtype=np.int64)
    return dim, split


def cuts_of_columns(columns: Sequence[Sequence[Placement | None]], num_rows: int) -> Cuts:
    """How rows cut values over one axis, from each value's placement in every row (None: not made): [rows, columns]."""
    dim, split = _cut([p for column in columns for p in column])
    return Cuts(dim.reshape(len(columns), num_rows).T, split.reshape(len(columns), num_rows).T)


def padded(shapes: Sequence[Sequence[int]]) -> np.ndarray:
    """Shapes of equal length, int64 [shapes, dims], at least one dim."""
    num_dims = max((len(shape) for shape in shapes), default=1) or 1
    return np.array([(*shape, *(1,) * (num_dims - len(shape))) for shape in shapes], dtype=np.int64).reshape(-1, num_dims)


def stacked(shapes: Sequence[np.ndarray]) -> np.ndarray:
    """Padded shapes of different length behind each other."""
    num_dims = max(s.shape[1] for s in shapes)
    found, end = np.ones((sum(map(len, shapes)), num_dims), dtype=np.int64), 0
    for s in shapes:
        found[end : end + len(s), : s.shape[1]] = s
        end += len(s)
    return found


def repeated(array: np.ndarray, times: int) -> np.ndarray:
    """The whole array several times, behind each other: ``np.tile`` along the first dim, which takes longer."""
    return array[None].repeat(times, axis=0).reshape(times * len(array), *array.shape[1:])


def split_at(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """What lies behind each other, one by one: ``np.split`` by lengths, which takes longer for many parts."""
    found, start = [], 0
    for length in lengths:
        found.append(flat[start : start + length])
        start += length
    return found


def _product(dim: np.ndarray, sizes: Sequence[int] | np.ndarray, num_dims: int) -> np.ndarray:
    """Product of the sizes of the axes that cut each dim, int64 [..., dims]; ``sizes`` may differ: int64 [..., axes]."""
    flat = dim.reshape(-1, dim.shape[-1])
    found = np.ones(len(flat) * (num_dims + 1), dtype=np.int64)  # behind each one's dims a place for what cuts none
    first = np.arange(0, len(found), num_dims + 1)
    for axis in range(dim.shape[-1]):
        size = sizes[..., axis].reshape(-1) if isinstance(sizes, np.ndarray) else sizes[axis]
        if isinstance(size, np.ndarray) or size > 1:
            found[first + np.where(flat[:, axis] < 0, num_dims, flat[:, axis])] *= size
    return found.reshape(*dim.shape[:-1], num_dims + 1)[..., :num_dims]


def piece_shapes(shape: np.ndarray, cuts: Cuts, sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Shapes of the largest pieces, int64 [..., dims]; see :func:`~meshwright.planner.ir.spec.max_local_shape`.

    ``sizes`` of the mesh axes may be others for each: int64 [..., axes].
    """
    return -(-shape // cuts.parts(sizes, shape.shape[-1]))


def piece_numels(shape: np.ndarray, cuts: Cuts, sizes: Sequence[int]) -> np.ndarray:
    """Elements of the largest pieces, int64 [...]."""
    return piece_shapes(shape, cuts, sizes).prod(axis=-1)


def divide(shape: np.ndarray, cuts: Cuts, sizes: Sequence[int]) -> np.ndarray:
    """Whether all pieces are equal, bool [...]; see :func:`~meshwright.planner.ir.spec.divides`."""
    num_dims = shape.shape[-1]
    even = (shape % cuts.parts(sizes, num_dims) == 0).all(axis=-1)
    grouped = cuts.split > 1
    if not grouped.any():
        return even
    plain = _product(np.where(grouped, -1, cuts.dim), sizes, num_dims)
    inner = _product(np.where(grouped, cuts.dim, -1), sizes, num_dims)
    least, most = np.full(plain.shape, np.iinfo(np.int64).max), np.ones_like(plain)
    dims = np.arange(num_dims)
    for axis in range(cuts.num_axes):
        here = grouped[..., axis, None] & (cuts.dim[..., axis, None] == dims)
        split = np.where(here, cuts.split[..., axis, None], 1)
        least, most = np.where(here, np.minimum(least, split), least), np.maximum(most, split)
    fits = (least == most) & (most % plain == 0) & (shape % most == 0) & ((shape // most) % inner == 0)
    return even & ((most == 1) | fits).all(axis=-1)


def are_scattered(shape: np.ndarray, cuts: Cuts, sizes: Sequence[int]) -> np.ndarray:
    """Whether what an axis cuts off is several stretches of memory of a piece, bool [..., axes].

    One stretch it is where the dims and groups before the cut have one element each on a rank: ``S(1)`` of ``[1, S, H]``.
    """
    num_dims = shape.shape[-1]
    pieces = piece_shapes(shape, cuts, sizes)
    before = np.cumprod(pieces, axis=-1)
    plain = _product(np.where(cuts.split > 1, -1, cuts.dim), sizes, num_dims)
    found = np.zeros(cuts.dim.shape, dtype=bool)
    for axis in range(cuts.num_axes):
        dim, split = cuts.dim[..., axis], cuts.split[..., axis]
        at = np.clip(dim, 0, num_dims - 1)[..., None]
        groups = np.where(split > 1, split // np.take_along_axis(plain, at, -1)[..., 0], 1)
        length = np.where(dim > 0, np.take_along_axis(before, np.maximum(at - 1, 0), -1)[..., 0], 1)
        found[..., axis] = (dim >= 0) & (groups * length > 1)
    return found
