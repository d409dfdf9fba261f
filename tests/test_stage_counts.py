"""The second integer program against enumeration, and what it does on a deep model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from meshwright.planner.solve.stages import Chain, Counts, Point, Run, deal, rank_bytes, step_seconds


def chain_of(seed: int) -> Chain:
    """A small random chain: up to three runs, two points, two to four stages on one or two laps."""
    dice = random.Random(seed)
    runs = []
    for _ in range(dice.choice([1, 2, 3])):
        work, saved, rest = dice.uniform(1, 4), dice.uniform(1, 4), dice.uniform(0, 3)
        points = [Point(work, dice.choice([0.0, 1.0]), rest, saved)]
        if dice.random() < 0.7:
            points.insert(0, Point(work * 1.3, 0.0, rest, saved * dice.uniform(0.1, 0.6)))
        runs.append(Run(dice.choice([1, 1, 2, 3, 4]), tuple(points), dice.uniform(0, 0.5)))
    blocks = sum(r.count for r in runs)
    stages = min(dice.choice([2, 2, 3, 4]), blocks)
    degree = 2 if stages == 4 else stages
    rank_of = (
        tuple(s % degree for s in range(stages)) if dice.random() < 0.5 else tuple(s * degree // stages for s in range(stages))
    )
    in_flight = tuple(float(stages - s) for s in range(stages))
    limit = None if dice.random() < 0.2 else dice.uniform(0.3, 0.9) * blocks * 10 / degree
    return Chain(tuple(runs), rank_of, in_flight, dice.choice([1, 2, 5]), limit, dice.choice([0.0, 1.0]))


def every_way(chain: Chain) -> Iterator[Counts]:
    """All contiguous ways, points of a run in order along the chain."""
    blocks = [r for r, run in enumerate(chain.runs) for _ in range(run.count)]
    forms = [
        [tuple(sorted(f)) for f in itertools.combinations_with_replacement(range(len(run.points)), run.count)]
        for run in chain.runs
    ]
    for cuts in itertools.combinations(range(1, len(blocks)), chain.num_stages - 1):
        stage_of = [sum(i >= c for c in cuts) for i in range(len(blocks))]
        for chosen in itertools.product(*forms):
            counts = [[[0] * len(run.points) for run in chain.runs] for _ in range(chain.num_stages)]
            for i, (r, q) in enumerate((r, q) for r, form in enumerate(chosen) for q in form):
                counts[stage_of[i]][r][q] += 1
            yield tuple(tuple(map(tuple, stage)) for stage in counts)


def fits(chain: Chain, counts: Counts) -> bool:
    return chain.limit_bytes is None or max(rank_bytes(chain, counts)) <= chain.limit_bytes * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_the_integer_program_equals_enumeration(seed):
    chain = chain_of(seed)
    best = min((step_seconds(chain, c) for c in every_way(chain) if fits(chain, c)), default=None)
    found = deal(chain, gap=1e-9)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.step_s == pytest.approx(best, rel=1e-6)
        assert fits(chain, found.counts) and found.counts in set(every_way(chain))
        assert found.bound_s <= found.step_s


def test_random_chains_are_of_every_kind():
    chains = [chain_of(seed) for seed in range(100)]
    found = [deal(c) for c in chains]
    assert 5 < sum(f is None for f in found) < 60
    mixed = [f for f, c in zip(found, chains, strict=True) if f and any(len(r.points) > 1 for r in c.runs)]
    assert any(any(q[0] for s in f.counts for q in s) and any(q[-1] for s in f.counts for q in s) for f in mixed)


def test_the_first_stages_recompute_where_memory_is_short():
    block = Run(126, (Point(1.3, 0.0, 1.0, 0.1), Point(1.0, 0.0, 1.0, 1.0)), 0.01)
    chain = Chain(
        (Run(1, (Point(0.2, rest_bytes=8.0),)), block, Run(1, (Point(1.5, rest_bytes=8.0),))),
        tuple(range(8)),
        tuple(range(8, 0, -1)),
        32,
        90.0,
    )
    found = deal(chain)
    assert found is not None
    again = [stage[1][0] for stage in found.counts]
    assert again[0] > 0 == again[-1] and again == sorted(again, reverse=True)
    assert max(rank_bytes(chain, found.counts)) <= 90.0


def test_fewer_blocks_than_stages_is_no_way_at_all():
    assert deal(Chain((Run(2, (Point(1.0),)),), (0, 1, 2), (3, 2, 1), 4)) is None
