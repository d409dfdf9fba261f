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
    from meshwright.planner.solve.combine import Expanded


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


Gathers = dict[tuple, "tuple[float, tuple[Placements, ...]] | None"]
"""What is known of gathers on a mesh: by value, where it is made and the axes that are gathered, seconds and path."""


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
    table, none = expanded.table, (0.0,) * len(expanded.candidates)
    if table.root is None:
        return expanded, none
    root = table.root.value
    best: dict[tuple, tuple[float, tuple[Placements, ...], tuple[int, ...]]] = {}
    for combination in expanded.index.tolist():
        made = table.made(combination)
        sharded = [a for a, n in enumerate(sizes) if n > 1 and made[a].is_shard]
        for count in range(1, len(sharded) + 1):
            for axes in itertools.combinations(sharded, count):
                gather = root.shape, root.dtype, made, axes
                if gather not in known:
                    known[gather] = _fastest(root, made, axes, costs)
                key, found = (axes, tuple(r for a, r in enumerate(combination) if a not in axes)), known[gather]
                if found is not None and (key not in best or found[0] < best[key][0]):
                    best[key] = *found, tuple(table.kept(r) if a in axes else r for a, r in enumerate(combination))
    if not best:
        return expanded, none
    seconds, paths, kept = zip(*best.values(), strict=True)
    more = table.expanded(np.array(kept, dtype=np.int64), paths)
    return expanded.followed_by(more), (*none, *seconds)


def _fastest(
    value: Value, made: Placements, axes: Sequence[int], costs: StepCosts
) -> tuple[float, tuple[Placements, ...]] | None:
    """Seconds and path of the fastest order of gathers over ``axes``; None where each is blocked."""
    found = []
    for order in itertools.permutations(reversed(axes)):
        path, seconds = [made], 0.0
        for axis in order:
            if not legal_step(path[-1], axis, R):
                break
            seconds += costs.step_s(value, path[-1], axis, R)[2]
            path.append((*path[-1][:axis], R, *path[-1][axis + 1 :]))
        else:
            found.append((seconds, tuple(path)))
    return min(found, key=lambda f: f[0], default=None)


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
