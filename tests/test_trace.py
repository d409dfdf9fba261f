"""Capture: the joint graph computes what the model computes, is in normal form, and failures say what to do."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.planner.ir.errors import InputError, TraceError
from meshwright.planner.trace import capture
from tests.helpers.models import ALL, EXTRA, ZOO, Case, loss_of
from tests.helpers.run_capture import Ran, captured, run


def eager(case: Case, model: nn.Module) -> Ran:
    output = model(**case.batch())
    loss = loss_of(output) if case.has_loss else output.sum()
    loss.backward()
    return Ran(output, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, dict(model.named_buffers()))


def assert_same_gradients(found: dict, wanted: dict) -> None:
    """Equal to 1e-5; small ones are measured against the largest gradient of the model, for some are pure rounding."""
    assert found.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * largest, msg=lambda m, n=name: f"{n}: {m}")


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, case in ALL.items() if not case.random])
def test_captured_graph_gives_outputs_gradients_and_buffers_of_the_model(name):
    case = ALL[name]
    ran = run(captured(name), case.model(), **case.batch())
    wanted = eager(case, case.model())
    for found, want in zip(pytree.tree_leaves(ran.output), pytree.tree_leaves(wanted.output), strict=True):
        torch.testing.assert_close(found, want.detach() if isinstance(want, torch.Tensor) else want, rtol=1e-5, atol=1e-5)
    assert type(ran.output) is type(wanted.output)
    assert_same_gradients(ran.gradients, wanted.gradients)
    for buffer, value in ran.mutations.items():
        torch.testing.assert_close(value, wanted.mutations[buffer])


def test_batch_norm_statistics_are_mutations():
    names = {o.name for o in captured("cnn").graph.outputs_of("mutation")}
    assert {"stem.1.running_mean", "stem.1.running_var", "stem.1.num_batches_tracked"} <= names


@pytest.mark.parametrize("name", ["mlp_dropout", "gpt2_dropout"])
def test_dropout_is_arithmetic_on_seeded_uniform_numbers(name):
    case, found = ALL[name], captured(name)
    assert [i.name for i in found.graph.inputs_of("seed")] == ["seed"]
    model = case.model()
    first, again, other = (loss_of(run(found, model, seed=s, **case.batch()).output) for s in (1, 1, 2))
    assert first == again != other
    assert abs(first - loss_of(case.model().eval()(**case.batch()))) < 0.2
    salts = [op.args[1] for op in found.graph.ops if op.target == "meshwright.uniform.default"]
    assert len(salts) == len(set(salts)) > 0


def test_dropout_keeps_the_expected_share_and_scale():
    model = nn.Dropout(0.25)
    x = torch.ones(100, 100)
    ran = run(capture(model, (x.requires_grad_(),)), model, x)
    kept = ran.output != 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(ran.output[kept], torch.full_like(ran.output[kept], 1 / 0.75))
    torch.testing.assert_close(ran.gradients["args[0]"], ran.output)


class Draws(nn.Module):
    def forward(self, x):
        return torch.stack(
            [torch.randn_like(x), torch.rand_like(x), torch.bernoulli(torch.full_like(x, 0.3)), torch.randint_like(x, 2, 6)]
        )


def test_random_tensors_have_their_distributions():
    x = torch.zeros(200, 200)
    normal, uniform, coin, whole = run(capture(Draws(), (x,), training=False), Draws(), x).output
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    assert set(coin.unique().tolist()) == {0.0, 1.0} and abs(coin.mean() - 0.3) < 0.02
    assert whole.unique().tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("name", ["cnn", "transformer", "gpt2", "mlp_dropout", "nested"])
def test_inference_capture_has_no_backward_and_gives_the_outputs(name):
    case = ALL[name]
    model = case.model().eval()
    found = capture(model, kwargs=case.batch(), training=False)
    assert not found.training
    assert {o.role for o in found.graph.outputs} == {"output"}
    assert all(op.phase == "forward" for op in found.graph.ops) and not found.graph.inputs_of("tangent")
    with torch.no_grad():
        wanted = pytree.tree_leaves(model(**case.batch()))
    for have, want in zip(pytree.tree_leaves(run(found, model, **case.batch()).output), wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_without_gradients_enabled_only_the_forward_is_captured():
    case = ALL["mlp"]
    with torch.no_grad():
        assert not capture(case.model(), kwargs=case.batch()).training


def test_gradient_of_an_input_that_requires_one():
    case = ALL["logits"]
    x = case.batch()["x"].requires_grad_()
    model = case.model()
    ran = run(capture(model, kwargs={"x": x}), model, x=x)
    case.model()(x).sum().backward()
    torch.testing.assert_close(ran.gradients["x"], x.grad)


class Doubled(torch.autograd.Function):
    """A backward that is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class UsesDoubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Doubled.apply(self.linear(x)).sum()


