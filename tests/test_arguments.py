"""What users pass: models, batches, meshes, devices, sizes; each mistake is one typed error that says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.inputs import call_of, model_of
from meshwright.models import load_named
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import Cluster, MeshShape
from meshwright.target import target_of

X = torch.zeros(2, 3)

# --- batches and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [((X, 1), (X, 1), {}), ([X], (X,), {}), ({"x": X}, (), {"x": X}), (X, (X,), {}), (lambda: {"x": X}, (), {"x": X})],
)
def test_example_inputs_come_in_five_forms(given, args, kwargs):
    found_args, found_kwargs = call_of(given)
    assert list(map(id, found_args)) == list(map(id, args)) and found_kwargs.keys() == kwargs.keys()


def test_other_example_inputs_are_refused():
    with pytest.raises(InputError, match="example_inputs is int; it must be a tuple of positional arguments"):
        call_of(3)
    with pytest.raises(InputError, match="example_inputs is empty"):
        call_of({})
    with pytest.raises(InputError, match="example_inputs is dict"):
        call_of({1: X})


def test_a_factory_is_called_on_the_meta_device():
    assert model_of(lambda: nn.Linear(10**5, 10**5)).weight.is_meta


def test_what_is_no_model_is_refused():
    with pytest.raises(InputError, match="model is int; it must be an nn.Module"):
        model_of(3)
    with pytest.raises(InputError, match="the model factory returned Tensor"):
        model_of(lambda: X)


# --- meshes and devices -------------------------------------------------------------------------------------------


def test_a_cluster_text_gives_mesh_and_device():
    target = target_of("2x4xH100")
    assert target.mesh == MeshShape((2, 4), ("node", "device"))
    assert target.hardware.device.name == "H100" and len(target.hardware.links) == 2
    assert target_of(Cluster(1, 8, "A100-80")).mesh == MeshShape((8,), ("device",))


def test_a_hardware_record_is_taken_as_it_is():
    hardware = target_of("2x4xH100").hardware
    assert target_of(MeshShape.of(4, 2), hardware).hardware == hardware
    with pytest.raises(InputError, match="hardware has 1 links, but mesh 4x2 has 2 axes: give one link per axis"):
        target_of(MeshShape.of(4, 2), Hardware(hardware.device, hardware.links[:1]))


def test_meshes_that_cannot_be_planned_for_are_refused():
    with pytest.raises(InputError, match="a mesh of 2x2 says nothing about its devices: pass hardware='H100'"):
        target_of(MeshShape.of(2, 2))
    with pytest.raises(InputError, match="unknown device 'B9000'; known are .*H100"):
        target_of("8x8xB9000")
    with pytest.raises(InputError, match="cluster '8 by 8' is not NODESxGPUSxDEVICE"):
        target_of("8 by 8")
    with pytest.raises(InputError, match="mesh is int; it must be a torch DeviceMesh"):
        target_of(8)


# --- models by name -----------------------------------------------------------------------------------------------

CONFIGS = {
    "gpt2": ({"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 96}, "GPT2LMHeadModel", {"input_ids", "labels"}),
    "llama": (
        {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96},
        "LlamaForCausalLM",
        {"input_ids", "labels"},
    ),
    "bert": (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "architectures": ["BertForSequenceClassification"]},
        "BertForSequenceClassification",
        {"input_ids", "labels"},
    ),
    "vit": (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        "ViTForImageClassification",
        {"pixel_values", "labels"},
    ),
    "t5": (
        {"num_layers": 1, "d_model": 32, "num_heads": 4, "vocab_size": 96},
        "T5ForConditionalGeneration",
        {"input_ids", "labels"},
    ),
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_hugging_face_config_names_a_model_and_its_batch(tmp_path: Path, model_type: str):
    fields, name, batch = CONFIGS[model_type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    for path in (tmp_path, tmp_path / "config.json"):
        found = load_named(str(path), 4, 16)
        assert found.name == name and set(found.example_inputs) == batch
        assert all(p.is_meta for p in found.model.parameters()) and all(t.is_meta for t in found.example_inputs.values())


def test_a_factory_in_a_module_names_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Linear(4, 4)\n"
        "def pair(): return torch.nn.Linear(4, 4), (torch.zeros(2, 4),)\n"
        "def example_inputs(batch, seq): return (torch.zeros(batch, seq, 4),)\n"
    )
    found = load_named("my_models:make", 3, 5)
    assert found.model.weight.is_meta and found.example_inputs[0].shape == (3, 5, 4)
    assert load_named("my_models:pair", 3, 5).example_inputs[0].shape == (2, 4)
    with pytest.raises(InputError, match="my_models has no callable 'nothing'"):
        load_named("my_models:nothing", 3, 5)


def test_models_that_do_not_exist_are_refused(tmp_path: Path):
    with pytest.raises(
        InputError, match=re.escape("model 'nowhere': no such file; write the path of a Hugging Face config.json")
    ):
        load_named("nowhere", 1, 1)
    with pytest.raises(InputError, match="no module named 'no_such_package'"):
        load_named("no_such_package:make", 1, 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="is not a config that transformers"):
        load_named(str(tmp_path), 1, 1)
