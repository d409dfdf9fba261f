"""The command line: reports, files, exit codes; what a user does wrong is one line and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.plan import Plan
from meshwright.planner.ir.spec import format_placements

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return str(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_axes_that_are_named_on_the_command_line_are_for_what_they_are_called(monkeypatch, config, tmp_path):
    asked = ("--cluster", "2x2xH100", "--batch", "4096", "--seq", "32", "--logical-mesh", "dp=2,tp=2", "--no-alternatives")
    found = {}
    for more in ((), ("--respect-axis-names",)):
        assert run(monkeypatch, "plan", config, *asked, *more, "--out", str(tmp_path / "plan.json")) == 0
        plan = Plan.load(tmp_path / "plan.json")
        assert (plan.mesh.sizes, plan.mesh.names) == ((2, 2), ("dp", "tp"))
        found[more] = {format_placements(p) for name, p in plan.inputs.items() if "input_ids" in name}
    assert list(found.values()) == [{"S(0)S(0)"}, {"S(0)R"}]


def test_plan_prints_the_report_and_writes_the_plan(monkeypatch, capsys, config, tmp_path):
    out = tmp_path / "plan.json"
    arguments = (
        "--cluster",
        "2x2xH100",
        "--batch",
        "8",
        "--seq",
        "32",
        "--strategy",
        "ddp",
        "--memory",
        "60GiB",
        "--logical-mesh",
        "given",
        "--no-alternatives",
        "--out",
        str(out),
    )
    assert run(monkeypatch, "plan", config, *arguments) == 0
    shown = capsys.readouterr().out
    assert "GPT2LMHeadModel" in shown and "Parameters at rest" in shown and "transformer.h.*.mlp.c_fc.weight" in shown
    plan = Plan.load(out)
    assert plan.strategy == "ddp" and plan.memory_limit_bytes == 60 * 1024**3 and plan.mesh.sizes == (2, 2)
    assert plan.alternatives == ()


def test_plan_as_json_is_the_plan_file(monkeypatch, capsys, config):
    assert run(monkeypatch, "plan", config, "--cluster", "2xH100", "--batch", "4", "--seq", "16", "--json") == 0
    assert Plan.from_json(capsys.readouterr().out).model == "GPT2LMHeadModel"


def test_devices_lists_every_record(monkeypatch, capsys):
    assert run(monkeypatch, "devices") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("H100", "H200", "A100-80", "CPU"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "CONFIG", "--cluster", "8 by 8", "--batch", "4"), "cluster '8 by 8' is not NODESxGPUSxDEVICE"),
        (("plan", "CONFIG", "--cluster", "8xB9000", "--batch", "4"), "unknown device 'B9000'"),
        (("plan", "nowhere", "--cluster", "8xH100", "--batch", "4"), "model 'nowhere': no such file"),
        (
            ("plan", "CONFIG", "--cluster", "8xH100", "--batch", "4", "--strategy", "ddd"),
            "strategy='ddd' is not known; known are 'auto', 'ddp'",
        ),
        (("plan", "CONFIG", "--cluster", "8xH100", "--batch", "4", "--precision", "fp8"), "precision='fp8' is not known"),
        (("plan", "CONFIG", "--cluster", "8xH100", "--batch", "4", "--memory", "much"), "memory 'much' is not a positive size"),
        (("run", "-n", "2", "nowhere.py"), "script 'nowhere.py' does not exist"),
        (("run", "--elastic", "-n", "3", "--allowed", "4,2", __file__), "-n 3 is not among the allowed numbers of ranks 4, 2"),
        (("run", "--elastic", "--allowed", "4,0", __file__), "numbers of ranks '4,0' are not NUMBER,NUMBER"),
        (
            ["plan", "CONFIG", "--cluster", "2x2xH100", "--batch", "8", "--seq", "32", "--degrees", "tp:2"],
            "degrees 'tp:2' is not NAME=DEVICES,... with each name once",
        ),
        (
            ["plan", "CONFIG", "--cluster", "2x2xH100", "--batch", "8", "--seq", "32", "--degrees", "tp=3"],
            "degrees tp=3 = 3 do not divide the 4 devices of 2x2",
        ),
        (
            ["plan", "CONFIG", "--cluster", "2x2xH100", "--batch", "8", "--seq", "32", "--logical-mesh", "best"],
            "logical_mesh='best' is not known: use 'search', 'given'",
        ),
        (
            ["plan", "CONFIG", "--cluster", "2x2xH100", "--batch", "8", "--seq", "32", "--logical-mesh", "dp=2;tp=2"],
            "logical mesh 'dp=2;tp=2' is not NAME=DEVICES,... with each name once",
        ),
        (
            ["plan", "CONFIG", "--cluster", "2x2xH100", "--batch", "8", "--seq", "32", "--respect-axis-names"],
            "no axis of mesh 2x2 (node, device) is called dp",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, config, arguments, message):
    assert run(monkeypatch, *(config if a == "CONFIG" else a for a in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("meshwright: ") and re.search(re.escape(message), line)


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["meshwright", "--debug", "run", "nowhere.py"])
    monkeypatch.setattr(cli, "_debug", False)
    with pytest.raises(InputError, match="script 'nowhere.py' does not exist"):
        cli.main()


def test_the_module_runs_and_its_help_lists_the_commands():
    shown = subprocess.run([sys.executable, "-m", "meshwright", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(f" {command} " in shown for command in ("plan", "run", "export", "devices"))
