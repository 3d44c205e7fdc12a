"""The rollout interface: its calls, weight versions, output batch, registry, and special tokens.

`VersionedRollout` implements what all engines share. An engine (`hf`, `vllm`) adds copying weights in, fingerprinting
them, and generating tokens. A rollout lives in a worker process (`ActorRolloutRefWorker`, `ReplicaWorker`), which makes
its calls. Not here: sampling (`sampling`), single requests (`request_server`), and weight transport
(`weight_transfer`).

Shapes: B prompt rows, P prompt width, n samples per prompt, S = B * n sequences, R response width (max_new_tokens).
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hybridrl.config.schema.workers import RolloutConfig
from hybridrl.errors import ConfigError, DataError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout.memory_release import warn_if_not_released
from hybridrl.workers.rollout.requests import RequestEngine
from hybridrl.workers.rollout.sampling.logits import StopCondition, StopStrings, load_stop_strings
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, row_seeds, sequence_keys
from hybridrl.workers.weight_transfer.adapter_merge import AdapterMerger
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, WeightNames

VERSION_ON_DISK = 0  # of weights that the engine read from the model's directory


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout needs to start.

    model_path: directory (or Hugging Face name) with the model's config, and with its weights if load_format is "auto".
    load_format: "auto" reads those weights. "dummy" leaves them random, and the rollout generates nothing before the
        first `load_weights`.
    override_config: entries that replace those of the model's own config.
    seed: of random ("dummy") weights. Samples depend on `SamplingParams.seed` or the batch's `seeds`.
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

    @property
    def max_length(self) -> int:
        return self.max_prompt_length + self.max_response_length

    @property
    def dtype(self) -> torch.dtype:
        return weights_dtype(self.config, self.device)


def weights_dtype(config: RolloutConfig, device: str) -> torch.dtype:
    """Return the dtype of a rollout's weights; "auto" is bfloat16 on CUDA and float32 on CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


@dataclass(frozen=True)
class RolloutHealth:
    """The weights that a rollout holds now, read from the engine's own tensors.

    version: of the weights that it would generate with; None if it would refuse.
    fingerprint: of the tensors that it holds; None while it sleeps.
    received: fingerprint of what the push of that version brought. It differs from `fingerprint` only after a push with
        adapters, which the rollout merges itself.
    """

    version: int | None
    fingerprint: int | None
    awake: bool = True
    received: int | None = None


class Rollout(Protocol):
    """A copy of the policy that generates.

    The process that owns the rollout makes the calls, one at a time. They block.
    """

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return the n samples of each prompt row in adjacent rows.

        Raises:
            StaleWeightsError: the rollout holds no complete, verified weights.
        """

    def load_weights(
        self,
        version: int,
        weights: Iterable[NamedTensor],
        *,
        sent: Callable[[], int] | None = None,
        adapters: bool = False,
    ) -> None:
        """Load exactly these weights as `version`, or raise StaleWeightsError and generate nothing.

        Args:
            version: of the push.
            weights: all weights of the model, under Hugging Face names.
            sent: called after the last weight; returns the fingerprint of what the sender sent. None without transport.
            adapters: `weights` are only low-rank adapters, for weights that an earlier full push brought with adapters.
        """

    def sleep(self) -> None:
        """Release memory for training if `free_cache_engine` is set: on CUDA weights and cache, on CPU the cache.

        The released memory is measured. A warning names the engine if it is less than the engine holds.
        """

    def wake_up(self) -> None:
        """Reclaim the memory; required before `load_weights` and `generate`."""

    def health(self) -> RolloutHealth:
        """Return version and fingerprint of the engine's tensors; damaged weights lose their version."""


