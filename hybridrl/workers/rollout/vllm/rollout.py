"""The `vllm` rollout: a vLLM engine inside the calling process.

On CPU or CUDA, through vLLM's public API.

Every rank of a training job may host one. The engine uses the job's process group if there is one, so all ranks must
start theirs together. It preserves the process state: environment, random states, grad mode, thread count.

One engine uses one device. With tensor parallelism every rank has an engine of its own (`executor`). The code that runs
inside vLLM is in `worker_extension`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib.util import find_spec
from typing import Any

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.config.capabilities import SAMPLING, RolloutCapabilities
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.workers.engine.hf_model import IMAGE_MODELS, auto_class, reads_images
from hybridrl.workers.images import PictureReader, collapsed
from hybridrl.workers.rollout.base import ROLLOUT_KEY, RolloutSetup, load_hf_config
from hybridrl.workers.rollout.responses import GeneratedTokens
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition
from hybridrl.workers.rollout.versioned import VersionedRollout
from hybridrl.workers.rollout.vllm.engine_arguments import argument_problems, engine_arguments
from hybridrl.workers.rollout.vllm.engine_start import start_engine
from hybridrl.workers.rollout.vllm.memory_release import device_bytes, resident_bytes
from hybridrl.workers.rollout.vllm.process_state import preserve_process_state
from hybridrl.workers.rollout.vllm.request_engine import VLLMRequestEngine
from hybridrl.workers.rollout.vllm.weights.block_fp8 import fp8_weights, quantization_config
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, WeightNames


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
            self._llm = start_engine(setup, {"quantization_config": quantization_config(model, fp8)} if is_fp8 else {})
            if setup.config.enable_rollout_routing_replay:
                self.call_worker("log_routes")
            if setup.slots is not None:
                self.call_worker("hold_adapters")
            self._self_test()
        self._use_weights_on_disk()

    @classmethod
    def setting_problems(cls, settings: RolloutConfig, *, max_length: int) -> Iterator[str]:
        yield from argument_problems(settings.engine_kwargs)
        yield from _routing_problems(settings)
        if not settings.enable_chunked_prefill and settings.max_num_batched_tokens < max_length:
            yield (
                f"{ROLLOUT_KEY}.max_num_batched_tokens={settings.max_num_batched_tokens}: without "
                f"{ROLLOUT_KEY}.enable_chunked_prefill a step must hold "
                f"data.max_prompt_length + data.max_response_length = {max_length} tokens; raise it"
            )

    @classmethod
    def package_problems(cls) -> Iterator[str]:
        if find_spec("vllm") is None:
            yield (
                f"{ROLLOUT_KEY}.name=vllm: vLLM is not installed; in the checkout: pip install -e '.[vllm]' (CUDA), or "
                "use hf"
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
            self.call_worker("open_batch", None, prompts, keys, sampling, stop_condition, num_done)
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
        """Hold an adapter that requests can name, see `HeldAdapters.add`. Needs `RolloutSetup.slots`."""
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


def _routing_problems(settings: RolloutConfig) -> Iterator[str]:
    """Yield settings with which vLLM does not compute every token where its experts are read."""
    if not settings.enable_rollout_routing_replay:
        return
    key = f"{ROLLOUT_KEY}.enable_rollout_routing_replay=true"
    if engine_arguments(settings.engine_kwargs).get("enable_prefix_caching"):
        yield f"{key}: tokens of vLLM's prefix cache are not computed; leave engine_kwargs.enable_prefix_caching out"
    if not settings.enforce_eager:
        yield f"{key}: CUDA graphs are captured before experts are read; set {ROLLOUT_KEY}.enforce_eager=true"


def _empty_model(setup: RolloutSetup) -> torch.nn.Module:
    """Return the model's Hugging Face class, without allocating the weights."""
    config = load_hf_config(setup)
    with torch.device("meta"):
        model: torch.nn.Module = auto_class(config).from_config(config, trust_remote_code=setup.trust_remote_code)
    return model
