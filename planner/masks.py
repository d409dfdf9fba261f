"""Hugging Face models skip a causal mask that says no more than ``is_causal=True``, but not while being exported.

An exported program may be run on other shapes and positions than it was exported for, so ``transformers`` then writes
out the mask of shape [batch, 1, sequence, sequence]. A capture here is for exactly the call it was made with, so it may
do what eager execution does: without padding and without position ids from the user no mask is made, and attention runs
the kernel that needs none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

_MODULE = "transformers.masking_utils"


@contextlib.contextmanager
def as_in_eager(positions_given: bool) -> Iterator[None]:
    """While entered, masks are made as in eager execution; nothing happens where transformers is not in use.

    Args:
        positions_given: whether the call passes position ids, which may pack several sequences into one row. Position
            ids that a model makes by itself count up by one: one sequence a row.
    """
    answers: dict[str, Callable[..., Any]] = {"is_torchdynamo_exporting": lambda: False}
    if not positions_given:
        answers["find_packed_sequence_indices"] = lambda position_ids: None
    module = sys.modules.get(_MODULE)
    before = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
