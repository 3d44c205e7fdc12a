"""Names of the weights in an export, which are those of the model's files where transformers has joined experts."""

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
