"""Model families: Hugging Face settings to Megatron's, and the Hugging Face tensors of each Megatron tensor.

Tables only. A family is its entry in FAMILIES. All of them are the Llama layout with a few switches.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from hybridrl.config.checks.megatron import model_problems
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import EngineSetup
from hybridrl.workers.engine.megatron.parallel_groups import KEY, ParallelSizes


@dataclass(frozen=True)
class ModelFamily:
    """Differences between families.

    Attributes:
        qkv_bias: Biases on queries, keys and values.
        qk_norm: A norm on queries and keys.
        experts: Mixture of experts in the MLP.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


FAMILIES = {
    "llama": ModelFamily(),
    "mistral": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True),
    "qwen3": ModelFamily(qk_norm=True),
    "qwen3_moe": ModelFamily(qk_norm=True, experts=True),
}


@dataclass(frozen=True)
class TensorMapping:
    """How a Megatron tensor is built from Hugging Face tensors.

    Attributes:
        hf_names: Hugging Face names.
        kind: How they are joined: "same" (concatenated), "qkv" (heads interleaved by group), "glu" (gate and up of one
            rank adjacent) or "vocabulary" (padded).
        shard_dim: Dimension sharded over tensor-parallel ranks, or None.
    """

    hf_names: tuple[str, ...]
    kind: str = "same"
    shard_dim: int | None = None


@dataclass(frozen=True)
class AdaptableLayer:
    """A Megatron layer that can get adapters, one for each of the Hugging Face layers that it joins.

    Attributes:
        name: Megatron name within a transformer layer.
        hf_parent: Hugging Face name of the module that has the layers.
        parts: Last names of the Hugging Face layers, in the order of the output.
        shard_dim: Dimension of the weight that is sharded over tensor-parallel ranks: 0 (output) or 1 (input).
    """

    name: str
    hf_parent: str
    parts: tuple[str, ...]
    shard_dim: int

    def tensors(self) -> dict[str, TensorMapping]:
        """Return the mappings of A (r, in) and B (out, r).

        One of the two is replicated.
        """
        dims = {"lora_A": 1 if self.shard_dim == 1 else None, "lora_B": 0 if self.shard_dim == 0 else None}
        return {
            f"{self.name}.{part}.{tensor}": TensorMapping((f"{self.hf_parent}.{part}.{tensor}",), shard_dim=dim)
            for part in self.parts
            for tensor, dim in dims.items()
        }


ADAPTABLE = (
    AdaptableLayer("self_attention.linear_qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), 0),
    AdaptableLayer("self_attention.linear_proj", "self_attn", ("o_proj",), 1),
    AdaptableLayer("mlp.linear_fc1", "mlp", ("gate_proj", "up_proj"), 0),
    AdaptableLayer("mlp.linear_fc2", "mlp", ("down_proj",), 1),
)
"""Experts get no adapters.

Their Hugging Face models keep all experts of a layer in one tensor, which is no linear layer.
"""


def _mlp(prefix: str, megatron: str) -> dict[str, TensorMapping]:
    return {
        f"{megatron}linear_fc1.weight": TensorMapping(
            (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), "glu", 0
        ),
        f"{megatron}linear_fc2.weight": TensorMapping((f"{prefix}down_proj.weight",), shard_dim=1),
    }


OUTER_TENSORS = {
    "embedding.word_embeddings.weight": TensorMapping(("model.embed_tokens.weight",), "vocabulary", 0),
    "decoder.final_layernorm.weight": TensorMapping(("model.norm.weight",)),
}
HEAD_TENSORS = {
    "causal_lm": {"output_layer.weight": TensorMapping(("lm_head.weight",), "vocabulary", 0)},
    "value": {
        "output_layer.weight": TensorMapping(("score.weight",)),
        "output_layer.bias": TensorMapping(("score.bias",)),
    },
    "score": {"output_layer.weight": TensorMapping(("score.weight",))},
}
LAYER_TENSORS = {
    "input_layernorm.weight": TensorMapping(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": TensorMapping(("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": TensorMapping(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv", 0),
    "self_attention.linear_qkv.bias": TensorMapping(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv", 0),
    "self_attention.linear_proj.weight": TensorMapping(("self_attn.o_proj.weight",), shard_dim=1),
    "self_attention.q_layernorm.weight": TensorMapping(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": TensorMapping(("self_attn.k_norm.weight",)),
    "mlp.router.weight": TensorMapping(("mlp.gate.weight",)),
    **_mlp("mlp.", "mlp."),
    **{name: mapping for layer in ADAPTABLE for name, mapping in layer.tensors().items()},
}
# Experts are never sharded.
EXPERT_TENSORS = {name: TensorMapping(mapping.hf_names, mapping.kind) for name, mapping in _mlp("", "").items()}


def mapping_for(name: str, kind: str) -> TensorMapping:
    """Return the mapping of a Megatron tensor.

    Layer and expert numbers in `name` count over the whole model. `kind` is the engine's kind.
    """
    if not name.startswith("decoder.layers."):
        return (OUTER_TENSORS | HEAD_TENSORS[kind])[name]
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    prefix = f"model.layers.{number}."
    if rest.startswith("mlp.experts.local_experts."):
        expert, rest = rest.removeprefix("mlp.experts.local_experts.").split(".", 1)
        found, prefix = EXPERT_TENSORS[rest], f"{prefix}mlp.experts.{expert}."
    else:
        found = LAYER_TENSORS[rest]
    return TensorMapping(tuple(prefix + part for part in found.hf_names), found.kind, found.shard_dim)


def transformer_config(config: EngineSetup, model: Any, sizes: ParallelSizes) -> TransformerConfig:
    """Return Megatron's settings for a Hugging Face config.

    Raises:
        ConfigError: This engine cannot run the model unchanged.
    """
    if problems := list(model_problems(config.settings, model.to_dict(), key=KEY)):
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
        sequence_parallel=config.settings.sequence_parallel,
        calculate_per_token_loss=True,  # losses are divided by global counts, so sum gradients
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for sequences of any length
        # An interleaved pipeline of two stages silently gives wrong results unless sends and receives are separate.
        overlap_p2p_comm=sizes.virtual_pipeline is not None,
        batch_p2p_comm=sizes.virtual_pipeline is None,
        # These need kernels of Transformer Engine, apex or Triton:
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(recompute if config.gradient_checkpointing else {}),
        **(_moe_settings(model, sizes) if family.experts else {}),
    )


def _moe_settings(model: Any, sizes: ParallelSizes) -> dict[str, Any]:
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_topk": model.num_experts_per_tok,
        # softmax over all experts, or over the chosen ones
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": 1,
        "expert_model_parallel_size": sizes.expert,
    }


def rotary(model: Any) -> dict[str, Any]:
    """Return GPTModel's arguments for rotary positions."""
    found = getattr(model, "rope_parameters", None) or {"rope_theta": model.rope_theta}
    scaled = found.get("rope_type", "default") == "llama3"
    return {"rotary_base": found["rope_theta"], "rope_scaling": scaled, "rope_scaling_factor": found.get("factor", 1.0)}
