"""Rules for Megatron layouts: settings, number of processes and the model's own config.

The driver checks them before anything starts, if the model's config.json is local. The engine checks them again before
it creates process groups. Imports no torch.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridrl.config.build import Problems
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.schema.workers import MegatronConfig, ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of megatron-core; only the factor can be set."""
EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj"}
SUPPORTED_VALUES = {
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
}
"""Values that the engine supports; with another value in config.json it would compute wrong results."""


def policy_problems(config: PPOConfig) -> Problems:
    """Yield what is wrong with Megatron as the engine of a PPO job."""
    layout, trainer, key = config.actor_rollout_ref.actor.megatron, config.trainer, "actor_rollout_ref.actor.megatron"
    yield from layout_problems(layout, world_size=trainer.nnodes * trainer.n_gpus_per_node, key=key)
    policy = config.actor_rollout_ref.model
    yield from _model_problems(policy, layout, key=key, model_key="actor_rollout_ref.model")
    for path in {config.critic.model.path, config.reward_model.model.path} - {None, policy.path}:
        if (model := local_model_config(path)) is not None:
            yield from (f"{path}: {problem}" for problem in model_problems(layout, model, key=key))
    offload = config.critic.fsdp_config
    if layout.use_distributed_optimizer and (offload.param_offload or offload.optimizer_offload):
        yield (
            f"critic.fsdp_config: offload is not supported with {key}.use_distributed_optimizer=true in this release; "
            "set that to false"
        )


def supervised_problems(config: SupervisedConfig) -> Problems:
    """Yield what is wrong with Megatron as the engine of a program that trains one model on fixed data."""
    layout, trainer = config.megatron, config.trainer
    yield from layout_problems(layout, world_size=trainer.nnodes * trainer.n_gpus_per_node, key="megatron")
    yield from _model_problems(config.model, layout, key="megatron", model_key="model")


def _model_problems(model: ModelConfig, layout: MegatronConfig, *, key: str, model_key: str) -> Problems:
    """Yield why Megatron cannot train a model that is on this machine, or its adapters."""
    if (found := local_model_config(model.path)) is not None:
        found |= dict(model.override_config)
        yield from (f"{model.path}: {problem}" for problem in model_problems(layout, found, key=key))
        if model.lora_rank and model.lora_adapter_path is None:
            yield from adapted_expert_problems(found, model.target_modules, key=model_key)


