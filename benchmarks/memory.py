"""Predicted peak memory against the live bytes of real training steps on CPU, model by strategy by recomputation.

    python benchmarks/memory.py [--only gpt2] [--json]

Each row runs two steps on two simulated ranks and follows every storage in the second (``tests/helpers/live_bytes.py``). Target: within
10 %, never predicted under the measured by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from tests.helpers.memory_runs import measure


def _gpt2(dropout: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = GPT2Config(vocab_size=1000, n_positions=256, n_embd=128, n_layer=4, n_head=4, use_cache=False, **drop)
        config.loss_type = "ForCausalLM"
        return GPT2LMHeadModel(config)

    return make


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": _gpt2(0.0), "gpt2-dropout": _gpt2(0.1), "llama": _llama}


def rows(only: str) -> Iterator[dict[str, Any]]:
    """One measurement per model, strategy and level whose model's name contains ``only``."""
    ids = torch.randint(0, 1000, (8, 256))
    for name, make in MODELS.items():
        for strategy in ("ddp", "zero3", "tp") if only in name else ():
            for level in ("none", "selective", "full"):
                m = measure(make, {"input_ids": ids, "labels": ids}, (2,), strategy=strategy, recompute=level)
                predicted, measured = m.plan.predicted.peak_memory_bytes, max(m.peaks)
                row = {"model": name, "strategy": strategy, "recompute": level, "predicted": predicted, "measured": measured}
                yield {"benchmark": "memory", **row, "ratio": round(m.ratio, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    for row in rows(args.only):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            sizes = f"{row['predicted'] / 1e6:8.2f} MB predicted {row['measured'] / 1e6:8.2f} MB measured"
            print(f"{row['model']:14}{row['strategy']:7}{row['recompute']:10}{sizes}  {row['ratio']:.3f}", flush=True)


if __name__ == "__main__":
    main()
