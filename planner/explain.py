"""What to tell a user whose model cannot be captured."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator

from torch import nn

from meshwright.planner.ir.errors import TraceError
from meshwright.planner.provenance import source_of_error, source_of_stack

_REMEDIES = (
    (
        r"GuardOnDataDependent|DataDependentOutput|DynamicOutputShape|data-dependent|_local_scalar_dense|item\(\)",
        "its result depends on the values in a tensor (a branch on a tensor, .item(), nonzero, a boolean mask as index), but one "
        "graph must serve every batch: use torch.where or a mask instead of the branch, and fixed sizes instead of counted ones; "
        "compute what is data-dependent outside the model and pass it in",
    ),
    (
        r"mutat|in-?place|assigned during export",
        "it changes a tensor that is neither local nor a registered buffer: register the state with register_buffer, or return the new value",
    ),
    (
        r"fake mode|Unhandled FakeTensor Device|same device|meta device|[Cc]annot access data pointer",
        "it mixes in a tensor that is no parameter, buffer or input: register it with register_buffer, or make it in forward "
        "on the device of an input",
    ),
    (
        r"use_reentrant",
        "reentrant checkpointing cannot be seen through: pass use_reentrant=False to torch.utils.checkpoint, or leave it out, since "
        "what is computed again is planned",
    ),
    (
        r"not linked with support|Torch not compiled with|CUDA",
        "it names a device: make tensors on the device of an input (x.device), which is decided when the plan runs",
    ),
    (
        r"required positional argument|unexpected keyword argument|multiple values for argument|takes \d+ positional",
        "the call does not match forward's parameters: check args and kwargs",
    ),
    (
        r"double backward|trying to backward|autograd\.grad",
        "it differentiates inside forward, which one joint graph cannot hold: take that gradient outside of the model",
    ),
)


def _explained(error: Exception, model: nn.Module) -> TraceError:
    """What to tell the user about an error inside capture."""
    name = type(model).__name__
    where = source_of_error(error.__traceback__) or source_of_stack(str(error))
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {first_line}"
    remedy = next(
        (r for pattern, r in _REMEDIES if re.search(pattern, text)), "check that the model runs on this batch without Meshwright"
    )
    at = f" at {where}" if where else ""
    return TraceError(f"{name} cannot be captured as one graph{at}: {remedy}. torch said {type(error).__name__}: {first_line}")


_TALKATIVE = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers that report a failing trace at length, which our own error does in a sentence."""


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """What is printed inside is printed once the block has succeeded, and forgotten if it fails."""
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
        yield
    print(printed.getvalue(), end="")
    print(complaints.getvalue(), end="", file=sys.stderr)


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Turns any exception inside into a :class:`TraceError` with the cause kept; torch's own reports stay silent.

    What the model prints is printed once the block has succeeded.
    """
    levels = {name: logging.getLogger(name).level for name in _TALKATIVE}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with kept_back():
            yield
    except TraceError:
        raise
    except Exception as error:
        raise _explained(error, model) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
