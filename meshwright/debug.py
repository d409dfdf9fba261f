"""The debug ladder: ``MESHWRIGHT_DEBUG=1`` phases and times, ``2`` solver sizes and gap, ``3`` the plan's report, ``4`` graphs
after each pass (``passes/base.py``), ``5`` the solver's log (``planner/solve/backend.py``). Each level includes those below.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from meshwright.planner.ir.plan import Plan

Progress = Callable[[str], None]


def level() -> int:
    """The level asked for; 0 without one, and on all ranks but the first."""
    text = os.environ.get("MESHWRIGHT_DEBUG", "0")
    return int(text) if text.isdigit() and os.environ.get("RANK", "0") == "0" else 0


def watched(progress: Progress | None) -> Progress:
    """``progress``, and from level 1 on a line with the seconds so far for every phase as it begins."""
    tell = progress or (lambda phase: None)
    if level() < 1:
        return tell
    started = time.perf_counter()

    def both(phase: str) -> None:
        _say(f"{time.perf_counter() - started:7.2f} s  {phase}")
        tell(phase)

    return both


def show_plan(plan: Plan) -> None:
    """What levels 2 and 3 say about a plan."""
    if level() >= 2:
        sizes = ", ".join(f"{k} {v}" for k, v in {**plan.solver, **plan.folded}.items())
        _say(f"objective {plan.objective_s:.6g} s, bound {plan.bound_s:.6g} s, gap {plan.gap:.2%}; {sizes}")
    if level() >= 3:
        _say("\n" + plan.report())


def _say(text: str) -> None:
    print(f"[meshwright] {text}", file=sys.stderr, flush=True)
