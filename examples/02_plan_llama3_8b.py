"""Plan the training of Llama 3 8B on 64 H100s, on a laptop: the model is made on the meta device, nothing is downloaded.

python examples/02_plan_llama3_8b.py
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
BATCH, SEQ = 64, 8192


def llama3_8b() -> torch.nn.Module:
    # Source: "The Llama 3 Herd of Models", arXiv:2407.21783, table 3.
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=LAYERS,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=SEQ,
            rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
            use_cache=False,
        )
    )


ids = torch.empty((BATCH, SEQ), dtype=torch.int64, device="meta")
plan = mw.plan(
    llama3_8b,
    "8x8xH100",
    {"input_ids": ids, "labels": ids},
    precision="bf16-mixed",
    progress=lambda phase: print(f"... {phase}", file=sys.stderr),
)
print(plan.report())
