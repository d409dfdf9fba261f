"""The integer program against enumeration: every choice, and for every flow every subset of arcs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.ir.errors import SolverError
from meshwright.planner.solve import backend
from meshwright.planner.solve.backend import Solver
from meshwright.planner.solve.marginals import proved_costs
from meshwright.planner.solve.optimise import Effort, Excluded, Solution, optimise, optimise_below, settled_ahead
from meshwright.planner.solve.paths import cheapest_tree
from meshwright.planner.solve.price import memory_of, objective_s, price
from meshwright.planner.solve.problem import Choice, Demand, Flow, Network, Peak, Problem, Restriction
from meshwright.planner.solve.program import NetworkCache, assemble, largest_memory_bytes, least_memory_bytes

EXACT = Effort(gap=1e-9, nodes=100_000, rounds=30)


def random_network(rng: random.Random) -> Network:
    nodes = rng.randint(2, 4)
    pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
    arcs = rng.sample(pairs, min(len(pairs), rng.randint(nodes, 7)))
    tails, heads = (np.array([a[k] for a in arcs], dtype=np.int64) for k in (0, 1))
    return Network(nodes, tails, heads, np.array([rng.randint(1, 9) for _ in arcs], dtype=float))


def random_problem(seed: int) -> Problem:
    """A chain or web of 2-4 choices with shared consumers, results of the graph, hidden flows and a memory limit."""
    rng = random.Random(seed)
    choices = [
        Choice(
            f"c{i}",
            rng.randint(1, 3),
            rng.randint(0, 1),
            np.array([float(rng.randint(0, 9)) for _ in range(rng.randint(1, 3))]),
        )
        for i in range(rng.randint(2, 4))
    ]
    choices = [
        Choice(c.name, c.count, c.segment, c.compute_s, {"static": np.array([float(rng.randint(0, 9)) for _ in c.compute_s])})
        for c in choices
    ]
    flows = []
    for k in range(rng.randint(1, 4)):
        network = random_network(rng)

        def nodes_for(choice: int, network: Network = network) -> np.ndarray:
            return np.array([rng.randrange(network.num_nodes) for _ in choices[choice].compute_s])

        supply = rng.randrange(len(choices))
        demands = [Demand(h, nodes_for(h)) for h in rng.sample(range(len(choices)), rng.randint(1, min(3, len(choices))))]
        if rng.random() < 0.3:
            accepted = rng.sample(range(network.num_nodes), rng.randint(1, network.num_nodes - 1))
            demands.append(Demand(None, np.array(sorted(accepted))))
        flows.append(
            Flow(
                f"v{k}",
                rng.randint(1, 3),
                rng.randint(0, 1),
                rng.random() < 0.4,
                network,
                np.array([rng.random() < 0.95 for _ in range(network.num_arcs)]),
                supply,
                nodes_for(supply),
                tuple(demands),
            )
        )
    peaks = (
        Peak(
            "peak", 2.0, tuple(((g, np.array([float(rng.randint(0, 5)) for _ in c.compute_s])),) for g, c in enumerate(choices))
        ),
    )
    limit = rng.choice([None, rng.randint(6, 30)])
    return Problem(tuple(choices), tuple(flows), peaks, {"fixed": 1}, limit, 1e-3, 1e-3)


def cheapest_arcs(flow: Flow, root: int, terminals: list[frozenset[int]]) -> float:
    """Over all subsets of arcs, the cheapest that connects the root with every terminal."""
    allowed = [int(a) for a in np.flatnonzero(flow.allowed)]
    best = np.inf
    for size in range(len(allowed) + 1):
        for subset in itertools.combinations(allowed, size):
            cost = float(flow.network.seconds[list(subset)].sum())
            if cost < best and reaches(flow.network, subset, root, terminals):
                best = cost
    return best


def reaches(network: Network, arcs: tuple[int, ...], root: int, terminals: list[frozenset[int]]) -> bool:
    seen = {root}
    for _ in arcs:
        seen |= {int(network.heads[a]) for a in arcs if int(network.tails[a]) in seen}
    return all(t & seen for t in terminals)


def terminals_of(flow: Flow, chosen: tuple[int, ...]) -> list[frozenset[int]]:
    return [
        frozenset(d.nodes.tolist()) if d.choice is None else frozenset([int(d.nodes[chosen[d.choice]])]) for d in flow.demands
    ]


def enumerate_best(problem: Problem) -> float:
    """The smallest objective over all choices that fit; infinite where there is none."""
    best = np.inf
    known: dict[tuple, float] = {}
    for chosen in itertools.product(*(range(c.num_candidates) for c in problem.choices)):
        seconds = {(kind, s): 0.0 for kind in ("compute", "exposed", "hidden") for s in (0, 1)}
        for choice, c in zip(problem.choices, chosen, strict=True):
            seconds["compute", choice.segment] += choice.count * float(choice.compute_s[c])
        for flow in problem.flows:
            root = int(flow.supply_nodes[chosen[flow.supply]])
            terminals = terminals_of(flow, chosen)
            key = (flow.name, root, tuple(terminals))
            if key not in known:
                known[key] = cheapest_arcs(flow, root, terminals)
            seconds["hidden" if flow.hidden else "exposed", flow.segment] += flow.count * known[key]
        static = sum(float(ch.memory_bytes["static"][c]) for ch, c in zip(problem.choices, chosen, strict=True))
        peak = 2 * max(sum(float(b[chosen[g]]) for g, b in term) for term in problem.peaks[0].terms)
        if problem.memory_limit_bytes is not None and static + peak + 1 > problem.memory_limit_bytes:
            continue
        total = sum(
            seconds["exposed", s] + max(seconds["compute", s], seconds["hidden", s]) + 1e-3 * seconds["hidden", s] for s in (0, 1)
        )
        best = min(best, total + 1e-3 * static)
    return best


@pytest.mark.parametrize("block", range(10))
def test_the_optimum_equals_enumeration_on_random_problems(block: int):
    for seed in range(block * 30, block * 30 + 30):
        problem = random_problem(seed)
        expected = enumerate_best(problem)
        solution = optimise(problem, Restriction(), NetworkCache(), EXACT)
        if solution is None:
            assert expected == np.inf, seed
            continue
        outcome = price(problem, Restriction(), solution.chosen)
        assert objective_s(problem, outcome, solution.chosen) == pytest.approx(expected, abs=1e-5), seed
        assert solution.bound_s <= expected + 1e-5, seed


def test_nothing_below_a_cost_is_excluded_unless_enumeration_finds_nothing_below_it_either():
    for seed in range(120):
        problem = random_problem(seed)
        expected = enumerate_best(problem)
        if expected == np.inf:
            continue
        found = optimise_below(problem, Restriction(), NetworkCache(), EXACT, expected * 1.01 + 1e-3)
        assert isinstance(found, Solution) and found.objective_s == pytest.approx(expected, abs=1e-5), seed
        none = optimise_below(problem, Restriction(), NetworkCache(), EXACT, expected * 0.99 - 1e-3)
        assert isinstance(none, Excluded) and none.bound_s <= expected + 1e-5, seed
        assert settled_ahead(problem, Restriction(), NetworkCache(), EXACT)[1].bound_s <= expected + 1e-5, seed


def test_every_plan_holds_what_its_bounds_say():
    rng = np.random.default_rng(0)
    for seed in range(40):
        problem = random_problem(seed)
        allowed = {g: rng.random(c.num_candidates) < 0.7 for g, c in enumerate(problem.choices)}
        allowed = {g: mask for g, mask in allowed.items() if mask.any()}
        restriction = Restriction(allowed)
        least, largest = (f(problem, restriction) for f in (least_memory_bytes, largest_memory_bytes))
        for _ in range(20):
            kept = [np.flatnonzero(allowed.get(g, np.ones(c.num_candidates))) for g, c in enumerate(problem.choices)]
            held = sum(memory_of(problem, tuple(int(rng.choice(k)) for k in kept)).values())
            assert least - 1e-6 <= held <= largest + 1e-6, seed


def test_no_plan_with_a_candidate_costs_less_than_is_proved_for_it():
    for seed in range(60):
        problem = replace(random_problem(seed), memory_limit_bytes=None)
        program = assemble(problem, Restriction(), NetworkCache())
        cost = program.cost_at(np.array([0.3, 0.6]))
        answer = Solver(program.arrays, integer=False).solve(cost)
        if answer.x is None:
            continue
        proved = proved_costs(program.links, program.columns, cost, answer.objective, answer.reduced_costs, answer.duals)
        for g, choice in enumerate(problem.choices):
            for c in range(choice.num_candidates):
                fixed = Restriction({g: np.arange(choice.num_candidates) == c})
                least = optimise(problem, fixed, NetworkCache(), EXACT)
                if least is not None:
                    assert proved[g][c] <= least.objective_s * program.scale * (1 + 1e-6) + 1e-3, (seed, g, c)
                    assert proved[g][c] >= answer.objective - 1e-3, (seed, g, c)


def test_the_cheapest_tree_equals_enumeration():
    for seed in range(200):
        rng = random.Random(seed)
        network = random_network(rng)
        flow = Flow("v", 1, 0, False, network, np.ones(network.num_arcs, dtype=bool), 0, np.array([0]), ())
        terminals = [frozenset(rng.sample(range(network.num_nodes), rng.randint(1, 2))) for _ in range(rng.randint(1, 3))]
        tree = cheapest_tree(network, flow.allowed, 0, terminals)
        expected = cheapest_arcs(flow, 0, terminals)
        assert (np.inf if tree is None else float(network.seconds[tree].sum())) == pytest.approx(expected), seed


def test_a_choice_is_the_same_every_time():
    for seed in (3, 14, 159):
        problem = random_problem(seed)
        first, second = (optimise(problem, Restriction(), NetworkCache(), EXACT) for _ in range(2))
        assert first == second


# --- a solver that gives up ---------------------------------------------------------------------------------------


class StatusNotOk(Exception):
    """Stands for OR-tools' own error type, which has no importable name."""


