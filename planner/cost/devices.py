"""The devices we know. Rates are peaks of the data sheet; matmul ceilings are measured."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Device

_TERA, _GIGA = 1e12, 1e9

_H100 = Device(
    name="H100",
    memory_bytes=80 * 10**9,
    memory_bytes_per_s=3350 * _GIGA,
    peak_flops_per_s={"float64": 67 * _TERA, "float32": 67 * _TERA, "bfloat16": 989 * _TERA, "float16": 989 * _TERA},
    matmul_efficiency={"float64": 0.80, "float32": 0.80, "bfloat16": 794.5 / 989, "float16": 794.5 / 989},
    kernel_overhead_s=4e-6,
    source="NVIDIA H100 SXM5 data sheet, dense; bf16 ceiling 794.5 TFLOP/s measured (ml-engineering, MAMF); float32 is the "
    "non-tensor-core rate (torch's default precision) and its ceiling is assumed to be that of bf16; 4 us per kernel is an "
    "assumed launch-to-launch time",
)

DEVICES: dict[str, Device] = {
    "H100": _H100,
    "H200": replace(
        _H100,
        name="H200",
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4800 * _GIGA,
        source="NVIDIA H200 data sheet, dense; bf16 ceiling 794.5 TFLOP/s measured (ml-engineering, MAMF); the rest as H100",
    ),
    "A100-80": Device(
        name="A100-80",
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2039 * _GIGA,
        peak_flops_per_s={"float64": 19.5 * _TERA, "float32": 19.5 * _TERA, "bfloat16": 312 * _TERA, "float16": 312 * _TERA},
        matmul_efficiency={"float64": 0.87, "float32": 0.87, "bfloat16": 271.2 / 312, "float16": 271.2 / 312},
        kernel_overhead_s=4e-6,
        source="NVIDIA A100 80GB SXM data sheet, dense; bf16 ceiling 271.2 TFLOP/s measured (ml-engineering, MAMF, torch 2.6); "
        "float32 is the non-tensor-core rate and its ceiling is assumed to be that of bf16; 4 us per kernel is assumed",
    ),
    "CPU": Device(
        name="CPU",
        memory_bytes=8 * 10**9,
        memory_bytes_per_s=27 * _GIGA,
        peak_flops_per_s={"float64": 33 * _GIGA, "float32": 67 * _GIGA, "bfloat16": 190 * _GIGA, "float16": 67 * _GIGA},
        matmul_efficiency={"float64": 0.9, "float32": 0.9, "bfloat16": 0.9, "float16": 0.9},
        kernel_overhead_s=7e-6,
        source="one core of a shared 2-core AMD EPYC 9004 machine (AVX-512), torch 2.13, one thread per rank: best of five "
        "1024 x 1024 matmuls (67 GFLOP/s float32, 191 bfloat16; float64 taken as half of float32), three-stream add of 64 MB "
        "(27 GB/s), 7 us per node of generated code; memory is an assumed share of the machine; gloo's threads run on the same core; 150 us of "
        "torch's schedule and this runtime per action of a stage, without its messages; functions: mean of exp, gelu, its gradient, sigmoid and "
        "layer norm, besides their traffic",
        moves_data=True,
        fuses=False,
        action_overhead_s=1.5e-4,
        functions_per_s=1.8e9,
    ),
}
"""Device name to record."""

_ALIASES = {
    "h100-sxm": "H100",
    "h100-80": "H100",
    "h100-80gb": "H100",
    "h100-sxm5": "H100",
    "h200-sxm": "H200",
    "h200-141": "H200",
    "h200-141gb": "H200",
    "a100": "A100-80",
    "a100-80gb": "A100-80",
    "a100-80gb-sxm": "A100-80",
    "a100-sxm": "A100-80",
    "cpu": "CPU",
}

_TILES = {"H100": (132 * 128 * 128, 32), "H200": (132 * 128 * 128, 32), "A100-80": (108 * 128 * 128, 32), "CPU": (0, 16)}
_DEFAULT_TILES = (100 * 128 * 128, 32)


def device_for(name: str) -> Device:
    """The record of a device, by name or alias in any case.

    Raises:
        InputError: no such device is known; the message lists those that are.
    """
    found = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    found = found or DEVICES.get(_ALIASES.get(name.lower(), ""))
    if found is None:
        raise InputError(f"device {name!r} is not known; known are {', '.join(DEVICES)} (also A100 for A100-80)")
    return found


def matmul_tiles(device: Device) -> tuple[int, int]:
    """(output elements that one wave of matmul tiles covers, half of the tile lost at an edge).

    Source: one 128 x 128 tile (cuBLAS's common one) on each of 132 or 108 multiprocessors (H100, A100 data sheets), edges
    computed in steps of 64; on CPUs fitted to float32 matmuls of 2 to 1024 rows by matrices of 48 x 192 to 1024 x 1024 on one core (AMD
    EPYC 9004, torch 2.13; 10 % off, 29 % where a side is 16 or less): loading and packing the larger side takes as long as 16 more rows.
    """
    return _TILES.get(device.name, _DEFAULT_TILES)
