"""Bounds by messages against the optimum, at any prices; and how tight they are where they should be exact."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.solve.bundle import Prices
from meshwright.planner.solve.foresight import Foresight, Look
from meshwright.planner.solve.messages import Messages
from meshwright.planner.solve.optimise import optimise, optimise_below
from meshwright.planner.solve.price import memory_of, objective_s, price
from meshwright.planner.solve.problem import Problem, Restriction
from meshwright.planner.solve.program import NetworkCache
from meshwright.planner.solve.smallest import fewest_by_messages, least_by_messages, smallest_by_messages
from tests.test_solve_program import EXACT, random_problem


def least_with_each_candidate(problem: Problem) -> list[np.ndarray]:
    """The optimum with each candidate fixed, by choice; infinite where nothing fits."""
    found = []
    for g, choice in enumerate(problem.choices):
        alone = [Restriction({g: np.arange(choice.num_candidates) == c}) for c in range(choice.num_candidates)]
        best = [optimise(problem, restriction, NetworkCache(), EXACT) for restriction in alone]
        found.append(np.array([np.inf if b is None else b.objective_s for b in best]))
    return found


def random_prices(problem: Problem, rng: np.random.Generator) -> Prices:
    """Weights of overlap, and a price of memory with a mixture of each peak's terms."""
    byte_s = float(rng.choice([0.0, 0.1, 1.0, 5.0]))
    mixtures = [byte_s * p.weight * rng.dirichlet(np.ones(len(p.terms))) * rng.random() for p in problem.peaks]
    return Prices(rng.random(2), byte_s, np.concatenate(mixtures))


def test_no_plan_that_fits_costs_less_than_the_messages_prove_at_any_prices_after_any_number_of_passes():
    rng, looked_at = np.random.default_rng(0), 0
    for seed in range(80):
        problem = random_problem(seed)
        least = least_with_each_candidate(problem)
        messages = Messages(problem, Restriction(), NetworkCache())
        for passes in (0, 1, 3):
            prices = random_prices(problem, rng)
            if problem.memory_limit_bytes is None:
                prices = replace(prices, byte_s=0.0, term_s=np.zeros_like(prices.term_s))
            messages.price(prices)
            messages.sweep(passes)
            bound, proved = messages.proved()
            assert bound <= min(float(row.min()) for row in least) + 1e-6, (seed, passes)
            for g, row in enumerate(least):
                assert (proved[g] <= row + 1e-6).all(), (seed, passes, g)
                looked_at += int(np.isfinite(row).sum())
    assert looked_at > 500


def test_what_is_foreseen_holds_and_the_plan_fits():
    met = 0
    for seed in range(150):
        problem = random_problem(seed)
        best = optimise(problem, Restriction(), NetworkCache(), EXACT)
        ahead = Look(problem, Restriction(), NetworkCache(), 1e-3, 12).until(np.inf)
        expected = np.inf if best is None else best.objective_s
        assert ahead.bound_s <= expected + 1e-6, seed
        if ahead.chosen is None:
            continue
        met += 1
        outcome = price(problem, Restriction(), ahead.chosen)
        assert expected - 1e-6 <= objective_s(problem, outcome, ahead.chosen), seed
        assert ahead.about_s <= objective_s(problem, outcome, ahead.chosen) + 1e-6, seed
        limit = problem.memory_limit_bytes
        assert limit is None or sum(memory_of(problem, ahead.chosen).values()) <= limit, seed
    assert met > 60


def test_a_chain_without_overlap_and_limit_is_solved_by_messages_alone():
    """One reader per value and no cycle: the bound is the optimum, and each candidate's floor the optimum with it."""
    exact = 0
    for seed in range(200):
        problem = replace(random_problem(seed), memory_limit_bytes=None, tie_hidden=1.0)
        flows = {}
        for flow in problem.flows:  # values between neighbours, each read once
            demand = next((d for d in flow.demands if d.choice == flow.supply + 1), None)
            if demand is not None:
                flows[flow.supply] = replace(flow, demands=(demand,), hidden=False)
        problem = replace(problem, flows=tuple(flows.values()))
        least = least_with_each_candidate(problem)
        if not np.isfinite(np.concatenate(least)).any():
            continue
        messages = Messages(problem, Restriction(), NetworkCache())
        messages.price(Prices.none(problem))
        messages.sweep(1)
        bound, proved = messages.proved()
        assert bound == pytest.approx(min(float(row.min()) for row in least), abs=1e-5), seed
        for floors, row in zip(proved, least, strict=True):
            reachable = np.isfinite(row)
            assert floors[reachable] == pytest.approx(row[reachable], abs=1e-5), seed
            assert (floors[~reachable] > messages.unreachable_s / 2).all(), seed
        exact += 1
    assert exact > 100


