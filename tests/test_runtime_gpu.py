"""On one CUDA device: the ops that exist on the CPU only are replaced, and the numbers stay."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx

from meshwright.passes.program import LocalProgram
from meshwright.planner.ir.mesh import MeshShape
from meshwright.runtime.device import use_device_kernels
from meshwright.runtime.mesh import make_mesh
from meshwright.runtime.module import build
from tests.helpers.legal_plans import replicated_plan
from tests.helpers.models import ALL, loss_of
from tests.helpers.prepared import captured, reference

_aten = torch.ops.aten


def _attention_program(queries: int) -> LocalProgram:
    """Attention of ``queries`` queries and its backward, as captured on the CPU."""
    graph = fx.Graph()
    q, k, v, grad = (graph.placeholder(name) for name in "qkvg")
    for node in (q, grad):
        node.meta["val"] = torch.empty(2, 4, queries, 8, device="meta")
    both = graph.call_function(_aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, True), {"scale": 0.5})
    out, lse = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    back = graph.call_function(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (grad, q, k, v, out, lse, 0.0, True), {"scale": 0.5}
    )
    graph.output((out, back))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return LocalProgram(module, None, ("q",), (), (), (), (), (), (), {}, (), "")


def test_the_cpus_attention_becomes_the_memory_efficient_one():
    code = use_device_kernels(_attention_program(64), torch.device("cuda")).forward.code
    assert "_scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, True, scale = 0.5)" in code
    assert "[True, True, True, False], True, scale = 0.5)" in code and "for_cpu.default(" not in code
    assert "slice" not in code and "pad" not in code


def test_logsumexp_is_padded_for_the_memory_efficient_kernels_alone():
    """Whatever stands between the two calls (a merge, a redistribution) sees as many sums as there are queries."""
    module = use_device_kernels(_attention_program(40), torch.device("meta")).forward
    q, k, v, grad = (torch.empty(2, 4, 40, 8, device="meta") for _ in range(4))
    out, (grad_q, *_) = module(q, k, v, grad)[0], module(q, k, v, grad)[1]
    assert out.shape == grad_q.shape == q.shape
    shapes = {
        str(n.target).split(".")[1]: n.args for n in module.graph.nodes if n.op == "call_function" and "aten" in str(n.target)
    }
    assert shapes["slice"][1:] == (2, 0, 40) and shapes["constant_pad_nd"][1:] == ([0, 24], float("inf"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "gpt2", "cnn", "gpt2_dropout"])
def test_a_model_trains_on_one_cuda_device(name, tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = make_mesh("cuda", (1,))
        pm = build(ALL[name].model(), captured(name), replicated_plan(captured(name), MeshShape.of(1)), mesh)
        loss = loss_of(pm(**ALL[name].batch()))
        loss.backward()
        assert all(p.device.type == "cuda" for p in pm.parameters())
        if not ALL[name].random:
            torch.testing.assert_close(loss.detach().cpu(), reference(name).loss, rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()
