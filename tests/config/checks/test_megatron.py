"""Models that the Megatron engine supports, judged by config.json files of transformers 5 and older."""

import pytest

from hybridrl.config.checks.megatron import adapted_expert_problems, layout_problems, model_problems
from hybridrl.config.schema.workers import MegatronConfig

SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refusal(layout: dict, model: dict) -> str:
    return "\n".join(model_problems(MegatronConfig(**layout), SIZES | model, key="megatron"))


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        (
            {"tensor_model_parallel_size": 8},
            {"model_type": "qwen2"},
            "=8: does not divide the model's num_key_value_heads=4",
        ),
        (
            {"tensor_model_parallel_size": 4},
            {"model_type": "llama", "intermediate_size": 66},
            "the model's intermediate_size=66",
        ),
        (
            {"pipeline_model_parallel_size": 4},
            {"model_type": "llama"},
            "num_hidden_layers=6 cannot be cut into 4 equal parts",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {"model_type": "llama"},
            "num_hidden_layers=6 cannot be cut into 4 equal parts",
        ),
        ({"expert_model_parallel_size": 2}, {"model_type": "qwen2"}, "=2: the model (qwen2) has no experts; use 1"),
        (
            {"expert_model_parallel_size": 4},
            {"model_type": "qwen3_moe", "num_experts": 6},
            "=4: does not divide the model's num_experts=6",
        ),
        (
            {},
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3},
            "a sliding window",
        ),
        ({}, {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({}, {"model_type": "mistral", "sliding_window": 4096}, "a sliding window"),
        (
            {},
            {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "supports only the default and Llama 3's",
        ),
        (
            {},
            {"model_type": "llama", "rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
            "supports only the default and Llama 3's",
        ),
        (
            {},
            {"model_type": "llama", "attention_bias": True},
            "attention_bias=True: the Megatron engine supports only False",
        ),
        (
            {},
            {"model_type": "llama", "hidden_act": "gelu"},
            "hidden_act=gelu: the Megatron engine supports only silu",
        ),
        (
            {},
            {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]},
            "mlp_only_layers=[0]: the Megatron engine supports only []",
        ),
        (
            {},
            {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2},
            "decoder_sparse_step=2: the Megatron engine supports only 1",
        ),
    ],
)
def test_an_unsupported_or_indivisible_model_is_refused(layout, model, words):
    assert words in refusal(layout, model)


@pytest.mark.parametrize(
    "model",
    [
        {
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 3,
            "rope_theta": 1e6,
        },
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 28},
        {
            "model_type": "qwen3",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "layer_types": ["full_attention"] * 6,
        },
        {"model_type": "mistral", "sliding_window": None, "rope_scaling": None},
        {"model_type": "llama", "rope_scaling": LLAMA3, "mlp_bias": False},
        {"model_type": "llama", "rope_scaling": LLAMA3 | {"factor": 32.0}, "vocab_size": 128257},
        {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ],
)
def test_a_supported_model_passes_with_tensor_and_pipeline_parallel_size_2(model):
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    assert refusal(layout, model) == ""


@pytest.mark.parametrize(
    ("experts", "targets", "words"),
    [
        (4, ["q_proj", "up_proj"], "model.target_modules=[q_proj,up_proj]: with strategy=megatron the 4 experts and"),
        (
            4,
            ["gate"],
            "their router (gate) get no adapters; name attention layers such as [q_proj,k_proj,v_proj,o_proj]",
        ),
        (4, ["all-linear"], ""),
        (4, ["q_proj", "o_proj"], ""),
        (None, ["gate_proj", "down_proj"], ""),
    ],
)
def test_adapters_of_experts_are_refused(experts, targets, words):
    found = "\n".join(adapted_expert_problems({"num_experts": experts}, targets, key="model"))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("layout", "world_size", "words"),
    [
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 2, "= 4 does not divide the 2 processes"),
        ({"context_parallel_size": 3}, 4, "= 3 does not divide the 4 processes"),
        (
            {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4},
            4,
            "=4: does not divide the 2 processes of a pipe",
        ),
    ],
)
def test_a_layout_that_its_processes_cannot_form_is_refused(layout, world_size, words):
    assert words in "\n".join(layout_problems(MegatronConfig(**layout), world_size=world_size, key="megatron"))