def test_custom_autograd_functions_keep_their_own_backward():
    model, x = UsesDoubled(), torch.randn(4, 8)
    ran = run(capture(model, (x,)), model, x)
    model(x).backward()
    torch.testing.assert_close(ran.gradients["linear.weight"], model.linear.weight.grad)


class Running(nn.Module):
    """Assigns one buffer, changes another in place, counts in Python."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("assigned", torch.zeros(8))
        self.register_buffer("changed", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.assigned = 0.5 * self.assigned + x.detach().mean(0)
        self.changed.add_(1)
        return (self.linear(x) * self.changed).sum()


def test_buffers_that_forward_assigns_or_changes_are_mutations_and_the_model_is_left_alone():
    model, x = Running(), torch.randn(4, 8)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = capture(model, (x,))
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[n] is t for n, t in before.items()) and model.calls == 0
    ran = run(found, model, x)
    assert set(ran.mutations) == {"assigned", "changed"}
    torch.testing.assert_close(ran.mutations["assigned"], x.mean(0))


def test_bf16_mixed_computes_in_bfloat16_and_gives_gradients_in_float32():
    case = ALL["llama"]
    model = case.model()
    found = capture(model, kwargs=case.batch(), precision="bf16-mixed")
    products = [op for op in found.graph.ops if op.target == "aten.mm.default"]
    assert {op.outs[0].dtype for op in products} == {torch.bfloat16}
    ran, exact = run(found, model, **case.batch()), run(captured("llama"), model, **case.batch())
    assert {g.dtype for g in ran.gradients.values()} == {torch.float32}
    for name, gradient in exact.gradients.items():
        assert (ran.gradients[name] - gradient).norm() < 0.05 * gradient.norm(), name


# --- names and structure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALL))
def test_every_parameter_buffer_input_and_gradient_is_named_once(name):
    case, graph = ALL[name], captured(name).graph
    model = case.model()
    assert [i.name for i in graph.inputs_of("parameter")] == [n for n, _ in model.named_parameters()]
    assert [i.name for i in graph.inputs_of("buffer")] == [n for n, _ in model.named_buffers()]
    assert {o.name for o in graph.outputs_of("gradient")} == {n for n, p in model.named_parameters() if p.requires_grad}
    assert [i.trainable for i in graph.inputs_of("parameter")] == [p.requires_grad for p in model.parameters()]
    for entry in graph.inputs_of("parameter"):
        assert entry.value.shape == tuple(model.get_parameter(entry.name).shape)


@pytest.mark.parametrize("name", ["tied", "llama_tied", "gpt2", "bert", "t5"])
def test_tied_weights_are_one_placeholder_with_aliases(name):
    groups = [(i.name, *i.aliases) for i in captured(name).graph.inputs_of("parameter") if i.aliases]
    model = ALL[name].model()
    for group in groups:
        assert len({id(model.get_parameter(n)) for n in group}) == 1
    assert groups


def test_nested_inputs_and_outputs_have_paths():
    graph = captured("nested").graph
    assert [i.name for i in graph.inputs_of("input")] == ["batch['x']", "batch['more'][0]"]
    outputs = {o.name: o for o in graph.outputs_of("output")}
    assert list(outputs) == ["loss", "parts['hidden']", "parts['pair'][0]", "parts['pair'][1]", "parts['count']"]
    assert outputs["parts['count']"].constant == 8
    assert [o.name for o in outputs.values() if o.differentiable] == ["loss"]
    assert [i.name for i in graph.inputs_of("tangent")] == ["loss"]
    assert captured("nested").baked_inputs == {2: None, 3: "a flag", 4: 0.5}


def test_without_a_loss_every_floating_output_is_differentiable():
    assert [o.differentiable for o in captured("logits").graph.outputs_of("output")] == [True]


class Unregistered(nn.Module):
    """Returns tensors that alias each other, an input and a buffer, positionally."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("ones", torch.ones(8))

    def forward(self, x):
        y = self.linear(x)
        return y, y.view(-1), x, self.ones, y


