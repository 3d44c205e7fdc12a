"""Weights in fp8 that vLLM holds as they were pushed: `rollout.quantization=fp8`."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.workers.rollout import RolloutSetup, make_rollout
from hybridrl.workers.rollout.vllm.weights.block_fp8 import fp8_weights, quantization_config
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from tests.families.configurations import configuration
from tests.support.workers.expert_cases import changed_model, log_prob_differences, pushed, rounded, setup_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 200,  # a ragged edge of the last block
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
DENSE = Qwen3Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)


def save(config, folder: Path) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def fp8_setup(path: str, dtype: str = "float32") -> RolloutSetup:
    setup = setup_of(path, dtype=dtype)
    return replace(setup, config=replace(setup.config, quantization="fp8"))


@pytest.mark.parametrize(
    "config", [pytest.param(EXPERTS, id="experts"), pytest.param(DENSE, id="dense", marks=pytest.mark.slow)]
)
def test_a_rollout_computes_with_the_values_and_scales_of_every_push(tmp_path, config):
    torch.set_num_threads(1)
    path = save(config, tmp_path)
    rollout = make_rollout("vllm", fp8_setup(path))
    for version in (1, 2):
        model = changed_model(path, seed=version)
        sent = OutgoingWeights(iter(pushed(model)), torch.float32)
        health = rollout.load_weights(version, iter(sent), sent=lambda sent=sent: sent.fingerprint)
        assert health.version == version == rollout.health().version
        assert log_prob_differences(rollout, model).abs().max() > 1e-2, "the rounding has an effect"
        assert log_prob_differences(rollout, rounded(model)).abs().max() < 1e-4
    layer = rollout.engine.model_executor.driver_worker.worker.model_runner.model.model.layers[1].self_attn.qkv_proj
    assert layer.weight.dtype == torch.float8_e4m3fn
    layer.weight.data.view(torch.int8)[0, 0] ^= 1
    assert rollout.health().version is None, "a flipped bit is found"
    damaged = pushed(changed_model(path, seed=3))
    outgoing = OutgoingWeights(iter(damaged), torch.float32)
    assert sum(1 for _ in outgoing)
    index = next(number for number, (name, _) in enumerate(damaged) if name.endswith("q_proj.weight"))
    damaged[index][1].view(torch.int8)[0, 0] ^= 1
    with pytest.raises(StaleWeightsError, match="was pushed with fingerprint"):
        rollout.load_weights(4, iter(damaged), sent=lambda: outgoing.fingerprint)


def test_joined_matrices_are_in_fp8_only_if_each_ends_at_a_block():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"num_key_value_heads": 2}))
    layer, kept = "model.layers.0.", fp8_weights(model, num_ranks=1)
    assert {name.removeprefix(layer) for name in kept if name.startswith(layer)} == {"mlp.down_proj.weight"}
    config = quantization_config(model, kept)
    assert {f"{layer}self_attn.{name}_proj" for name in "qkvo"} < {*config["modules_to_not_convert"]}
    with pytest.raises(ConfigError, match=r"none of the 14 matrices of Qwen3ForCausalLM in fp8: .* on 2 ranks"):
        fp8_weights(model, num_ranks=2)
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(configuration("Falcon-H1"))
    with pytest.raises(ConfigError, match=r"FalconH1ForCausalLM has layers of Mamba \(model.layers.0.mamba\); use"):
        fp8_weights(mamba, num_ranks=1)
