"""Every error a user can cause, by kind.

A message says what is wrong, where (node, axis, source line), what was found and what was needed, and what to do.
Context is added with ``add_note``; nothing wraps an error in another.
"""

from __future__ import annotations


class MeshwrightError(Exception):
    """Root of all errors raised by Meshwright."""


class InputError(MeshwrightError, ValueError):
    """What the user passed cannot be used: a model, a mesh, a batch, an option, a file."""


class TraceError(InputError):
    """The model cannot be captured as one graph; names the source line and what to change."""


class NoRuleError(InputError):
    """An op has no sharding rule and ``on_missing_rule="error"`` was asked for."""


class PlanFormatError(InputError):
    """A plan file is malformed, of another schema version, or does not match its own hash."""


class FormatError(InputError):
    """A file of a checkpoint or an export is malformed, cut off, tampered with, or not what its manifest says."""


class InfeasibleError(MeshwrightError):
    """No plan satisfies the constraints.

    Attributes:
        binding: the constraint that cannot hold (``"memory"``, or the name of a pin or strategy).
        needed_bytes: the smallest memory per device that would fit, in bytes; None where memory is not the reason.
    """

    def __init__(self, message: str, *, binding: str, needed_bytes: int | None = None):
        super().__init__(message)
        self.binding = binding
        self.needed_bytes = needed_bytes


class SolverError(MeshwrightError):
    """The solver failed on a program that it should be able to solve."""


class VerifyError(MeshwrightError):
    """A plan or a rewritten graph breaks its own invariants: a bug of ours or a hand-written plan that is wrong."""


class RuntimeMismatchError(MeshwrightError, RuntimeError):
    """Ranks disagree, or what runs is not what was planned; names the rank and the difference."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A checkpoint could not be written: a full disk, a lost rank; the checkpoints that were there before still are."""


class StepError(MeshwrightError, RuntimeError):
    """A training step over pipeline stages could not be finished; names who failed and what every rank was doing.

    The process group is destroyed, so that no rank waits for ever: the job must end and continue from a checkpoint.

    Attributes:
        rank: the global rank that failed, or None where that is not known.
        action: what it was doing: ``"computing F3 of stage 1"``, or ``""``.
    """

    def __init__(self, message: str, *, rank: int | None = None, action: str = ""):
        super().__init__(message)
        self.rank = rank
        self.action = action
