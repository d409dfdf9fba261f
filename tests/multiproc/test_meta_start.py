"""Models that no rank holds whole: the constructor's own numbers bit for bit, or drawn shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.runtime.tape import record
from tests.helpers.models import ALL, Mlp, gpt2
from tests.helpers.ranks import run_ranks


class Odd(nn.Module):
    """Whatever constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias)
        self.register_buffer("drawn", torch.randn(5))
        self.register_buffer("counted", torch.arange(7), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        self.data = nn.Parameter(torch.zeros(3))
        self.data.data.normal_(1, 2)
        self.embedding = nn.Embedding(10, 4, padding_idx=2)
        self.norm, self.lstm, self.attention = nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.MultiheadAttention(8, 2)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32),
    **{name: ALL[name].build for name in ("mlp", "cnn", "gpt2", "llama", "bert", "vit", "t5", "tied", "unet")},
}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_replay_gives_the_numbers_of_the_constructor_and_the_same_random_state(build: Callable[[], nn.Module]):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        wanted, end = _state(build()), torch.get_rng_state()
        torch.manual_seed(3)
        tape, found = record(build), {}
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
        tape.replay(lambda name, whole: found.update({name: whole.clone()}))
        assert torch.equal(torch.get_rng_state(), end)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in wanted.items())


def test_a_replay_holds_one_parameter_at_a_time():
    tape = record(lambda: gpt2(layers=4))
    with torch.random.fork_rng(devices=[]):
        most = tape.replay(lambda name, whole: None)
    sizes = {ref.storage: ref.bytes for ref in tape.finals.values()}
    assert most <= max(sizes.values()) * 1.01 < sum(sizes.values()) / 8


def _needs_values() -> nn.Module:
    return nn.Linear(2 + int(torch.rand(1).item() > 0.5), 4)


_OUTSIDE = nn.Parameter(torch.ones(3))


def _from_outside() -> nn.Module:
    model = nn.Linear(2, 2)
    model.shared = _OUTSIDE
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_needs_values, "it needs values of its tensors; pass the module itself"),
        (_from_outside, "shared was made outside of it"),
        (lambda: 3, "gives a int"),
    ],
    ids=["values", "outside", "no module"],
)
def test_a_constructor_that_cannot_be_replayed_says_why_and_what_else_there_is(make: Any, text: str):
    with pytest.raises(mw.InputError, match=text) as caught:
        record(make)
    assert "\n" not in str(caught.value)


# --- on ranks -----------------------------------------------------------------------------------------------------

MODELS = {"mlp": Mlp, "tied": ALL["tied"].build}
OPTIONS: dict[str, dict[str, Any]] = {"zero3": {"strategy": "zero3"}, "stages": {"degrees": {"pp": 2}}}


def _start(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, build in MODELS.items():
        torch.manual_seed(11 if rank == 0 else 99)  # the first rank's state counts
        pm: Any = mw.autoparallelize(build, (2,), ALL[name].batch(), alternatives=False, **options)
        found[name] = (pm.full_state_dict(), torch.get_rng_state(), pm.step(ALL[name].batch()).item(), pm.plan.notes)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ranks_start_from_the_weights_of_one_process(options: dict[str, Any]):
    wanted = {}
    for name, build in MODELS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            wanted[name] = (build().state_dict(), torch.get_rng_state())
    for rank in run_ranks(2, _start, options):
        for name, (state, end) in wanted.items():
            found, generator, loss, notes = rank[name]
            assert found.keys() == state.keys() and all(torch.equal(found[n], t) for n, t in state.items())
            assert torch.equal(generator, end) and loss == loss and not any("drawn" in note for note in notes)


def _sharded(rank: int) -> dict[str, Any]:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    make = lambda: gpt2(layers=1, hidden=64, heads=4)  # noqa: E731
    pm: Any = mw.autoparallelize(make, (2,), ALL["gpt2"].batch(), strategy="tp", alternatives=False, init="sharded")
    assert torch.equal(torch.get_rng_state(), before)
    empty: Any = mw.autoparallelize(Mlp, (2,), ALL["mlp"].batch(), strategy="zero3", alternatives=False, init="none")
    with pytest.raises(mw.InputError, match="have no values"):
        empty.step(ALL["mlp"].batch())
    with pytest.raises(mw.InputError, match="needs example_inputs"):
        mw.autoparallelize(Mlp, (2,))
    with pytest.raises(mw.InputError, match="given as a callable"):
        mw.autoparallelize(Mlp(), (2,), ALL["mlp"].batch(), init="sharded")
    with pytest.raises(mw.InputError, match="init='some' is not known"):
        mw.autoparallelize(Mlp, (2,), ALL["mlp"].batch(), init="some")
    return {"state": pm.full_state_dict(), "notes": pm.plan.notes, "loss": pm.step(ALL["gpt2"].batch()).item()}


def test_shards_drawn_by_themselves_have_the_constructors_distribution_and_the_plan_says_so():
    first, second = run_ranks(2, _sharded)
    wanted = gpt2(layers=1, hidden=64, heads=4).state_dict()
    assert any("drawn shard by shard" in note for note in first["notes"])
    assert first["loss"] == pytest.approx(second["loss"])
    for name, t in first["state"].items():
        assert torch.equal(t, second["state"][name])
        if t.is_floating_point() and t.numel() > 1000:
            assert float(t.std()) == pytest.approx(float(wanted[name].std()), rel=0.1) and abs(float(t.mean())) < 0.01
            half = t.chunk(2, 0)
            assert not torch.equal(*half) and not torch.equal(*t.chunk(2, 1)) and not torch.equal(t, wanted[name])
        elif not t.is_floating_point() or t.std() == 0:
            assert torch.equal(t, wanted[name])
