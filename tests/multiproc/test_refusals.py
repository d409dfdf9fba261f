"""Bad input on ranks: a typed error with what, where, found, needed and what to do; never a hang."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.planner.ir.errors import InputError, RuntimeMismatchError
from meshwright.planner.ir.mesh import MeshShape
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from tests.helpers.legal_plans import replicated_plan
from tests.helpers.models import ALL
from tests.helpers.prepared import captured
from tests.helpers.ranks import RankFailed, run_ranks
from tests.multiproc.common import start, zero3


def test_a_call_that_was_not_planned_is_refused_by_what_differs():
    plan, batch = zero3("gpt2", (2,)), ALL["gpt2"].batch()
    ids, labels = batch["input_ids"], batch["labels"]

    def on_rank(rank):
        pm = start("gpt2", plan)
        for kwargs, message in (
            ({"input_ids": ids[:7], "labels": labels[:7]}, r"\['input_ids'\] has shape \[7, 16\], needed \[8, 16\]"),
            ({"input_ids": ids.float(), "labels": labels}, r"\['input_ids'\] has dtype float32, needed int64; cast the batch"),
            ({"input_ids": ids}, r"\['labels'\] is None, needed int64\[8, 16\]"),
            ({"input_ids": [ids], "labels": labels}, r"\['input_ids'\] is missing .*\['input_ids'\]\[0\] is unexpected"),
            ({"input_ids": ids, "labels": labels, "use_cache": True}, r"\['use_cache'\] is True, needed None"),
        ):
            with pytest.raises(InputError, match=message):
                pm(**kwargs)
        with pytest.raises(InputError, match=r"cannot be called so: multiple values for argument 'input_ids'"):
            pm(ids, input_ids=ids)
        pm.eval()
        with pytest.raises(InputError, match="it is in evaluation mode, planned in training mode"):
            pm(**batch)
        with pytest.raises(InputError, match="is a part of a parallel module"):
            pm.get_submodule("transformer.wte")(ids)

    run_ranks(2, on_rank)


def test_a_step_of_a_model_without_a_loss_is_refused():
    plan = zero3("logits", (2,))

    def on_rank(rank):
        pm = start("logits", plan)
        for step in (pm.step, pm.eval_step):
            with pytest.raises(InputError, match="a step needs the loss, and the model returns output"):
                step(ALL["logits"].batch())

    run_ranks(2, on_rank)


def test_a_parameter_changed_outside_is_refused():
    plan, batch = zero3("tied", (2,)), ALL["tied"].batch()

    def changed_by(change):
        pm = start("tied", plan)
        change(pm)
        return pm(**batch)

    def on_rank(rank):
        whole = torch.nn.Parameter(torch.zeros(32, 32))
        for change, message in (
            (lambda pm: setattr(pm.mix, "weight", whole), "parameter mix.weight was changed outside: it is a Parameter"),
            (
                lambda pm: pm.half(),
                r"tokens.weight was changed outside: it has dtype torch.float16, the plan needs torch.float32",
            ),
            (lambda pm: setattr(pm.mix, "weight", pm.mix.bias), r"mix.weight .* has global shape \(32,\)"),
            (lambda pm: setattr(pm.head, "weight", torch.nn.Parameter(pm.head.weight + 1)), r"head.weight .* is another object"),
            (
                lambda pm: setattr(pm, "mix", torch.nn.Linear(32, 32)),
                "mix was changed outside: it is a submodule that was replaced",
            ),
            (
                lambda pm: setattr(
                    pm.mix,
                    "weight",
                    torch.nn.Parameter(pm.mix.weight.redistribute(placements=[torch.distributed.tensor.Replicate()])),
                ),
                r"mix.weight .* has (local shape|placement)",
            ),
        ):
            with pytest.raises(RuntimeMismatchError, match=message):
                changed_by(change)

    run_ranks(2, on_rank)


def test_a_checkpoint_that_does_not_match_is_refused_by_name():
    plan = zero3("mlp", (2,))

    def on_rank(rank):
        pm, good = start("mlp", plan), ALL["mlp"].model().state_dict()
        missing = {k: v for k, v in good.items() if k != "mid.weight"}
        with pytest.raises(InputError, match=r"missing 'mid.weight'; pass strict=False"):
            pm.load_state_dict(missing)
        with pytest.raises(InputError, match="unexpected 'more'"):
            pm.load_state_dict({**good, "more": good["mid.bias"]})
        with pytest.raises(InputError, match=r"mid.weight has shape \[32, 64\], the model needs \[64, 64\]"):
            pm.load_state_dict({**good, "mid.weight": good["mid.weight"][:32]})
        with pytest.raises(InputError, match="assign=True"):
            pm.load_state_dict(good, assign=True)
        assert pm.load_state_dict(missing, strict=False).missing_keys == ["mid.weight"]

    run_ranks(2, on_rank)


def test_a_plan_for_something_else_is_refused():
    plan, other, larger = zero3("mlp", (2,)), zero3("tied", (2,)), replicated_plan(captured("mlp"), MeshShape.of(4))

    def on_rank(rank):
        mesh = make_mesh("cpu", (2,))
        with pytest.raises(InputError, match=r"the plan is for another model or batch: it was made for program [0-9a-f]{12}"):
            build(ALL["mlp"].model(), captured("mlp"), other, mesh)
        with pytest.raises(RuntimeMismatchError, match="the plan is for a mesh of 4 = 4 devices, found one of 2 = 2"):
            build(ALL["mlp"].model(), captured("mlp"), larger, mesh)
        with pytest.raises(InputError, match="batch is 'both', must be one of 'global', 'local'"):
            build(ALL["mlp"].model(), captured("mlp"), plan, mesh, batch="both")

    run_ranks(2, on_rank)


def test_a_mesh_larger_than_the_world_or_without_this_rank_is_refused():
    def on_rank(rank):
        with pytest.raises(InputError, match="mesh 2x2 has 4 devices but the world has 2 ranks: start 4 ranks"):
            make_mesh("cpu", (2, 2))
        with pytest.raises(InputError, match="mesh must be a torch.distributed.device_mesh.DeviceMesh, found tuple"):
            build(ALL["mlp"].model(), captured("mlp"), zero3("mlp", (2,)), (2,))
        alone = DeviceMesh("cpu", [0])
        if rank == 1:
            with pytest.raises(InputError, match=r"rank 1 is not in mesh \[0\]"):
                build(ALL["mlp"].model(), captured("mlp"), zero3("mlp", (2,)), alone)

    captured("mlp")
    run_ranks(2, on_rank)


def test_ranks_that_disagree_get_an_error_that_names_the_rank_on_every_rank():
    plans = [zero3("mlp", (2,)), replicated_plan(captured("mlp"), MeshShape.of(2))]

    def on_rank(rank):
        batch = ALL["mlp"].batch()
        with pytest.raises(RuntimeMismatchError, match="start-up: rank 1 differs from rank 0 in its plan: found [0-9a-f]{16}"):
            start("mlp", plans[rank])
        with pytest.raises(RuntimeMismatchError, match="rank 1 differs from rank 0 in its batch mode: found local"):
            start("mlp", plans[0], batch=("global", "local")[rank])
        pm = start("mlp", plans[0])
        batch["x"] = batch["x"] + rank
        with pytest.raises(RuntimeMismatchError, match=r"rank 1 differs from rank 0 in its batch \['x'\]: .*pass batch='local'"):
            pm(**batch)

    run_ranks(2, on_rank, timeout=60)


def test_a_rank_that_dies_in_a_step_ends_the_others():
    plan = zero3("mlp", (2,))

    def on_rank(rank):
        pm = start("mlp", plan)
        for _ in range(3):
            if rank == 1:
                raise SystemExit(5)
            pm(**ALL["mlp"].batch()).backward()

    with pytest.raises(RankFailed, match="rank 1"):
        run_ranks(2, on_rank, timeout=60)
