"""Plans written by hand: legal values with everything that a report can show."""

from __future__ import annotations

from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.ir.plan import (
    Alternative,
    Collective,
    Fallback,
    InputInfo,
    MeshTried,
    OpInfo,
    OpSpec,
    Plan,
    Prediction,
    Redistribution,
)
from meshwright.planner.ir.spec import parse_placements

_GIB = 1024**3


def sample_plan() -> Plan:
    """A made-up plan of a 4-layer transformer on 2x4 devices; layer 3 differs from the others."""
    inputs = {"ids": "S(0)R", "wte": "RS(0)"}
    info = {
        "ids": InputInfo("input", "input_ids", (16, 128), "int64"),
        "wte": InputInfo("parameter", "wte.weight", (50257, 64), "float32", ("lm_head.weight",)),
    }
    ops, op_info = (
        {"embedding": "RS(0),S(0)R->S(0)P"},
        {"embedding": OpInfo("aten.embedding.default", "forward", "wte", (16, 128, 64))},
    )
    for layer in range(4):
        inputs[f"up_{layer}"] = "RS(0)" if layer < 3 else "S(0)R"
        info[f"up_{layer}"] = InputInfo("parameter", f"h.{layer}.mlp.up.weight", (256, 64), "float32")
        ops[f"mm_{layer}"] = "S(0)R,RS(1)->S(0)S(1)" if layer < 3 else "S(0)R,RR->S(0)R"
        op_info[f"mm_{layer}"] = OpInfo("aten.mm.default", "forward", f"h.{layer}.mlp.up", (2048, 256))
    ops["nll"], op_info["nll"] = "S(0)R->PR", OpInfo("aten.nll_loss_forward.default", "forward", "", ())
    return Plan(
        graph_hash="0" * 64,
        model="TinyTransformer",
        mesh=MeshShape((2, 4), ("node", "device")),
        device="H100",
        links=("InfiniBand NDR 400", "NVLink4"),
        memory_limit_bytes=76 * _GIB,
        strategy="auto",
        precision="bf16-mixed",
        optimizer="adamw",
        training=True,
        inputs={k: parse_placements(v) for k, v in inputs.items()},
        ops={k: OpSpec.parse(v) for k, v in ops.items()},
        outputs=(parse_placements("RR"), None),
        redistributions=(Redistribution("embedding", "forward", (parse_placements("S(0)P"), parse_placements("S(0)R"))),),
        collectives=(
            Collective("all_reduce", 1, 4 << 20, 120e-6, False, 8),
            Collective("all_gather", 0, 64 << 10, 15e-6, True, 1),
            Collective("reduce_scatter", 0, 64 << 10, 15e-6, True, 1),
        ),
        predicted=Prediction(
            9.1e-3,
            0.96e-3,
            30e-6,
            10.06e-3,
            {"parameters": 3 * _GIB, "optimizer": 6 * _GIB, "gradients": 3 * _GIB, "activations": 20 * _GIB},
        ),
        objective_s=10.06e-3,
        bound_s=10.0e-3,
        gap=0.006,
        fallbacks=(Fallback("aten.roll.default", 2, 41e-6, 1 << 20),),
        alternatives=(
            Alternative("ddp", False, 9.4e-3, 90 * _GIB, mesh=(8,)),
            Alternative("zero3", True, 12.6e-3, 30 * _GIB, mesh=(2, 4)),
            Alternative("tp", False, None, None, "batch 16 has no dim that 8 divides"),
        ),
        meshes=(
            MeshTried((2, 4), ("dp", "tp"), ("InfiniBand NDR 400", "NVLink4"), "chosen", 8.1e-3, 8.2e-3),
            MeshTried((8,), ("axis0",), ("NVLink4 + 4x InfiniBand NDR 400",), "slower", 9.0e-3, 9.1e-3),
            MeshTried((4, 2), ("axis0", "axis1"), ("a", "b"), "excluded", 8.3e-3, None, "its relaxation takes that long"),
            *(MeshTried((n,), ("axis0",), ("a",), "infeasible", reason="nothing fits") for n in range(2, 6)),
        ),
        solver={"trace_s": 1.2, "solve_s": 0.31, "variables": 18234},
        folded={"classes": 31, "clusters": 96},
        notes=("aten.roll.default has no rule: declare one with meshwright.rule",),
        input_info=info,
        op_info=op_info,
    )
