"""Merge pushed low-rank adapters into base weights that the rollout keeps.

So only A and B are sent.

`VersionedRollout` uses it in the rollout's process. The engine computes with merged weights. Requests, tensor
parallelism, fingerprints and speed are the same as without adapters. (vLLM's own LoRA layers, which the training
service uses for several versions at once, give the same tokens.) Cost: a second copy, in host memory, of the weights
that adapters change.
"""

from collections.abc import Iterable, Iterator

import torch

from hybridrl.errors import StaleWeightsError
from hybridrl.workers.weight_transfer.fingerprint import (
    ADAPTER_ENDINGS,
    Dtypes,
    NamedTensor,
    WeightNames,
    WeightStream,
    adapted_weight,
    is_adapter,
    pushed_dtype,
    tensor_hash,
)


class AdapterMerger:
    """Keeps the base weights of adapters between pushes.

    Also a hash of every weight passed to the engine.

    A full push has its adapters first, then every weight of the model. Without adapters it is passed on unchanged. A
    push of adapters alone needs an earlier full push with adapters. dtype: the rollout's.
    """

    def __init__(self, names: WeightNames, *, dtype: Dtypes):
        self._names, self._dtype = names, dtype
        self._base_weights: dict[str, torch.Tensor] = {}
        self._hashes: dict[str, int] = {}

    def expect_full_push(self, weights: Iterable[NamedTensor], *, is_hashed: bool) -> WeightStream:
        """Drop all kept state and return the stream of a full push, for `merge`.

        Args:
            weights: Adapters first.
            is_hashed: See `WeightStream`.
        """
        self._base_weights, self._hashes = {}, {}
        return WeightStream(weights, self._names, dtype=self._dtype, is_hashed=is_hashed)

    def expect_adapters(self, weights: Iterable[NamedTensor]) -> WeightStream:
        """Return the stream of a push of adapters alone: A and B of every layer that had them.

        Raises:
            StaleWeightsError: no earlier full push brought adapters.
        """
        if not self._base_weights:
            raise StaleWeightsError(
                "adapters were pushed alone, and this rollout keeps no weights to merge them into; push everything"
            )
        expected = [name.removesuffix(".weight") + ending for name in self._base_weights for ending in ADAPTER_ENDINGS]
        return WeightStream(weights, self._names, dtype=self._dtype, expected=expected)

    def merge(self, stream: WeightStream) -> Iterator[NamedTensor]:
        """Yield the weights to load into the engine, with adapters merged."""
        matrices: dict[str, torch.Tensor] = {}
        earlier = dict(self._base_weights)
        for name, tensor in stream:
            if is_adapter(name):
                matrices[name] = tensor.detach().clone()  # valid only until the next one is requested
            elif adapted := _adapter_pair(matrices, name):
                self._base_weights[name] = tensor.detach().to("cpu", pushed_dtype(name, self._dtype), copy=True)
                yield self._hashed(name, _merged(tensor, *adapted))
            else:
                yield self._hashed(name, tensor) if matrices else (name, tensor)
        unmatched = {adapted_weight(name) for name in matrices} - self._base_weights.keys()
        if unmatched:
            names = ", ".join(sorted(unmatched)[:3])
            raise StaleWeightsError(f"adapters of {names} came without these weights, or not in pairs; push everything")
        for name, base in earlier.items():
            if adapted := _adapter_pair(matrices, name):
                yield self._hashed(name, _merged(base.to(adapted[0].device), *adapted))

    def expected_fingerprint(self, stream: WeightStream) -> int:
        """Return the fingerprint that the engine must have after all of `stream` went through `merge`."""
        return sum(self._hashes.values()) % (1 << 64) if self._base_weights else stream.fingerprint

    def _hashed(self, name: str, tensor: torch.Tensor) -> NamedTensor:
        self._hashes[name] = tensor_hash(tensor, pushed_dtype(name, self._dtype))
        return name, tensor


def _merged(base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
    merged = base.to(torch.float32, copy=True)
    return merged.addmm_(lora_b.float(), lora_a.float()).to(base.dtype)


def _adapter_pair(matrices: dict[str, torch.Tensor], weight: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B of a weight, if both have arrived."""
    layer, _, kind = weight.rpartition(".")
    names = [f"{layer}{ending}" for ending in ADAPTER_ENDINGS]
    if kind != "weight" or not all(name in matrices for name in names):
        return None
    return matrices[names[0]], matrices[names[1]]