@dataclass
class GeneratedTokens:
    """Generated sequences, padded on the right.

    tokens: (S, R) int64. mask: (S, R) int64, 1 on generated tokens. log_probs: (S, R) float32, 0 on padding.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def empty(
        cls, num_sequences: int, width: int, *, pad_token_id: int, device: torch.device | str = "cpu"
    ) -> "GeneratedTokens":
        shape = (num_sequences, width)
        return cls(
            tokens=torch.full(shape, pad_token_id, dtype=torch.int64, device=device),
            mask=torch.zeros(shape, dtype=torch.int64, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def to(self, device: torch.device | str) -> "GeneratedTokens":
        return GeneratedTokens(self.tokens.to(device), self.mask.to(device), self.log_probs.to(device))


class VersionedRollout(ABC):
    """A `Rollout` that tracks the version of its weights and generates only with verified ones.

    Engines implement the abstract methods.
    """

    engine_name: str

    def __init__(self, setup: RolloutSetup, *, names: WeightNames):
        self.setup = setup
        self._awake = True
        self._version: int | None = None
        self._fingerprint: int | None = None
        self._received: int | None = None
        self._merger = AdapterMerger(names, dtype=setup.dtype)
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}

    @abstractmethod
    def request_engine(self) -> RequestEngine:
        """Return a new engine for `RequestServer` that serves single requests with this rollout."""

    @abstractmethod
    def _copy_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy named weights into the engine; raise for an unknown name or a wrong shape."""

    @abstractmethod
    def _engine_fingerprint(self) -> int:
        """Return the fingerprint of the tensors that the engine computes with."""

    @abstractmethod
    def _generate(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, *, num_done: int = 0
    ) -> GeneratedTokens:
        """Return n samples of each of B >= 1 prompts (token ids without padding), on CPU.

        keys: (S,) int64, for `uniforms`.
        """

    @abstractmethod
    def _used_bytes(self) -> int:
        """Return the bytes in use in the kind of memory that `_release_memory` frees."""

    @abstractmethod
    def _release_memory(self) -> int:
        """Release memory but keep the weights; return the bytes by which `_used_bytes` must fall."""

    @abstractmethod
    def _reclaim_memory(self) -> None:
        """Restore the state before `_release_memory`."""

    def load_weights(
        self,
        version: int,
        weights: Iterable[NamedTensor],
        *,
        sent: Callable[[], int] | None = None,
        adapters: bool = False,
    ) -> None:
        self._require_awake("load_weights")
        before, self._version = self._version, None
        weights = iter(weights)
        try:
            stream = self._merger.expect_adapters(weights) if adapters else self._merger.expect_full_push(weights)
            self._copy_weights(self._merger.merge(stream))
        finally:
            # Iterating may be a collective call of all training ranks. A rank that stops early would block the others.
            for _ in weights:
                pass
        pushed, arrived = stream.fingerprint if sent is None else sent(), stream.fingerprint
        loaded, expected = self._engine_fingerprint(), self._merger.expected_fingerprint(stream)
        if stream.missing or arrived != pushed or loaded != expected:
            missing = (
                f" without {len(stream.missing)} of its weights ({', '.join(sorted(stream.missing)[:3])})"
                if stream.missing
                else ""
            )
            raise StaleWeightsError(
                f"{self.engine_name} rollout: version {version} was pushed{missing} with fingerprint {pushed:016x}, "
                f"and {arrived:016x} arrived; the engine holds {loaded:016x} instead of {expected:016x} (version "
                f"{before} before the push). Push all weights again; the rollout generates nothing until then."
            )
        self._version, self._fingerprint, self._received = version, loaded, pushed

    def _use_weights_on_disk(self) -> None:
        """Mark the weights that the engine read at its start as version 0, unless they are random ("dummy")."""
        if self.setup.load_format == "auto":
            self._version, self._fingerprint = VERSION_ON_DISK, self._engine_fingerprint()
            self._received = self._fingerprint

    def health(self) -> RolloutHealth:
        if not self._awake:
            return RolloutHealth(version=self._version, fingerprint=None, awake=False)
        fingerprint = self._engine_fingerprint()
        if fingerprint != self._fingerprint:
            self._version = None
        return RolloutHealth(version=self._version, fingerprint=fingerprint, received=self._received)

    def sleep(self) -> None:
        if self._awake and self.frees_memory:
            before = self._used_bytes()
            expected = self._release_memory()
            self._awake = False
            warn_if_not_released(self.engine_name, expected=expected, freed=before - self._used_bytes())

    def wake_up(self) -> None:
        if not self._awake:
            self._reclaim_memory()
            self._awake = True

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        self._require_awake("generate")
        version = self.current_version()
        self._require_lengths_fit(sampling, prompts)
        seeds = prompts.batch["seeds"] if "seeds" in prompts.batch else row_seeds(sampling.seed, len(prompts))
        if len(prompts) == 0:
            generated = GeneratedTokens.empty(0, sampling.max_new_tokens, pad_token_id=self.setup.pad_token_id)
        else:
            generated = self.generate_tokens(_token_lists(prompts), sequence_keys(seeds, sampling.n), sampling)
        return with_responses(prompts, generated, sampling=sampling, version=version)

    def generate_tokens(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, *, num_done: int = 0
    ) -> GeneratedTokens:
        """Return `sampling.n` samples of each of B >= 1 token lists, for callers that continue or serve responses.

        Args:
            prompts: token ids without padding.
            keys: (B * n,) int64, for `uniforms`.
            sampling: how to sample.
            num_done: how many of each list's last tokens belong to the response; penalties, `min_tokens` and `stop`
                count them.
        """
        self._require_awake("generate")
        self.current_version()
        generated = self._generate(prompts, keys, sampling, num_done=num_done)
        # Engines compute in inference mode; clones are plain tensors that callers may write to.
        return GeneratedTokens(generated.tokens.clone(), generated.mask.clone(), generated.log_probs.clone())

    def stop_condition(self, sampling: SamplingParams) -> StopCondition:
        """Return what ends a response with these parameters."""
        strings = None
        if sampling.stop:
            if sampling.stop not in self._stop_strings:
                path, trust = self.setup.model_path, self.setup.trust_remote_code
                self._stop_strings[sampling.stop] = load_stop_strings(
                    sampling.stop, model_path=path, trust_remote_code=trust
                )
            strings = self._stop_strings[sampling.stop]
        return StopCondition(
            (() if sampling.ignore_eos else self.setup.eos_token_ids) + sampling.stop_token_ids, strings
        )

    @property
    def frees_memory(self) -> bool:
        """Whether `sleep` releases memory."""
        return self.setup.config.free_cache_engine and self.on_cuda

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.setup.device).type == "cuda"

    def _require_awake(self, call: str) -> None:
        if not self._awake:
            raise RuntimeError(f"{self.engine_name} rollout: {call}() while asleep; call wake_up() first")

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


