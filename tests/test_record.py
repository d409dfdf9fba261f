"""A model recorded in one pass: the very graph that export and AOTAutograd give, or nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.planner import trace
from meshwright.planner.ir.errors import TraceError
from meshwright.planner.schema import Unusual
from tests.helpers.models import ALL
from tests.helpers.run_capture import run


def refused(*_):
    raise Unusual("the test wants the other way")


def recorded(monkeypatch, *args, **kwargs):
    """Captured in one pass, or an error."""
    with monkeypatch.context() as m:
        m.setattr(trace, "_exported_joint", lambda *_: pytest.fail("it was not recorded"))
        return trace.capture(*args, **kwargs)


def exported(monkeypatch, *args, **kwargs):
    """Captured by export and AOTAutograd."""
    with monkeypatch.context() as m:
        m.setattr(trace, "_recorded_joint", refused)
        return trace.capture(*args, **kwargs)


def told(capture):
    """A captured program with what is known of where it comes from."""
    return [*map(repr, capture.graph.inputs), *map(repr, capture.graph.ops), *map(repr, capture.graph.outputs)]


SAMPLE = ("cnn", "gpt2_dropout", "llama_tied_padded", "t5", "nested")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in ALL])
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_recorded_program_is_the_exported_one(name, training, monkeypatch):
    case = ALL[name]
    asked = {"kwargs": case.batch(), "training": training}
    assert told(recorded(monkeypatch, case.model(), **asked)) == told(exported(monkeypatch, case.model(), **asked))


def test_in_low_precision_too(monkeypatch):
    case = ALL["bert"]
    asked = {"kwargs": case.batch(), "precision": "bf16-mixed"}
    assert told(recorded(monkeypatch, case.model(), **asked)) == told(exported(monkeypatch, case.model(), **asked))


# --- writing in place ---------------------------------------------------------------------------------------------


class Way(nn.Module):
    """A linear layer and a buffer, used in a way that the test gives."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.way = way

    def forward(self, x):
        return self.way(self, x)


def chain(m, x):
    y = m.linear(x)
    y += 1
    y.mul_(x).clamp_(max=2).relu_()
    return (y + m.linear(x)).sum()


def other_type(m, x):
    count = torch.zeros(8)
    count += (x > 0).sum(0)
    return (m.linear(x) * count).sum()


def parts(m, x):
    weights = torch.ones_like(x)
    weights[1:, 2] = 3
    weights[0] = x[1]
    weights[:, 4:6][2:] *= 2
    weights.masked_fill_(weights > 2, 0.5)
    return (m.linear(x) * weights).sum()


def part_of_a_buffer(m, x):
    with torch.no_grad():
        m.seen[2:5] = x[:3, 0]
        m.seen[0].add_(1)
    return (m.linear(x) * m.seen).sum()


def buffer_twice(m, x):
    m.seen.add_(x.detach().mean(0))
    first = m.seen * 2
    m.seen.mul_(0.5)
    return (m.linear(x) * (m.seen + first)).sum()


def constant(m, x):
    return (m.linear(x) * torch.tensor([1.0, 2.0] * 4)).sum() * torch.tensor(2.0).item()


FOLLOWED = [chain, other_type, parts, part_of_a_buffer, buffer_twice, constant]


def written_and_read_by_another_name(m, x):
    y = m.linear(x) * 2
    flat = y.view(-1)
    y.add_(1)
    return flat.sum()


def part_with_a_gradient(m, x):
    y = torch.zeros(4, 8)
    y[1:] = m.linear(x)[1:]
    return (y * x).sum()


def buffer_by_another_name(m, x):
    m.seen.view(2, 4).add_(1)
    return m.linear(x).sum()


def other_memory(m, x):
    y = torch.zeros(8)
    y.data = torch.ones(8)
    return (m.linear(x) * y).sum()


def turned_in_place(m, x):
    y = m.linear(x)[:, :4].clone()
    y.t_()
    return y.sum()


def computed_again(m, x):
    return checkpoint(m.linear, x, use_reentrant=False).sum()


def cast_by_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.linear(x)
    return y.float().sum()


UNUSUAL = [written_and_read_by_another_name, part_with_a_gradient, buffer_by_another_name, turned_in_place, cast_by_autocast]


def assert_as_in_eager(capture, way, rtol=1e-6):
    x, model = torch.linspace(-1, 1, 32).reshape(4, 8), Way(way)
    ran = run(capture, model, x)
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(ran.output, loss.detach(), rtol=rtol, atol=rtol)
    torch.testing.assert_close(ran.gradients["linear.weight"], model.linear.weight.grad, rtol=rtol, atol=rtol)
    for name, value in ran.mutations.items():
        torch.testing.assert_close(value, dict(model.named_buffers())[name])
    changed = {n for n, b in model.named_buffers() if not torch.equal(b, dict(Way(way).named_buffers())[n])}
    assert set(ran.mutations) == changed


@pytest.mark.parametrize("way", FOLLOWED)
def test_what_is_written_in_place_reads_as_what_was_written(way, monkeypatch):
    found = recorded(monkeypatch, Way(way), (torch.randn(4, 8),))
    assert_as_in_eager(found, way)
    assert found.graph.hash == exported(monkeypatch, Way(way), (torch.randn(4, 8),)).graph.hash


@pytest.mark.parametrize("way", UNUSUAL)
def test_what_one_pass_does_not_follow_is_exported(way, monkeypatch):
    model, x = Way(way), torch.randn(4, 8)
    with pytest.raises(pytest.fail.Exception, match="not recorded"):
        recorded(monkeypatch, model, (x,))
    assert_as_in_eager(trace.capture(model, (x,)), way, rtol=1e-2 if way is cast_by_autocast else 1e-6)


@pytest.mark.parametrize("way", [other_memory, computed_again])
def test_what_one_pass_does_not_follow_is_not_recorded_wrongly(way, monkeypatch):
    with pytest.raises((pytest.fail.Exception, TraceError)):
        recorded(monkeypatch, Way(way), (torch.randn(4, 8),))


def test_a_module_under_two_names_is_exported(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model.append(model[1])
    with pytest.raises(pytest.fail.Exception, match="not recorded"):
        recorded(monkeypatch, model, (torch.randn(4, 8),))


def test_what_a_model_prints_is_printed_once(monkeypatch, capsys):
    def speaks(m, x):
        print("hello")
        return m.linear(x).sum()

    def speaks_and_is_unusual(m, x):
        print("hello")
        return written_and_read_by_another_name(m, x)

    for way in (speaks, speaks_and_is_unusual):
        trace.capture(Way(way), (torch.randn(4, 8),))
        assert capsys.readouterr().out.count("hello") == 1


def test_hooks_and_functional_ops_of_a_model_see_what_they_see_without_capture(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, inputs, output: F.relu(output, inplace=True))
    asked = (torch.randn(4, 8),)
    assert told(recorded(monkeypatch, model, asked)) == told(exported(monkeypatch, model, asked))
