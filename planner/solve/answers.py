"""What is asked of a search, and what it says."""

from __future__ import annotations

from dataclasses import dataclass


class NoPlanFoundError(RuntimeError):
    """A limit of the effort was reached without any plan, and none was excluded."""


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        gap: relative gap at which to stop.
        nodes: nodes of a search tree at most. A count, not a time: equal input, equal plan.
        time_limit_s: seconds for one integer program, for safety: never reached as a rule, and told when it is.
        rounds: prices tried by a scan at most.
        columns: columns of all relaxations together from which on no node is split; a count, as ``nodes``.
        prices: prices of overlap and memory at which messages are passed before anything is solved, at most.
        foreseen: part of ``gap`` at which a plan that is foreseen is taken without looking further.
    """

    gap: float = 1e-2
    nodes: int = 200
    time_limit_s: float = 30.0
    rounds: int = 12
    columns: int = 100_000
    prices: int = 12
    foreseen: float = 0.1

    def takes(self, cost: float, bound: float) -> bool:
        """Whether a plan that is foreseen is so near to the bound that it is taken as it is."""
        return cost * (1 - self.foreseen * self.gap) <= bound


@dataclass(frozen=True)
class Solution:
    """A choice for everything.

    Attributes:
        chosen: candidate of every choice.
        objective_s: objective in seconds, tie-breaks and penalties included.
        bound_s: proved lower bound of it.
        method: ``"messages"`` (nothing was solved), ``"lp"`` (relaxations alone), ``"mip"`` (integer programs too), ``"branch"`` (halves too); with ``", limit"`` where
            the search stopped before the gap asked for.
        columns: columns of the program.
        rows: rows of the program.
        weights: of overlap at which the bound was highest, by segment; None where nothing was solved.
    """

    chosen: tuple[int, ...]
    objective_s: float
    bound_s: float
    method: str
    columns: int
    rows: int
    weights: tuple[float, ...] | None = None

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the bound; 0 where proved optimal."""
        return max(0.0, (self.objective_s - self.bound_s) / max(abs(self.objective_s), 1e-30))


@dataclass
class Unlimited:
    """What is learned on the way about the problem without its memory limit.

    Attributes:
        bound_s: lower bound of the objective; weak where the limit binds.
    """

    bound_s: float = 0.0


@dataclass(frozen=True)
class Excluded:
    """No plan that is good enough: all cost at least ``bound_s``."""

    bound_s: float
