"""The user's own arguments of vLLM's engine: `actor_rollout_ref.rollout.engine_kwargs`.

The driver refuses arguments that hybridrl sets itself. The worker process refuses names that the installed vLLM does
not have, before it starts the engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.base import ROLLOUT_KEY

KEY = f"{ROLLOUT_KEY}.engine_kwargs"
SECTION = "vllm"  # verl's name for these arguments within engine_kwargs

SETTINGS = {  # argument -> the setting that has its value
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "dtype": f"{ROLLOUT_KEY}.dtype",
    "seed": "trainer.seed",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "max_num_seqs": f"{ROLLOUT_KEY}.max_num_seqs",
    "max_num_batched_tokens": f"{ROLLOUT_KEY}.max_num_batched_tokens",
    "enable_chunked_prefill": f"{ROLLOUT_KEY}.enable_chunked_prefill",
    "enforce_eager": f"{ROLLOUT_KEY}.enforce_eager",
    "tensor_parallel_size": f"{ROLLOUT_KEY}.tensor_model_parallel_size",
    "gpu_memory_utilization": f"{ROLLOUT_KEY}.gpu_memory_utilization",
    "kv_cache_memory_bytes": f"{ROLLOUT_KEY}.kv_cache_memory_mb",
    "enable_sleep_mode": f"{ROLLOUT_KEY}.free_cache_engine",
}
REASONS = {  # argument -> why there is no choice
    "async_scheduling": "tokens are drawn by hybridrl, which needs each one before the next step",
    "data_parallel_size": "each worker process has an engine of its own",
    "disable_log_stats": "statistics of the engine are off",
    "distributed_executor_backend": "the engine runs inside the worker process",
    "enable_lora": "adapters are merged into the weights, see actor_rollout_ref.model.lora_rank",
    "generation_config": "sampling follows the settings, not the model's directory",
    "load_format": "the weights come from the trainer",
    "logits_processors": "tokens are drawn by hybridrl",
    "pipeline_parallel_size": "the layers of an engine are on one device",
    "quantization": "the engine holds exactly the weights that were pushed, which their fingerprint verifies",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "speculative_config": "tokens are drawn by hybridrl, one at a time",
    "use_tqdm_on_load": "progress bars are off",
    "weight_transfer_config": "weights arrive by actor_rollout_ref.rollout.weight_sync.transport",
    "worker_extension_cls": "it loads pushed weights",
}


def engine_arguments(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; those below `vllm` have the same meaning and take precedence."""
    nested = engine_kwargs.get(SECTION)
    if not isinstance(nested, Mapping):
        return dict(engine_kwargs)
    return {name: value for name, value in engine_kwargs.items() if name != SECTION} | dict(nested)


def argument_problems(engine_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments that hybridrl sets itself."""
    for name, value in engine_arguments(engine_kwargs).items():
        if name in SETTINGS:
            yield f"{KEY}.{name}={value}: vLLM gets {name} from {SETTINGS[name]}; set that instead"
        elif name in REASONS:
            yield f"{KEY}.{name}={value}: hybridrl sets {name} itself: {REASONS[name]}; leave it out"


def require_known(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError for an argument that vLLM's engine does not have. known: the names that it has."""
    known = set(known)
    for name, value in arguments.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{KEY}.{name}={value}: vLLM's engine has no such argument"
                + (f"; did you mean {near[0]}?" if near else "; see EngineArgs in vLLM's documentation")
            )
