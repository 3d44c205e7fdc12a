"""An export: its names of weights, which are those of the model's files, its other files, and its code."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.config.schema.workers import ModelConfig
from hybridrl.workers.engine.export import export_hf
from tests.support.workers.engine_cases import make_engine, whole_weights
from tests.support.workers.megatron_models import NEEDS_MEGATRON
from tests.support.workers.routing_cases import save_mixture


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_tokenizer):
    """Return a Qwen3-MoE, its export, and the weights of the engine that wrote it."""
    model, export = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("export")
    engine = make_engine(save_mixture(model, "Qwen3Moe", tokenizer=tiny_tokenizer))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter += 1
    export_hf(engine.weights(), str(export), model=ModelConfig(path=str(model)))
    return model, export, whole_weights(engine)


def test_an_export_has_the_names_that_save_pretrained_writes(exported):
    model, export, own = exported
    names = load_file(export / "model.safetensors").keys()
    assert names == load_file(model / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    found = AutoModelForCausalLM.from_pretrained(export).state_dict()
    assert found.keys() == own.keys() and all(torch.equal(found[name], tensor) for name, tensor in own.items())


@NEEDS_MEGATRON
def test_megatron_reads_an_export_of_fsdp(exported):
    from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
    from tests.support.workers.megatron_rank import make_engine as make_megatron

    _, export, own = exported
    found = whole_weights(make_megatron(str(export), {}, optim=None))
    destroy_model_parallel()
    assert found.keys() == own.keys() and all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_experts_that_are_joined_on_disk_stay_joined(exported, tmp_path, tiny_tokenizer):
    AutoModelForCausalLM.from_pretrained(exported[0]).save_pretrained(tmp_path / "model", save_original_format=False)
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    export_hf(make_engine(path).weights(), str(tmp_path / "export"), model=ModelConfig(path=path))
    names = load_file(tmp_path / "export/model.safetensors").keys()
    assert names == load_file(tmp_path / "model/model.safetensors").keys() == exported[2].keys()


def test_the_export_of_a_model_of_the_hub_has_its_other_files(tmp_path, tiny_qwen2, monkeypatch):
    snapshot = tmp_path / "models--own--tiny/snapshots/1"
    shutil.copytree(tiny_qwen2, snapshot)
    (snapshot / "preprocessor_config.json").write_text("{}")
    (tmp_path / "models--own--tiny/refs").mkdir()
    (tmp_path / "models--own--tiny/refs/main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights = load_file(tiny_qwen2 / "model.safetensors").items()
    export_hf(weights, str(tmp_path / "export"), model=ModelConfig(path="own/tiny"))
    assert (tmp_path / "export/generation_config.json").exists()
    assert (tmp_path / "export/preprocessor_config.json").exists()


def test_an_export_has_the_code_that_its_model_brings(tmp_path, tiny_qwen2):
    model, export = tmp_path / "model", tmp_path / "export"
    shutil.copytree(tiny_qwen2, model)
    (model / "configuration_own.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    (model / "modeling_own.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((model / "config.json").read_text()) | {"model_type": "own"}
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    weights = load_file(model / "model.safetensors")
    export_hf(weights.items(), str(export), model=ModelConfig(path=str(model), trust_remote_code=True))
    found = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
