"""The whole batch at once in stages keeps one rank busy at a time: it saves memory, and no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import planning
from meshwright.planner.ir.plan import Plan

CHANNELS = 256


class Normed(nn.Module):
    """Batch statistics: the batch cannot be cut into micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.block() for _ in range(4)))
        self.head = nn.Linear(CHANNELS, 16)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.layers(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, CHANNELS - 3)))
        return nn.functional.cross_entropy(self.head(h.mean((2, 3))), labels)


def planned(**asked: Any) -> Plan:
    inputs = {
        "x": torch.empty(64, 3, 16, 16, device="meta"),
        "labels": torch.empty(64, dtype=torch.int64, device="meta"),
    }
    return mw.plan(Normed, "1x4xH100", inputs, alternatives=False, **asked)


@pytest.mark.parametrize("degree", [2, 4])
def test_the_whole_batch_at_once_is_no_faster_in_stages(degree: int):
    in_stages, best = planned(degrees={"pp": degree}, schedule="naive", micro_batches=1), planned()
    assert best.pipeline is None and in_stages.pipeline is not None
    assert best.bound_s <= in_stages.predicted.step_time_s


def test_it_is_looked_at_only_where_memory_hurts(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    search = planning._search_in_stages

    def watched(*args: Any) -> Plan | None:
        asked.append(args[3].at_once)
        return search(*args)

    monkeypatch.setattr(planning, "_search_in_stages", watched)
    free = planned()
    assert asked == [False]
    asked.clear()
    planned(memory_limit=int(0.62 * free.predicted.peak_memory_bytes))
    assert asked and all(asked)
    asked.clear()
    planned(recompute="none")
    assert asked == [False]