def test_outputs_may_alias_each_other_inputs_and_buffers():
    model, x = Unregistered(), torch.randn(4, 8)
    ran = run(capture(model, (x,)), model, x)
    for found, wanted in zip(ran.output, model(x), strict=True):
        torch.testing.assert_close(found, wanted.detach())
    (a, b, *_, c) = model(x)
    (a.sum() + b.sum() + c.sum()).backward()
    torch.testing.assert_close(ran.gradients["linear.weight"], model.linear.weight.grad)


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        return (self.linear(x) * self.scale + torch.tensor([5.0, 6.0, 7.0, 8.0])).sum()


def test_tensors_that_are_no_state_become_constants():
    model, x = Constants(), torch.randn(2, 4)
    found = capture(model, (x,))
    assert [i.name for i in found.graph.inputs_of("constant")] == list(found.constants) == ["constant_0", "constant_1"]
    torch.testing.assert_close(run(found, model, x).output, model(x).detach())


@pytest.mark.parametrize("name", list(ALL))
def test_graph_is_in_normal_form(name):
    found = captured(name)
    for node in found.gm.graph.nodes:
        if node.target is operator.getitem:
            assert node.meta["phase"] == node.args[0].meta["phase"]
    phases = [n.meta["phase"] for n in found.gm.graph.nodes if n.op == "call_function"]
    assert phases == sorted(phases, key=("forward", "backward").index)
    made = [n for n in found.gm.graph.nodes if n.op not in ("output",)]
    assert {n.op for n in made} <= {"placeholder", "call_function"}
    for node in made:
        if node.op == "call_function" and node.target is not operator.getitem:
            assert isinstance(node.target, torch._ops.OpOverload)
        if node.op == "call_function":
            assert node.users, f"{node} is dead"
    texts = [line.split(" = ", 1)[1] for line in found.graph.lines() if " = " in line and line.split(" = ")[0]]
    assert len(texts) == len(set(texts)), "an op stands twice"


FORBIDDEN = {
    "aten.view.default", "aten._unsafe_view.default", "aten.t.default", "aten.transpose.int", "aten.unsqueeze.default",
    "aten.detach.default", "aten.clone.default", "aten.alias.default", "aten.addmm.default", "aten.linear.default",
    "aten.mean.default", "aten.mean.dim", "aten.var_mean.correction", "aten._log_softmax.default", "aten.native_dropout.default",
    "aten._native_batch_norm_legit_functional.default", "aten.sum.default", "aten.zeros_like.default",
}  # fmt: skip


@pytest.mark.parametrize("name", list(ALL))
def test_vocabulary_is_small(name):
    ops = captured(name).graph.ops
    assert not FORBIDDEN & {op.target for op in ops}
    for op in ops:
        if op.target in ("aten.nll_loss_forward.default", "aten.nll_loss_backward.default"):
            assert op.args[3 if "forward" in op.target else 4] == 2, "nll_loss must be in sum form"
        if op.target == "aten.convolution.default":
            assert op.args[2] is None


