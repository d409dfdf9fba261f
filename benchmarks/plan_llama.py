"""How long planning Llama-3-8B takes: 32 layers on the meta device, for 8x8xH100, batch 64 of 8192 tokens, bf16.

    python benchmarks/plan_llama.py [--layers 32] [--mesh 8x8xH100] [--batch 64] [--seq 8192] [--json]

Needs no GPU and no weights. Baseline: the targets of this version, 60 s and 6 GB on 2 cores, printed beside each number.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import torch

TARGET_S = 60.0
TARGET_GB = 6.0


def model(layers: int) -> torch.nn.Module:
    """Llama-3-8B's shapes (public configuration), on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Capture and plan once; seconds by phase and sizes."""
    start = time.perf_counter()
    from meshwright.planner.cost import hardware_for
    from meshwright.planner.ir.mesh import Cluster
    from meshwright.planner.remat import save_few
    from meshwright.planner.search import make_plan
    from meshwright.planner.trace import capture

    cluster = Cluster.parse(args.mesh)
    built = model(args.layers)
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.int64, device="meta")
    imported = time.perf_counter()
    captured = capture(built, (), {"input_ids": tokens, "labels": tokens}, precision="bf16-mixed")
    traced = time.perf_counter()
    captured = save_few(captured)
    saved = time.perf_counter()
    plan = make_plan(
        captured,
        cluster.mesh,
        hardware_for(cluster.mesh, cluster.device, cluster),
        strategy=args.strategy,
        alternatives=not args.no_alternatives,
    )
    done = time.perf_counter()
    seconds = {"import": imported - start, "trace": traced - imported, "recompute": saved - traced}
    seconds |= {k.removesuffix("_s"): v for k, v in plan.solver.items() if k.endswith("_s")}
    return {
        "benchmark": "plan_llama",
        "layers": args.layers,
        "mesh": args.mesh,
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "total_s": round(done - start, 2),
        "target_s": TARGET_S,
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "target_gb": TARGET_GB,
        "ops": len(captured.graph.ops),
        "folded": {k: v for k, v in plan.folded.items() if isinstance(v, int)},
        "variables": plan.solver["variables"],
        "constraints": plan.solver["constraints"],
        "method": plan.solver["method"],
        "gap": plan.gap,
        "step_time_s": plan.predicted.step_time_s,
        "compute_s": plan.predicted.compute_s,
        "exposed_s": plan.predicted.exposed_s,
        "hidden_s": plan.predicted.hidden_s,
        "peak_memory_gb": round(plan.predicted.peak_memory_bytes / 1e9, 2),
        "memory_gb": {k: round(v / 1e9, 3) for k, v in plan.predicted.memory_bytes.items()},
        "alternatives": {a.strategy: a.step_time_s if a.fits else a.reason for a in plan.alternatives},
    }


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{found['mesh']}, {found['layers']} layers, {found['ops']} ops, {found['folded']}"]
    lines += [f"  {phase:14} {s:8.2f} s" for phase, s in found["seconds"].items()]
    lines.append(
        f"  {'total':14} {found['total_s']:8.2f} s   = {found['total_s'] / TARGET_S:.2f} of the target of {TARGET_S:g} s"
    )
    lines.append(
        f"  {'peak memory':14} {found['peak_rss_gb']:8.2f} GB  = {found['peak_rss_gb'] / TARGET_GB:.2f} of the target of {TARGET_GB:g} GB"
    )
    lines.append(
        f"  {found['variables']} variables, {found['constraints']} constraints, solved by {found['method']}, gap {found['gap']:.2%}"
    )
    lines.append(
        f"  step {found['step_time_s']:.3f} s (compute {found['compute_s']:.3f}, exposed {found['exposed_s']:.3f}, "
        f"hidden {found['hidden_s']:.3f}), {found['peak_memory_gb']} GB per device {found['memory_gb']}"
    )
    lines += [f"  {name}: {t if isinstance(t, str) else f'{t:.3f} s'}" for name, t in found["alternatives"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", default="8x8xH100")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--no-alternatives", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    args = parser.parse_args()
    found = measure(args)
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    main()
