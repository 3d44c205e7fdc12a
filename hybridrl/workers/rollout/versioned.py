"""The base of the built-in rollouts.

Weights are verified in the engine's own tensors, and released memory is measured.

`hf` and `vllm` derive from it. An engine adds copying weights in, fingerprinting them, and generating tokens.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers import weight_transfer
from hybridrl.workers.rollout.base import VERSION_ON_DISK, Rollout, RolloutHealth, RolloutSetup
from hybridrl.workers.rollout.responses import GeneratedTokens
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.weight_transfer.adapter_merge import AdapterMerger
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, WeightNames, WeightStream

logger = logging.getLogger(__name__)
# Allocators round up, and other threads allocate meanwhile. An engine that kept its weights or its cache frees far
# less.
MIN_RELEASED_SHARE = 0.9


class VersionedRollout(Rollout):
    """A `Rollout` that fingerprints the tensors it computes with, merges adapters, and measures the memory it frees.

    Engines implement the abstract methods, give an `engine_name`, and declare `reads_own_weights` and `adapters`.

    Args:
        setup: Settings and model.
        names: Of the model's weights.
        quantized: Names of weights that the engine holds as they are quantised.
    """

    def __init__(self, setup: RolloutSetup, *, names: WeightNames, quantized: Set[str] = frozenset()):
        super().__init__(setup)
        self._version = None  # until `_use_weights_on_disk` or a push
        self._awake = True
        self._fingerprint: int | None = None
        self._merger = (
            AdapterMerger(names, dtype=self.held)
            if setup.config.quantization is None
            else weight_transfer.Dequantizer(names, dtype=self.held, kept=quantized)
        )

    @abstractmethod
    def _engine_fingerprint(self, changed: Set[str] | None = None) -> int:
        """Return the fingerprint of the tensors that the engine computes with.

        Args:
            changed: Names of the weights that were replaced since the last call; None: read all. An engine may read all
                in any case.
        """

    @abstractmethod
    def _generate(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        *,
        num_done: int = 0,
        images: Sequence[RowImages | None] | None = None,
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
    ) -> RolloutHealth:
        self._require_awake("load_weights")
        before, self._version = self._version, None
        weights, replaced = iter(weights), set[str]()
        try:
            if adapters:
                stream = self._merger.expect_adapters(weights)
            else:
                stream = self._merger.expect_full_push(weights, is_hashed=sent is None)
            self.replace_weights(_noted(self._merger.merge(stream), replaced))
        finally:
            # Iterating may be a collective call of all training ranks. A rank that stops early would block the others.
            for _ in weights:
                pass
        pushed = stream.fingerprint if sent is None else sent()
        arrived = stream.fingerprint if stream.is_hashed else pushed
        loaded = self._engine_fingerprint(replaced if adapters else None)
        expected = self._merger.expected_fingerprint(stream) if stream.is_hashed else pushed
        if stream.missing or arrived != pushed or loaded != expected:
            raise self._stale_weights(version, before, stream, pushed=pushed, loaded=loaded, expected=expected)
        self._version, self._fingerprint, self._received = version, loaded, pushed
        return RolloutHealth(version=version, fingerprint=loaded, received=pushed)

    def _stale_weights(
        self, version: int, before: int | None, stream: WeightStream, *, pushed: int, loaded: int, expected: int
    ) -> StaleWeightsError:
        names = ", ".join(sorted(stream.missing)[:3])
        missing = f" without {len(stream.missing)} of its weights ({names})" if stream.missing else ""
        arrived = f", and {stream.fingerprint:016x} arrived" if stream.is_hashed else ""
        return StaleWeightsError(
            f"{self.engine_name} rollout: version {version} was pushed{missing} with fingerprint {pushed:016x}"
            f"{arrived}; the engine holds {loaded:016x} instead of {expected:016x} (version {before} before the push). "
            "Push all weights again; the rollout generates nothing until then."
        )

    def _use_weights_on_disk(self) -> None:
        """Mark the weights that the engine read at its start as version 0, unless they are random ("dummy")."""
        if self.setup.load_format == "auto":
            self._version, self._fingerprint = VERSION_ON_DISK, self._engine_fingerprint()
            self._received = self._fingerprint

    def health(self) -> RolloutHealth:
        """Return version and fingerprint of the engine's tensors; damaged weights lose their version."""
        if not self._awake:
            return RolloutHealth(version=self._version, fingerprint=None, awake=False)
        fingerprint = self._engine_fingerprint()
        if fingerprint != self._fingerprint:
            self._version = None
        return RolloutHealth(version=self._version, fingerprint=fingerprint, received=self._received)

    def sleep(self) -> None:
        """Release memory if `free_cache_engine` is set: on CUDA weights and cache, on CPU the cache.

        The released memory is measured. A warning names the engine if it is less than the engine holds.
        """
        if self._awake and self.frees_memory:
            before = self._used_bytes()
            expected = self._release_memory()
            self._awake = False
            _warn_if_not_released(self.engine_name, expected=expected, freed=before - self._used_bytes())

    def wake_up(self) -> None:
        if not self._awake:
            self._reclaim_memory()
            self._awake = True

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        self._require_awake("generate")
        return super().generate(prompts, sampling)

    def generate_tokens(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        *,
        num_done: int = 0,
        images: Sequence[RowImages | None] | None = None,
    ) -> GeneratedTokens:
        self._require_awake("generate")
        self.current_version()
        generated = self._generate(prompts, keys, sampling, num_done=num_done, images=images)
        # Engines compute in inference mode; clones are plain tensors that callers may write to.
        return replace(
            generated,
            tokens=generated.tokens.clone(),
            mask=generated.mask.clone(),
            log_probs=generated.log_probs.clone(),
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


def _noted(weights: Iterable[NamedTensor], names: set[str]) -> Iterator[NamedTensor]:
    """Yield the weights, and add their names to `names`."""
    for name, tensor in weights:
        names.add(name)
        yield name, tensor


def _warn_if_not_released(engine: str, *, expected: int, freed: int) -> None:
    """Log a warning if an engine freed less than `MIN_RELEASED_SHARE` of the expected bytes."""
    if freed < MIN_RELEASED_SHARE * expected:
        logger.warning(
            "%s rollout: sleep() freed %.1f MB of the %.1f MB that its weights and its cache take. Training continues "
            "with less free memory. If it runs out, lower actor_rollout_ref.rollout.gpu_memory_utilization or "
            "kv_cache_memory_mb",
            engine,
            freed / 1e6,
            expected / 1e6,
        )
