"""How long planning takes, whole process, from start to a saved plan, imports included.

    python benchmarks/plan_speed.py [--only llama-3-8b] [--json] [--timeout 300]

One row per model and cluster, each in a process of its own beside its target; then the same against depth (Llama-3-8B shapes,
8 to 128 layers) and against devices (8 to 16,384), where growth under 2x is the target. Needs no GPU and no weights.

Targets are wall seconds on two cores that are otherwise idle. On a loaded machine wall says little: CPU seconds (of the process,
user and system) and the load (of the last minute) stand beside it.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

START = time.perf_counter()
_SPAWNED = "PLAN_SPEED_SPAWNED"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: of the model; ``cluster`` it is planned for.
        model: a key of ``MODELS``, with its number of layers (0: its own).
        batch: global batch: sequences or images.
        seq: tokens of a sequence.
        target_s: seconds that it should take at most, or None.
    """

    name: str
    cluster: str
    model: str
    batch: int
    seq: int = 0
    layers: int = 0
    target_s: float | None = None


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> Callable[[int], Any]:
    def make(depth: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=depth or layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    return make


def _mixtral(depth: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32768,
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=depth or 56,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_local_experts=8,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def _gpt2_xl(depth: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=depth or 48, n_head=25, use_cache=False, loss_type="ForCausalLM"))


def _bert_large(depth: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=depth or 24, num_attention_heads=16, intermediate_size=4096)
    return BertForMaskedLM(config)


def _vit_h(depth: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1280,
        num_hidden_layers=depth or 32,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        image_size=224,
        num_labels=1000,
    )
    return ViTForImageClassification(config)


def _t5_3b(depth: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=128, d_ff=16384, num_layers=depth or 24, num_heads=32, decoder_start_token_id=0, use_cache=False
    )
    return T5ForConditionalGeneration(config)


def _resnet_152(depth: int) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 8, depth or 36, 3], layer_type="bottleneck", num_labels=1000)
    return ResNetForImageClassification(config)


# Public configurations. Sources: the models' config.json on the Hugging Face hub, and their papers.
MODELS: dict[str, Callable[[int], Any]] = {
    "llama-3-8b": _llama(4096, 14336, 32, 32),
    "llama-3-70b": _llama(8192, 28672, 80, 64),
    "llama-3-405b": _llama(16384, 53248, 126, 128),
    "mixtral-8x22b": _mixtral,
    "gpt2-xl": _gpt2_xl,
    "bert-large": _bert_large,
    "vit-h": _vit_h,
    "t5-3b": _t5_3b,
    "resnet-152": _resnet_152,
}
PHASES = (
    "import_s",
    "model_s",
    "trace_s",
    "recompute_s",
    "fuse_s",
    "fold_s",
    "build_s",
    "bound_s",
    "solve_s",
    "alternatives_s",
    "check_s",
    "expand_s",
    "describe_s",
    "save_s",
)
IMAGES = ("vit-h", "resnet-152")

ROWS = (
    Row("llama-3-8b", "8x8xH100", "llama-3-8b", 64, 8192, target_s=6),
    Row("llama-3-70b", "64x8xH100", "llama-3-70b", 512, 4096, target_s=10),
    Row("llama-3-405b", "2048x8xH100", "llama-3-405b", 2048, 8192, target_s=20),
    Row("mixtral-8x22b", "32x8xH100", "mixtral-8x22b", 256, 4096, target_s=20),
    Row("gpt2-xl", "2x8xA100-80", "gpt2-xl", 64, 1024, target_s=8),
    Row("bert-large", "2x8xA100-80", "bert-large", 256, 512, target_s=8),
    Row("vit-h", "2x8xA100-80", "vit-h", 256, target_s=8),
    Row("t5-3b", "2x8xA100-80", "t5-3b", 64, 512, target_s=8),
    Row("resnet-152", "2x8xA100-80", "resnet-152", 256, target_s=8),
    *(Row(f"depth-{n}", "8x8xH100", "llama-3-8b", 64, 8192, n) for n in (8, 16, 32, 64, 128)),
    *(Row(f"devices-{n * 8}", f"{n}x8xH100", "llama-3-8b", max(8 * n, 64), 8192) for n in (1, 8, 64, 512, 2048)),
)


