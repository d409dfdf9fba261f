"""Advice: the table that guides hand out, computed; it gives the textbook's answers in the textbook's situations."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.advice import Advice, Option, _order
from meshwright.planner.cost.topology import Topology
from meshwright.planner.ir.mesh import Cluster
from meshwright.target import target_of


class Stack(nn.Module):
    """``layers`` times a linear layer of ``width``; ``head`` more at its end."""

    def __init__(self, width: int, layers: int, head: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, head, bias=False) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).square().mean()


@cache
def advice(width: int, layers: int, cluster: str, batch: int, head: int = 0, limit: str | None = None) -> Advice:
    x = torch.empty(batch, width, device="meta")
    return mw.advise(lambda: Stack(width, layers, head), cluster, x, memory_limit=limit)


def fitting(found: Advice) -> list[str]:
    return [o.strategy for o in found.options if o.fits]


def test_one_node_and_the_model_fits_gives_data_parallelism() -> None:
    found = advice(1024, 6, "1x4xH100", 1 << 17)
    assert found.fits_one and found.best is not None
    assert found.best.strategy in ("ddp", "zero1", "zero2", "zero3")


def test_a_small_model_that_merely_trains_slowly_gets_data_parallelism_and_nothing_more() -> None:
    found = advice(1024, 6, "1x4xH100", 1 << 17)
    assert found.best is not None and found.best.strategy == "ddp"
    assert "Data parallelism is all that this model needs" in found.verdict


def test_one_node_and_the_model_does_not_fit_gives_what_divides_it() -> None:
    # 6 layers of 4 MiB with gradients and AdamW: 96 MiB, under 64 MiB.
    found = advice(1024, 6, "1x4xH100", 256, limit="64MiB")
    assert not found.fits_one and found.largest_fits and found.best is not None
    assert found.best.strategy in ("zero3", "tp", "zero1+tp", "pipeline", "zero1", "zero2")
    assert "ddp" not in fitting(found)
    ddp = next(o for o in found.options if o.strategy == "ddp")
    assert "does not fit: it needs at least" in ddp.reason and ddp.memory_bytes > 64 << 20


def test_the_largest_layer_alone_does_not_fit_gives_tp_or_zero3() -> None:
    # The head has 256 MiB of weights, 1 GiB with gradients and AdamW.
    found = advice(512, 2, "1x8xH100", 64, head=1 << 17, limit="640MiB")
    assert not found.largest_fits and found.largest.name == "head"
    assert found.best is not None and found.best.strategy in ("tp", "zero3")
    assert "not even the largest layer (head) does" in found.verdict.lower()


def test_several_nodes_with_fast_links_give_sharded_data_or_3d() -> None:
    found = advice(1024, 6, "2x4xH100", 1 << 13, limit="80MiB")
    assert found.best is not None and found.best.strategy in ("zero1", "zero2", "zero3", "hsdp", "3d")


def test_slow_links_between_nodes_keep_tensor_parallelism_inside_them() -> None:
    found = advice(1024, 6, "2x4xH100@1Gbit", 1 << 13, limit="104MiB")
    assert found.best is not None
    assert found.best.strategy in ("zero1", "zero2", "zero3", "hsdp", "3d", "tp")
    fast = advice(1024, 6, "2x4xH100", 1 << 13, limit="80MiB")  # as above, even with less memory
    assert fast.best is not None and fast.best.step_time_s < found.best.step_time_s
    tp = next(o for o in found.options if o.strategy == "tp")
    assert tp.mesh == (2, 4), "tensor parallelism inside the nodes, data parallelism across"


def test_best_first_and_ties_go_to_the_simpler() -> None:
    def option(name: str, step_s: float | None, memory: int = 1) -> Option:
        return Option(name, step_s is not None, step_s, memory, 0, (), "")

    given = [option("auto", 1.0), option("zero3", 1.001), option("ddp", 1.01), option("tp", 1.1), option("3d", None, 9)]
    ordered = sorted([*given, option("pipeline", None, 7)], key=lambda o: (not o.fits, *_order(o, 1.0)))
    assert [o.strategy for o in ordered] == ["ddp", "zero3", "auto", "tp", "pipeline", "3d"]


def test_every_strategy_has_its_numbers_and_a_sentence() -> None:
    found = advice(1024, 6, "1x4xH100", 256, limit="64MiB")
    for option in found.options:
        assert option.reason and "\n" not in option.reason
        assert not option.fits or (option.step_time_s and option.memory_bytes <= found.limit_bytes)
    assert json.loads(json.dumps(found.to_json_dict()))["best"] == found.best.strategy
    by_name = {o.strategy: o for o in found.options}
    assert {"data_parallel", "tp+sp", "tp-sp", "ddp+pipeline", "3d"} <= by_name.keys()
    assert by_name["pipeline"].communication_bytes > 0, "what stages send counts"
    assert "no input of the model has one" in by_name["tp+sp"].reason
    text = found.report(width=140)
    assert "Strategies, the best first" in text and found.best.strategy in text


def test_nothing_fits_says_what_is_nearest() -> None:
    found = advice(1024, 6, "1x1xH100", 256, limit="8MiB")
    assert found.best is None and "No strategy fits this cluster; the nearest" in found.verdict


def test_what_is_asked_wrongly_is_refused() -> None:
    x = torch.empty(4, 8, device="meta")
    with pytest.raises(mw.InputError, match="strategy='zero9' is not known"):
        mw.advise(lambda: Stack(8, 1), "1x2xH100", x, strategies=("zero9",))
    with pytest.raises(mw.InputError, match="NODESxGPUSxDEVICE"):
        mw.advise(lambda: Stack(8, 1), "2x4xH100@0Gbit", x)


def test_the_network_that_was_given_is_shared_by_the_devices_of_a_node() -> None:
    cluster = Cluster.parse("4x8xA100-80@100Gbit")
    assert cluster.node_bytes_per_s == 12.5e9 and str(cluster) == "4x8xA100-80@100Gbit"
    given, usual = (target_of(c).topology for c in (cluster, Cluster.parse("4x8xA100-80")))
    assert isinstance(given, Topology)
    assert given.link((4, 8), 0).bytes_per_s == pytest.approx(0.9 * 12.5e9 / 8)
    assert given.link((4, 8), 1) == usual.link((4, 8), 1)
