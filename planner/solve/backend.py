"""The only file that imports OR-tools: linear and mixed-integer programs from arrays, and minimum cuts."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, replace

import numpy as np
from ortools.graph.python import max_flow
from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2, result_pb2
from ortools.math_opt.core.python import solver as core

from meshwright.planner.ir.errors import SolverError

# Level of MESHWRIGHT_DEBUG from which the solver's own log is printed.
_DEBUG_SOLVER_LOG = 5


@dataclass(frozen=True)
class LinearProgram:
    """Minimise ``cost @ x`` subject to ``row_lower <= A x <= row_upper`` and ``lower <= x <= upper``.

    Attributes:
        cost: objective, shape [columns].
        lower: lower bounds, shape [columns].
        upper: upper bounds, shape [columns].
        integer: which columns must be integers, shape [columns].
        row_lower: shape [rows].
        row_upper: shape [rows].
        entry_rows: row of each non-zero of A, ascending, shape [non-zeros].
        entry_columns: column of each non-zero, ascending within a row, shape [non-zeros].
        entries: the non-zeros, shape [non-zeros].
    """

    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integer: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    entry_rows: np.ndarray
    entry_columns: np.ndarray
    entries: np.ndarray

    @property
    def num_columns(self) -> int:
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        return len(self.row_lower)


@dataclass(frozen=True)
class Answer:
    """What the solver said.

    Attributes:
        status: ``"optimal"`` (within the gap asked for), ``"feasible"`` (a limit was reached), ``"infeasible"`` or
            ``"unknown"`` (a limit was reached with nothing found).
        x: the columns' values, shape [columns]; None without a solution.
        objective: value of ``x``.
        bound: proved lower bound of the objective.
        reduced_costs: of a pure linear program, shape [columns]; else None.
        duals: of a pure linear program, shape [rows]; else None.
    """

    status: str
    x: np.ndarray | None = None
    objective: float = float("inf")
    bound: float = float("-inf")
    reduced_costs: np.ndarray | None = None
    duals: np.ndarray | None = None


def _proto(program: LinearProgram, integer: bool) -> model_pb2.ModelProto:
    model = model_pb2.ModelProto()
    ids = range(program.num_columns)
    model.variables.ids.extend(ids)
    model.variables.lower_bounds.extend(program.lower)
    model.variables.upper_bounds.extend(program.upper)
    model.variables.integers.extend(program.integer if integer else np.zeros(program.num_columns, dtype=bool))
    model.linear_constraints.ids.extend(range(program.num_rows))
    model.linear_constraints.lower_bounds.extend(program.row_lower)
    model.linear_constraints.upper_bounds.extend(program.row_upper)
    model.linear_constraint_matrix.row_ids.extend(program.entry_rows)
    model.linear_constraint_matrix.column_ids.extend(program.entry_columns)
    model.linear_constraint_matrix.coefficients.extend(program.entries)
    return model


_WAYS = (
    (parameters_pb2.EMPHASIS_OFF, parameters_pb2.LP_ALGORITHM_DUAL_SIMPLEX),
    (parameters_pb2.EMPHASIS_MEDIUM, parameters_pb2.LP_ALGORITHM_DUAL_SIMPLEX),
    (parameters_pb2.EMPHASIS_MEDIUM, parameters_pb2.LP_ALGORITHM_BARRIER),
)
"""Presolve and algorithm: the first is the fastest for flow-form problems (measured); the others are for programs on which HiGHS gives
up for numerical reasons ("HighsModelStatus was Unknown"), as it did once on two thousand nodes."""


def _parameters(
    way: tuple[int, int], integer: bool, gap: float | None, nodes: int | None, time_limit_s: float | None
) -> parameters_pb2.SolveParametersProto:
    """Threads are left alone: HiGHS refuses another number of threads later in the same process."""
    params = parameters_pb2.SolveParametersProto(presolve=way[0])
    params.enable_output = int(os.environ.get("MESHWRIGHT_DEBUG") or 0) >= _DEBUG_SOLVER_LOG
    if not integer:
        params.lp_algorithm = way[1]
    elif gap is not None:
        params.relative_gap_tolerance = gap
    if integer and nodes is not None:
        params.node_limit = nodes
    if time_limit_s is not None:
        params.time_limit.FromTimedelta(datetime.timedelta(seconds=time_limit_s))
    return params


_STATUS = {
    result_pb2.TERMINATION_REASON_OPTIMAL: "optimal",
    result_pb2.TERMINATION_REASON_FEASIBLE: "feasible",
    result_pb2.TERMINATION_REASON_INFEASIBLE: "infeasible",
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED: "infeasible",
    result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND: "unknown",
}


def _dense(vector: object, size: int) -> np.ndarray:
    """A sparse vector of the answer as an array of ``size``."""
    out = np.zeros(size)
    out[np.asarray(vector.ids, dtype=np.int64)] = vector.values  # type: ignore[attr-defined]
    return out


class Solver:
    """One program, to be solved with several costs."""

    def __init__(self, program: LinearProgram, *, integer: bool):
        """Take the arrays; the relaxation is solved unless ``integer``."""
        self._num_columns, self._num_rows = program.num_columns, program.num_rows
        self._integer = integer
        self._model = _proto(program, integer)

    def solve(
        self, cost: np.ndarray, *, gap: float | None = None, nodes: int | None = None, time_limit_s: float | None = None
    ) -> Answer:
        """Solve with HiGHS.

        Args:
            cost: the objective, shape [columns].
            gap: relative gap at which a mixed-integer solve may stop.
            nodes: nodes of the search tree at most, likewise.
            time_limit_s: limit; the answer then says ``"feasible"`` or ``"unknown"``.

        Raises:
            SolverError: the solver gave up for numerical reasons, whatever it was told.
            RuntimeError: the solver failed (a bug: an unbounded or malformed program).
        """
        used = np.flatnonzero(cost)
        self._model.objective.Clear()
        self._model.objective.linear_coefficients.ids.extend(used)
        self._model.objective.linear_coefficients.values.extend(cost[used])
        failures = []
        for way in _WAYS:
            try:
                return self._read(self._run(_parameters(way, self._integer, gap, nodes, time_limit_s)))
            except Exception as e:  # OR-tools' own type has no importable name
                if type(e).__name__ != "StatusNotOk":
                    raise
                failures.append(str(e))
        raise SolverError(
            f"HiGHS gave up on a program of {self._num_columns} columns and {self._num_rows} rows: {'; '.join(dict.fromkeys(failures))}. "
            "Plan with fewer choices (degrees=, logical_mesh=, pins=), and please report the model and the cluster"
        )

    def _run(self, params: parameters_pb2.SolveParametersProto) -> result_pb2.SolveResultProto:
        return core.solve(
            self._model,
            parameters_pb2.SOLVER_TYPE_HIGHS,
            parameters_pb2.SolverInitializerProto(),
            params,
            model_parameters_pb2.ModelSolveParametersProto(),
            None,
            callback_pb2.CallbackRegistrationProto(),
            None,
            None,
        )

    def _read(self, result: result_pb2.SolveResultProto) -> Answer:
        status = _STATUS.get(result.termination.reason)
        if status is None:
            raise RuntimeError(f"the solver ended with reason {result.termination.reason}: {result.termination.detail}")
        bound = result.termination.objective_bounds.dual_bound
        if status in ("infeasible", "unknown") or not result.solutions:
            return Answer(status if status == "infeasible" else "unknown", bound=bound)
        best = result.solutions[0]
        x = _dense(best.primal_solution.variable_values, self._num_columns)
        answer = Answer(status, x, best.primal_solution.objective_value, bound)
        if self._integer:
            return answer
        reduced = _dense(best.dual_solution.reduced_costs, self._num_columns)
        return replace(answer, reduced_costs=reduced, duals=_dense(best.dual_solution.dual_values, self._num_rows))


def min_cut(tails: np.ndarray, heads: np.ndarray, capacities: np.ndarray, source: int, sink: int) -> set[int]:
    """Nodes on the source side of a minimum cut.

    Args:
        tails: node index at which each arc starts, shape [arcs].
        heads: node index at which each arc ends, shape [arcs].
        capacities: non-negative integer capacities, shape [arcs]; their sum must stay below 2**63.
        source: source node.
        sink: sink node.

    Raises:
        ValueError: the solver gave no optimal flow.
    """
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(source, sink)
    if status != flow.OPTIMAL:
        raise ValueError(f"maximum flow ended with status {status}")
    return set(flow.get_source_side_min_cut())