def measure(row: Row) -> dict[str, Any]:
    """Plan once, in this process."""
    import torch

    import meshwright as mw

    if row.model in IMAGES:
        pixels = torch.empty(row.batch, 3, 224, 224, device="meta")
        inputs = {"pixel_values": pixels, "labels": torch.empty(row.batch, dtype=torch.int64, device="meta")}
    else:
        tokens = torch.empty(row.batch, row.seq, dtype=torch.int64, device="meta")
        inputs = {"input_ids": tokens, "labels": tokens}
    imported = time.perf_counter()
    plan = mw.plan(lambda: MODELS[row.model](row.layers).train(), row.cluster, inputs, precision="bf16-mixed")
    planned = time.perf_counter()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        plan.save(file.name)
    saved = time.perf_counter()
    return {
        "total_s": round(time.time() - float(os.environ.get(_SPAWNED, "nan")), 2),
        "cpu_s": round(time.process_time(), 2),
        "load": round(os.getloadavg()[0], 1),
        "import_s": round(imported - START, 2),
        **{k: round(v, 2) for k, v in plan.solver.items() if k.endswith("_s")},
        "save_s": round(saved - planned, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "gap": plan.gap,
        "step_time_s": plan.predicted.step_time_s,
        "ops": len(plan.ops),
        "classes": plan.folded["classes"],
        "captured": plan.folded.get("captured", []),
        "variables": plan.solver["variables"],
        "notes": list(plan.notes),
    }


def compile_package() -> None:
    """Bytecode of the package, as an installation has it: a checkout whose Python writes none would compile its source in every process."""
    import meshwright

    root = os.path.dirname(os.path.abspath(meshwright.__file__))
    for folder in (root, *(entry.path for entry in os.scandir(root) if entry.is_dir() and entry.is_symlink())):
        compileall.compile_dir(os.path.realpath(folder), quiet=2)


def in_own_process(row: Row, timeout_s: float) -> dict[str, Any]:
    """The row measured from the start of a process to its saved plan."""
    found: dict[str, Any] = {"benchmark": "plan_speed", "name": row.name, "cluster": row.cluster, "target_s": row.target_s}
    command = [sys.executable, os.path.abspath(__file__), "--child", row.name]
    environment = {**os.environ, _SPAWNED: str(time.time())}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {**found, "error": f"not done after {timeout_s:g} s"}
    if done.returncode:
        return {**found, "error": done.stderr.strip().splitlines()[-1]}
    return {**found, **json.loads(done.stdout.splitlines()[-1])}


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{found['name']:14} {found['cluster']:13}"
    if "error" in found:
        return f"{head} {found['error'][:120]}"
    target = f"{found['total_s'] / found['target_s']:5.2f} of {found['target_s']:g} s" if found["target_s"] else " " * 12
    parts = " ".join(f"{k.removesuffix('_s')} {found.get(k, 0):.2f}" for k in PHASES)
    return (
        f"{head} {found['total_s']:7.2f} s {target:13} cpu {found['cpu_s']:6.2f} s  load {found['load']:4.1f}  "
        f"{found['peak_rss_gb']:5.2f} GB  gap {found['gap']:6.2%}  {parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", help="part of a row's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one row")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(next(r for r in ROWS if r.name == args.child))))
        return
    compile_package()
    found = []
    for row in ROWS:
        if args.only is None or args.only in row.name:
            found.append(in_own_process(row, args.timeout))
            print(json.dumps(found[-1]) if args.json else line(found[-1]), flush=True)
    if not args.json:
        for series in ("depth-", "devices-"):
            of_series = [f for f in found if f["name"].startswith(series) and "error" not in f]
            if len(of_series) > 1:
                wall, cpu = (max(f[k] for f in of_series) / min(f[k] for f in of_series) for k in ("total_s", "cpu_s"))
                print(
                    f"{series.rstrip('-')}: the longest takes {wall:.2f} times the shortest, {cpu:.2f} in CPU seconds (target 2)"
                )


if __name__ == "__main__":
    main()