def layout_problems(megatron: MegatronConfig, *, world_size: int, key: str) -> Iterator[str]:
    """Yield what is wrong with a layout on this many processes, for any model.

    Args:
        megatron: The layout.
        world_size: Number of processes.
        key: Name of the section in messages.
    """
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    ep, vpp = megatron.expert_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    if world_size % (tp * pp * cp):
        yield (
            f"{key}: tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} * "
            f"context_parallel_size={cp} = {tp * pp * cp} "
            f"does not divide the {world_size} processes (trainer.nnodes * trainer.n_gpus_per_node); change one of them"
        )
    elif (world_size // pp) % ep:
        yield (
            f"{key}.expert_model_parallel_size={ep}: does not divide the {world_size // pp} processes of a "
            "pipeline stage; "
            "use a divisor of it"
        )
    if megatron.sequence_parallel and tp == 1:
        yield f"{key}.sequence_parallel=true: has no effect with {key}.tensor_model_parallel_size=1; leave it out"
    if vpp is not None and pp == 1:
        yield (
            f"{key}.virtual_pipeline_model_parallel_size={vpp}: has no effect with "
            f"{key}.pipeline_model_parallel_size=1; leave it out"
        )
    if (megatron.param_offload or megatron.optimizer_offload) and megatron.use_distributed_optimizer:
        name = "param_offload" if megatron.param_offload else "optimizer_offload"
        yield (
            f"{key}.{name}=true: not supported with the distributed optimizer in this release; set "
            f"{key}.use_distributed_optimizer=false"
        )


def model_problems(megatron: MegatronConfig, model: dict, *, key: str) -> Iterator[str]:
    """Yield why a layout, or the engine, cannot train a model.

    Args:
        megatron: The layout.
        model: Content of the model's config.json.
        key: Name of the section in messages.
    """
    family = model.get("model_type")
    if family not in FAMILIES:
        yield (
            f"{key}: strategy=megatron supports the model types {', '.join(FAMILIES)}, not {family}; use strategy=fsdp"
        )
        return
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    for name, number in (("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if number % tp:
            yield (
                f"{key}.tensor_model_parallel_size={tp}: does not divide the model's {name}={number}; use a "
                "divisor of it"
            )
    if model["intermediate_size"] % tp:
        yield (
            f"{key}.tensor_model_parallel_size={tp}: does not divide the model's "
            f"intermediate_size={model['intermediate_size']}"
        )
    parts = pp * (megatron.virtual_pipeline_model_parallel_size or 1)
    if model["num_hidden_layers"] % parts:
        yield (
            f"{key}.pipeline_model_parallel_size={pp}: the model's "
            f"num_hidden_layers={model['num_hidden_layers']} cannot be cut into "
            f"{parts} equal parts (stages * virtual_pipeline_model_parallel_size); use a divisor of it"
        )
    yield from _expert_problems(megatron, model, key=key)
    yield from _unsupported_problems(model)


def _expert_problems(megatron: MegatronConfig, model: dict, *, key: str) -> Iterator[str]:
    ep, experts = megatron.expert_model_parallel_size, model.get("num_experts") or model.get("num_local_experts")
    if ep > 1 and experts is None:
        yield f"{key}.expert_model_parallel_size={ep}: the model ({model['model_type']}) has no experts; use 1"
    if experts is None:
        return
    tp = megatron.tensor_model_parallel_size
    if tp > 1 and not megatron.sequence_parallel:
        yield f"{key}.tensor_model_parallel_size={tp}: a model with experts also needs {key}.sequence_parallel=true"
    if experts % ep:
        yield (
            f"{key}.expert_model_parallel_size={ep}: does not divide the model's num_experts={experts}; use a "
            "divisor of it"
        )


def adapted_expert_problems(model: dict, target_modules: Sequence[str], *, key: str) -> Iterator[str]:
    """Yield adapters (LoRA) of experts or of their router, which Megatron's layers here do not have.

    Args:
        model: Content of the model's config.json.
        target_modules: Last names of the layers that get adapters.
        key: Name of the section with `target_modules` in messages.
    """
    experts = model.get("num_experts") or model.get("num_local_experts")
    if experts and (named := sorted(set(target_modules) & EXPERT_LAYERS)):
        yield (
            f"{key}.target_modules=[{','.join(target_modules)}]: with strategy=megatron the {experts} experts and "
            f"their router ({', '.join(named)}) get no adapters; name attention layers such as [q_proj,k_proj,v_proj,"
            "o_proj], or use all-linear, which means them"
        )


def _unsupported_problems(model: dict) -> Iterator[str]:
    """Yield features of a model of a known family that the engine would compute wrongly."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}  # rope_scaling before transformers 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    own_llama3 = kind == "llama3" and all(rope.get(name, value) == value for name, value in LLAMA3_ROPE.items())
    if kind != "default" and not own_llama3:
        yield f"rope_parameters={rope}: the Megatron engine supports only the default and Llama 3's; use strategy=fsdp"
    if _uses_sliding_window(model):
        yield "the Megatron engine does not support attention over a sliding window; use strategy=fsdp"
    for name, usual in SUPPORTED_VALUES.items():
        if (value := model.get(name) or usual) != usual:
            yield f"{name}={value}: the Megatron engine supports only {usual}; use strategy=fsdp"


def _uses_sliding_window(model: dict) -> bool:
    """Return whether a layer attends over a window.

    Older config files of Qwen set a window that is not used, and have no `layer_types`.
    """
    if kinds := model.get("layer_types"):
        return "sliding_attention" in kinds
    if not model.get("sliding_window"):
        return False
    if model["model_type"].startswith("qwen"):
        return bool(model.get("use_sliding_window")) and model.get("max_window_layers", 28) < model["num_hidden_layers"]
    return True


def local_model_config(path: str | None) -> dict | None:
    """Return the content of a local model's config.json.

    None is returned if there is none, as for a name on the hub.
    """
    file = Path(path).expanduser() / "config.json" if path else None
    return json.loads(file.read_text()) if file is not None and file.is_file() else None
