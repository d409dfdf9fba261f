"""Forks against the cheapest tree, by enumeration over sources and demands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.planner.solve.forks import Groups, Leg, forks_of, together
from meshwright.planner.solve.paths import Routes, cheapest_tree, distances
from meshwright.planner.solve.problem import Network


def random_network(rng: np.random.Generator) -> Network:
    """Up to seven nodes; some pairs have no arc, so that not all can be reached."""
    n = int(rng.integers(3, 8))
    tails, heads = np.nonzero((rng.random((n, n)) < 0.45) & ~np.eye(n, dtype=bool))
    return Network(n, tails, heads, rng.integers(1, 20, len(tails)).astype(float))


def per_fork(leg: Leg, by_node: np.ndarray) -> np.ndarray:
    at_legs = by_node[leg.nodes]
    return at_legs if leg.groups is None else at_legs[leg.groups.index]


@pytest.mark.parametrize("num_demands", [2, 3])
def test_the_least_over_the_forks_is_the_cheapest_tree(num_demands: int) -> None:
    rng, compared, unreachable = np.random.default_rng(num_demands), 0, 0
    for _ in range(25):
        network = random_network(rng)
        everything = np.ones(network.num_arcs, dtype=bool)
        cost, n = Routes(network, everything).cost, network.num_nodes
        forks = forks_of(cost, np.arange(n), num_demands)
        for source, *wanted in itertools.product(range(n), repeat=1 + num_demands):
            total = per_fork(forks.supply, cost[source]) + forks.between
            for leg, node in zip(forks.demands, wanted, strict=True):
                total = total + per_fork(leg, cost[:, node])
            tree = cheapest_tree(network, everything, source, [frozenset({t}) for t in wanted])
            if tree is None:
                assert np.isinf(total.min())
                unreachable += 1
            else:
                assert total.min() == pytest.approx(network.seconds[tree].sum(), abs=1e-6)
                compared += 1
    assert compared > 1000 and unreachable > 100


def test_forks_start_only_where_the_value_can_be():
    """Two nodes that nothing reaches from the source are no forks."""
    network = Network(4, np.array([0, 2]), np.array([1, 3]), np.array([1.0, 1.0]))
    forks = forks_of(Routes(network, np.ones(2, dtype=bool)).cost, np.array([0]), 2)
    assert forks.supply.nodes.tolist() == [0, 1]


def test_shortest_paths_of_many_networks_at_once_are_those_of_each():
    rng = np.random.default_rng(5)
    parts = [(network, rng.random(network.num_arcs) < 0.8) for network in (random_network(rng) for _ in range(40))]
    for (network, allowed), cost in zip(parts, distances(parts), strict=True):
        np.testing.assert_array_equal(cost, Routes(network, allowed).cost)
    assert distances([]) == []


def test_all_demands_are_in_exactly_one_tree():
    for count in range(1, 9):
        parts = list(together(count))
        assert [i for part in parts for i in part] == list(range(count))
        assert all(1 <= len(part) <= 3 for part in parts)


def test_groups_find_the_extremes_of_their_candidates():
    groups, values = Groups(np.array([1, 0, 1, 2, 0])), np.array([5.0, 2.0, -1.0, 7.0, 3.0])
    assert groups.most(values).tolist() == [3.0, 5.0, 7.0]
    assert groups.least(values).tolist() == [2.0, -1.0, 7.0]
