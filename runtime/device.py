"""From the kernels of the CPU, where programs are captured, to those of the device that runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.passes.program import LocalProgram

_aten = torch.ops.aten


def use_device_kernels(program: LocalProgram, device: torch.device) -> LocalProgram:
    """Rewrite in place the ops that exist on the CPU only: its attention becomes the device's memory-efficient one.

    Nothing changes for ``device("cpu")``.

    Returns:
        ``program``.
    """
    if device.type == "cpu":
        return program
    for module in program.graphs:
        for node in list(module.graph.nodes):
            if node.op != "call_function":
                continue
            replace = _REPLACED.get(node.target)
            if replace is not None:
                replace(module.graph, node, device)
        module.graph.lint()
        module.recompile()
    return program


# aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None,
# scale=None) -> (output, logsumexp); its backward (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *,
# attn_mask=None, scale=None) -> (grad_query, grad_key, grad_value). Source: native_functions.yaml of torch 2.13.


_LSE_MULTIPLE = 32
"""The memory-efficient kernels make and want logsumexp padded to a multiple of this, with infinity: no probability there. The program
has it without. Source: ``kAlignLSE`` of torch's mem_eff_attention."""


def _attention(graph: fx.Graph, node: fx.Node, device: torch.device) -> None:
    query, key, value, dropout, causal = _positional(node, 0.0, False)
    mask = node.kwargs.get("attn_mask")
    node.target = _aten._scaled_dot_product_efficient_attention.default
    node.args, node.kwargs = (query, key, value, mask, True, dropout, causal), {"scale": node.kwargs.get("scale")}
    length = _num_queries(query)
    for result in [user for user in node.users if user.args[1] == 1] if length % _LSE_MULTIPLE else []:
        readers = list(result.users)
        with graph.inserting_after(result):
            cut = graph.call_function(_aten.slice.Tensor, (result, 2, 0, length))
        cut.meta.update(result.meta)
        for reader in readers:
            reader.replace_input_with(result, cut)


def _attention_backward(graph: fx.Graph, node: fx.Node, device: torch.device) -> None:
    grad, query, key, value, out, logsumexp, dropout, causal = node.args
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    with graph.inserting_before(node):
        # the random state of attention's own dropout, which is 0 here: dropout is a separate op in captured graphs
        state = graph.call_function(_aten.full.default, ([], 0), {"dtype": torch.int64, "device": device})
        if missing := -_num_queries(query) % _LSE_MULTIPLE:
            logsumexp = graph.call_function(_aten.constant_pad_nd.default, (logsumexp, [0, missing], math.inf))
    node.target = _aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    node.args = (grad, query, key, value, mask, out, logsumexp, state, state, dropout, wanted, causal)
    node.kwargs = {"scale": scale}


def _num_queries(query: Any) -> int:
    """Of a query node [B, H, Q, D]."""
    return int(query.meta["val"].shape[2])


def _positional(node: fx.Node, *defaults: Any) -> list[Any]:
    missing = 5 - len(node.args)
    return [*node.args, *(defaults[len(defaults) - missing :] if missing else ())]


_REPLACED: dict[object, Callable[[fx.Graph, fx.Node, torch.device], None]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
