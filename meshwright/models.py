"""Models named on the command line: a local Hugging Face config, or a factory in a module."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.inputs import model_of
from meshwright.planner.ir.errors import InputError


@dataclass(frozen=True)
class NamedModel:
    """A model and a batch for it.

    Attributes:
        name: what the user calls it.
        model: the module, on the meta device.
        example_inputs: keywords or positional arguments of its call, as ``plan`` takes them.
    """

    name: str
    model: torch.nn.Module
    example_inputs: Any


def load_named(text: str, batch: int, seq: int, device: str = "meta") -> NamedModel:
    """The model that ``text`` names, on the meta device, and a meta batch of ``batch`` x ``seq``.

    Args:
        text: path of a Hugging Face ``config.json`` or of the directory that holds it; or ``package.module:factory``, where
            ``factory()`` gives a module (and then ``example_inputs(batch, seq)`` of the same module gives the batch) or a
            pair of module and example inputs.
        batch: global batch size.
        seq: sequence length (models of sequences only).
        device: where the model is made instead.

    Raises:
        InputError: nothing such, or a kind of model for which no batch is known.
    """
    if ":" in text and not os.path.exists(text):
        return _from_factory(text, batch, seq, device)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(
            f"model {text!r}: no such file; write the path of a Hugging Face config.json (or its directory), or package.module:factory"
        )
    return _from_config(path, batch, seq, device)


# --- factories ----------------------------------------------------------------------------------------------------


def _from_factory(text: str, batch: int, seq: int, device: str) -> NamedModel:
    where, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{where}.".startswith(f"{e.name}."):
            raise
        raise InputError(
            f"model {text!r}: no module named {e.name!r} (searched the current directory and the installed packages)"
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"model {text!r}: {where} has no callable {name!r}")
    with torch.device(device):
        made = factory()
    if isinstance(made, tuple):
        return NamedModel(text, model_of(made[0]), made[1])
    make_inputs = getattr(module, "example_inputs", None)
    if make_inputs is None:
        raise InputError(
            f"model {text!r}: {name}() gives a module without a batch; let it return (module, example_inputs), "
            f"or define example_inputs(batch, seq) in {where}"
        )
    return NamedModel(text, model_of(lambda: made), make_inputs(batch, seq))


# --- Hugging Face -------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _language(config: Any, batch: int, seq: int) -> Batch:
    return {"input_ids": _ids(batch, seq), "labels": _ids(batch, seq)}


def _classified(config: Any, batch: int, seq: int) -> Batch:
    return {"input_ids": _ids(batch, seq), "labels": _ids(batch)}


def _images(config: Any, batch: int, seq: int) -> Batch:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.empty((batch, config.num_channels, height, width), device="meta")
    return {"pixel_values": pixels, "labels": _ids(batch)}


_BATCHES: tuple[tuple[str, Callable[[Any, int, int], Batch]], ...] = (
    ("ForImageClassification", _images),
    ("ForSequenceClassification", _classified),
    ("ForCausalLM", _language),
    ("LMHeadModel", _language),
    ("ForMaskedLM", _language),
    ("ForConditionalGeneration", _language),
    ("ForTokenClassification", _language),
)
"""End of a class name to the batch that its training takes."""


def _from_config(path: Path, batch: int, seq: int, device: str) -> NamedModel:
    try:
        import transformers
    except ImportError:
        raise InputError("a Hugging Face config needs transformers: pip install 'meshwright[hf]'") from None
    # What it warns of (token ids, loss types, generation) has no weight in a plan.
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(
            path.parent if path.name == "config.json" else path, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as e:
        raise InputError(f"{path} is not a config that transformers {transformers.__version__} knows: {e}") from None
    kind = _class_of(config, transformers, path)
    make_batch = next((make for end, make in _BATCHES if kind.__name__.endswith(end)), None)
    if make_batch is None:
        raise InputError(
            f"{path}: no batch is known for {kind.__name__}; known are classes ending in {', '.join(end for end, _ in _BATCHES)}; "
            "for others write package.module:factory"
        )
    config.use_cache = False
    with torch.device(device):
        model = kind(config)
    return NamedModel(kind.__name__, model.train(), make_batch(config, batch, seq))


def _class_of(config: Any, transformers: Any, path: Path) -> Any:
    """The class that the config names, else the causal language model of its type."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None:
            return kind
    auto = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForMaskedLM)
    for family in (*auto, transformers.AutoModelForImageClassification):
        if type(config) in family._model_mapping:
            return family._model_mapping[type(config)]
    raise InputError(
        f"{path}: 'architectures' names no class of transformers, and none is known for model type {config.model_type!r}"
    )
