"""Which Megatron layouts can work: pure rules over settings, a number of processes and a model's own config. Knows no
torch.

The driver asks before anything starts, as far as the model's config.json is at hand; the engine asks again before it
makes a group.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridrl.config.schema.workers import ActorConfig, ActorRolloutRefConfig, MegatronConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core has built in; only the factor can be chosen."""
USUAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
}
"""What the engine has; another value in a model's config.json would be computed wrongly."""


def layout_problems(megatron: MegatronConfig, *, world_size: int, key: str) -> Iterator[str]:
    """Yield what is wrong with a layout on this many processes, whatever the model.

    `key` is the section's name in messages.
    """
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
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
            f"{key}.{name}=true: not with the distributed optimizer in this release; set "
            f"{key}.use_distributed_optimizer=false"
        )


def model_problems(megatron: MegatronConfig, model: dict, *, key: str) -> Iterator[str]:
    """Yield what a layout, or the engine, cannot do with a model, given as the content of its config.json."""
    family = model.get("model_type")
    if family not in FAMILIES:
        yield f"{key}: strategy=megatron knows the model types {', '.join(FAMILIES)}, not {family}; use strategy=fsdp"
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
    yield from _unusual(model)


def _expert_problems(megatron: MegatronConfig, model: dict, *, key: str) -> Iterator[str]:
    ep, experts = megatron.expert_model_parallel_size, model.get("num_experts") or model.get("num_local_experts")
    if ep > 1 and experts is None:
        yield f"{key}.expert_model_parallel_size={ep}: the model ({model['model_type']}) has no experts; use 1"
    if experts is None:
        return
    tp = megatron.tensor_model_parallel_size
    if tp > 1 and not megatron.sequence_parallel:
        yield f"{key}.tensor_model_parallel_size={tp}: a model with experts needs {key}.sequence_parallel=true with it"
    if experts % ep:
        yield (
            f"{key}.expert_model_parallel_size={ep}: does not divide the model's num_experts={experts}; use a "
            "divisor of it"
        )


def _unusual(model: dict) -> Iterator[str]:
    """What a model of a known family may have that the engine would compute wrongly."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}  # the latter until transformers 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    own_llama3 = kind == "llama3" and all(rope.get(name, value) == value for name, value in LLAMA3_ROPE.items())
    if kind != "default" and not own_llama3:
        yield f"rope_parameters={rope}: the Megatron engine has only the default and Llama 3's own; use strategy=fsdp"
    if _slides(model):
        yield "attention over a sliding window is not in the Megatron engine; use strategy=fsdp"
    for name, usual in USUAL.items():
        if (value := model.get(name) or usual) != usual:
            yield f"{name}={value} is not in the Megatron engine, which has {usual}; use strategy=fsdp"


def _slides(model: dict) -> bool:
    """Whether a layer attends over a window.

    Old files of Qwen name a window that they do not use, and no kinds of layers.
    """
    if kinds := model.get("layer_types"):
        return "sliding_attention" in kinds
    if not model.get("sliding_window"):
        return False
    if model["model_type"].startswith("qwen"):
        return bool(model.get("use_sliding_window")) and model.get("max_window_layers", 28) < model["num_hidden_layers"]
    return True


def data_parallel_size(actor: ActorConfig, *, world_size: int) -> int:
    """Return how many parts a batch is cut into for engines of this many processes: one per process, or per model."""
    if actor.strategy != "megatron":
        return world_size
    layout = actor.megatron
    return world_size // (
        layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    )


def in_one_process(policy: ActorRolloutRefConfig) -> ActorRolloutRefConfig:
    """Return the settings with a layout of one process, which loads what any layout saved."""
    one = replace(
        policy.actor.megatron,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )
    return replace(policy, actor=replace(policy.actor, megatron=one))


def local_model_config(path: str | None) -> dict | None:
    """Return the content of a local model's config.json, None where there is none to read yet (a name on the hub)."""
    file = Path(path).expanduser() / "config.json" if path else None
    return json.loads(file.read_text()) if file is not None and file.is_file() else None
