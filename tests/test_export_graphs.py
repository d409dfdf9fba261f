"""Graphs and records as JSON: what is written is read back the same; what is not ours is refused with one line, and nothing runs."""

from __future__ import annotations

import copy
import itertools
import json
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from meshwright.passes import LocalProgram, lower
from meshwright.planner.ir.errors import FormatError, InputError, VerifyError
from meshwright.runtime.export.check import fake_mode, propagate
from meshwright.runtime.export.graphs import GraphReader, group_markers, write_graph
from meshwright.runtime.export.operators import operators
from meshwright.runtime.export.plain import from_plain, pretty, to_plain
from meshwright.runtime.export.ranks import merged, picked
from meshwright.runtime.export.records import hooks
from tests.helpers.models import ALL
from tests.helpers.prepared import captured, planned

CPU = torch.device("cpu")
QUICK = [
    ("mlp", (2,), "ddp"),
    ("gpt2_dropout", (2,), "zero1"),
    ("bert", (2, 2), "tp"),
]


def reader(groups: tuple[str, ...] = ("axis 0", "axis 1"), device: torch.device = CPU) -> GraphReader:
    return GraphReader(groups, device, operators())


def lowered(name: str, sizes: tuple[int, ...], strategy: str) -> list[LocalProgram]:
    """Every rank's program."""
    at = itertools.product(*map(range, sizes))
    return [lower(captured(name), planned(name, sizes, strategy), c, group_markers(len(sizes))) for c in at]


def check_round_trip(programs: list[LocalProgram]) -> None:
    """All ranks' programs in one text, and each rank's back out of it."""
    write = hooks(None)
    text = pretty(merged([to_plain(LocalProgram, p, write) for p in programs]))
    assert len(text) < 60 * sum(len(g.graph.nodes) for g in programs[0].graphs) * 8
    for rank, program in enumerate(programs):
        data = picked(json.loads(text), rank, len(programs), "it")
        back = from_plain(LocalProgram, data, "it", hooks(reader()))
        assert [g.code for g in back.graphs] == [g.code for g in program.graphs]
        assert to_plain(LocalProgram, back, write) == to_plain(LocalProgram, program, write)
        assert (back.inputs, back.saved, back.collectives) == (program.inputs, program.saved, program.collectives)
    check_values(back, program)


def check_values(back: LocalProgram, program: LocalProgram) -> None:
    """The fake values of a graph that was read are those that lowering found."""
    with fake_mode():
        for mine, theirs in zip(back.graphs, program.graphs, strict=True):
            given = [_fake(n.meta["val"]) for n in theirs.graph.nodes if n.op == "placeholder"]
            found = propagate(mine, given, "it")
            wanted = next(reversed(theirs.graph.nodes)).args[0]
            for a, b in zip(found, wanted, strict=True):
                assert (a is None) == (b is None)
                assert a is None or (a.shape, a.dtype) == (b.meta["val"].shape, b.meta["val"].dtype)


def _fake(val: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)


@pytest.mark.parametrize(("name", "sizes", "strategy"), QUICK)
def test_a_program_is_read_back_as_it_was_written(name, sizes, strategy):
    check_round_trip(lowered(name, sizes, strategy))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_program_of_the_zoo_is_read_back_as_it_was_written(name):
    for sizes, strategy in (((2,), "ddp"), ((2,), "zero3"), ((2, 2), "tp"), ((2,), "zero1"), ((2, 2), "auto")):
        check_round_trip(lowered(name, sizes, strategy))


def test_what_is_read_computes_the_same():
    (program,) = lowered("gpt2", (1,), "ddp")
    back = from_plain(LocalProgram, to_plain(LocalProgram, program, hooks(None)), "it", hooks(reader()))
    g = torch.Generator().manual_seed(0)
    values = [n.meta["val"] for n in program.forward.graph.nodes if n.op == "placeholder"]
    inputs = [
        torch.randint(0, 2, v.shape, generator=g, dtype=v.dtype)
        if not v.is_floating_point()
        else torch.rand(v.shape, generator=g)
        for v in values
    ]
    for a, b in zip(program.forward(*inputs), back.forward(*inputs), strict=True):
        assert torch.equal(a, b)


_ARGUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats()
    | st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(_ARGUMENTS, st.sampled_from([torch.bfloat16, torch.strided, torch.channels_last, CPU, torch.bool]))
@settings(deadline=None, max_examples=60)
def test_every_argument_is_read_back(argument, special):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_function(operator.getitem, ([2, x], argument, special)),))
    data = json.loads(json.dumps(write_graph(fx.GraphModule({}, graph)), allow_nan=False))
    assert repr(_args(reader().read(data, "it").graph)) == repr(_args(graph))


