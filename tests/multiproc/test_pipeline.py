"""Models in pipeline stages on gloo ranks: the numbers of one process, whatever the schedule, stages and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.runtime.module import build
from tests.helpers.equality import RTOL, compare, gathered
from tests.helpers.models import ALL
from tests.helpers.pipelines import start, trial, try_all
from tests.helpers.prepared import captured, planned, reference
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import strategy_trial, try_all as try_strategies

ALL_SCHEDULES = (("naive", 1), ("gpipe", 2), ("1f1b", 4), ("interleaved_1f1b", 4), ("zero_bubble", 4), ("zbv", 4))
COUNTS = (
    ("gpipe", 1),
    ("gpipe", 8),
    ("1f1b", 2),
    ("1f1b", 8),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 2),
    ("zbv", 2),
    ("zbv", 8),
)


def assert_equal_to_one_process(ranks: int, trials: list[Any]) -> None:
    for rank, found in enumerate(run_ranks(ranks, lambda rank: try_all(rank, trials), timeout=400)):
        wrong = {label: differences for label, differences in found.items() if differences}
        assert not wrong, f"rank {rank}: {wrong}"


def test_every_schedule_equals_one_process():
    assert_equal_to_one_process(2, [trial("gpt2", schedule, m) for schedule, m in ALL_SCHEDULES])


@pytest.mark.parametrize("name", ["llama", "llama_tied", "t5", "unet_deep"])
def test_models_in_stages_equal_one_process(name):
    assert_equal_to_one_process(2, [trial(name, "1f1b", 4), trial(name, "zero_bubble", 2)])


def test_batch_normalisation_in_stages_equals_one_process():
    assert_equal_to_one_process(2, [trial("cnn", "naive", 1), trial("cnn", "zbv", 1)])


@pytest.mark.parametrize(("sizes", "strategy", "schedule"), [((2,), "zero3", "1f1b"), ((2,), "tp", "zero_bubble")])
def test_data_and_tensor_parallelism_inside_stages_equal_one_process(sizes, strategy, schedule):
    assert_equal_to_one_process(4, [trial("llama_tied", schedule, 4, 2, (sizes, strategy))])


def test_four_ranks_in_one_pipeline_equal_one_process():
    assert_equal_to_one_process(4, [trial("unet_deep", "interleaved_1f1b", 4, 4), trial("gpt2", "gpipe", 2, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied", "t5", "unet_deep", "bert"])
def test_every_schedule_and_number_of_micro_batches_equals_one_process(name):
    assert_equal_to_one_process(2, [trial(name, schedule, m) for schedule, m in (*ALL_SCHEDULES, *COUNTS)])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "auto"])
@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "t5", "unet_deep"])
def test_every_strategy_inside_stages_equals_one_process(name, strategy):
    trials = [trial(name, schedule, m, 2, ((2,), strategy)) for schedule, m in ALL_SCHEDULES if schedule != "naive"]
    assert_equal_to_one_process(4, trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_pipeline_data_and_tensor_parallelism_on_eight_ranks_equal_one_process(name):
    assert_equal_to_one_process(8, [trial(name, "1f1b", 4, 2, ((2, 2), "tp"))])


# --- the public functions -----------------------------------------------------------------------------------------


def _public(rank: int, names: tuple[str, ...], options: dict[str, Any]) -> tuple[float, dict[str, Any], str, list[str]]:
    case = ALL["llama_tied"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    pm = mw.autoparallelize(case.model(), mesh, case.batch(), **options)
    loss = pm.step(case.batch())
    wanted = reference("llama_tied").gradients
    found = {n: gathered(p.grad) for n, p in pm.named_parameters()}
    return float(loss), {"names": sorted(found)}, pm.plan.report(), compare(found, {n: wanted[n] for n in found}, RTOL, 1e-6)


@pytest.mark.parametrize("names", [pytest.param(("pp", "dp"), marks=pytest.mark.slow), ("dp", "pp")])
def test_a_mesh_axis_named_pp_means_stages(names):
    wanted = reference("llama_tied")
    ranks = run_ranks(4, _public, names, {"strategy": "ddp", "micro_batches": 4, "schedule": "1f1b"})
    for loss, _, report, wrong in ranks:
        assert abs(loss - float(wanted.loss)) < 1e-5
        assert not wrong
        assert "2 stages on 2 ranks, 1f1b, 4 micro-batches" in report
    held = [set(r[1]["names"]) for r in ranks]
    assert set().union(*held) >= {n for n, g in wanted.gradients.items() if g is not None}
    assert sum(h != held[0] for h in held) == 2


def _by_degrees(rank: int, strategy: str) -> tuple[str, str, int]:
    case = ALL["mlp"]
    pm = mw.autoparallelize(case.model(), (2,), case.batch(), strategy=strategy)
    return f"{float(pm.step(case.batch())):.6f}", pm.plan.pipeline.schedule, pm.plan.pipeline.micro_batches


@pytest.mark.parametrize(("strategy", "allowed"), [("pipeline", (2, 4, 8)), ("model_parallel", (1,))])
def test_named_strategies_cut_the_model_over_all_ranks(strategy, allowed):
    first, second = run_ranks(2, _by_degrees, strategy)
    loss, schedule, micro_batches = first
    assert first == second and loss == f"{float(reference('mlp').loss):.6f}"
    assert micro_batches in allowed and (schedule == "naive") == (micro_batches == 1)


def test_a_pipeline_with_everything_searched_trains_as_one_process():
    trials = [strategy_trial(name, "auto", 4, {"pp": 2}) for name in ("gpt2", "llama_tied")]
    assert all(t.plan.pipeline is not None and t.plan.pipeline.micro_batches > 1 for t in trials)
    for found in run_ranks(4, try_strategies, trials, timeout=300):
        assert found == {t.label: [] for t in trials}


def _one_loop(rank: int, plan: Any) -> list[float]:
    pm = build(ALL["mlp"].model(), captured("mlp"), plan, init_device_mesh("cpu", (2,)))
    opt = torch.optim.SGD(pm.parameters(), lr=1e-2)
    losses = [float(pm.eval_step(ALL["mlp"].batch()))]
    for _ in range(2):
        opt.zero_grad()
        losses.append(float(pm.step(ALL["mlp"].batch())))
        opt.step()
    return losses


def test_step_works_without_stages_too():
    plan = planned("mlp", (2,), "zero3")
    first, second = run_ranks(2, _one_loop, plan)
    assert first == second
    assert abs(first[0] - float(reference("mlp").loss)) < 1e-5
    assert first[0] == first[1] > first[2]


# --- training -----------------------------------------------------------------------------------------------------


def _clipped(rank: int, given: Any, max_norm: float) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    pm = start(given)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    for _ in range(3):
        opt.zero_grad()
        pm.step(given.case.batch())
        norm = pm.clip_grad_norm_(max_norm)
        opt.step()
    return float(norm), pm.full_state_dict(), [n for n, _ in pm.named_parameters()]


def test_clipping_by_the_norm_of_all_stages_equals_one_process():
    given = trial("llama_tied", "zero_bubble", 4)
    model, batch = given.case.model(), given.case.batch()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        opt.zero_grad()
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    for found, state, _ in run_ranks(2, _clipped, given, 0.5):
        assert abs(found - float(norm)) < 1e-5 * float(norm)
        assert not compare(state, dict(model.state_dict()), RTOL, 1e-5)


def _accumulated(rank: int, given: Any) -> list[str]:
    pm = start(given)
    pm.step(given.case.batch())
    once = {n: gathered(p.grad).clone() for n, p in pm.named_parameters()}
    pm.step(given.case.batch())
    return compare({n: gathered(p.grad) for n, p in pm.named_parameters()}, {n: 2 * g for n, g in once.items()}, 1e-6, 0.0)


def test_gradients_accumulate_over_steps():
    assert run_ranks(2, _accumulated, trial("llama_tied", "1f1b", 2)) == [[], []]


def _saved_and_loaded(rank: int, given: Any) -> list[str]:
    pm = start(given)
    other = given.case.model(seed=5).state_dict()
    pm.load_state_dict(other)
    wrong = compare(pm.full_state_dict(), dict(other), 0.0, 0.0)
    own = {n: t.clone() for n, t in pm.state_dict().items()}
    pm.step(given.case.batch())
    torch.optim.SGD(pm.parameters(), lr=1.0).step()
    pm.load_state_dict(own)
    try:
        pm.load_state_dict({**other, "nothing.weight": torch.zeros(1)})
        wrong.append("an unexpected key was loaded")
    except mw.InputError as e:
        wrong += [] if "unexpected 'nothing.weight'" in str(e) else [str(e)]
    return wrong + compare(pm.full_state_dict(), dict(other), 0.0, 0.0)


def test_checkpoints_of_one_device_and_of_a_rank_load_back():
    assert run_ranks(2, _saved_and_loaded, trial("llama_tied", "gpipe", 2)) == [[], []]


def _misused(rank: int, given: Any) -> list[str]:
    pm = start(given)
    said = []
    batch = given.case.batch()
    for use in (
        lambda: pm(**batch),
        lambda: pm.step({**batch, "x": batch["x"][:4]}),
        lambda: pm.step({"x": batch["x"]}),
        lambda: pm.load_state_dict({}, assign=True),
    ):
        try:
            use()
            said.append("nothing")
        except mw.InputError as e:
            said.append(str(e))
    return [*said, f"{float(pm.step(batch)):.6f}"]


def test_misuse_is_refused_and_leaves_the_pipeline_usable():
    for said in run_ranks(2, _misused, trial("mlp", "gpipe", 2)):
        assert "use loss = pm.step(batch)" in said[0]
        assert "'x'] has shape [4, 32], needed [8, 32]" in said[1]
        assert "target" in said[2]
        assert "load without assign" in said[3]
        assert said[4] == f"{float(reference('mlp').loss):.6f}"


def _refused(rank: int, options: dict[str, Any], name: str) -> str:
    case = ALL[name]
    try:
        mw.autoparallelize(case.model(), (2,), case.batch(), **options)
    except mw.MeshwrightError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mlp", {"degrees": {"pp": 2}, "micro_batches": 3}, "InputError: 3 micro-batches do not divide the batch of 8"),
        ("cnn", {"degrees": {"pp": 2}, "micro_batches": 2}, "InputError: the model cannot run in 2 micro-batches"),
        ("mlp", {"degrees": {"pp": 3}}, "InputError: pp=3 does not divide the 2 devices"),
        ("mlp", {"degrees": {"pp": 2}, "stages_per_rank": 40, "schedule": "zero_bubble"}, "which makes at most"),
        ("mlp", {"schedule": "1f1b"}, "schedule and stages_per_rank are for pipeline stages"),
        ("mlp", {"degrees": {"pp": 2}, "schedule": "2f2b"}, "schedule='2f2b' is not known"),
        ("mlp", {"degrees": {"pp": 2}, "micro_batches": 0}, "it must be a whole number of at least 1"),
        ("mlp", {"degrees": {"pp": 2}, "memory_limit": "2KiB"}, "InfeasibleError"),
        ("mlp", {"degrees": {"pp": 2}, "batch": "local"}, "takes the global batch on every rank"),
        ("logits", {"degrees": {"pp": 2}}, "a step needs the loss"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(name, options, says):
    for said in run_ranks(2, _refused, options, name):
        assert says in said


def test_a_module_in_stages_says_what_it_is():
    given = trial("mlp", "gpipe", 2)
    said = run_ranks(2, lambda rank: repr(start(given)), timeout=60)
    assert [f"PipelineModule(Mlp, stages [{rank}] of 2, gpipe" in text for rank, text in enumerate(said)] == [True, True]
