"""Few repeated blocks captured, the others copied: equal to capturing them all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.planner import blocks, fuse, rules
from meshwright.planner.alike import MIN_TOTAL, Stack, find_stacks, shortened
from meshwright.planner.ir.graph import OpGraph, Value
from meshwright.planner.pinned import folded_pins
from meshwright.planner.repeat import Folded, capture_folded
from meshwright.planner.trace import capture
from meshwright.planner.weights import weigh
from tests.helpers import models
from tests.helpers.models import ALL, loss_of
from tests.helpers.run_capture import run

ALIKE = ("gpt2", "llama", "qwen3", "bert")
"""Whose blocks are like those of another model, or are copied in mixed precision below: slow."""
STACKED = ("transformer", "vit", "t5", "gpt2_dropout", *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE))


def deep(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the zoo with more layers, and its batch."""
    monkeypatch.setattr(models, "LAYERS", layers)
    builders = {
        "gpt2": lambda: models.gpt2(layers=layers),
        "gpt2_dropout": lambda: models.gpt2(0.1, layers=layers),
        "llama": lambda: models.llama(layers),
    }
    case = dataclasses.replace(ALL[name], build=builders.get(name, ALL[name].build))
    return case.model(), case.batch()


def program(graph: OpGraph) -> list[Any]:
    """The program up to the names of nodes and the order of independent ops: equal lists, equal programs."""
    known: dict[str, int] = {}

    def told(arg: Any) -> Any:
        if isinstance(arg, Value):
            return known[arg.name]
        return tuple(map(told, arg)) if isinstance(arg, tuple) else repr(arg)

    for i in graph.inputs:
        known[i.value.name] = hash((i.role, i.name, i.aliases, i.value.shape, i.value.dtype, i.trainable))
    ops = []
    for op in graph.ops:
        kwargs = tuple((k, told(v)) for k, v in op.kwargs)
        line = hash((op.target, told(op.args), kwargs, op.phase, op.module_path, op.recompute_of is None))
        known.update((v.name, hash((line, k))) for k, v in enumerate(op.outs) if v is not None)
        ops.append(line)
    results = [(o.role, o.name, o.value and known[o.value.name], o.differentiable) for o in graph.outputs]
    return [*(known[i.value.name] for i in graph.inputs), *sorted(ops), *results]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


class Tower(nn.Module):
    """Residual blocks with running statistics, between two linear layers."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for i, block in enumerate(self.blocks):
            h = self.step(i, block, h)
        return self.head(h).square().mean()

    def step(self, i: int, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h)


BATCH = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}


# --- equal to the whole capture -----------------------------------------------------------------------------------


def same(folded: Folded, model: nn.Module, batch: dict[str, Any], precision: str | None = None) -> None:
    direct = capture_folded(model, kwargs=batch, precision=precision, fold=False).at(folded.recompute).whole
    assert program(folded.whole.graph) == program(direct.graph)
    a, b = run(folded.whole, model, **batch), run(direct, model, **batch)
    assert torch.equal(loss_of(a.output), loss_of(b.output))
    assert list(a.gradients) == list(b.gradients) and list(a.mutations) == list(b.mutations)
    for name, gradient in b.gradients.items():
        assert gradient is None or torch.equal(a.gradients[name], gradient), name
    assert all(torch.equal(a.mutations[name], new) for name, new in b.mutations.items())


@pytest.mark.parametrize("name", STACKED)
def test_copied_layers_equal_captured_ones_bitwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deep(name, 6, monkeypatch)
    folded = capture_folded(model, kwargs=batch)
    assert folded.repeats and not folded.notes
    same(folded, model, batch)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_five_layers_in_mixed_precision_equal_captured_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deep(name, 5, monkeypatch)
    same(capture_folded(model, kwargs=batch, precision="bf16-mixed"), model, batch, "bf16-mixed")


def test_running_statistics_of_copied_blocks_are_updated() -> None:
    model = Tower().train()
    folded = capture_folded(model, kwargs=BATCH)
    assert folded.repeats and not folded.notes
    same(folded, model, BATCH)


def test_inference_is_folded_too() -> None:
    model = Tower().eval()
    folded = capture_folded(model, kwargs=BATCH, training=False)
    direct = capture(model, kwargs=BATCH, training=False)
    assert folded.repeats and program(folded.whole.graph) == program(direct.graph)
    assert torch.equal(run(folded.whole, model, **BATCH).output, model(**BATCH))


def test_the_planned_program_has_one_size_at_any_depth() -> None:
    sizes = {depth: len(capture_folded(Tower(depth), kwargs=BATCH).plannable.graph.ops) for depth in (5, 6, 20)}
    assert len(set(sizes.values())) == 1


def test_the_model_is_left_as_it_was() -> None:
    model = Tower()
    before = {name: id(m) for name, m in model.named_modules()}
    capture_folded(model, kwargs=BATCH)
    assert {name: id(m) for name, m in model.named_modules()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- what is alike ------------------------------------------------------------------------------------------------


def test_blocks_that_differ_at_the_start_are_captured_beside_one_that_stands_for_others() -> None:
    model = Tower(7)
    model.blocks[1].extra = nn.Parameter(torch.ones(1))  # type: ignore[union-attr]
    assert find_stacks(model) == (Stack("blocks", 3, 7),)
    assert find_stacks(model)[0].kept == (0, 1, 2, 3, 6) and find_stacks(model)[0].copies == 2


def test_short_lists_are_not_folded() -> None:
    assert find_stacks(Tower(MIN_TOTAL - 1)) == () and len(find_stacks(Tower(MIN_TOTAL))) == 1


def _shared(model: Tower) -> None:
    model.blocks[3].mix.weight = model.blocks[2].mix.weight  # type: ignore[union-attr]


def _hooked(model: Tower) -> None:
    model.blocks[5].register_forward_hook(lambda m, args, out: out * 2)


def _frozen(model: Tower) -> None:
    model.blocks[5].mix.weight.requires_grad_(False)  # type: ignore[union-attr]


def _other_number(model: Tower) -> None:
    model.blocks[5].norm.eps = 1e-3  # type: ignore[union-attr]


def _other_mode(model: Tower) -> None:
    model.blocks[5].norm.eval()  # type: ignore[union-attr]


def _listed(model: Tower) -> None:
    model.kinds = ["full", "full", "full", "sliding", "full", "full"]  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_shared, _hooked, _frozen, _other_number, _other_mode, _listed])
def test_blocks_that_differ_in_the_module_tree_are_not_folded(change: Any) -> None:
    model = Tower()
    change(model)
    assert find_stacks(model) == ()


def test_shortened_restores_the_list_when_the_body_raises() -> None:
    model = Tower()
    children = list(model.blocks)
    with pytest.raises(KeyError), shortened(model, find_stacks(model)):
        assert len(model.blocks) == 3
        raise KeyError
    assert list(model.blocks) == children and list(model.blocks._modules) == [*"012345"]


# --- what forward does with them ----------------------------------------------------------------------------------


class ByPosition(Tower):
    def step(self, i: int, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h) * 2 if i == 3 else block(h)


class ByLength(Tower):
    def step(self, i: int, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h) / len(self.blocks)


class Skips(Tower):
    """The head reads the second block too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        kept = []
        for block in self.blocks:
            h = block(h)
            kept.append(h)
        return self.head(h + kept[1]).square().mean()


