"""Many choices moved at a time: the best place on trees, never a worse one elsewhere; plans near bounds that fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.planner.solve.balance import balanced, fits
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.foresight import Look
from meshwright.planner.solve.forks import Groups
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.moves import Edge, Sum
from meshwright.planner.solve.optimise import optimise
from meshwright.planner.solve.price import objective_s, price
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.program import NetworkCache
from tests.test_solve_program import EXACT, random_problem


def random_sum(rng: np.random.Generator, pairs: list[tuple[int, int]], size: int) -> Sum:
    """A sum over some variables of two to four candidates, and pairs of them, in some of which candidates of the second are grouped."""
    counts = rng.integers(2, 5, size)
    matrices: list[np.ndarray] = []
    edges: list[list[Edge]] = [[] for _ in range(size)]
    for k, (a, b) in enumerate(pairs):
        groups = Groups(np.concatenate([[0, 1], rng.integers(0, 2, counts[b] - 2)])) if rng.random() < 0.4 else None
        matrix = rng.random((counts[a], counts[b] if groups is None else 2))
        matrices += [matrix, matrix.T]
        edges[a].append((2 * k, b, None, groups))
        edges[b].append((2 * k + 1, a, groups, None))
    return Sum([rng.random(n) for n in counts], matrices, edges)


def cost(terms: Sum, at: list[int]) -> float:
    """What it costs to be somewhere."""
    alone = sum(float(own[i]) for own, i in zip(terms.alone, at, strict=True))
    firsts = [(g, e) for g, edges in enumerate(terms.edges) for e in edges if e[0] % 2 == 0]
    return alone + sum(float(terms.row(e, at[e[1]])[at[g]]) for g, e in firsts)


def least(terms: Sum) -> float:
    return min(cost(terms, list(at)) for at in itertools.product(*(range(len(own)) for own in terms.alone)))


def test_a_tree_is_moved_to_its_very_best_place_at_once():
    rng = np.random.default_rng(0)
    for _ in range(60):
        size = int(rng.integers(2, 7))
        terms = random_sum(rng, [(int(rng.integers(0, b)), b) for b in range(1, size)], size)
        at = [int(rng.integers(0, len(own))) for own in terms.alone]
        terms.move_forest(rng.permutation(size).tolist(), at)
        assert cost(terms, at) == pytest.approx(least(terms))


def test_where_there_are_cycles_no_move_is_worse_and_many_find_the_best_place_as_a_rule():
    rng, best, moved = np.random.default_rng(1), 0, 0
    for _ in range(60):
        size = int(rng.integers(4, 7))
        pairs = [pair for pair in itertools.combinations(range(size), 2) if rng.random() < 0.6]
        terms = random_sum(rng, pairs, size)
        at = [int(rng.integers(0, len(own))) for own in terms.alone]
        for _ in range(12):
            before, where = cost(terms, at), list(at)
            has_moved = terms.move_forest(rng.permutation(size).tolist(), at)
            assert cost(terms, at) <= before + 1e-12
            assert has_moved == (at != where)
            moved += has_moved
        best += cost(terms, at) == pytest.approx(least(terms))
    assert best >= 55 and moved > 60


def test_balanced_plans_fit_get_better_and_are_near_the_optimum():
    met, near, feasible = 0, 0, 0
    for seed in range(120):
        problem = random_problem(seed)
        best = optimise(problem, Restriction(), NetworkCache(), EXACT)
        look = Look(problem, Restriction(), NetworkCache(), 1e-3, 6)
        prices = look.until(np.inf).prices
        messages = Messages(problem, Restriction(), NetworkCache())
        messages.price(prices)
        messages.sweep(4)
        messages.reading()
        found = [p for p in balanced(messages, problem, prices, messages.read) if p.objective < messages.unreachable_s]
        assert [p.objective for p in found] == sorted((p.objective for p in found), reverse=True)
        for plane in found:
            assert fits(problem, plane) and best is not None
            outcome = price(problem, Restriction(), plane.chosen)
            assert objective_s(problem, outcome, plane.chosen) >= best.objective_s - 1e-6, seed
        feasible += best is not None
        met += bool(found)
        near += bool(found) and found[-1].objective <= 1.05 * best.objective_s
    assert feasible > 60 and met > 0.8 * feasible and near > 0.8 * met, (feasible, met, near)


def test_a_look_that_was_stopped_goes_on_to_what_one_at_once_knows():
    tighter = 0
    for seed in range(80):
        problem = random_problem(seed)
        best = optimise(problem, Restriction(), NetworkCache(), EXACT)
        at_once = Look(problem, Restriction(), NetworkCache(), 1e-3, 8).until(np.inf)
        look = Look(problem, Restriction(), NetworkCache(), 1e-3, 8)
        bounds = []
        for enough_s in (0.0, 0.6 * at_once.bound_s, 0.9 * at_once.bound_s, np.inf):
            ahead = look.until(enough_s)
            bounds.append(ahead.bound_s)
            assert ahead.is_short == (ahead.bound_s >= enough_s), seed
        assert bounds == sorted(bounds)
        assert bounds[-1] <= (np.inf if best is None else best.objective_s) + 1e-6
        assert bounds[-1] >= 0.98 * at_once.bound_s, seed
        assert (ahead.chosen is None) == (at_once.chosen is None) or ahead.about_s >= ahead.bound_s
        tighter += bounds[-1] > bounds[0]
    assert tighter > 40


def test_prices_say_something_of_a_problem_with_as_many_terms():
    problem = random_problem(0)
    free = Prices.none(problem)
    dear = Prices(free.weights, 1.0, free.term_s)
    assert not free.is_for(problem) and dear.is_for(problem)
    assert not Prices(free.weights, 1.0, np.zeros(len(free.term_s) + 1)).is_for(problem)
