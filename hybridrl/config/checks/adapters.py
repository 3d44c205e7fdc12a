"""Adapters in the format of `peft`: what `adapter_config.json` says, and rules for settings of LoRA.

`lora_adapter_path` names a directory with `adapter_config.json` and `adapter_model.safetensors`. The driver checks it
before anything starts, and the workers read it (`workers/engine/peft_format.py` has the tensors).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.introspection import value_text
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import ConfigError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = {
    "use_dora": "weight decomposition (DoRA)",
    "bias": "trained biases",
    "modules_to_save": "layers that are trained in full",
    "rank_pattern": "ranks that differ between layers",
    "alpha_pattern": "scales that differ between layers",
    "fan_in_fan_out": "transposed weights",
    "trainable_token_indices": "trained embeddings",
    "target_parameters": "adapters of parameters that are no linear layer",
    "lora_bias": "biases of adapters",
}
"""Entries of peft's LoraConfig that change what is computed and that adapters here do not have."""


@dataclass(frozen=True)
class SavedAdapter:
    """What `adapter_config.json` says of an adapter: the change is alpha / rank times B A."""

    rank: int
    alpha: float


def read_saved_adapter(path: str) -> SavedAdapter:
    """Return what the configuration of the adapter in this directory says.

    Rank-stabilised adapters (alpha / sqrt(rank)) are returned with the alpha that gives the same scale.

    Raises:
        ConfigError: The directory has no adapter of LoRA, or one that computes something else.
    """
    file = Path(path) / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text())
        rank, alpha = int(found["r"]), float(found["lora_alpha"])
        if rank < 1 or not 0 < alpha < math.inf:
            raise ValueError(f"r={rank} and lora_alpha={alpha:g} must be above 0")
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"model.lora_adapter_path={path}: {ADAPTER_CONFIG} of a LoRA adapter cannot be read ({error}); give a "
            "directory that peft's save_pretrained, or hybridrl export --adapter, has written"
        ) from error
    if found.get("peft_type") != "LORA":
        raise ConfigError(f"model.lora_adapter_path={path}: is an adapter of type {found.get('peft_type')}, not LORA")
    for name, meaning in UNSUPPORTED.items():
        if found.get(name) not in (None, False, "none", {}, []):
            raise ConfigError(
                f"model.lora_adapter_path={path}: its {name}={found[name]!r} means {meaning}, which adapters here do "
                "not have; merge it into the model with peft's merge_and_unload and set model.path to the result"
            )
    if not (Path(path) / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"model.lora_adapter_path={path}: has no {ADAPTER_WEIGHTS}; save it with safe_serialization")
    return SavedAdapter(rank, alpha * math.sqrt(rank) if found.get("use_rslora") else alpha)


def saved_adapter_config(*, rank: int, alpha: float, target_modules: list[str], base: str) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for an adapter of a causal language model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": target_modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def adapter_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield LoRA settings without effect, and adapters that cannot be read."""
    key, model = (
        ("actor_rollout_ref.model", config.actor_rollout_ref.model)
        if isinstance(config, PPOConfig)
        else ("model", config.model)
    )
    if model.lora_adapter_path is not None:
        yield from _saved_adapter_problems(model, model.lora_adapter_path, key=key)
        return
    if model.lora_rank and not model.target_modules:
        yield f"{key}.target_modules=[]: no layer would be trained; use all-linear, or names such as [q_proj,v_proj]"
    if not model.lora_rank:
        yield from idle_problems(config, f"{key}.lora_alpha", f"{key}.target_modules", why=f"without {key}.lora_rank")


def _saved_adapter_problems(model: ModelConfig, path: str, *, key: str) -> Problems:
    """Yield an adapter that cannot be read, and settings that contradict it."""
    try:
        saved = read_saved_adapter(path)
    except ConfigError as error:
        yield str(error).replace("model.lora_adapter_path", f"{key}.lora_adapter_path", 1)
        return
    for name, theirs in (("lora_rank", saved.rank), ("lora_alpha", saved.alpha)):
        ours = getattr(model, name)
        if ours not in (getattr(ModelConfig(), name), theirs):
            yield f"{key}.{name}={ours:g}: the adapter in {path} has {theirs:g}; leave it out"
    if model.target_modules != ModelConfig().target_modules:
        chosen = value_text(model.target_modules)
        yield f"{key}.target_modules={chosen}: the adapter in {path} has layers of its own; leave it out"
