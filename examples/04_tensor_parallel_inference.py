"""Inference with tensor parallelism: every rank holds a part of each weight, and all of them answer together.

meshwright run -n 2 examples/04_tensor_parallel_inference.py
"""

import torch
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    use_cache=False,
)
whole = LlamaForCausalLM(config).eval()
prompt = torch.randint(256, (4, 16))

with torch.no_grad():
    expected = whole(input_ids=prompt).logits
    model = mw.autoparallelize(whole, (dist.get_world_size(),), {"input_ids": prompt}, strategy="tp")
    logits = model(input_ids=prompt).logits

if dist.get_rank() == 0:
    print(model.plan.report())
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"this rank holds {held:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"next tokens {logits[:, -1].argmax(-1).tolist()}, largest difference {(logits - expected).abs().max():.1e}")
torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
