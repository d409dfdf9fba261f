"""Exports of real ranks: loaded in fresh processes that have neither planner nor model, they go on with the very same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.planner.ir.errors import InputError
from tests.helpers import bare_rank, pipelines
from tests.helpers.exports import export_and_train_on, made, run_bare
from tests.helpers.models import ALL
from tests.helpers.prepared import trial
from tests.helpers.ranks import run_ranks

ALL_WHOLE = [
    *(
        (name, (2,), strategy)
        for name in ("gpt2_dropout", "llama_tied", "cnn")
        for strategy in ("ddp", "zero1", "zero3", "tp", "auto")
    ),
    *(("llama_tied", (2, 2), strategy) for strategy in ("ddp", "zero1", "zero3", "tp", "auto")),
]


def check(ranks: int, given: Any, folder: Path, **options: Any) -> None:
    run_ranks(ranks, export_and_train_on, given, folder, timeout=400)
    assert run_bare(ranks, folder, **options) == [[]] * ranks


def test_a_loaded_module_trains_on_bit_equal(tmp_path):
    check(2, trial("gpt2_dropout", (2,), "zero1"), tmp_path)


def test_loaded_stages_train_on_bit_equal(tmp_path):
    check(2, pipelines.trial("gpt2_dropout", "1f1b", 2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "strategy"), ALL_WHOLE)
def test_every_strategy_trains_on_bit_equal(name, sizes, strategy, tmp_path):
    check(len(sizes) * 2, trial(name, sizes, strategy), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_every_schedule_trains_on_bit_equal(schedule, tmp_path):
    check(2, pipelines.trial("llama_tied", schedule, 1 if schedule == "naive" else 4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "inside"), [(4, ((2,), "zero1")), (4, ((2,), "zero3")), (8, ((2, 2), "tp"))])
def test_stages_with_strategies_inside_train_on_bit_equal(ranks, inside, tmp_path):
    check(ranks, pipelines.trial("gpt2_dropout", "1f1b", 4, 2, inside), tmp_path)


@pytest.mark.slow
def test_a_batch_normalised_model_in_stages_trains_on_bit_equal(tmp_path):
    check(2, pipelines.trial("cnn", "zbv", 1), tmp_path)


def _by_name(rank: int, name: str, sizes: tuple[int, ...], options: dict[str, Any], folder: Path) -> list[str]:
    case = ALL[name]
    pm: Any = mw.autoparallelize(case.model(), sizes, case.batch(), alternatives=False, **options)
    optimizer = bare_rank.adamw(pm)
    bare_rank.take_steps(pm, optimizer, [case.batch(0)])
    pm.export(folder / "export", optimizer=optimizer)
    loaded: Any = mw.load(folder / "export")
    with pytest.raises(mw.InputError, match="an exported module reduces gradients in every backward|more micro_batches"):
        loaded.no_sync().__enter__()
    again = bare_rank.adamw(loaded)
    loaded.load_checkpoint(folder / "export" / "state", again)
    batches = [case.batch(i) for i in range(1, 4)]
    wanted = bare_rank.numbers(pm, bare_rank.take_steps(pm, optimizer, batches))
    return bare_rank.differences(bare_rank.numbers(loaded, bare_rank.take_steps(loaded, again, batches)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("mlp", (2,), {"strategy": "data_parallel"}),
        ("gpt2_dropout", (2,), {"strategy": "ddp", "micro_batches": 2}),
        ("gpt2_dropout", (2,), {"strategy": "zero1", "micro_batches": 2}),
        ("mlp", (4,), {"strategy": "ddp+pipeline"}),
        ("regularised", (2,), {"strategy": "pipeline", "micro_batches": 2}),
        ("gpt2_dropout", (2, 2), {"strategy": "3d"}),
    ],
)
def test_strategies_by_name_train_on_bit_equal(name, sizes, options, tmp_path):
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    assert run_ranks(ranks, _by_name, name, sizes, options, tmp_path, timeout=400) == [[]] * ranks


@pytest.mark.slow
def test_a_module_that_is_compiled_at_load_trains_close_to_the_one_it_came_from(tmp_path):
    given = trial("mlp", (2,), "zero3")
    run_ranks(2, export_and_train_on, given, tmp_path, timeout=400)

    def compare(rank: int) -> float:
        wanted = torch.load(tmp_path / f"numbers-{rank}.pt")["losses"]
        pm: Any = mw.load(tmp_path / "export", compile=True)
        opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
        pm.load_checkpoint(tmp_path / "export" / "state", opt)
        worst = 0.0
        for batch, loss in zip(torch.load(tmp_path / "batches.pt"), wanted, strict=True):
            opt.zero_grad()
            worst = max(worst, float((pm.step(batch) - loss).abs() / loss.abs()))
            opt.step()
        return worst

    assert max(run_ranks(2, compare, timeout=400)) < 1e-5


# --- inference, exports of exports, options -----------------------------------------------------------------------


def _inference(rank: int, folder: Path) -> list[Any]:
    case = ALL["gpt2_dropout"]
    pm: Any = mw.autoparallelize(case.model(), (2,), case.batch(), strategy="tp")
    few = {name: t[:2] for name, t in case.batch(7).items()}
    pm.export(folder / "one", inference=[case.batch(), few])
    pm.eval()
    with torch.no_grad():
        wanted = [pm(**case.batch(5)), pm(**few)]
    loaded: Any = mw.load(folder / "one")
    loaded.export(folder / "two")
    found = []
    for path in ("one", "two"):
        loaded = mw.load(folder / path).eval()
        with torch.no_grad():
            got = [loaded(**case.batch(5)), loaded(**few)]
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a.loss, b.loss) and torch.equal(a.loss, b["loss"])
            assert torch.equal(a.logits.to_local(), b.logits.to_local())
            assert a.logits.placements == b.logits.placements
        with torch.no_grad(), pytest.raises(InputError) as refused:
            loaded(**{name: t[:4] for name, t in case.batch().items()})
        found.append((type(got[0]).__name__, repr(loaded).splitlines()[0], str(refused.value)))
    same = [(folder / p / "programs" / "0" / "graphs-0.json").read_text() for p in ("one", "two")]
    return [*found, same[0] == same[1], sorted(p.name for p in folder.iterdir())]


def test_inference_is_exported_for_the_batches_that_are_asked_for_and_refuses_others(tmp_path):
    for first, second, same, names in run_ranks(2, _inference, tmp_path, timeout=400):
        assert first == second and same and names == ["one", "two"]
        kind, text, refused = first
        assert kind == "OutputRecord" and text.startswith("ParallelModule(GPT2LMHeadModel on 2)")
        assert "shape [4, 16], needed [8, 16]" in refused


def _failing(rank: int, folder: Path) -> list[str]:
    pm = made(trial("mlp", (2,), "ddp"))
    (folder / "there").mkdir(exist_ok=True)
    said = []
    for path in (folder / "there", folder / "full"):
        if path.name == "full" and rank == 0:
            import meshwright.runtime.export.methods as methods

            def no_room(*args: Any) -> None:
                raise OSError(28, "No space left on device")

            methods.write_files = no_room
        try:
            pm.export(path)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_export_that_fails_fails_on_every_rank_and_leaves_nothing(tmp_path):
    first, second = run_ranks(2, _failing, tmp_path)
    for said in (first, second):
        assert said[0].startswith("InputError") and "there already" in said[0]
        assert "No space left on device" in said[1]
    assert [p.name for p in tmp_path.iterdir()] == ["there"] and not list((tmp_path / "there").iterdir())