def test_loss_count_depends_on_labels_only():
    """What a mean loss divides by is computed from inputs alone, so it is known before the first forward."""
    graph = captured("gpt2").graph
    (loss,) = graph.outputs_of("output")[:1]
    division = graph.producer[loss.value.name]
    assert division.target == "aten.div.Tensor"
    sources, pending = set(), [division.args[1].name]
    while pending:
        made = graph.producer[pending.pop()]
        if hasattr(made, "role"):
            sources.add(made.name)
        else:
            pending += [v.name for v in made.ins]
    assert sources == {"labels"}


# --- provenance ---------------------------------------------------------------------------------------------------


def test_ops_know_module_source_and_forward_op():
    graph = captured("gpt2").graph
    products = [op for op in graph.ops if op.target == "aten.mm.default" and op.phase == "forward"]
    assert products[0].module_path == "transformer.h.0.attn.c_attn"
    assert products[0].source.startswith("pytorch_utils.py:")
    for op in graph.ops:
        if op.target == "aten.native_layer_norm_backward.default":
            assert graph.by_name[op.forward_op].target == "aten.native_layer_norm.default"
            assert graph.by_name[op.forward_op].module_path == op.module_path


# --- determinism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "llama", "gpt2_dropout"])
def test_meta_and_real_weights_give_the_same_graph(name):
    case = ALL[name]
    batch = pytree.tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, case.batch())
    assert capture(case.model(device="meta"), kwargs=batch).graph.hash == captured(name).graph.hash


def test_fake_weights_give_the_same_graph():
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = ALL["transformer"]
    with FakeTensorMode():
        model = case.build().train()
    assert capture(model, kwargs=case.batch()).graph.hash == captured("transformer").graph.hash


