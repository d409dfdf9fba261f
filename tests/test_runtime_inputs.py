"""Calls as leaves by path, differences between calls, seeds, and what needs no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.inputs import CallBinder, describe_call, difference, dtype_differences, key_of
from meshwright.runtime.params import skeleton
from meshwright.runtime.random import SeedSequence
from tests.helpers.models import ALL
from tests.helpers.prepared import captured


def forward(x, pair=None, *, scale=1.0, **more):
    pass


X, Y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)


def test_one_call_has_the_same_leaves_however_it_is_written():
    binder = CallBinder(forward)
    ways = [
        ((X, (Y, None)), {"k": 1}),
        ((X,), {"k": 1, "pair": (Y, None)}),
        ((), {"pair": (Y, None), "k": 1, "x": X, "scale": 1.0}),
    ]
    keys = {key_of(describe_call(binder.leaves(args, kwargs), grad=True)) for args, kwargs in ways}
    assert len(keys) == 1
    assert list(binder.leaves(*ways[0])) == ["['x']", "['pair'][0]", "['pair'][1]", "['scale']", "['more']['k']"]


def test_arguments_that_forward_does_not_take_are_refused():
    with pytest.raises(InputError, match=r"forward\(x, pair=None.*\) cannot be called so: missing a required argument: 'x'"):
        CallBinder(forward).leaves((), {})


def test_differences_say_what_was_found_and_needed():
    binder = CallBinder(forward)

    def call(*args, **kwargs):
        return describe_call(binder.leaves(args, kwargs), grad=True)

    planned = call(X, [Y], k=1)
    assert difference(planned, planned) == ""
    assert difference(planned, call(X[:1], [Y], k=1)) == "['x'] has shape [1, 3], needed [2, 3]"
    assert difference(planned, call(X.double(), [Y], k=1)) == "['x'] has dtype float64, needed float32"
    assert difference(planned, call(X, [Y], k=2)) == "['more']['k'] is 2, needed 1"
    assert difference(planned, call(X, [Y, Y])) == (
        "['more']['k'] is missing (needed: 1); ['pair'][1] is unexpected (found: int64[4])"
    )
    grad = call(X.clone().requires_grad_(), [Y], k=1)
    assert difference(planned, grad) == "['x'] requires a gradient, which the example did not"
    assert difference(grad, planned) == ""
    assert dtype_differences(planned, call(X[:1].double(), [Y], k=1)) == "['x'] has dtype float64, needed float32"
    assert dtype_differences(planned, call(X[:1], [Y], k=2)) == ""


def test_a_captured_call_gives_placeholders_and_plain_values_by_path():
    placeholders, plain = CallBinder(ALL["nested"].model().forward).captured(captured("nested"))
    assert list(placeholders) == ["['batch']['x']", "['batch']['more'][0]"]
    assert plain == {"['batch']['more'][1]": None, "['batch']['more'][2]": "a flag", "['scale']": 0.5}
    placeholders, plain = CallBinder(ALL["gpt2"].model().forward).captured(captured("gpt2"))
    assert list(placeholders) == ["['input_ids']", "['labels']"] and plain["['attention_mask']"] is None


def test_seeds_repeat_from_a_saved_state_and_otherwise_never():
    seeds = SeedSequence(5)
    first = [seeds.draw() for _ in range(1000)]
    assert len(set(first)) == 1000 and all(0 <= s < 1 << 63 for s in first)
    assert SeedSequence(6).draw() not in first
    state = seeds.state()
    after, other = seeds.draw(), SeedSequence(0)
    other.load_state(state)
    assert other.draw() == after


def test_a_skeleton_has_no_storage_and_keeps_ties_modes_and_frozen_parameters():
    model = ALL["tied"].model()
    model.mix.eval().requires_grad_(False)
    bare = skeleton(model)
    assert bare.head.weight is bare.tokens.weight and bare.head.weight.is_meta
    assert not bare.mix.training and bare.head.training and not bare.mix.weight.requires_grad
    assert not model.head.weight.is_meta

    class Locked(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with pytest.raises(InputError, match=r"Locked cannot be copied \(RuntimeError: no copies\)"):
        skeleton(Locked(2, 2))
