"""Model families: Hugging Face settings to Megatron's, and which Hugging Face tensors make up which Megatron tensor.
Tables only.

A family is its entry in FAMILIES; all of them are the Llama layout with a few switches.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from hybridrl.config.checks.megatron import model_problems
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import EngineConfig
from hybridrl.workers.engine.megatron.parallel_groups import KEY, Sizes


@dataclass(frozen=True)
class Family:
    """What differs between families.

    qkv_bias: biases on queries, keys and values. qk_norm: a norm on queries and keys.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
}


@dataclass(frozen=True)
class Recipe:
    """How a Megatron tensor is made.

    parts: Hugging Face names. kind: how they are joined. cut: the dimension cut over tensor ranks.
    """

    parts: tuple[str, ...]
    # "qkv": heads interleaved by group; "glu": gate and up of one rank next to each other; "vocabulary": padded
    kind: str = "same"
    cut: int | None = None


def _mlp(prefix: str, megatron: str) -> dict[str, Recipe]:
    return {
        f"{megatron}linear_fc1.weight": Recipe((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), "glu", 0),
        f"{megatron}linear_fc2.weight": Recipe((f"{prefix}down_proj.weight",), cut=1),
    }


OUTSIDE = {
    "embedding.word_embeddings.weight": Recipe(("model.embed_tokens.weight",), "vocabulary", 0),
    "decoder.final_layernorm.weight": Recipe(("model.norm.weight",)),
}
HEADS = {
    "causal_lm": {"output_layer.weight": Recipe(("lm_head.weight",), "vocabulary", 0)},
    "value": {"output_layer.weight": Recipe(("score.weight",)), "output_layer.bias": Recipe(("score.bias",))},
    "score": {"output_layer.weight": Recipe(("score.weight",))},
}
LAYER = {
    "input_layernorm.weight": Recipe(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Recipe(("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Recipe(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv", 0),
    "self_attention.linear_qkv.bias": Recipe(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv", 0),
    "self_attention.linear_proj.weight": Recipe(("self_attn.o_proj.weight",), cut=1),
    "self_attention.q_layernorm.weight": Recipe(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Recipe(("self_attn.k_norm.weight",)),
    "mlp.router.weight": Recipe(("mlp.gate.weight",)),
    **_mlp("mlp.", "mlp."),
}
EXPERT = {name: Recipe(recipe.parts, recipe.kind) for name, recipe in _mlp("", "").items()}  # whole experts, never cut


def recipe_of(name: str, kind: str) -> Recipe:
    """Return the recipe of a Megatron tensor whose layer and expert numbers count over the whole model, of an engine of
    this kind.
    """
    if not name.startswith("decoder.layers."):
        return (OUTSIDE | HEADS[kind])[name]
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    prefix = f"model.layers.{number}."
    if rest.startswith("mlp.experts.local_experts."):
        expert, rest = rest.removeprefix("mlp.experts.local_experts.").split(".", 1)
        found, prefix = EXPERT[rest], f"{prefix}mlp.experts.{expert}."
    else:
        found = LAYER[rest]
    return Recipe(tuple(prefix + part for part in found.parts), found.kind, found.cut)


def transformer_config(config: EngineConfig, model: Any, sizes: Sizes) -> TransformerConfig:
    """Return Megatron's settings for a Hugging Face config.

    Raises ConfigError for what this engine cannot run as it is.
    """
    if problems := list(model_problems(config.megatron, model.to_dict(), key=KEY)):
        raise ConfigError("\n".join(f"{config.path}: {problem}" for problem in problems))
    family, dtype = FAMILIES[model.model_type], config.compute_dtype
    heads = model.num_attention_heads
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=heads,
        num_query_groups=getattr(model, "num_key_value_heads", None) or heads,
        kv_channels=getattr(model, "head_dim", None) or model.hidden_size // heads,
        ffn_hidden_size=model.intermediate_size,
        layernorm_epsilon=model.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,  # none, so that PPO's ratio starts at 1
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        context_parallel_size=sizes.context,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.megatron.sequence_parallel,
        calculate_per_token_loss=True,  # losses come divided by global counts: gradients are summed and never averaged
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for sequences of any length
        # An interleaved pipeline of two stages gives wrong results, without an error, unless sends and receives are
        # separate.
        overlap_p2p_comm=sizes.virtual_pipeline is not None,
        batch_p2p_comm=sizes.virtual_pipeline is None,
        # Kernels of Transformer Engine, apex or Triton:
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(recompute if config.gradient_checkpointing else {}),
        **(_experts(model, sizes) if family.experts else {}),
    )


def _experts(model: Any, sizes: Sizes) -> dict[str, Any]:
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_topk": model.num_experts_per_tok,
        # weights of all experts, or of the chosen ones among themselves
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": 1,
        "expert_model_parallel_size": sizes.expert,
    }


def rotary(model: Any) -> dict[str, Any]:
    """Return GPTModel's arguments for rotary positions."""
    found = _rope(model)
    scaled = found.get("rope_type", "default") == "llama3"
    return {"rotary_base": found["rope_theta"], "rope_scaling": scaled, "rope_scaling_factor": found.get("factor", 1.0)}


def _rope(model: Any) -> dict[str, Any]:
    return getattr(model, "rope_parameters", None) or {"rope_theta": model.rope_theta}