def test_hash_is_equal_in_another_process():
    code = (
        "from tests.helpers.models import ALL; from meshwright.planner.trace import capture;"
        "c = ALL['mlp_dropout']; capture(ALL['tied'].model(), kwargs=ALL['tied'].batch());"
        "print(capture(c.model(), kwargs=c.batch()).graph.hash)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == captured("mlp_dropout").graph.hash


def test_other_shapes_give_another_hash():
    case = ALL["mlp"]
    batch = {k: v[:4] for k, v in case.batch().items()}
    assert capture(case.model(), kwargs=batch).graph.hash != captured("mlp").graph.hash


def test_positional_arguments():
    case = ALL["mlp"]
    found = capture(case.model(), tuple(case.batch().values()))
    assert [i.name for i in found.graph.inputs_of("input")] == ["args[0]", "args[1]"]


# --- wrong inputs -------------------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """A linear layer called in a way that the test gives."""

    def __init__(self, forward):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.way = forward

    def forward(self, x):
        return self.way(self.linear, x)


def branch(linear, x):
    if x.sum() > 0:
        x = 2 * x
    return linear(x).sum()


def item(linear, x):
    return linear(x).sum() * x.mean().item()


def boolean_mask(linear, x):
    return linear(x)[x[:, 0] > 0].sum()


def input_in_place(linear, x):
    x.mul_(2)
    return linear(x).sum()


def parameter_in_place(linear, x):
    with torch.no_grad():
        linear.weight.mul_(2)
    return linear(x).sum()


def no_tensor(linear, x):
    return 3


def nothing_to_train(linear, x):
    return linear(x).detach().sum()


def unseeded(linear, x):
    return linear(x).sum() + torch.multinomial(x.abs(), 2).sum()


def wrong_shape(linear, x):
    return linear(x.t()).sum()


def numpy_inside(linear, x):
    return linear(torch.from_numpy(x.numpy())).sum()


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


def unknown_container(linear, x):
    return Box(linear(x).sum())


@pytest.mark.parametrize(
    "way, words",
    [
        (branch, ["in branch: if x.sum() > 0:", "torch.where"]),
        (item, ["in forward: return self.way(self.linear, x)", "depends on the values"]),
        (boolean_mask, ["in forward: return self.way", "boolean mask as index"]),
        (input_in_place, ["input 'args[0]' in place", "clone()"]),
        (parameter_in_place, ["'linear.weight' in place", "register_buffer"]),
        (no_tensor, ["returns no tensor", "int"]),
        (nothing_to_train, ["nothing to train", "training=False"]),
        (unseeded, ["aten.multinomial.default", "in forward: return self.way", "pass the random numbers in"]),
        (wrong_shape, ["in wrong_shape: return linear(x.t()).sum()", "[8, 4] X [8, 8]"]),
        (numpy_inside, ["in numpy_inside", "without Meshwright"]),
        (unknown_container, ["Box", "register_pytree_node"]),
    ],
)
def test_what_cannot_be_captured_is_a_trace_error_with_place_and_remedy(way, words, capsys):
    model = Wrong(way)
    weight = model.linear.weight
    with pytest.raises(TraceError) as caught:
        capture(model, (torch.randn(4, 8),))
    for word in words:
        assert word in str(caught.value)
    assert model.linear.weight is weight and type(weight) is nn.Parameter
    assert capsys.readouterr() == ("", "")


def test_cause_of_a_trace_error_is_kept():
    with pytest.raises(TraceError) as caught:
        capture(Wrong(wrong_shape), (torch.randn(4, 8),))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_wrong_call_is_a_trace_error():
    with pytest.raises(TraceError, match="does not match forward's parameters"):
        capture(ALL["mlp"].model(), kwargs={"x": torch.randn(8, 32)})


def test_lazy_module_is_a_trace_error():
    with pytest.raises(TraceError, match="run the model once"):
        capture(nn.LazyLinear(4), (torch.randn(2, 3),))


@pytest.mark.parametrize(
    "model, args, kwargs, options, words",
    [
        (F.relu, (), None, {}, "torch.nn.Module is needed"),
        (nn.Linear(2, 2), [torch.ones(2)], None, {}, "args is a list"),
        (nn.Linear(2, 2), (), [torch.ones(2)], {}, "kwargs is a list"),
        (nn.Linear(2, 2), (torch.ones(2),), None, {"precision": "fp8"}, "precision 'fp8' is unknown"),
    ],
)
def test_wrong_arguments_are_input_errors(model, args, kwargs, options, words):
    with pytest.raises(InputError, match=words):
        capture(model, args, kwargs, **options)


def test_zoo_and_extra_have_no_name_in_common():
    assert not ZOO.keys() & EXTRA.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_a_causal_mask_without_padding_is_not_written_out(name):
    case = ZOO[name]
    batch = {k: v for k, v in case.batch().items() if k != "attention_mask"}
    graph = capture(case.model(), kwargs=batch).graph
    attention = [op for op in graph.ops if op.target.startswith("aten._scaled_dot_product") and op.phase == "forward"]
    assert attention
    seq = batch["input_ids"].shape[1]
    assert not any(v.dtype == torch.bool and v.shape[-2:] == (seq, seq) for op in graph.ops for v in op.outs if v is not None)


def test_position_ids_from_the_user_keep_the_mask_that_separates_packed_sequences():
    case = ZOO["llama"]
    batch = case.batch()
    rows, seq = batch["input_ids"].shape
    packed = torch.cat([torch.arange(seq // 2)] * 2).expand(rows, seq).contiguous()
    batch = {k: v for k, v in batch.items() if k != "attention_mask"} | {"position_ids": packed}
    model = case.model()
    found, expected = run(capture(model, kwargs=batch), model, **batch).output, model(**batch)
    torch.testing.assert_close(loss_of(found), loss_of(expected), rtol=1e-5, atol=0)
