"""Ops taken apart once and read again: what is recorded is what it would be if each were taken apart anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.planner import trace
from meshwright.planner.faking import fake_like
from meshwright.planner.record import Recorder
from meshwright.planner.script import Script, Writing, call_kind, tensors_of

aten = torch.ops.aten


class Normed(nn.Module):
    """Five batch normalisations alike, one of another width, one used twice, one in evaluation, and losses that differ in who is who."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (4, 4, 4, 4, 4, 8))
        self.last = nn.BatchNorm2d(4)
        self.still = nn.BatchNorm2d(4).eval()
        self.wide, self.narrow = nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 4, 1, bias=False)

    def forward(self, x):
        first, *others, wide = self.norms
        h = first(x)
        for norm in others:
            h = norm(F.relu(h) + x)
        h = self.narrow(wide(self.wide(h)))
        h = self.last(self.last(h)) + self.still(h)
        return F.mse_loss(h, x) + F.mse_loss(x, h) + F.mse_loss(h, h.clone()) + F.mse_loss(h, h)


def told(capture):
    return [*map(repr, capture.graph.inputs), *map(repr, capture.graph.ops), *map(repr, capture.graph.outputs)]


def test_a_program_with_scripts_is_the_program_without(monkeypatch):
    read = []
    original = Recorder._read_out
    monkeypatch.setattr(Recorder, "_read_out", lambda self, *a: read.append(a[0]) or original(self, *a))
    monkeypatch.setattr(trace, "_exported_joint", lambda *_: pytest.fail("it was not recorded"))
    x = torch.empty(2, 4, 6, 6)
    scripted = told(trace.capture(Normed(), (x,), training=True))
    assert sum(len(script.steps) > 10 for script in read) >= 4
    monkeypatch.setattr(Recorder, "_scripted", lambda self, apart, func, args, kwargs: self._run_apart(apart, func, args, kwargs))
    assert told(trace.capture(Normed(), (x,), training=True)) == scripted


def fakes(count):
    mode = FakeTensorMode()
    return [fake_like(torch.empty(2, 3, device="meta"), mode) for _ in range(count)]


def test_calls_are_of_one_kind_where_everything_agrees():
    a, b, c, d = fakes(4)

    def kind(*args, **kwargs):
        return call_kind(aten.mul.Tensor, args, kwargs, tensors_of((args, kwargs)))

    assert kind(a, b) == kind(c, d) == kind(b, a)
    assert kind(a, a) == kind(b, b) != kind(a, b)
    assert kind(a, 1) != kind(a, 1.0) != kind(a, True)
    assert kind(a, a.view(2, 3)) != kind(a, b)
    assert kind(a, b.t()) != kind(a, b)
    assert kind(a, [b]) != kind(a, b)
    assert kind(a, b, alpha=1) != kind(a, b)
    with torch.no_grad():
        without = kind(a, b)
    assert without != kind(a, b)
    assert kind(a.requires_grad_(), b) != kind(c, d)
    assert kind(torch.empty(2, 3), b) is None
    assert kind(a, b, of=object()) != kind(a, b, of=object())


def test_a_script_says_what_was_done():
    a, b, c = fakes(3)
    writing = Writing([a, b])
    writing.op(aten.add.Tensor, (a, b), {}, c)
    script = writing.end((c, None, b))
    assert isinstance(script, Script)
    new, other = fakes(2)
    given = script.given({1: other, 2: new})
    assert given[0] is new and given[1] is None and given[2] is other


@pytest.mark.parametrize(
    "case", ["a view of an argument is given", "two that share memory are given", "another tensor is read", "another is given"]
)
def test_no_script_where_it_would_not_say_all(case):
    a, b, c, other = fakes(4)
    writing = Writing([a, b])
    writing.op(aten.add.Tensor, (a, b), {}, c)
    result = c
    if case == "a view of an argument is given":
        result = a.view(6)
        writing.op(aten.view.default, (a, [6]), {}, result)
    elif case == "two that share memory are given":
        view = c.view(6)
        writing.op(aten.view.default, (c, [6]), {}, view)
        result = (c, view)
    elif case == "another tensor is read":
        writing.op(aten.add.Tensor, (a, other), {}, b)
    else:
        result = other
    assert writing.end(result) is None


def test_no_script_where_a_view_is_stale():
    a, b, c = fakes(3)
    view = a.view(6)
    for sharing, is_script in (([id(a)], True), ([id(a), id(view)], False)):
        writing = Writing([a, b])
        writing.op(aten.view.default, (a, [6]), {}, view)
        writing.op(aten.add.Tensor, (a, b), {}, c)
        writing.write(a, c, sharing)
        assert (writing.end(c) is not None) is is_script


def test_no_script_writes_to_what_it_has_made():
    a, b, c = fakes(3)
    writing = Writing([a])
    writing.op(aten.exp.default, (a,), {}, b)
    writing.op(aten.exp.default, (b,), {}, c)
    writing.write(b, c, [id(b)])
    assert writing.end(b) is None