class Dense(Tower):
    """Every block reads the block before the last as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = h = self.stem(x)
        for block in self.blocks:
            before, h = h, block(h) + before
        return self.head(h).square().mean()


@pytest.mark.parametrize("kind", [ByPosition, ByLength, Skips, Dense])
def test_a_forward_that_does_not_treat_blocks_alike_is_captured_whole_and_says_so(kind: type[Tower]) -> None:
    model = kind()
    folded = capture_folded(model, kwargs=BATCH)
    assert not folded.repeats and "captured whole, because" in folded.notes[0]
    same(folded, model, BATCH)


def test_folding_can_be_turned_off() -> None:
    folded = capture_folded(Tower(), kwargs=BATCH, fold=False)
    assert not folded.repeats and not folded.notes and folded.whole is folded.plannable


# --- weights, pins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_add_up_to_the_clusters_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deep(name, 7, monkeypatch)
    folded = capture_folded(model, kwargs=batch, precision="bf16-mixed")
    few = weigh(blocks.fold(fuse.fuse(folded.plannable.graph, rules.rows_for)), folded.repeats)
    whole = blocks.fold(fuse.fuse(folded.whole.graph, rules.rows_for))
    assert sum(few.weights) == len(whole.clusters)
    assert len(set(few.class_of)) == len(set(whole.class_of))
    assert blocks.summary(few) == blocks.summary(whole)


def test_pins_that_treat_copies_alike_stay() -> None:
    folded = capture_folded(Tower(8), kwargs=BATCH)
    graph, repeats = folded.plannable.graph, folded.repeats
    everywhere = {"blocks.*.mix.weight": "S(0)"}
    assert folded_pins(everywhere, graph, repeats) == everywhere
    each = {f"blocks.{i}.mix.weight": "S(0)" for i in range(8)}
    assert folded_pins(each, graph, repeats) == {f"blocks.{i}.mix.weight": "S(0)" for i in (0, 1, 2, 7)}
    assert folded_pins({"blocks.4.mix.weight": "S(0)"}, graph, repeats) is None
    assert folded_pins({**each, "blocks.3.mix.weight": "R"}, graph, repeats) is None
    assert folded_pins({"blocks.0.*": "R", "head.weight": "S(1)"}, graph, repeats) == {"blocks.0.*": "R", "head.weight": "S(1)"}


def test_a_plan_of_other_programs_is_refused() -> None:
    from meshwright.planner.ir.errors import VerifyError

    six, nine = (capture_folded(Tower(depth), kwargs=BATCH) for depth in (6, 9))
    with pytest.raises(VerifyError, match="no counterpart"):
        from meshwright.planner.expand import planned_names

        planned_names(six.plannable.graph, nine.whole.graph, six.repeats)
