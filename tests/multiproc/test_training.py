"""What a training loop does with a parallel module, beside one forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from meshwright.planner.ir.mesh import MeshShape
from tests.helpers.equality import whole
from tests.helpers.legal_plans import greedy_plan, replicated_plan
from tests.helpers.models import ALL, loss_of
from tests.helpers.prepared import captured, planned, reference
from tests.helpers.ranks import run_ranks
from tests.multiproc.common import close, replan, start, zero3


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


# --- accumulation, clipping, graph lifetimes ----------------------------------------------------------------------


def _accumulate(model: torch.nn.Module) -> list[torch.Tensor]:
    case, norms = ALL["transformer"], []
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(2):
        opt.zero_grad()
        for micro in range(2):
            loss = loss_of(model(**case.batch(2 * step + micro)))
            (loss / 2).backward()
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        opt.step()
    return norms


def test_gradients_accumulate_and_clip_as_in_one_process():
    plan, model = zero3("transformer", (2,)), ALL["transformer"].model()
    wanted = _accumulate(model)

    def on_rank(rank):
        pm = start("transformer", plan)
        norms = _accumulate(pm)
        for a, b in zip(norms, wanted, strict=True):
            close(a, b)
        for name, p in model.named_parameters():
            close(whole(pm.get_parameter(name)), p.detach())

    run_ranks(2, on_rank)


def test_a_graph_is_used_once_unless_it_is_retained():
    plan = zero3("mlp", (2,))

    def on_rank(rank):
        pm = start("mlp", plan)
        loss = pm(**ALL["mlp"].batch())
        loss.backward(retain_graph=True)
        once = gradients(pm)
        loss.backward()
        for name, g in gradients(pm).items():
            close(g, 2 * once[name])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in pm.parameters())

    run_ranks(2, on_rank)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizer_variants_see_the_new_weights(options):
    plan, model, batch = zero3("mlp", (2,)), ALL["mlp"].model(), ALL["mlp"].batch()

    def losses(m):
        opt = torch.optim.AdamW(m.parameters(), lr=1e-2, **options)
        found = []
        for _ in range(3):
            opt.zero_grad()
            loss = m(**batch)
            loss.backward()
            opt.step()
            found.append(loss.detach())
        return torch.stack(found)

    wanted = losses(model)
    run_ranks(2, lambda rank: close(losses(start("mlp", plan)), wanted))


# --- inference, other calls ---------------------------------------------------------------------------------------


def test_inference_in_training_mode_needs_no_other_program():
    plan = zero3("gpt2", (2,))

    def on_rank(rank):
        pm = start("gpt2", plan, outputs="full")
        with torch.no_grad():
            out = pm(**ALL["gpt2"].batch())
        assert not out.loss.requires_grad
        close(out.loss, reference("gpt2").loss)
        assert type(out.logits) is torch.Tensor and out.logits.shape == (8, 16, 96)
        assert len(pm._library.programs) == 1

    reference("gpt2")
    run_ranks(2, on_rank)


def test_evaluation_mode_uses_running_statistics_and_moves_no_parameter():
    plan, model, batch = zero3("cnn", (2,)), ALL["cnn"].model(), ALL["cnn"].batch()
    with torch.no_grad():
        model(**batch)
        model.eval()
        wanted = model(**batch)

    def on_rank(rank):
        pm = start("cnn", plan, replan=replan, outputs="full")
        before = dict(pm.named_parameters())
        with torch.no_grad():
            pm(**batch)
            pm.eval()
            found = pm(**batch)
            again = pm(**batch)
        close(found["loss"], wanted["loss"])
        close(found["logits"], wanted["logits"], 1e-4)
        assert torch.equal(found["logits"], again["logits"]) and len(pm._library.programs) == 2
        assert all(p is before[n] for n, p in pm.named_parameters())
        close(pm.get_buffer("stem.1.running_mean"), model.get_buffer("stem.1.running_mean"))

    run_ranks(2, on_rank)


def test_another_batch_size_gets_a_program_of_its_own():
    plan, model = zero3("mlp"), ALL["mlp"].model()
    small = {k: v[:6] for k, v in ALL["mlp"].batch().items()}
    loss = model(**small)
    loss.backward()
    wanted = gradients(model)

    def on_rank(rank):
        pm = start("mlp", plan, replan=replan)
        pm(**ALL["mlp"].batch())
        pm(**small).backward()
        pm(**ALL["mlp"].batch())
        assert len(pm._library.programs) == 2
        for name, g in gradients(pm).items():
            close(g, wanted[name])

    run_ranks(4, on_rank)


def test_freezing_and_unfreezing_parameters_is_noticed():
    plan, model, batch = zero3("frozen", (2,)), ALL["frozen"].model(), ALL["frozen"].batch()
    model.base2.requires_grad_(True)
    model(**batch).backward()
    wanted = gradients(model)

    def on_rank(rank):
        pm = start("frozen", plan, replan=replan)
        pm(**batch)
        pm.get_parameter("base2.weight").requires_grad_(True)
        pm.get_parameter("base2.bias").requires_grad_(True)
        pm(**batch).backward()
        found = gradients(pm)
        assert set(found) == set(wanted)
        for name, g in found.items():
            close(g, wanted[name])

    run_ranks(2, on_rank)


def test_arguments_may_come_in_any_order_by_position_or_by_name():
    plan, batch = zero3("mlp", (2,)), ALL["mlp"].batch()

    def on_rank(rank):
        pm = start("mlp", plan)
        x, target = batch["x"], batch["target"]
        losses = [pm(x, target), pm(x, target=target), pm(target=target, x=x)]
        assert losses[0] == losses[1] == losses[2] and len(pm._library.programs) == 1

    run_ranks(2, on_rank)


def test_a_local_batch_gives_what_the_global_one_gives():
    plan = zero3("mlp")
    names = {i.name: i.value.name for i in captured("mlp").graph.inputs_of("input")}

    def on_rank(rank):
        batch = ALL["mlp"].batch()
        pieces = {k: v.chunk(4)[rank] for k, v in batch.items()}
        assert all(str(plan.inputs[v]) == "(S(0), S(0))" for v in names.values())
        pm = start("mlp", plan, batch="local")
        loss = pm(**pieces)
        loss.backward()
        close(loss.detach(), reference("mlp").loss)
        for name, g in gradients(pm).items():
            close(g, reference("mlp").gradients[name])

    reference("mlp")
    run_ranks(4, on_rank)


def test_a_batch_input_gets_its_gradient():
    from meshwright.planner import trace
    from meshwright.runtime.mesh import make_mesh
    from meshwright.runtime.module import build

    model, batch = ALL["mlp"].model(), ALL["mlp"].batch()
    batch["x"].requires_grad_()
    capture = trace.capture(model, (), batch)
    plan = greedy_plan(capture, MeshShape.of(2), batch_axes=(0,))
    model(**batch).backward()
    wanted, batch["x"].grad = batch["x"].grad, None

    def on_rank(rank):
        pm = build(ALL["mlp"].model(), capture, plan, make_mesh("cpu", (2,)))
        pm(**batch).backward()
        close(batch["x"].grad, wanted)

    run_ranks(2, on_rank)


def test_two_models_on_two_meshes_live_in_one_process():
    plans = [zero3("mlp", (4,)), zero3("tied", (2, 2)), zero3("mlp", (2, 2))]
    for name in ("mlp", "tied"):
        reference(name)

    def on_rank(rank):
        modules = [(name, start(name, plan)) for name, plan in zip(("mlp", "tied", "mlp"), plans, strict=True)]
        losses = [pm(**ALL[name].batch()) for name, pm in modules]
        for loss in losses:
            loss.backward()
        for (name, pm), loss in zip(modules, losses, strict=True):
            close(loss.detach(), reference(name).loss)
            for n, g in gradients(pm).items():
                close(g, reference(name).gradients[n])

    run_ranks(4, on_rank)


# --- state --------------------------------------------------------------------------------------------------------


def test_state_goes_to_and_from_single_device_checkpoints():
    plan, other = zero3("gpt2", (2,)), ALL["gpt2"].model(seed=1)

    def on_rank(rank):
        pm = start("gpt2", plan)
        assert list(pm.state_dict()) == list(other.state_dict())
        assert pm.get_parameter("lm_head.weight") is pm.get_parameter("transformer.wte.weight")
        pm.load_state_dict(other.state_dict())
        loss = loss_of(pm(**ALL["gpt2"].batch())).detach()
        full = pm.full_state_dict()
        assert all(torch.equal(full[k], v) for k, v in other.state_dict().items())
        theirs = get_model_state_dict(pm, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert rank or all(torch.equal(theirs[k], v) for k, v in other.state_dict().items())
        pm.load_state_dict(start("gpt2", plan).state_dict())
        return loss, loss_of(pm(**ALL["gpt2"].batch())).detach()

    loaded, back = run_ranks(2, on_rank)[0]
    close(loaded, loss_of(other(**ALL["gpt2"].batch())).detach())
    close(back, reference("gpt2").loss)


def test_a_model_on_the_meta_device_plans_alike_and_trains_once_loaded():
    from meshwright.planner import remat, trace

    case, plan = ALL["llama"], zero3("llama", (2,))
    empty = case.model(device="meta")
    assert remat.save_few(trace.capture(empty, (), case.batch())).graph.hash == captured("llama").graph.hash

    def on_rank(rank):
        pm = start("llama", plan, model=empty)
        with pytest.raises(ValueError, match=r"have no values, since the model was on the meta device .*load a checkpoint"):
            pm(**case.batch())
        incomplete = pm.load_state_dict(case.model().state_dict(), strict=False)
        assert not incomplete.missing_keys
        for name, buffer in case.model().named_buffers():
            pm.get_buffer(name).copy_(buffer)
        close(loss_of(pm(**case.batch())).detach(), reference("llama").loss)

    reference("llama")
    run_ranks(2, on_rank)


def test_ranks_with_other_weights_take_those_of_the_first():
    plan = zero3("mlp", (2,))

    def on_rank(rank):
        pm = start("mlp", plan, model=ALL["mlp"].model(seed=rank))
        close(pm(**ALL["mlp"].batch()).detach(), reference("mlp").loss)

    reference("mlp")
    run_ranks(2, on_rank)


# --- precision and random numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_bf16_mixed_is_close_to_the_same_casts_in_one_process(name):
    case, plan = ALL[name], zero3(name, (2,), precision="bf16-mixed")
    model, batch = case.model(), case.batch()

    def half(t):
        return t.bfloat16() if t.is_floating_point() else t

    casts = {n: half(p) for n, p in model.named_parameters()}
    loss = loss_of(functional_call(model, casts, (), {k: half(v) for k, v in batch.items()}, tie_weights=True))
    loss.backward()

    def on_rank(rank):
        pm = start(name, plan, precision="bf16-mixed")
        found = loss_of(pm(**batch))
        found.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in pm.parameters())
        close(found.detach().float(), loss.detach().float(), 1e-2)
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        for n, g in gradients(pm).items():
            torch.testing.assert_close(g, model.get_parameter(n).grad, rtol=0, atol=2e-2 * largest)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("name", ["mlp_dropout", "gpt2_dropout"])
def test_dropout_draws_the_masks_of_one_rank_wherever_things_lie(name):
    case = ALL[name]
    alone = replicated_plan(captured(name), MeshShape.of(1))
    plans = [zero3(name), replicated_plan(captured(name), MeshShape.of(2, 2)), planned(name, (2, 2), "tp")]

    def two_steps(plan):
        torch.manual_seed(7)
        pm = start(name, plan)
        state = pm.random_state()
        losses = [loss_of(pm(**case.batch())) for _ in range(2)]
        losses[0].backward()
        pm.load_random_state(state)
        again = loss_of(pm(**case.batch()))
        assert losses[0] != losses[1] and again == losses[0]
        return [loss.detach() for loss in losses], gradients(pm)

    losses, grads = run_ranks(1, lambda rank: two_steps(alone))[0]

    def on_rank(rank):
        for plan in plans:
            found, theirs = two_steps(plan)
            for a, b in zip(found, losses, strict=True):
                close(a, b)
            for n, g in theirs.items():
                torch.testing.assert_close(g, grads[n], rtol=1e-4, atol=1e-5 * float(grads[n].abs().max()) + 1e-7)

    run_ranks(4, on_rank)
