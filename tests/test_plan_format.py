"""Plans as files: round trips, hashes, and files that are no plans."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from meshwright.planner.ir.errors import PlanFormatError
from meshwright.planner.ir.json_lines import json_lines
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import Alternative, Collective, Fallback, OpSpec, Plan, Prediction, Redistribution
from meshwright.planner.ir.spec import parse_placements


def small_plan() -> Plan:
    sr, rr, pr = map(parse_placements, ("S(0)R", "RR", "PR"))
    return Plan(
        graph_hash="0" * 64,
        model="Toy",
        mesh=MeshShape.of(2, 2),
        device="CPU",
        links=("gloo", "gloo"),
        memory_limit_bytes=1 << 30,
        strategy="auto",
        precision=None,
        optimizer="adamw",
        training=True,
        inputs={"x": sr, "w": rr},
        ops={"mm": OpSpec((sr, rr), (sr,)), "split": OpSpec((sr,), (sr, None))},
        outputs=(rr, None),
        redistributions=(Redistribution("mm", "forward", (pr, rr)),),
        collectives=(Collective("all_reduce", 0, 64, 1e-6, False),),
        predicted=Prediction(1e-3, 1e-4, 0.0, 1.1e-3, {"parameters": 64}),
        objective_s=1.1e-3,
        bound_s=1.1e-3,
        gap=0.0,
        fallbacks=(Fallback("my.op.default", 1, 1e-6, 4),),
        alternatives=(Alternative("ddp", False, None, None, "batch not divisible"),),
        notes=("a note",),
    )


def test_a_plan_reads_back_equal(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_hash_covers_what_a_plan_does_and_not_its_times():
    plan = small_plan()
    slower = dataclasses.replace(plan, objective_s=9.0, notes=(), solver={"solve_s": 3})
    moved = dataclasses.replace(plan, inputs={**plan.inputs, "w": parse_placements("S(0)R")})
    assert plan.hash == slower.hash
    assert plan.hash != moved.hash


def edited(**changes) -> str:
    return json.dumps({**json.loads(small_plan().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "schema version 'list'"),
        (edited(schema_version=99), "schema version 99, this version reads 1"),
        (edited(mesh={"sizes": [2]}), "malformed: KeyError"),
        (edited(inputs={"x": "S(0)Q"}), "malformed: InputError: placement text"),
        (edited(ops={"mm": "S(0)R"}), "no '->'"),
        (edited(inputs={"x": "RR"}), "it was edited"),
        (edited(surprise=1), "malformed: TypeError"),
    ],
)
def test_files_that_are_no_plans_are_refused(text, message):
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(text)


def test_a_missing_file_is_a_typed_error(tmp_path):
    with pytest.raises(PlanFormatError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_lines_of_a_table_are_what_json_makes_of_their_entries() -> None:
    entries: list[Any] = [
        1,
        1.0,
        True,
        -0.0,
        0.0,
        None,
        'q"é\n',
        float("inf"),
        [],
        {},
        [1, True, (0.0,), "x"],
        {"k": [1], "l": {}},
    ]
    tuples: list[Any] = [(), (1,), (True,), (1.0,), (0.0,), (-0.0,), ("a", 1), (("a",),), (1, 0), (True, False)]
    record = {f"t{i}": t for i, t in enumerate([*tuples, *entries])}
    flat = {f"e{i}": e for i, e in enumerate(entries[:8])}
    data = {
        "list": [*tuples, *entries, record],
        "records": {"a": record, "b": 1, '"': {}},
        "flat": flat,
        "none": {},
        "empty": [],
        "n": 5,
    }
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        elif isinstance(value, list) and value:
            inner = ",\n".join(f"  {json.dumps(v)}" for v in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    assert json_lines(data) == "{\n" + ",\n".join(lines) + "\n}"
