"""The problem as an integer program in arrays: the flow form.

For every flow, demand ``h`` and node ``p``::

    sum_out F[h] - sum_in F[h]  =  sum_{c supplied at p} x[supply, c]  -  sum_{c wanting p} x[h, c]      (_conserve)
    F[h, e] <= Y[e]   for arcs that several demands can use; Y is paid once                              (_share)
    static + weights * peaks <= limit;   peak >= each of its terms                                       (_memory)
    V[segment] >= hidden - compute,  V >= 0;   T = compute + exposed + V                                 (with_overlap)

Only ``x`` is integer. Source: PLANNER_FACTS §0(c); there the form is measured against four others. The overlap rows are kept
apart: they are dense, and make the relaxation twenty times slower and fractional. :mod:`.optimise` prices them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.solve.backend import LinearProgram
from meshwright.planner.solve.marginals import Link
from meshwright.planner.solve.network import without_dominated
from meshwright.planner.solve.paths import Routes, distances, on_some_path
from meshwright.planner.solve.problem import SEGMENTS, Demand, Flow, Network, Problem, Restriction

# The objective is scaled so that a typical problem's is about this, well above the solver's tolerances (1e-7).
_OBJECTIVE = 1e4
_INTEGRAL = 1e-6


@dataclass(frozen=True)
class Program:
    """Arrays for the solver and how to read its answer.

    Attributes:
        arrays: the program without overlap; its cost is what is paid whatever hides (exposed seconds, ties), scaled.
        columns: choice to column by candidate, -1 where the candidate is not allowed.
        scale: objective units per second.
        compute: scaled compute of each segment by column, shape [segments, columns].
        hidden: scaled communication that can be issued ahead, shape [segments, columns].
        links: the demands of all flows.
        memory_row: row of the memory limit; None where there is none, or no choice could exceed it.
        memory_unit: what a byte counts in that row.
    """

    arrays: LinearProgram
    columns: tuple[np.ndarray, ...]
    scale: float
    compute: np.ndarray
    hidden: np.ndarray
    links: tuple[Link, ...] = ()
    memory_row: int | None = None
    memory_unit: float = 0.0

    def candidates_of(self, x: np.ndarray) -> tuple[int, ...]:
        """The chosen candidate of every choice: the largest of its columns."""
        return tuple(int(np.argmax(np.where(c >= 0, x[c], -1.0))) for c in self.columns)

    def runners_up(self, x: np.ndarray) -> tuple[int, ...]:
        """The candidate of every choice with the largest part beside the chosen one; the chosen one where it has all."""
        chosen = self.candidates_of(x)
        rest = [np.where(c >= 0, x[c], -1.0) for c in self.columns]
        for parts, first in zip(rest, chosen, strict=True):
            parts[first] = _INTEGRAL
        return tuple(int(np.argmax(parts)) for parts in rest)

    def byte_s(self, duals: np.ndarray) -> float:
        """Seconds that a byte of memory is worth, by the duals of a relaxation; 0 where the limit does not bind."""
        if self.memory_row is None:
            return 0.0
        return max(0.0, -float(duals[self.memory_row])) * self.memory_unit / self.scale

    def is_integral(self, x: np.ndarray) -> bool:
        """Whether all candidates' columns are integers."""
        values = x[self.arrays.integer]
        return bool(np.all(np.abs(values - np.round(values)) < _INTEGRAL))

    def cost_at(self, weights: np.ndarray) -> np.ndarray:
        """Cost in which ``weights`` (by segment) of hidden and the rest of compute count: a lower bound of the time."""
        return self.arrays.cost + (1 - weights) @ self.compute + weights @ self.hidden

    def parts(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """What is paid anyway, compute by segment and hidden by segment."""
        return float(self.arrays.cost @ x), self.compute @ x, self.hidden @ x

    def with_overlap(self) -> LinearProgram:
        """The program whose cost is the time: one column and one row more per segment with hidden communication."""
        arrays = self.arrays
        used = [s for s in range(len(SEGMENTS)) if self.hidden[s].any()]
        n, m = arrays.num_columns, arrays.num_rows
        rows, columns, entries = [arrays.entry_rows], [arrays.entry_columns], [arrays.entries]
        for k, s in enumerate(used):
            row = self.compute[s] - self.hidden[s]
            at = np.flatnonzero(row)
            rows.append(np.full(len(at) + 1, m + k))
            columns.append(np.append(at, n + k))
            entries.append(np.append(row[at], 1.0))
        more = np.zeros(len(used))
        return LinearProgram(
            np.append(arrays.cost + self.compute.sum(axis=0), more + 1.0),
            np.append(arrays.lower, more),
            np.append(arrays.upper, more + np.inf),
            np.append(arrays.integer, more.astype(bool)),
            np.append(arrays.row_lower, more),
            np.append(arrays.row_upper, more + np.inf),
            np.concatenate(rows),
            np.concatenate(columns),
            np.concatenate(entries),
        )


class _Rows:
    """Columns and rows of a program under construction."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._entries: list[float] = []

    def column(self, cost: float, upper: float = np.inf, *, integer: bool = False, fixed: bool = False) -> int:
        self.cost.append(cost)
        self.lower.append(upper if fixed else 0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, lower: float, upper: float, entries: Iterable[tuple[int, float]]) -> int:
        index = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        for column, entry in entries:
            self._rows.append(index)
            self._columns.append(column)
            self._entries.append(entry)
        return index

    def program(self) -> LinearProgram:
        """The arrays; several entries of one row and column are added up."""
        n = len(self.cost)
        at = np.array(self._rows, dtype=np.int64) * n + np.array(self._columns, dtype=np.int64)
        unique, inverse = np.unique(at, return_inverse=True)
        entries = np.bincount(inverse, weights=self._entries, minlength=len(unique))
        kept = np.abs(entries) > 0
        return LinearProgram(
            np.array(self.cost, dtype=float),
            np.array(self.lower, dtype=float),
            np.array(self.upper, dtype=float),
            np.array(self.integer, dtype=bool),
            np.array(self.row_lower, dtype=float),
            np.array(self.row_upper, dtype=float),
            unique[kept] // n,
            unique[kept] % n,
            entries[kept],
        )


class NetworkCache:
    """What many flows share: reduced arc sets and shortest paths per network and mask. Keep one per problem."""

    def __init__(self) -> None:
        self._useful: dict[tuple, np.ndarray] = {}
        self._routes: dict[tuple, Routes] = {}
        self._arcs: dict[tuple, np.ndarray] = {}
        self._costs: dict[tuple, np.ndarray] = {}

    def costs(self, parts: Sequence[tuple[Network, np.ndarray]]) -> list[np.ndarray]:
        """Seconds of shortest paths over the allowed arcs of each network, shape [nodes, nodes]."""
        keys = [(id(network), allowed.tobytes()) for network, allowed in parts]
        new = {key: part for key, part in zip(keys, parts, strict=True) if key not in self._costs}
        self._costs.update(zip(new, distances(list(new.values())), strict=True))
        return [self._costs[key] for key in keys]

    def useful(self, network: Network, allowed: np.ndarray) -> np.ndarray:
        """Allowed arcs less the dominated ones, shape [arcs]."""
        key = (id(network), allowed.tobytes())
        if key not in self._useful:
            self._useful[key] = without_dominated(network, allowed)
        return self._useful[key]

    def routes(self, network: Network, allowed: np.ndarray) -> Routes:
        """Shortest paths over the useful arcs."""
        key = (id(network), allowed.tobytes())
        if key not in self._routes:
            self._routes[key] = Routes(network, self.useful(network, allowed))
        return self._routes[key]

    def arcs(
        self, network: Network, allowed: np.ndarray, sources: frozenset[int], targets: frozenset[int], alone: bool
    ) -> np.ndarray:
        """Arcs that a demand can use; where it is ``alone`` those of shortest paths suffice."""
        mask = allowed.tobytes()
        key = (id(network), mask, sources, targets, alone)
        if key in self._arcs:
            return self._arcs[key]
        useful = self.useful(network, allowed)
        if alone:
            found = self.routes(network, allowed).between(sorted(sources), sorted(targets))
        else:
            found = on_some_path(network, useful, sources, targets)
        self._arcs[key] = found
        return found


def assemble(problem: Problem, restriction: Restriction, cache: NetworkCache, *, objective: str = "time") -> Program:
    """Fill the arrays.

    Args:
        problem: the problem.
        restriction: what is taken away from it.
        cache: reduced networks of this problem.
        objective: ``"time"``; ``"memory"`` to find the smallest memory (the limit is then ignored); ``"avoid"`` to take as few
            avoided candidates as possible.
    """
    build = _Assembly(problem, restriction, cache, objective)
    build.choices()
    for index, flow in enumerate(problem.flows):
        build.flow(index, flow)
    build.memory()
    arrays = build.rows.program()
    compute, hidden = (build.dense(vectors, arrays.num_columns) for vectors in (build.compute, build.hidden))
    memory = (build.memory_row, build.memory_unit)
    return Program(arrays, tuple(build.columns), build.scale, compute, hidden, tuple(build.links), *memory)


class _Assembly:
    def __init__(self, problem: Problem, restriction: Restriction, cache: NetworkCache, objective: str):
        self.problem = problem
        self.restriction = restriction
        self.cache = cache
        self.rows = _Rows()
        self.objective = objective
        self.timed = objective == "time"
        self.scale = scale_of(problem) if self.timed else 1.0
        self.columns: list[np.ndarray] = []
        self.compute: list[list[tuple[int, float]]] = [[] for _ in SEGMENTS]
        self.hidden: list[list[tuple[int, float]]] = [[] for _ in SEGMENTS]
        self.links: list[Link] = []
        self.memory_row: int | None = None
        self.memory_unit = 0.0

    def choices(self) -> None:
        """One binary column per allowed candidate; exactly one is taken."""
        for g, choice in enumerate(self.problem.choices):
            allowed = self.restriction.allowed.get(g, np.ones(choice.num_candidates, dtype=bool))
            chosen = np.flatnonzero(allowed)
            seconds = choice.count * choice.compute_s * self.scale
            gathers = np.zeros(choice.num_candidates) if choice.gather_s is None else choice.count * choice.gather_s * self.scale
            cost = self._ties(g) + (gathers * (self.problem.tie_hidden if choice.gather_hidden else 1.0) if self.timed else 0.0)
            columns = np.full(choice.num_candidates, -1, dtype=np.int64)
            for c in chosen:
                columns[c] = self.rows.column(cost[c], 1.0, integer=True, fixed=len(chosen) == 1)
                self.compute[choice.segment].append((int(columns[c]), seconds[c]))
                if choice.gather_hidden and gathers[c] > 0:
                    self.hidden[choice.segment].append((int(columns[c]), gathers[c]))
            self.columns.append(columns)
            if len(chosen) != 1:
                self.rows.row(1.0, 1.0, [(int(columns[c]), 1.0) for c in chosen])

    def _ties(self, g: int) -> np.ndarray:
        """Cost by candidate beside compute: the tie-break on memory, or what is to be avoided."""
        choice = self.problem.choices[g]
        if self.objective == "avoid":
            return choice.count * self.restriction.avoid.get(g, np.zeros(choice.num_candidates)).astype(float)
        if not self.timed:
            return np.zeros(choice.num_candidates)
        return self.scale * choice.static_bytes * self.problem.tie_memory_s_per_byte

    def flow(self, index: int, flow: Flow) -> None:
        allowed = flow.allowed & self.restriction.arcs[index] if index in self.restriction.arcs else flow.allowed
        sources = self._nodes(flow.supply, flow.supply_nodes)
        demands = [
            (d, t)
            for d, t in self._targets(flow)
            if not (len(sources) == 1 and (t == sources or (d.choice is None and sources <= t)))
        ]
        alone = len(demands) == 1
        arcs = [self.cache.arcs(flow.network, allowed, sources, targets, alone) for _, targets in demands]
        shared = self._share(flow, arcs)
        for (demand, targets), used in zip(demands, arcs, strict=True):
            columns, shares = self._flow_columns(flow, used, shared)
            rows = self._conserve(flow, demand, sources | targets, used, columns)
            ends = (flow.network.tails[used], flow.network.heads[used])
            link = (*ends, np.array(columns, dtype=np.int64), np.array(shares, dtype=np.int64), rows)
            self.links.append(Link(flow.supply, demand.choice, flow.supply_nodes, demand.nodes, *link))

    def _nodes(self, choice: int, nodes: np.ndarray) -> frozenset[int]:
        return frozenset(nodes[self.columns[choice] >= 0].tolist())

    def _targets(self, flow: Flow) -> list[tuple[Demand, frozenset[int]]]:
        """Demands with the nodes they may want; equal results of the graph once."""
        found: dict[tuple, tuple[Demand, frozenset[int]]] = {}
        for k, demand in enumerate(flow.demands):
            nodes = frozenset(demand.nodes.tolist()) if demand.choice is None else self._nodes(demand.choice, demand.nodes)
            found[(None, nodes) if demand.choice is None else (k, nodes)] = demand, nodes
        return list(found.values())

    def _pay(self, flow: Flow, arc: int) -> int:
        """A column that buys an arc for all of the flow's values."""
        seconds = flow.count * float(flow.network.seconds[arc]) * self.scale
        cost = seconds * (self.problem.tie_hidden if flow.hidden else 1.0)
        column = self.rows.column(cost if self.timed else 0.0)
        if flow.hidden:
            self.hidden[flow.segment].append((column, seconds))
        return column

    def _share(self, flow: Flow, arcs: Sequence[np.ndarray]) -> dict[int, int]:
        """A paying column for every arc that several demands can use."""
        if len(arcs) < 2:
            return {}
        users = np.bincount(np.concatenate(arcs), minlength=flow.network.num_arcs)
        return {int(a): self._pay(flow, int(a)) for a in np.flatnonzero(users > 1)}

    def _flow_columns(self, flow: Flow, arcs: np.ndarray, shared: dict[int, int]) -> tuple[list[int], list[int]]:
        """Column by arc, and the row by which it shares a bought arc (-1: it buys the arc itself)."""
        columns, shares = [], []
        for arc in arcs.tolist():
            columns.append(self.rows.column(0.0) if arc in shared else self._pay(flow, arc))
            bought = ((columns[-1], 1.0), (shared[arc], -1.0)) if arc in shared else None
            shares.append(-1 if bought is None else self.rows.row(-np.inf, 0.0, bought))
        return columns, shares

    def _conserve(self, flow: Flow, demand: Demand, ends: frozenset[int], arcs: np.ndarray, columns: list[int]) -> np.ndarray:
        """One row a node; row by node, -1 where there is none, shape [nodes]."""
        balance: dict[int, list[tuple[int, float]]] = {node: [] for node in sorted(ends)}
        for arc, column in zip(arcs.tolist(), columns, strict=True):
            balance.setdefault(int(flow.network.tails[arc]), []).append((column, 1.0))
            balance.setdefault(int(flow.network.heads[arc]), []).append((column, -1.0))
        for column, node in zip(self.columns[flow.supply].tolist(), flow.supply_nodes.tolist(), strict=True):
            if column >= 0:
                balance[node].append((column, -1.0))
        accepted: set[int] = set()
        if demand.choice is None:
            accepted = set(demand.nodes.tolist())
        else:
            for column, node in zip(self.columns[demand.choice].tolist(), demand.nodes.tolist(), strict=True):
                if column >= 0:
                    balance[node].append((column, 1.0))
        rows = np.full(flow.network.num_nodes, -1, dtype=np.int64)
        for node, entries in balance.items():
            rows[node] = self.rows.row(-np.inf if node in accepted else 0.0, 0.0, entries)
        return rows

    def dense(self, vectors: Sequence[Sequence[tuple[int, float]]], num_columns: int) -> np.ndarray:
        """(column, seconds) pairs by segment as an array, shape [segments, columns]; zero when memory is minimised."""
        out = np.zeros((len(SEGMENTS), num_columns))
        for segment, pairs in enumerate(vectors if self.timed else ()):
            for column, seconds in pairs:
                out[segment, column] = seconds
        return out

    def memory(self) -> None:
        """One row: static memory and peaks within the limit; left out where no choice could exceed it."""
        limit = self.problem.memory_limit_bytes
        minimised = self.objective == "memory"
        if not minimised and (limit is None or largest_memory_bytes(self.problem, self.restriction) <= limit):
            return
        unit = 1.0 / max(1.0, float(limit or 0), _static_scale(self.problem))
        entries = [(int(col), float(b) * unit) for g in range(len(self.columns)) for col, b in self._static(g)]
        entries += [(self._peak(peak_terms, unit), peak.weight) for peak in self.problem.peaks if (peak_terms := peak.terms)]
        if not minimised:
            assert limit is not None
            room = (limit - sum(self.problem.fixed_bytes.values())) * unit
            self.memory_row, self.memory_unit = self.rows.row(-np.inf, room, entries), unit
            return
        for column, amount in entries:
            self.rows.cost[column] += amount * _OBJECTIVE

    def _static(self, g: int) -> list[tuple[int, float]]:
        static = self.problem.choices[g].static_bytes
        return [(col, b) for col, b in zip(self.columns[g].tolist(), static.tolist(), strict=True) if col >= 0 and b]

    def _peak(self, terms: Sequence[Sequence[tuple[int, np.ndarray]]], unit: float) -> int:
        """A column at least as large as every term; terms that cannot be the largest are left out."""
        column = self.rows.column(0.0)
        ranges = [self._term_range(term) for term in terms]
        floor = max(low for low, _ in ranges)
        self.rows.lower[column] = max(0.0, floor) * unit
        for term, (_, high) in zip(terms, ranges, strict=True):
            if high > floor:
                entries = [
                    (int(col), -float(b) * unit)
                    for g, bytes_ in term
                    for col, b in zip(self.columns[g], bytes_, strict=True)
                    if col >= 0 and b
                ]
                self.rows.row(0.0, np.inf, [(column, 1.0), *entries])
        return column

    def _term_range(self, term: Sequence[tuple[int, np.ndarray]]) -> tuple[float, float]:
        """Smallest and largest value that the choices' candidates allow."""
        parts = [bytes_[self.columns[g] >= 0] for g, bytes_ in term]
        return sum(float(p.min()) for p in parts), sum(float(p.max()) for p in parts)


def scale_of(problem: Problem) -> float:
    """Objective units per second of all programs of a problem."""
    return _OBJECTIVE / typical_seconds(problem)


def typical_seconds(problem: Problem) -> float:
    """Seconds of about the size of the objective: compute at its fastest, and each flow's median step."""
    compute = sum(float(c.count * c.compute_s.min()) for c in problem.choices)
    steps = sum(float(f.count * f.network.median_s) for f in problem.flows)
    return max(compute, steps / 10, 1e-12)


def _static_scale(problem: Problem) -> float:
    return sum(float(b.max()) for c in problem.choices for b in c.memory_bytes.values())


def largest_memory_bytes(problem: Problem, restriction: Restriction) -> float:
    """An upper bound of the memory of any plan."""
    return _memory_bytes(problem, restriction, lambda values: float(values.max(initial=0.0)))


def least_memory_bytes(problem: Problem, restriction: Restriction) -> float:
    """A lower bound of the memory of any plan; every choice has a candidate left."""
    return _memory_bytes(problem, restriction, lambda values: float(values.min()))


def _memory_bytes(problem: Problem, restriction: Restriction, of: Callable[[np.ndarray], float]) -> float:
    """Memory with each choice taken at one end of what it can hold, each part of it by itself."""

    def at(g: int, values: np.ndarray) -> float:
        allowed = restriction.allowed.get(g)
        return of(values if allowed is None else values[allowed])

    static = sum(at(g, c.static_bytes) for g, c in enumerate(problem.choices))
    peaks = sum(p.weight * max(sum(at(g, b) for g, b in t) for t in p.terms) for p in problem.peaks if p.terms)
    return static + peaks + sum(problem.fixed_bytes.values())
