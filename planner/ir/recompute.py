"""What the backward computes again: a level for the whole program, or for the first of its repeated blocks and the others.

========= ==========================================================================================================
none      cheap ops alone (views, pointwise, casts, random numbers), where that keeps fewer bytes
selective also every other op but matrix products and convolutions: normalisations, softmax, attention of short sequences
full      everything inside a block: of a block only what it reads from outside is kept
========= ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.ir.errors import InputError, PlanFormatError

LEVELS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Recompute:
    """A choice of what the backward computes again.

    Attributes:
        level: one of ``LEVELS``.
        blocks: how many of the blocks, in the order in which they run, are at ``level``; None: all.
        rest: level of the other blocks.
    """

    level: str = "none"
    blocks: int | None = None
    rest: str = "none"

    def __post_init__(self) -> None:
        for level in (self.level, self.rest):
            if level not in LEVELS:
                raise InputError(f"recompute level {level!r} is unknown: use one of {', '.join(map(repr, LEVELS))}")
        if self.blocks is not None and (self.blocks < 1 or self.level == self.rest):
            raise InputError(f"recompute {self.level!r} in {self.blocks} blocks and {self.rest!r} in the others says nothing")

    @property
    def is_mixed(self) -> bool:
        return self.blocks is not None

    def level_of(self, block: int) -> str:
        """Level of the block that is number ``block`` in the order in which they run."""
        return self.level if self.blocks is None or block < self.blocks else self.rest

    def __str__(self) -> str:
        return self.level if self.blocks is None else f"{self.level} in the first {self.blocks} blocks, {self.rest} in the others"

    def to_json_dict(self) -> dict[str, Any]:
        return {"level": self.level} if self.blocks is None else {"level": self.level, "blocks": self.blocks, "rest": self.rest}

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> Recompute:
        """Read what :meth:`to_json_dict` wrote.

        Raises:
            PlanFormatError: an unknown field or level.
        """
        try:
            return cls(**data)
        except (InputError, TypeError) as e:
            raise PlanFormatError(f"recompute of the plan is malformed: {e}") from None