def test_values_with_several_readers_are_exact_where_there_is_no_cycle():
    """One choice feeds all others by one flow: the bound is the optimum, arcs bought once for two or three readers."""
    exact, shared = 0, 0
    for seed in range(300):
        problem = replace(random_problem(seed), memory_limit_bytes=None, tie_hidden=1.0)
        flow = next((f for f in problem.flows if len({d.choice for d in f.demands} - {f.supply, None}) > 1), None)
        if flow is None:
            continue
        readers = list({d.choice: d for d in flow.demands if d.choice not in (flow.supply, None)}.values())[:3]
        problem = replace(problem, flows=(replace(flow, demands=tuple(readers), hidden=False),))
        best = optimise(problem, Restriction(), NetworkCache(), EXACT)
        if best is None:
            continue
        messages = Messages(problem, Restriction(), NetworkCache())
        messages.price(Prices.none(problem))
        messages.sweep(2)
        bound, _ = messages.proved()
        assert bound == pytest.approx(best.objective_s, abs=1e-5), seed
        exact += 1
        shared += len(readers) == 3
    assert exact > 50 and shared > 5


def test_the_smallest_plan_by_messages_is_that_of_enumeration_where_they_prove_one():
    met = 0
    for seed in range(150):
        problem = random_problem(seed)
        problem = problem if seed % 2 else replace(problem, peaks=())  # the largest of several is harder than a sum
        found = smallest_by_messages(problem, Restriction(), NetworkCache(), 1e-2)
        if found is None:
            continue
        met += 1
        held, least = sum(memory_of(problem, found.chosen).values()), least_memory(problem)
        assert held <= least * 1.01 + 1, seed
        assert found.bound_s <= least + 1 and found.objective_s == pytest.approx(held), seed
        price(problem, Restriction(), found.chosen)  # all of it can be reached
    assert met > 50


def test_what_messages_say_of_the_least_memory_bounds_it_and_shows_where_nothing_fits():
    proved = 0
    for seed in range(150):
        problem = random_problem(seed)
        found, least = least_by_messages(problem, Restriction(), NetworkCache(), 1e-2), least_memory(problem)
        if found is None or np.isinf(least):
            continue
        assert found.least_bytes <= least + 1, seed
        assert found.chosen is None or least <= found.held_bytes + 1, seed
        tight = replace(problem, memory_limit_bytes=max(1, int(0.9 * least)))
        nothing = tuple(np.full(c.num_candidates, -np.inf) for c in tight.choices)
        ahead = Foresight(100.0, 1.0, nothing, Prices.none(tight), None, np.inf)  # as where a bound went out of sight
        assert not ahead.is_usual and optimise_below(tight, Restriction(), NetworkCache(), EXACT, ahead=ahead) is None, seed
        proved += found.least_bytes > tight.memory_limit_bytes
    assert proved > 30


def test_the_fewest_avoided_candidates_by_messages_are_as_few_as_by_integers():
    rng, met, some = np.random.default_rng(1), 0, 0
    for seed in range(150):
        problem = random_problem(seed)
        avoid = {g: rng.random(c.num_candidates) < 0.6 for g, c in enumerate(problem.choices) if rng.random() < 0.8}
        restriction = Restriction(avoid=avoid)
        chosen = fewest_by_messages(problem, restriction)
        if chosen is None:
            continue
        expected = optimise(problem, restriction, NetworkCache(), EXACT, objective="avoid")
        assert expected is not None, seed
        count = sum(problem.choices[g].count * avoided[chosen[g]] for g, avoided in avoid.items())
        fewest = sum(problem.choices[g].count * avoided[expected.chosen[g]] for g, avoided in avoid.items())
        assert count == fewest, seed
        limit = problem.memory_limit_bytes
        assert limit is None or sum(memory_of(problem, chosen).values()) <= limit, seed
        price(problem, Restriction(), chosen)  # all of it can be reached
        met, some = met + 1, some + (count > 0)
    assert met > 60 and some > 20


def least_memory(problem: Problem) -> float:
    """The least memory of all plans whose values can be brought to where they are wanted."""
    best = np.inf
    for chosen in itertools.product(*(range(c.num_candidates) for c in problem.choices)):
        held = sum(memory_of(problem, chosen).values())
        if held < best:
            try:
                price(problem, Restriction(), chosen)
            except VerifyError:
                continue
            best = held
    return best
