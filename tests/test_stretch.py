"""The whole program from one with few copies of a block: the very one that is copied, recomputed and ordered block by block."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.planner import repeat
from meshwright.planner.correspond import Unlike
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.ir.recompute import Recompute
from meshwright.planner.repeat import Folded, capture_folded
from meshwright.planner.stretch import FEW, Stretch, stretched
from tests.helpers import models
from tests.helpers.models import ALL

LAYERS = 15
BUILDERS = {
    "gpt2_dropout": lambda: models.gpt2(0.1, layers=LAYERS),
    "llama": lambda: models.llama(LAYERS),
    "t5": ALL["t5"].build,
}
CHOICES = (Recompute("none"), Recompute("full"), Recompute("full", 7, "selective"))


@pytest.fixture(scope="module", params=BUILDERS)
def folded(request) -> Folded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LAYERS", LAYERS)
        case = dataclasses.replace(ALL[request.param], build=BUILDERS[request.param])
        return capture_folded(case.model(), kwargs=case.batch())


@pytest.mark.parametrize("recompute", CHOICES, ids=str)
def test_a_stretched_program_is_the_copied_one(folded, recompute):
    at = folded.at(recompute)
    view = at._stretched_view()
    assert view == at._whole_graph[1] and view.hash == at._whole_graph[1].hash
    assert len(view.ops) > 2 * len(at.plannable.graph.ops)


def test_in_inference_too():
    case = ALL["vit"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LAYERS", LAYERS)
        at = capture_folded(case.model(), kwargs=case.batch(), training=False)
    assert at.repeats and at._stretched_view() == at._whole_graph[1]


def test_where_blocks_do_not_tell_they_are_copied(folded, monkeypatch):
    def refused(*_):
        raise Unlike("the test wants it")

    monkeypatch.setattr(repeat, "stretched", refused)
    again = Folded(folded._traced)
    assert again.whole_view is again._whole_graph[1]


# --- what is refused ----------------------------------------------------------------------------------------------


def few(folded: Folded) -> tuple[OpGraph, Stretch]:
    """A program with few copies of a block, and a stretch of it."""
    stack, *others = folded._traced.stacks
    assert not others
    parts = repeat._Few.of(folded.repeats, stack)
    view = folded._recomputing(folded._traced.spliced(lambda _: FEW - 1), parts.repeats)[1]
    (stretch,) = parts.stretches
    return view, stretch


@pytest.fixture(scope="module")
def llama() -> Folded:
    return capture_folded(models.llama(LAYERS), kwargs=ALL["llama"].batch())


def test_what_is_there_can_be_stretched(llama):
    view, stretch = few(llama)
    assert len(stretched(view, stretch, llama._traced.order).ops) > len(view.ops)


@pytest.mark.parametrize("change", ["an op between", "another order", "another argument", "another parameter", "a missing op"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_blocks_that_are_not_alike_are_refused(llama, change, phase):
    view, stretch = few(llama)
    ops, inputs = list(view.ops), list(view.inputs)
    copied = [i for i, op in enumerate(ops) if op.name.removesuffix("_r").endswith("__2") and op.phase == phase]
    i = copied[len(copied) // 2]
    if change == "an op between":
        ops.insert(i, dataclasses.replace(ops[i], name="other", outs=(Value("other", (2,), ops[i].outs[0].dtype),)))
    elif change == "another order":
        ops[i], ops[i + 1] = ops[i + 1], ops[i]
    elif change == "another argument":
        ops[i] = dataclasses.replace(ops[i], args=(*ops[i].args, 5))
    elif change == "a missing op":
        del ops[i]
    else:
        k = next(k for k, entry in enumerate(inputs) if entry.value.name.endswith("__2"))
        inputs[k] = dataclasses.replace(inputs[k], trainable=False)
    with pytest.raises(Unlike):
        stretched(OpGraph(tuple(inputs), tuple(ops), view.outputs), stretch, llama._traced.order)