def with_responses(
    prompts: DataProto, generated: GeneratedTokens, *, sampling: SamplingParams, version: int
) -> DataProto:
    """Return the batch of S rows for the trainer: the prompts' columns repeated, and the response columns.

    Adds `prompts` (S, P), `responses` (S, R), `response_mask` (S, R), `weights_version` (S,) and, with
    sampling.logprobs, `rollout_log_probs` (S, R); `input_ids`, `attention_mask` and `position_ids` grow to (S, P + R).
    `prompts` itself is not changed.
    """
    rows = prompts.repeat(sampling.n, interleave=True)
    columns = dict(rows.batch.items())
    num_sequences, width = generated.tokens.shape
    positions = columns["position_ids"][:, -1:] + torch.arange(1, width + 1)
    columns |= {
        "prompts": columns["input_ids"],
        "responses": generated.tokens,
        "input_ids": torch.cat([columns["input_ids"], generated.tokens], dim=1),
        "attention_mask": torch.cat(
            [columns["attention_mask"], generated.mask.to(columns["attention_mask"].dtype)], dim=1
        ),
        "position_ids": torch.cat([columns["position_ids"], positions], dim=1),
        "response_mask": generated.mask,
        "weights_version": torch.full((num_sequences,), version, dtype=torch.int64),
    }
    if sampling.logprobs:
        columns["rollout_log_probs"] = generated.log_probs
    return DataProto.from_dict(tensors=columns, non_tensors=rows.non_tensor_batch, meta_info=dict(prompts.meta_info))


def _token_lists(prompts: DataProto) -> list[list[int]]:
    """Return the prompts' token ids without padding; raise DataError for a prompt without tokens."""
    masks = prompts.batch["attention_mask"].bool()
    lists = [ids[mask].tolist() for ids, mask in zip(prompts.batch["input_ids"], masks, strict=True)]
    empty = [row for row, tokens in enumerate(lists) if not tokens]
    if empty:
        raise DataError(f"prompt rows {empty[:8]} have no token (attention_mask is all 0); a model needs at least one")
    return lists


def load_hf_config(setup: RolloutSetup) -> Any:
    """Return the model's Hugging Face config with the overrides applied.

    Raises:
        ConfigError: an override names an unknown entry, or the model has too few positions for the batch.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=setup.trust_remote_code)
    for key, value in setup.override_config.items():
        if not hasattr(config, key):
            raise ConfigError(
                f"actor_rollout_ref.model.override_config.{key}={value!r}: the config of "
                f"{setup.model_path!r} has no such entry"
            )
        setattr(config, key, value)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < setup.max_length:
        raise ConfigError(
            f"data.max_prompt_length={setup.max_prompt_length} and "
            f"data.max_response_length={setup.max_response_length} need "
            f"{setup.max_length} positions; the model {setup.model_path!r} has {limit} (max_position_embeddings)"
        )
    return config


ROLLOUTS: dict[str, Callable[[RolloutSetup], Rollout]] = {}


def register_rollout(name: str) -> Callable[[Callable[[RolloutSetup], Rollout]], Callable[[RolloutSetup], Rollout]]:
    """Register a rollout as `actor_rollout_ref.rollout.name=<name>`."""

    def register(make: Callable[[RolloutSetup], Rollout]) -> Callable[[RolloutSetup], Rollout]:
        ROLLOUTS[name] = make
        return make

    return register


def make_rollout(name: str, setup: RolloutSetup) -> Rollout:
    """Return a started rollout engine; raise ConfigError for an unknown name."""
    if name not in ROLLOUTS:
        near = difflib.get_close_matches(name, ROLLOUTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name!r} is unknown; known: {', '.join(sorted(ROLLOUTS))}{hint}"
        )
    return ROLLOUTS[name](setup)


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
    eos_ids = tuple(dict.fromkeys([*([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []), *listed]))
    if not eos_ids:
        raise ConfigError(
            f"the tokenizer of {path} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    return SpecialTokens(eos_ids, eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
