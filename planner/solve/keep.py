"""Copies of parameters that are gathered once per optimizer step and kept for the whole of it: ZeRO-1 and 2.

```
w S(0) -> bfloat16 S(0) -> t S(1)                 every reader gathers what it reads, in each phase (ZeRO-3)
w S(0) -> bfloat16 S(0), kept R -> t R            gathered once; all that is behind it is whole
```

What is kept is the smallest value that all readers of the parameter derive from, after its own casts. At rest, and with it the
gradient and the optimizer's state, the parameter stays sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwright.planner.ir.cluster import Cluster
from meshwright.planner.ir.graph import Op, Value
from meshwright.planner.ir.redistribute import legal_step, step_axis
from meshwright.planner.ir.spec import Placement, Placements, R
from meshwright.planner.kinds import is_free
from meshwright.planner.solve.candidates import Candidate

if TYPE_CHECKING:
    from meshwright.planner.solve.expanded import Expanded


class StepCosts(Protocol):
    """What pricing a gather needs of the cost model."""

    def step_s(self, value: Value, src: Placements, axis: int, dst: Placement) -> tuple[str, int, float]: ...


@dataclass(frozen=True)
class Root:
    """What of a parameter can be kept.

    Attributes:
        value: the value.
        above: indices of the cluster's ops that lead to it, its own and those that compute one of them again among them.
        views: names of the cluster's values that only look at a kept copy in another way.
    """

    value: Value
    above: frozenset[int]
    views: frozenset[str]


def root_of(cluster: Cluster) -> Root | None:
    """What can be kept of a parameter; None for other clusters and for a parameter that nothing reads."""
    if cluster.source is None or cluster.source.role != "parameter" or not cluster.outs:
        return None
    return _root(cluster.source.value, cluster.ops, cluster.outs)


@lru_cache(maxsize=1 << 14)
def _root(source: Value, ops: tuple[Op, ...], outs: tuple[Value, ...]) -> Root:
    values, phase = {source.name: source}, {source.name: "forward"}
    behind, same = dict[str, str](), dict[str, str]()
    names = {op.name: op.outs[0].name for op in ops if op.outs[0] is not None}
    for op in ops:
        made = op.outs[0]
        assert made is not None
        values[made.name], phase[made.name] = made, op.phase
        same[made.name] = names.get(op.recompute_of or op.name, made.name)
        behind[made.name] = op.ins[0].name
    chains = [_chain(v.name, behind, same) for v in outs]
    common = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*chains, strict=False))]
    root = min((n for n in common if phase[n] == "forward"), key=lambda n: values[n].size_bytes)
    leading = set(common[1 : common.index(root) + 1])
    above = frozenset(m for m, op in enumerate(ops) if same[names[op.name]] in leading)
    return Root(values[root], above, _views(ops, root, above, same))


def _chain(value: str, behind: dict[str, str], same: dict[str, str]) -> list[str]:
    """What a value is made from, the placeholder first; what is computed again counts as the first."""
    chain = [same.get(value, value)]
    while chain[-1] in behind:
        before = behind[chain[-1]]
        chain.append(same.get(before, before))
    return chain[::-1]


def _views(ops: tuple[Op, ...], root: str, above: frozenset[int], same: dict[str, str]) -> frozenset[str]:
    found = {root}
    for m, op in enumerate(ops):
        made = op.outs[0]
        assert made is not None
        is_view = m not in above and is_free(op) and made.dtype == op.ins[0].dtype and op.ins[0].name in found
        if is_view or same[made.name] == root:
            found.add(made.name)
    return frozenset(found)


Gathers = dict[tuple, tuple[float, int]]
"""What is known of gathers on a mesh: by value, where it is made and the axes that are gathered, seconds and the number of the path."""


def with_kept(expanded: Expanded, sizes: tuple[int, ...], costs: StepCosts, known: Gathers) -> tuple[Expanded, tuple[float, ...]]:
    """The candidates, and behind them those that keep a copy which is whole over some axes that shard the parameter.

    Of several that rest differently and are read alike, the one that is gathered fastest.

    Args:
        expanded: the candidates.
        sizes: of the mesh axes.
        costs: what steps cost.
        known: what other parameters found out; grows.

    Returns:
        The candidates, and for each the seconds of gathering the copy once.
    """
    table, none = expanded.table, (0.0,) * len(expanded)
    if table.root is None:
        return expanded, none
    root, cut = table.root.value, tuple([n > 1 for n in sizes])
    ways = expanded.once(("ways to keep", cut), lambda: _ways(expanded, cut))
    best: dict[int, tuple[float, int, int]] = {}
    for at, way in enumerate(ways):
        gather = root.shape, root.dtype, way.made, way.axes
        if gather not in known:
            known[gather] = _fastest(root, way, costs)
        seconds, number = known[gather]
        if way.group not in best or seconds < best[way.group][0]:
            best[way.group] = seconds, at, number
    if not best:
        return expanded, none
    taken = tuple([(at, number) for _, at, number in best.values()])
    longer = expanded.once(("kept", cut, taken), lambda: _with(expanded, [(ways[at], number) for at, number in taken]))
    return longer, (*none, *[seconds for seconds, _, _ in best.values()])


@dataclass(frozen=True)
class _Way:
    """A candidate that could keep a copy.

    Attributes:
        rows: its rows.
        made: where it makes what can be kept.
        axes: those to gather it over.
        paths: the gathers in every order that is possible.
        group: number of those that are read alike, one of which is taken.
    """

    rows: tuple[int, ...]
    made: Placements
    axes: tuple[int, ...]
    paths: tuple[_Path, ...]
    group: int


def _ways(expanded: Expanded, cut: Sequence[bool]) -> list[_Way]:
    """All candidates that could keep a copy where some axes cut something."""
    found: list[_Way] = []
    groups: dict[tuple, int] = {}
    for rows in map(tuple, expanded.index.tolist()):
        made = expanded.table.made(rows)
        sharded = [a for a, is_cut in enumerate(cut) if is_cut and made[a].is_shard]
        for count in range(1, len(sharded) + 1):
            for axes in itertools.combinations(sharded, count):
                paths = _paths(made, axes)
                if paths:
                    key = axes, tuple(r for a, r in enumerate(rows) if a not in axes)
                    found.append(_Way(rows, made, axes, paths, groups.setdefault(key, len(groups))))
    return found


@dataclass(frozen=True, slots=True)
class _Path:
    """Gathers one after the other.

    Attributes:
        through: the placements that they pass through.
        axes: the axis of each gather.
    """

    through: tuple[Placements, ...]
    axes: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def _paths(made: Placements, axes: tuple[int, ...]) -> tuple[_Path, ...]:
    """What gathers over ``axes`` pass through, for each order in which none is blocked."""
    found = []
    for order in itertools.permutations(reversed(axes)):
        through = [made]
        for axis in order:
            if not legal_step(through[-1], axis, R):
                break
            through.append((*through[-1][:axis], R, *through[-1][axis + 1 :]))
        else:
            found.append(_Path(tuple(through), order))
    return tuple(found)


def _fastest(value: Value, way: _Way, costs: StepCosts) -> tuple[float, int]:
    """Seconds of the fastest path, and its number."""
    seconds = [
        sum([costs.step_s(value, src, axis, R)[2] for src, axis in zip(path.through[:-1], path.axes, strict=True)])
        for path in way.paths
    ]
    return min(zip(seconds, itertools.count(), strict=False))


def _with(expanded: Expanded, ways: Sequence[tuple[_Way, int]]) -> Expanded:
    """The candidates, and behind them some that keep a copy, each by the number of a path."""
    rows = [[expanded.table.kept(r) if a in way.axes else r for a, r in enumerate(way.rows)] for way, _ in ways]
    return expanded.followed_by(np.array(rows, dtype=np.int64), [way.paths[number].through for way, number in ways])


def kept_unit(members: Sequence[Cluster], times: Callable[[str], int]) -> int:
    """Bytes of all copies that clusters of one class keep, for an element of one; 0 where they can keep none."""
    pairs = [(m.source, root_of(m)) for m in members]
    return sum(
        times(source.value.name) * root.value.dtype.itemsize for source, root in pairs if source is not None and root is not None
    )


def gathers_of(cluster: Cluster, candidate: Candidate, costs: StepCosts) -> list[tuple[str, int, int, float]]:
    """Kind, axis, bytes and seconds of the collectives that gather a candidate's kept copy."""
    root = root_of(cluster)
    if root is None or candidate.kept is None:
        return []
    found = []
    for src, dst in itertools.pairwise(candidate.kept):
        axis = step_axis(src, dst)
        kind, size, seconds = costs.step_s(root.value, src, axis, dst[axis])
        found.append((kind, axis, size, seconds))
    return found
