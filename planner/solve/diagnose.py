"""Why there is no plan: which constraint cannot hold, and the smallest change that would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.planner.ir.errors import InfeasibleError
from meshwright.planner.solve.optimise import optimise
from meshwright.planner.solve.problem import Restriction
from meshwright.planner.solve.tables import Tables

# The memory row is kept this fraction below the limit, so that the solver's tolerance never breaks the limit itself.
ROW_MARGIN = 1e-6

WHAT_TO_DO: Mapping[str, str] = {
    "parameters": "more devices, a smaller model, or a strategy that shards parameters ('zero3', 'tp', 'auto')",
    "gradients": "more devices, or a strategy that shards parameters and with them gradients ('zero3', 'tp', 'auto')",
    "optimizer": "more devices, an optimizer with less state (optimizer='sgd'), or a strategy that shards parameters",
    "accumulated": "no sums over passes: micro_batches= in one step, or a strategy that shards parameters and with them gradients",
    "activations": "a smaller batch or sequence per device, more devices, or more recomputation",
    "working": "a smaller batch or sequence per device: one op's operands and results alone take this",
    "gathered": "a mesh on which the largest parameter can stay sharded in use ('tp'), or a smaller one",
    "buffers": "a model with smaller buffers: they are replicated",
    "inputs": "a smaller batch",
}


def explain_infeasible(
    tables: Tables,
    parts: Sequence[tuple[str, Restriction]],
    limit: int | None,
    memory: Mapping[str, int] | None,
    recompute: str = "none",
) -> InfeasibleError:
    """The error for a problem without solution.

    Args:
        tables: the problem.
        parts: what was demanded, each with the name it has for the user (``"strategy 'tp'"``, ``"pin '*.weight'"``).
        limit: the memory limit in bytes.
        memory: what the smallest plan needs, by category; None where there is none.
        recompute: what the backward computes again, in words.

    Returns:
        An error to raise, with the binding constraint, and the smallest memory that would fit if that is it.
    """
    if memory is None:
        return _contradiction(tables, parts)
    needed = int(sum(memory.values()) * (1 + 3 * ROW_MARGIN)) + 1
    category = max(memory, key=lambda k: memory[k])
    under = f" under {' and '.join(name for name, _ in parts)}" if parts else ""
    even = "" if recompute == "none" else f" even with recompute={recompute!r}"
    over = f", over the limit by {size_text(needed - limit)}" if limit else ""
    return InfeasibleError(
        f"no plan on mesh {tables.mesh}{under} fits {size_text(limit or 0)} per device{even}: the smallest needs {size_text(needed)} ({needed} bytes)"
        f"{over}; {category} take {size_text(memory[category])} of it. What helps: {WHAT_TO_DO.get(category, 'more devices')}",
        binding="memory",
        needed_bytes=needed,
    )


def _contradiction(tables: Tables, parts: Sequence[tuple[str, Restriction]]) -> InfeasibleError:
    """Name the smallest set of demands, taken in order, that contradict one another."""
    needed = list(parts)
    for part in parts:
        fewer = [p for p in needed if p is not part]
        if fewer and _contradict(tables, fewer):
            needed = fewer
    names = [name for name, _ in needed]
    return InfeasibleError(
        f"no plan on mesh {tables.mesh} satisfies {' together with '.join(names)}: "
        + ("they contradict each other; drop one" if len(names) > 1 else "drop it, or ask for another placement"),
        binding=" and ".join(names),
    )


def _contradict(tables: Tables, parts: Sequence[tuple[str, Restriction]]) -> bool:
    whole = Restriction()
    for _, part in parts:
        whole = whole.merged(part)
    return optimise(tables.problem, whole, tables.cache, objective="memory") is None


def size_text(number: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number} bytes"