def _args(graph: fx.Graph) -> list[Any]:
    return [(n.args, n.kwargs) for n in graph.nodes]


def test_groups_and_devices_are_bound_again():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    summed = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "axis 1"))
    made = graph.call_function(torch.ops.aten.full.default, ([2], 0), {"device": CPU})
    graph.output((summed, made))
    data = write_graph(fx.GraphModule({}, graph))
    assert data["nodes"][0][2] == ["%x", {"text": "sum"}, {"group": 1}] and data["nodes"][1][3] == {"device": {"device": "here"}}
    back = reader(("a", "b"), torch.device("meta")).read(data, "it").graph
    nodes = list(back.nodes)
    assert nodes[1].args[2] == "b" and nodes[2].kwargs["device"] == torch.device("meta")


def test_an_operator_outside_the_list_cannot_be_written():
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.rand.default, ([2],)),))
    with pytest.raises(InputError, match="calls aten.rand.default, which is not in the list"):
        write_graph(fx.GraphModule({}, graph))


def test_no_listed_operator_changes_its_arguments_or_draws_random_numbers():
    for name, target in operators().items():
        if name.startswith(("operator.", "time.")):
            continue
        assert not target._schema.is_mutable, name
        files = {a.name for a in target._schema.arguments} & {"filename", "file", "path"}
        assert not files and "from_file" not in name
        drawn = torch.Tag.nondeterministic_seeded in target.tags and "scaled_dot_product" not in name  # with a dropout of 0
        assert not drawn, name


def test_ranks_that_differ_in_more_than_integers_are_refused():
    assert merged([{"a": [1, "x"]}, {"a": [2, "x"]}]) == {"a": [{"by_rank": [1, 2]}, "x"]}
    for other in ({"a": [1, "y"]}, {"a": [1.5, "x"]}, {"a": [True, "x"]}, {"a": [1]}, {"b": [1, "x"]}):
        with pytest.raises(VerifyError, match="differs between ranks in more than integers"):
            merged([{"a": [1, "x"]}, other])


# --- hostile graphs -----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "inputs": [["x", "float32", [2, 3]], ["w", "float32", [3, 4]]],
    "nodes": [
        ["mm", "aten.mm.default", ["%x", "%w"]],
        ["sum_1", "aten.sum.dim_IntList", ["%mm", [0]], {"dtype": {"dtype": "float32"}}],
    ],
    "outputs": ["%sum_1", None],
}


def changed(**parts: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **parts}


def node(*parts: Any) -> dict[str, Any]:
    return changed(nodes=[*copy.deepcopy(GOOD["nodes"]), list(parts)])