def _small_program() -> backend.LinearProgram:
    """Minimise ``x + 2 y`` with ``x + y >= 1``."""
    return backend.LinearProgram(
        np.array([1.0, 2.0]),
        np.zeros(2),
        np.ones(2),
        np.zeros(2, bool),
        np.array([1.0]),
        np.array([np.inf]),
        np.array([0, 0]),
        np.array([0, 1]),
        np.array([1.0, 1.0]),
    )


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_program_that_the_solver_gives_up_on_is_solved_another_way(monkeypatch, failures: int) -> None:
    program, calls, real = _small_program(), [], backend.core.solve

    def solve(*arguments):
        calls.append(arguments)
        if len(calls) <= failures:
            raise StatusNotOk("HighsModelStatus was Unknown [INTERNAL]")
        return real(*arguments)

    monkeypatch.setattr(backend.core, "solve", solve)
    answer = backend.Solver(program, integer=False).solve(program.cost)
    assert answer.objective == pytest.approx(1.0) and len(calls) == failures + 1


def test_a_solver_that_always_gives_up_is_a_typed_error(monkeypatch) -> None:
    def solve(*arguments):
        raise StatusNotOk("HighsModelStatus was Unknown [INTERNAL]")

    monkeypatch.setattr(backend.core, "solve", solve)
    program = _small_program()
    with pytest.raises(SolverError, match="HiGHS gave up on a program of 2 columns and 1 rows: HighsModelStatus was Unknown"):
        backend.Solver(program, integer=False).solve(program.cost)
