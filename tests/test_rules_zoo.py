"""Every distinct op of the zoo's training graphs has a rule, and every row that planning may use is proved.

Distinct means: same op, shapes and arguments. All run in float64, so that float32 and bfloat16 captures count once.
"""

from __future__ import annotations

import pytest

from meshwright import prove
from meshwright.planner import remat, trace
from meshwright.planner.ir.graph import OpGraph
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.spec import Row
from meshwright.planner.rules import rows_for
from meshwright.planner.rules.registry import signature
from meshwright.planner.strided import Lifted
from meshwright.samples import in_double, random_inputs
from tests.helpers.models import ALL

_proved: set[tuple[object, Row]] = set()


def _graph(name: str) -> OpGraph:
    case = ALL[name]
    return remat.save_few(trace.capture(case.model(), (), case.batch())).graph


NAMES = [pytest.param(name, marks=pytest.mark.slow) if name.endswith("_padded") else name for name in ALL]
"""The padded ones have other batches; the distinct ops of their programs are nearly those of the models they are named after."""


@pytest.mark.parametrize("name", NAMES)
def test_every_op_of_a_model_has_a_rule_and_every_row_of_it_holds(name: str):
    graph = _graph(name)
    assert not {op.target for op in graph.ops if rows_for(op) is None}
    lifted = Lifted(graph, rows_for)
    for op in map(in_double, graph.ops):
        key = signature(op)
        todo = [row for row in lifted.rows[op.name] or () if (key, row) not in _proved]
        inputs = random_inputs(op) if todo else ()
        for row in todo:
            _proved.add((key, row))
            for n in (2, 3):
                if prove.fits(op, row, n):
                    prove.prove(op, inputs, row, n)


def test_lifted_rows_hold_together_with_plain_ones():
    """Sequence shards in groups on one axis, batch shards on the other: ``S(0)S(0;8)`` on 2x2."""
    graph = _graph("gpt2")
    lifted, mesh = Lifted(graph, rows_for), MeshShape.of(2, 2)
    proved = 0
    for op in map(in_double, graph.ops[:60]):
        rows = [r for r in lifted.rows[op.name] or () if any(p and p.split > 1 for p in (*r.ins, *r.outs))]
        plain = [r for r in lifted.rows[op.name] or () if r not in rows]
        inputs = random_inputs(op)
        pairs = [pair for a in rows for b in plain for pair in ((a, b), (b, a))]
        proved += sum(prove.prove_rows(op, inputs, pair, mesh) for pair in pairs)
    assert proved > 100