HOSTILE: dict[str, tuple[Any, str]] = {
    "not an object": ([1], "an object"),
    "field missing": ({"inputs": [], "nodes": []}, "exactly the fields"),
    "field too many": (changed(code="import os"), "exactly the fields"),
    "shape of floats": (changed(inputs=[["x", "float32", [2.0, 3]]]), "type int"),
    "dtype that is a function": (changed(inputs=[["x", "load", [2]]]), "element type"),
    "name with code": (
        changed(inputs=[["x=__import__('os').system('true')", "float32", [2, 3]], GOOD["inputs"][1]]),
        "name of a node",
    ),
    "name with newline": (changed(inputs=[["x\n", "float32", [2, 3]], GOOD["inputs"][1]]), "name of a node"),
    "keyword as name": (node("lambda", "aten.neg.default", ["%x"]), "name of a node"),
    "self as name": (changed(inputs=[["self", "float32", [2, 3]]], nodes=[], outputs=["%self"]), "name of a node"),
    "builtin as name": (node("print", "aten.neg.default", ["%x"]), "free in generated code"),
    "name in Cyrillic": (node("х", "aten.neg.default", ["%x"]), "name of a node"),
    "name twice": (node("mm", "aten.neg.default", ["%x"]), "no other node"),
    "name of 10,000 letters": (node("a" * 10_000, "aten.neg.default", ["%x"]), "name of a node"),
    "reads a file": (node("f", "aten.from_file.default", [{"text": "/etc/passwd"}]), "operator of the list"),
    "python function": (node("f", "os.system", [{"text": "true"}]), "operator of the list"),
    "builtin function": (node("f", "builtins.eval", [{"text": "1"}]), "operator of the list"),
    "operator of another namespace": (node("f", "prims.device_put.default", ["%x", {"device": "here"}]), "operator of the list"),
    "operator in place": (node("f", "aten.add_.Tensor", ["%x", "%x"]), "operator of the list"),
    "dunder attribute": (node("f", "aten.mm.__class__", ["%x"]), "operator of the list"),
    "operator that is no text": (node("f", ["aten.mm.default"], ["%x"]), "name, operator"),
    "later node": (changed(nodes=[["a", "aten.neg.default", ["%b"]], ["b", "aten.neg.default", ["%x"]]]), "earlier node"),
    "text without a mark": (node("f", "aten.neg.default", ["x"]), "earlier node"),
    "keyword that is code": (node("f", "aten.neg.default", ["%x"], {"a=1);print(": 1}), "keyword arguments by name"),
    "keyword unknown": (node("f", "aten.neg.default", ["%x"], {"out": "%x"}), "what aten.neg.default takes"),
    "integer for an element type": (node("f", "aten.full.default", [[2], 1], {"dtype": 961}), "which is no Optional.ScalarType"),
    "argument twice": (node("f", "aten.neg.default", ["%x"], {"self": "%x"}), "self twice"),
    "arguments too many": (node("f", "aten.neg.default", ["%x", "%x", 3]), "3 arguments"),
    "nested list for a list": (node("f", "aten.full.default", [[[2]], 1]), "which is no List"),
    "number beyond 64 bits": (node("f", "aten.full.default", [[2], 2**70]), "64 bits"),
    "unknown special": (node("f", "aten.full.default", [[2], {"eval": "1"}]), "one of text"),
    "two specials": (node("f", "aten.full.default", [[2], {"text": "a", "group": 0}]), "one key"),
    "device elsewhere": (node("f", "aten.full.default", [[2], 1], {"device": {"device": "cuda:99"}}), "one of text"),
    "group beyond the mesh": (
        node("f", "_c10d_functional.all_reduce.default", ["%x", {"text": "sum"}, {"group": 7}]),
        "one of text",
    ),
    "integers by rank for an unknown rank": (node("f", "aten.full.default", [[2], {"by_rank": [1, 2, 3]}]), "one of text"),
    "node of three fields too few": (node("f", "aten.neg.default"), "name, operator"),
    "output that is a number": (changed(outputs=[3]), "a node with one tensor"),
    "output of several tensors": (
        changed(nodes=[["s", "aten.split_with_sizes.default", ["%x", [1, 1]]]], outputs=["%s"]),
        "a node with one tensor",
    ),
    # what the list allows but cannot work
    "shapes that do not fit": (node("f", "aten.mm.default", ["%w", "%x"]), "does not work on its arguments"),
    "arguments missing": (node("f", "aten.mm.default", ["%x"]), "does not work on its arguments"),
    "text for a tensor": (node("f", "aten.neg.default", [{"text": "x"}]), "which is no Tensor"),
    "an attribute of a tensor": (node("f", "operator.getitem", ["%x", {"text": "__class__"}]), "does not work on its arguments"),
    "index of a tensor": (node("f", "operator.getitem", ["%x", 0]), "does not work on its arguments"),
    "tensor of an exabyte": (node("f", "aten.full.default", [[2**30, 2**30], 1]), "does not work|a device can hold"),
    "negative size": (node("f", "aten.full.default", [[-5], 1]), "does not work"),
    "placements that are no placements": (
        node("f", "meshwright.uniform.default", ["%x", 0, [2], {"text": "S(9999999)"}, [2], [0], True]),
        "does not work",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_with_one_line(name, monkeypatch):
    data, message = HOSTILE[name]
    for function in ("system", "popen", "remove"):
        monkeypatch.setattr(f"os.{function}", lambda *a, f=function: pytest.fail(f"os.{f} was called"))
    with fake_mode(), pytest.raises(FormatError, match=message) as caught:
        gm = reader().read(json.loads(json.dumps(data)), "graph")
        propagate(gm, [torch.empty(n.meta["declared"][1]) for n in gm.graph.nodes if n.op == "placeholder"], "graph")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_the_graph_that_the_hostile_ones_are_made_of_is_fine():
    with fake_mode():
        found = propagate(reader().read(GOOD, "graph"), [torch.empty(2, 3), torch.empty(3, 4)], "graph")
    assert found[0].shape == (4,) and found[1] is None


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_graph_with_anything_replaced_by_anything_is_read_or_refused(data):
    """Any place of the JSON replaced by any JSON: only our own error, or a graph that means what it says."""
    places = list(_places(GOOD))
    place = data.draw(st.sampled_from(places))
    scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    anything = st.recursive(
        scalar, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5), s, max_size=2), max_leaves=4
    )
    fuzzed = _replaced(GOOD, place, data.draw(anything))
    with fake_mode():
        try:
            gm = reader().read(fuzzed, "graph")
            propagate(gm, [torch.empty(2, 3), torch.empty(3, 4)], "graph")
        except FormatError:
            pass


def _places(data: Any, at: tuple[Any, ...] = ()) -> Any:
    if at:
        yield at
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _places(value, (*at, key))


def _replaced(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(data)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return found
