"""Adapters as files: what is written is read back, also by peft's numbers, and what cannot be computed is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.config.checks.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_saved_adapter
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.export import export_adapter
from hybridrl.workers.engine.peft_format import adapted_layers, read_adapter
from tests.support.workers.engine_cases import (
    WHOLE,
    make_batch,
    make_engine,
    num_response_tokens,
    save_tiny_qwen2,
    train,
)

OURS = LoRA(4, 6, ("q_proj", "down_proj"))  # scale 1.5: dividing B by it would round


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def trained(qwen2):
    engine = make_engine(qwen2, lora=OURS)
    batch = make_batch()
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=4)
    return engine


@pytest.fixture
def saved(trained, qwen2, tmp_path):
    folder = tmp_path / "adapter"
    export_adapter(trained.weights(lora="unscaled_adapters"), str(folder), model=ModelConfig(path=qwen2), lora=OURS)
    return folder


def log_probs(engine):
    return engine.forward(make_batch(), WHOLE, outputs=("log_probs",))["log_probs"]


def test_the_files_have_the_names_and_entries_of_peft(saved):
    tensors = load_file(saved / ADAPTER_WEIGHTS)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert tensors[f"{layer}.lora_A.weight"].shape == (4, 32) and tensors[f"{layer}.lora_B.weight"].shape == (32, 4)
    assert len(tensors) == 2 * 2 * 2  # A and B of two layers in each of two blocks
    found = json.loads((saved / ADAPTER_CONFIG).read_text())
    assert found["target_modules"] == ["down_proj", "q_proj"]
    assert (found["peft_type"], found["task_type"], found["r"], found["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 6)
    assert sorted(path.name for path in saved.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def test_a_model_that_continues_from_it_computes_the_same_and_can_be_trained(saved, trained, qwen2):
    again = make_engine(qwen2, lora=LoRA(4, 6, path=str(saved)))
    assert torch.equal(log_probs(again), log_probs(trained))
    assert (log_probs(again) - log_probs(make_engine(qwen2))).abs().max() > 1e-3
    batch = make_batch()
    [report] = train(again, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=1)
    assert report["grad_norm"] > 0


def test_with_adapters_off_a_model_is_its_base(trained, qwen2):
    with trained.adapters_off():
        found = log_probs(trained)
    assert torch.equal(found, log_probs(make_engine(qwen2)))
    assert (log_probs(trained) - found).abs().max() > 1e-3


def test_a_rank_stabilised_adapter_has_its_own_scale(saved):
    change(saved, use_rslora=True)
    assert read_saved_adapter(str(saved)).alpha == 12  # 6 / sqrt(4) is 12 / 4


def change(folder, **entries):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_dora": True}, "its use_dora=True means weight decomposition"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] means layers that are trained in full"),
        ({"peft_type": "IA3"}, "is an adapter of type IA3, not LORA"),
        ({"r": None}, "cannot be read"),
    ],
    ids=str,
)
def test_an_adapter_that_computes_something_else_is_refused(saved, entries, message):
    change(saved, **entries)
    with pytest.raises(ConfigError, match=message):
        read_saved_adapter(str(saved))


def test_an_adapter_of_another_model_or_without_all_tensors_is_refused(saved, qwen2):
    tensors = load_file(saved / ADAPTER_WEIGHTS)
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    save_file(renamed, saved / ADAPTER_WEIGHTS)
    with pytest.raises(ConfigError, match="adapts model.layers.0.self_attn.query, which is no linear layer"):
        make_engine(qwen2, lora=LoRA(4, 6, path=str(saved)))
    save_file(
        {name: tensor[:2] for name, tensor in tensors.items() if "lora_A" in name}
        | {name: tensor[:, :2].contiguous() for name, tensor in tensors.items() if "lora_B" in name},
        saved / ADAPTER_WEIGHTS,
    )
    with pytest.raises(ConfigError, match=r"\(2, \d+\).*\(\d+, 2\), expected .*\(4, \d+\).*\(\d+, 4\)"):
        make_engine(qwen2, lora=LoRA(4, 6, path=str(saved)))
    tensors.popitem()
    save_file(tensors, saved / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match="lacks"):
        read_adapter(str(saved))


def test_an_export_without_adapters_is_refused(trained, qwen2, tmp_path):
    with pytest.raises(ConfigError, match="trained without adapters"):
        export_adapter(iter(()), str(tmp_path / "x"), model=ModelConfig(path=qwen2), lora=None)
    assert adapted_layers(["a.b.lora_A", "a.b.lora_B"]) == ["a.b"]
