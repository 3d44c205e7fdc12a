"""The rollout interface: its calls and capabilities, registry, and special tokens.

`Rollout` is the base class of all of them. It lives in a worker process (`ActorRolloutRefWorker`, `ReplicaWorker`),
which makes its calls. `VersionedRollout` (`versioned`) is that of the built-in ones, which can also fingerprint
their own weights. Not here: sampling (`sampling`), single requests (`request_engine`), and weight transport
(`weight_transfer`).

Shapes: B prompt rows, n samples per prompt, S = B * n sequences.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hybridrl.algos.partition.row_images import RowImages, images_of
from hybridrl.config.capabilities import SAMPLING, SHAPES_SAMPLES
from hybridrl.config.capabilities import RolloutCapabilities as RolloutCapabilities
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import ConfigError, DataError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.registry import Registry
from hybridrl.workers import rollout
from hybridrl.workers.engine.base import resolve_dtype
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.rollout.responses import GeneratedTokens, token_lists, with_responses
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition, default_seeds, sequence_keys
from hybridrl.workers.weight_transfer.fingerprint import ArrivingWeights, HeldDtypes, NamedTensor
from hybridrl.workers.weight_transfer.fingerprint import fingerprint as fingerprint

if TYPE_CHECKING:
    from hybridrl.workers.rollout.request_engine import RequestEngine
    from hybridrl.workers.rollout.requests import ProbedTokens

ROLLOUT_KEY = "actor_rollout_ref.rollout"
WEIGHT_SYNC_KEY = f"{ROLLOUT_KEY}.weight_sync"
VERSION_ON_DISK = 0  # of weights that the engine read from the model's directory


@dataclass(frozen=True)
class AdapterSlots:
    """Room for adapters that requests name, in an engine that computes with them unmerged.

    Attributes:
        max_rank: Highest rank.
        layers: Last names of the layers that may have them.
        num: How many are computed with in one step.
    """

    max_rank: int
    layers: tuple[str, ...]
    num: int = 4


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout needs to start.

    model_path: directory (or Hugging Face name) with the model's config, and with its weights if load_format is "auto".
    load_format: "auto" reads those weights. "dummy" leaves them random, and the rollout generates nothing before the
        first `load_weights`.
    override_config: entries that replace those of the model's own config.
    seed: of random ("dummy") weights. Samples depend on `SamplingParams.seed` or the batch's `seeds`.
    slots: for adapters that requests name; None: adapters are merged. Only `vllm` has them.
    """

    model_path: str
    config: RolloutConfig
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_prompt_length: int
    max_response_length: int
    device: str = "cpu"
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    load_format: str = "auto"
    seed: int = 0
    max_images: int = 16
    slots: AdapterSlots | None = None

    @property
    def max_length(self) -> int:
        return self.max_prompt_length + self.max_response_length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights; "auto" is bfloat16 on CUDA and float32 on CPU."""
        return resolve_dtype(self.config.dtype, torch.device(self.device).type)


def sent_dtypes(config: RolloutConfig, model: ModelConfig, device: str) -> HeldDtypes:
    """Return the dtypes in which an actor sends its weights to the rollout of these settings."""
    assert model.path is not None, "the actor was loaded from this path"
    dtype = resolve_dtype(config.dtype, torch.device(device).type)
    model_type = _model_type(model.path, model.trust_remote_code)
    kept = rollout_class(config.name).capabilities.float32_weights
    return HeldDtypes.of(dtype, model_type=model_type, float32_weights=kept)


def held_dtypes(setup: RolloutSetup, capabilities: RolloutCapabilities) -> HeldDtypes:
    """Return the dtypes in which a rollout holds its weights."""
    model_type = _model_type(setup.model_path, setup.trust_remote_code)
    return HeldDtypes.of(setup.dtype, model_type=model_type, float32_weights=capabilities.float32_weights)


@functools.cache
def _model_type(path: str, trust_remote_code: bool) -> str:
    return overridden_config(path, {}, trust_remote_code=trust_remote_code).get_text_config().model_type


@dataclass(frozen=True)
class RolloutHealth:
    """The weights that a rollout holds now.

    version: of the weights that it would generate with; None if it would refuse.
    fingerprint: of the engine's own tensors; None while it sleeps, and without the capability `reads_own_weights`.
    received: fingerprint of what the push of that version brought. It differs from `fingerprint` only after a push with
        adapters, which the rollout merges itself.
    reads_own_weights: whether the engine has this capability. Without it a push is verified by `version` and
        `received` alone.
    probed: what it sampled after a push with a probe.
    """

    version: int | None
    fingerprint: int | None
    awake: bool = True
    received: int | None = None
    reads_own_weights: bool = True
    probed: "ProbedTokens | None" = None


class Rollout(ABC):
    """A copy of the policy that generates; the base class of every engine.

    The process that owns the rollout makes the calls, one at a time. They block. A subclass must implement
    `generate_tokens` and `replace_weights`, and declare in `capabilities` what else it can do. Settings that need more
    are refused before anything starts. `hybridrl.testing.check_rollout` tests a subclass.

    Attributes:
        capabilities: What the class can do.
        held: Dtypes of its weights, in which they are pushed and hashed.
        engine_name: Its name in messages; default: the name of the first class without one.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    engine_name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.engine_name = cls.engine_name or cls.__name__

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup
        self.held = held_dtypes(setup, self.capabilities)
        self._version = VERSION_ON_DISK if setup.load_format == "auto" else None
        self._received: int | None = None

    @classmethod
    def setting_problems(cls, settings: RolloutConfig, *, max_length: int) -> Iterable[str]:
        """Return what this engine cannot run in `settings`, one sentence each.

        The driver calls it before the start.

        Args:
            settings: The section `actor_rollout_ref.rollout`.
            max_length: Tokens of the longest prompt and response together.
        """
        return ()

    @classmethod
    def package_problems(cls) -> Iterable[str]:
        """Return which package of this engine the machine lacks; called before a start, not to inspect a job."""
        return ()

    @abstractmethod
    def generate_tokens(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        *,
        num_done: int = 0,
        images: Sequence[RowImages | None] | None = None,
    ) -> GeneratedTokens:
        """Return `sampling.n` samples of each of B >= 1 token lists; the samples of a prompt are adjacent.

        A response ends with the token that `stop_condition` describes, which it keeps, or at `max_new_tokens`. The
        tensors are on the CPU, and callers may write to them (no inference tensors).

        Args:
            prompts: Token ids without padding.
            keys: (B * n,) int64, one for each sample, equal only for equal seeds. An engine with keyed sampling draws
                token t of a sample with `uniforms(key, t)`; another one may use them as seeds.
            sampling: How to sample.
            num_done: How many of each list's last tokens belong to the response; penalties, `min_tokens` and `stop`
                count them.
            images: Of each prompt, given only to a class with the capability `images`. A response never has a token
                that stands for an image.
        """

    def given_images(self, images: Sequence[RowImages | None] | None) -> dict[str, Any]:
        """Return the keyword of `generate_tokens` for prompts of which some have images; empty without any.

        Raises:
            ConfigError: The class does not read images.
        """
        if images is None or all(found is None for found in images):
            return {}
        if not self.capabilities.images:
            raise ConfigError(
                f"{ROLLOUT_KEY}.name: the prompts have images, and the {self.engine_name} rollout does not declare the "
                "capability images; use hf"
            )
        return {"images": images}

    @abstractmethod
    def replace_weights(self, weights: Iterable[NamedTensor]) -> None:
        """Replace all weights of the engine, given under Hugging Face names; read `weights` to the end.

        A tensor is valid only until the next one is requested. Raise for an unknown name or a wrong shape: the rollout
        then generates nothing until a later push.
        """

    def load_weights(
        self,
        version: int,
        weights: Iterable[NamedTensor],
        *,
        sent: Callable[[], int] | None = None,
        adapters: bool = False,
    ) -> RolloutHealth:
        """Load exactly these weights as `version`, or raise StaleWeightsError and generate nothing.

        Returns:
            What `health` says after the push, without reading the weights again.

        Args:
            version: Of the push.
            weights: All weights of the model, under Hugging Face names.
            sent: Called after the last weight; returns the fingerprint of what the sender sent. None without transport.
            adapters: `weights` are only low-rank adapters, for weights that an earlier full push brought with adapters.
        """
        if adapters:
            raise ConfigError(
                f"{WEIGHT_SYNC_KEY}.lora=adapter: needs the capability adapters, which the {self.engine_name} rollout "
                "does not declare; use merged"
            )
        before, self._version = self._version, None
        arriving = ArrivingWeights(weights, dtype=self.held)
        try:
            self.replace_weights(arriving)
        finally:
            unread = arriving.drain()
        pushed = arriving.fingerprint if sent is None else sent()
        if unread or arriving.fingerprint != pushed:
            raise StaleWeightsError(
                f"{self.engine_name} rollout: version {version} was pushed with fingerprint {pushed:016x}, and "
                f"{arriving.fingerprint:016x} arrived, {unread} tensors of it unread (version {before} before the "
                "push). Push all weights again; the rollout generates nothing until then."
            )
        self._version, self._received = version, pushed
        return self.health()

    def health(self) -> RolloutHealth:
        """Return the version, and what the engine knows about its weights.

        Without the capability `reads_own_weights` that is the fingerprint of what the last push brought.
        """
        return RolloutHealth(self._version, None, received=self._received, reads_own_weights=False)

    def sleep(self) -> None:  # noqa: B027 - optional
        """Release memory for training if `free_cache_engine` is set; the weights stay valid. Default: keep all."""

    def wake_up(self) -> None:  # noqa: B027 - an engine that keeps all has nothing to reclaim
        """Reclaim the memory; required before `load_weights` and `generate`."""

    def request_engine(self) -> "RequestEngine":
        """Return a new engine that serves single requests with this rollout.

        A rollout with the capability `partial` may return `BatchedRequestEngine(self)`.
        """
        raise ConfigError(
            f"{ROLLOUT_KEY}.name: the {self.engine_name} rollout serves no single requests, which "
            f"{ROLLOUT_KEY}.mode=async needs; it does not declare the capability requests"
        )

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return the n samples of each prompt row in adjacent rows.

        Raises:
            StaleWeightsError: The rollout holds no complete, verified weights.
            ConfigError: `sampling` needs what the rollout does not declare.
        """
        version = self.current_version()
        self.require_sampling(sampling)
        self._require_lengths_fit(sampling, prompts)
        seeds = prompts.batch["seeds"] if "seeds" in prompts.batch else default_seeds(sampling.seed, len(prompts))
        if len(prompts) == 0:
            generated = GeneratedTokens.empty(0, sampling.max_new_tokens, pad_token_id=self.setup.pad_token_id)
        else:
            keys, more = sequence_keys(seeds, sampling.n), self.given_images(images_of(prompts))
            generated = self.generate_tokens(token_lists(prompts), keys, sampling, **more)
        return with_responses(prompts, generated, sampling=sampling, version=version)

    @functools.cached_property
    def _stop_strings(self) -> "rollout.StopStringCache":
        return rollout.StopStringCache(self.setup.model_path, trust_remote_code=self.setup.trust_remote_code)

    def stop_condition(self, sampling: SamplingParams) -> StopCondition:
        """Return what ends a response with these parameters."""
        strings = self._stop_strings.detector(sampling.stop) if sampling.stop else None
        return StopCondition(
            (() if sampling.ignore_eos else self.setup.eos_token_ids) + sampling.stop_token_ids, strings
        )

    def current_version(self) -> int:
        """Return the version of the rollout's weights.

        Raises:
            StaleWeightsError: the rollout holds no weights that were pushed completely.
        """
        if self._version is None:
            raise StaleWeightsError(
                f"{self.engine_name} rollout: it holds no weights that were pushed completely (dummy weights at the "
                "start, a failed push, or damage found by health()); call load_weights() before generate()"
            )
        return self._version

    def require_version(self, version: int | None, *, holder: str) -> None:
        """Raise StaleWeightsError unless the rollout holds this version.

        Args:
            version: None accepts any version that was pushed completely.
            holder: name of the process, for the error.
        """
        if version is not None and (current := self.current_version()) != version:
            raise StaleWeightsError(
                f"{holder} holds weights of version {current}, and version {version} was pushed: that push never "
                "arrived here; push again"
            )

    def require_sampling(self, sampling: SamplingParams) -> None:
        """Raise ConfigError for a parameter that the rollout does not declare, instead of ignoring it."""
        declared = self.capabilities.sampling | (frozenset() if sampling.do_sample else SHAPES_SAMPLES)
        defaults = SamplingParams(max_new_tokens=1)
        for name in SAMPLING:
            value = getattr(sampling, name)
            if name not in declared and value != getattr(defaults, name):
                raise ConfigError(
                    f"sampling {name}={value!r}: the {self.engine_name} rollout does not declare {name} in its "
                    "capabilities.sampling; leave it out, or use another rollout"
                )
        if sampling.logprobs and not self.capabilities.log_probs:
            raise ConfigError(
                f"{ROLLOUT_KEY}.calculate_log_probs=true: needs the capability log_probs, which the "
                f"{self.engine_name} rollout does not declare; set it to false"
            )

    def _require_lengths_fit(self, sampling: SamplingParams, prompts: DataProto) -> None:
        width = prompts.batch["input_ids"].shape[1]
        if width > self.setup.max_prompt_length:
            raise DataError(
                f"prompts are {width} tokens wide; the rollout was built for "
                f"{self.setup.max_prompt_length} (data.max_prompt_length)"
            )
        if sampling.max_new_tokens > self.setup.max_response_length:
            raise ValueError(
                f"sampling max_new_tokens={sampling.max_new_tokens}: the rollout was built for "
                f"{self.setup.max_response_length} "
                "(data.max_response_length)"
            )


def load_hf_config(setup: RolloutSetup) -> Any:
    """Return the model's Hugging Face config with the overrides applied.

    Raises:
        ConfigError: an override names an unknown entry, or the model has too few positions for the batch.
    """
    config = overridden_config(setup.model_path, setup.override_config, trust_remote_code=setup.trust_remote_code)
    if attention := setup.override_config.get("attn_implementation"):
        config._attn_implementation = attention
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < setup.max_length:
        raise ConfigError(
            f"data.max_prompt_length={setup.max_prompt_length} and "
            f"data.max_response_length={setup.max_response_length} need "
            f"{setup.max_length} positions; the model {setup.model_path!r} has {limit} (max_position_embeddings)"
        )
    return config


ROLLOUTS: Registry[type[Rollout]] = Registry(
    f"{ROLLOUT_KEY}.name",
    kind="rollout",
    builtins={
        "hf": "hybridrl.workers.rollout.hf:HFRollout",
        "vllm": "hybridrl.workers.rollout.vllm.rollout:VLLMRollout",
    },
    plugins="actor_rollout_ref.model.external_lib",
)


def register_rollout(name: str) -> Callable[[type[Rollout]], type[Rollout]]:
    """Register a rollout as `actor_rollout_ref.rollout.name=<name>`."""
    return ROLLOUTS.register(name)


def rollout_class(name: str, *, setting: str = ROLLOUTS.setting) -> type[Rollout]:
    """Return the rollout called `name`, or the one at an import path; nothing is started.

    Raises:
        ConfigError: The name is unknown, or it is no rollout. `setting` is the key in the message.
    """
    found = ROLLOUTS.lookup(name, setting=setting)
    if not (isinstance(found, type) and issubclass(found, Rollout)):
        raise ConfigError(
            f"{setting}={name}: {found!r} is not a rollout; derive a class from hybridrl.workers.rollout.Rollout"
        )
    return found


def make_rollout(name: str, setup: RolloutSetup) -> Rollout:
    """Return a started rollout engine; raise ConfigError for an unknown name."""
    return rollout_class(name)(setup)


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that end a response and fill its padding."""

    eos_ids: tuple[int, ...]
    pad_id: int


def load_special_tokens(path: str, *, trust_remote_code: bool = False) -> SpecialTokens:
    """Return the end-of-sequence and padding ids of a model directory.

    The end-of-sequence ids are the tokenizer's and those of the generation config. A tokenizer without a padding token
    pads with the end of sequence, which is safe because masks mark the padding.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model without generation_config.json
        listed = None
    listed = [listed] if isinstance(listed, int) else listed or []
    if not isinstance(listed, list) or not all(isinstance(number, int) for number in listed):
        raise ConfigError(f"{path}/generation_config.json: eos_token_id={listed!r} must be a token's number, or a list")
    eos_ids = tuple(dict.fromkeys([*([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []), *listed]))
    if not eos_ids:
        raise ConfigError(
            f"the tokenizer of {path} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    return SpecialTokens(eos_ids, eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
