"""Meshwright: automatic parallel planning and execution for PyTorch models.

    import meshwright as mw

    plan = mw.plan(model, "8x8xH100", batch)              # anywhere, no process group
    pm = mw.autoparallelize(model, mesh)                   # on every rank, under torchrun

Names are imported when first used, so that ``import meshwright`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.planner.ir import collector

if TYPE_CHECKING:
    from meshwright.advice import advise as advise
    from meshwright.api import autoparallelize as autoparallelize, plan as plan
    from meshwright.calculator import memory as memory
    from meshwright.custom import rule as rule
    from meshwright.planner.ir.errors import (
        CheckpointError as CheckpointError,
        FormatError as FormatError,
        InfeasibleError as InfeasibleError,
        InputError as InputError,
        MeshwrightError as MeshwrightError,
        NoRuleError as NoRuleError,
        PlanFormatError as PlanFormatError,
        RuntimeMismatchError as RuntimeMismatchError,
        SolverError as SolverError,
        StepError as StepError,
        TraceError as TraceError,
        VerifyError as VerifyError,
    )
    from meshwright.planner.ir.hardware import Device as Device, Hardware as Hardware, Link as Link
    from meshwright.planner.ir.mesh import Cluster as Cluster, MeshShape as MeshShape
    from meshwright.planner.ir.plan import Plan as Plan
    from meshwright.planner.ir.spec import Row as Row
    from meshwright.runtime.checkpoint.plain import to_safetensors as to_safetensors
    from meshwright.runtime.export.load import load as load
    from meshwright.verifying import Verified as Verified, verify as verify

__version__ = "0.1.0"

_HOME = {
    "autoparallelize": "meshwright.api",
    "plan": "meshwright.api",
    "advise": "meshwright.advice",
    "load": "meshwright.runtime.export.load",
    "memory": "meshwright.calculator",
    "rule": "meshwright.custom",
    "verify": "meshwright.verifying",
    "Verified": "meshwright.verifying",
    "to_safetensors": "meshwright.runtime.checkpoint.plain",
    "Cluster": "meshwright.planner.ir.mesh",
    "MeshShape": "meshwright.planner.ir.mesh",
    "Plan": "meshwright.planner.ir.plan",
    "Device": "meshwright.planner.ir.hardware",
    "Hardware": "meshwright.planner.ir.hardware",
    "Link": "meshwright.planner.ir.hardware",
    "Row": "meshwright.planner.ir.spec",
    "MeshwrightError": "meshwright.planner.ir.errors",
    "InputError": "meshwright.planner.ir.errors",
    "TraceError": "meshwright.planner.ir.errors",
    "NoRuleError": "meshwright.planner.ir.errors",
    "PlanFormatError": "meshwright.planner.ir.errors",
    "CheckpointError": "meshwright.planner.ir.errors",
    "FormatError": "meshwright.planner.ir.errors",
    "InfeasibleError": "meshwright.planner.ir.errors",
    "StepError": "meshwright.planner.ir.errors",
    "SolverError": "meshwright.planner.ir.errors",
    "VerifyError": "meshwright.planner.ir.errors",
    "RuntimeMismatchError": "meshwright.planner.ir.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}; it has {', '.join(__all__)}")
    with collector.paused():
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
