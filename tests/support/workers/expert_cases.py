"""A tiny mixture of experts, and a comparison of what a rollout computes with against a plain forward pass."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.workers.rollout import Rollout, RolloutSetup, SamplingParams
from hybridrl.workers.weight_transfer.quantize import (
    GRIDS,
    dequantize_blocks,
    is_quantizable,
    quantize_blocks,
    quantized_weights,
)

PROMPTS = [list(range(1, 20)), list(range(30, 50))]
RESPONSE = 12
FP8 = GRIDS["fp8"]


def save_experts(path: Path) -> str:
    """Write a Qwen3-MoE with large random weights, so that wrong experts change the tokens."""
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    config = Qwen3MoeConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def changed_model(path: str, *, seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def setup_of(path: str, *, dtype: str = "float32", device: str = "cpu") -> RolloutSetup:
    config = RolloutConfig(dtype=dtype, kv_cache_memory_mb=1, max_num_seqs=16, gpu_memory_utilization=0.3)
    return RolloutSetup(path, config, (5, 9), 0, 32, RESPONSE, device=device, load_format="dummy")


@torch.no_grad()
def log_prob_differences(rollout: Rollout, model: torch.nn.Module) -> torch.Tensor:
    """Return rollout log-prob minus that of the model, (N,) for all tokens of two greedy responses."""
    sampling = SamplingParams(RESPONSE, do_sample=False, ignore_eos=True)
    found = rollout.generate_tokens(PROMPTS, torch.zeros(len(PROMPTS), dtype=torch.int64), sampling)
    differences = []
    for prompt, tokens, log_probs in zip(PROMPTS, found.tokens, found.log_probs, strict=True):
        ids = torch.cat([torch.tensor(prompt), tokens])[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        differences.append(log_probs - logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1))
    return torch.cat(differences)


@torch.no_grad()
def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with the products of values and scales in place of its weights."""
    for name, weight in model.named_parameters():
        if is_quantizable(name, weight):
            weight.copy_(dequantize_blocks(*quantize_blocks(weight, FP8), weight.dtype))
    return model


def pushed(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a model's weights in fp8, as an actor pushes them."""
    return [(name, tensor.clone()) for name, tensor in quantized_weights(model.named_parameters(), FP8)]
