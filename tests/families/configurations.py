"""Tiny configurations of model families, each with what it is known for: windows, groups of experts, sinks, states.

Not a test file. Windows are shorter than the rows.
"""

from pathlib import Path
from typing import Any

import torch

VOCAB = 96
EOS = (5, 9, 14, 20)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": list(EOS),
}
HEADS = {"head_dim": 16}
DELTA = HEADS | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 16}
SIGMOID_ROUTING = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
ALTERNATING = HEADS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
NEMOTRON = HEADS | {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "attention", "moe", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    **SIGMOID_ROUTING,
}

# family: transformers' class of its configuration, and what differs from SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"sliding_window": 6}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", HEADS),
    "Qwen3-MoE": ("Qwen3MoeConfig", HEADS | EXPERTS | {"norm_topk_prob": True}),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", DELTA | SHARED_EXPERT),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | SHARED_EXPERT),
    "DeepSeek-V3": ("DeepseekV3Config", LATENT | SIGMOID_ROUTING),
    "GLM-4": ("Glm4Config", HEADS),
    "GLM-4-MoE": ("Glm4MoeConfig", HEADS | SIGMOID_ROUTING | {"use_qk_norm": True}),
    "gpt-oss": ("GptOssConfig", ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 2": (
        "Gemma2Config",
        ALTERNATING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "Gemma 3": ("Gemma3TextConfig", ALTERNATING | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "Nemotron-H": ("NemotronHConfig", NEMOTRON),
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1], "mamba_expand": 2}),
    "Falcon-H1": ("FalconH1Config", MAMBA | HEADS | {"mamba_d_ssm": 64}),
    "Jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}


def configuration(family: str) -> Any:
    import transformers

    name, changes = FAMILIES[family]
    return getattr(transformers, name)(**SIZES | changes)


def save_family(family: str, folder: Path) -> str:
    """Write the family's model with random weights, always the same, and a tokenizer; return its directory."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration(family))
        for parameter in model.parameters():  # norms, sinks and biases are constant in a new model
            parameter += 0.05 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w5").save_pretrained(folder)
