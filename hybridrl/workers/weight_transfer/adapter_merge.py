"""Pushes of adapters alone: the rollout keeps the frozen weights below them and makes merged ones itself, so that only
A and B travel.

The engine computes with merged weights and knows nothing of adapters: requests, tensor parallelism and fingerprints are
as without them, and so is its speed. (vLLM's own LoRA layers give the same tokens; on the CPU they take 4 to 5 times as
long for a model of 1M parameters, and about as long for one of 50M.) Price: the weights that adapters change are kept
once more, in host memory.
"""

from collections.abc import Iterable, Iterator

import torch

from hybridrl.errors import StaleWeightsError
from hybridrl.workers.weight_transfer.fingerprint import (
    ADAPTER_ENDINGS,
    Named,
    WeightNames,
    WeightStream,
    adapted_weight,
    is_adapter,
    tensor_hash,
)


class Merging:
    """What a rollout keeps between pushes: the weights below adapters, and a hash of every weight that its engine was
    given.

    dtype: the rollout's. A push of everything has adapters first, then every weight of the model; one without adapters
    is passed on as it is. A push of adapters alone needs one of everything before it.
    """

    def __init__(self, names: WeightNames, *, dtype: torch.dtype):
        self._names, self._dtype = names, dtype
        self._below: dict[str, torch.Tensor] = {}
        self._hashes: dict[str, int] = {}

    def everything(self, weights: Iterable[Named]) -> WeightStream:
        """Return what a push of everything has to bring, to be passed through `merged`. What was kept is forgotten."""
        self._below, self._hashes = {}, {}
        return WeightStream(weights, self._names, dtype=self._dtype)

    def adapters(self, weights: Iterable[Named]) -> WeightStream:
        """Return what a push of adapters alone has to bring: A and B of every layer that had them.

        StaleWeightsError if none had.
        """
        if not self._below:
            raise StaleWeightsError(
                "adapters were pushed alone, and this rollout keeps no weights that they could change; push everything"
            )
        awaited = [name.removesuffix(".weight") + ending for name in self._below for ending in ADAPTER_ENDINGS]
        return WeightStream(weights, self._names, dtype=self._dtype, awaited=awaited)

    def merged(self, stream: WeightStream) -> Iterator[Named]:
        """Yield the weights that change, as the engine has to hold them."""
        matrices: dict[str, torch.Tensor] = {}
        kept = dict(self._below)
        for name, tensor in stream:
            if is_adapter(name):
                matrices[name] = tensor.detach().clone()  # valid only until the next one is asked for
            elif adapted := _pair(matrices, name):
                self._below[name] = tensor.detach().to("cpu", self._dtype, copy=True)
                yield self._counted(name, self._merge(tensor.to(self._dtype), *adapted))
            else:
                yield self._counted(name, tensor) if matrices else (name, tensor)
        alone = {adapted_weight(name) for name in matrices} - self._below.keys()
        if alone:
            names = ", ".join(sorted(alone)[:3])
            raise StaleWeightsError(f"adapters of {names} came without these weights, or not in pairs: push everything")
        for name, below in kept.items():
            if adapted := _pair(matrices, name):
                yield self._counted(name, self._merge(below.to(adapted[0].device), *adapted))

    def expected(self, stream: WeightStream) -> int:
        """Return the fingerprint that the engine must have after all of `stream` went through `merged`."""
        return sum(self._hashes.values()) % (1 << 64) if self._below else stream.fingerprint

    def _merge(self, below: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(below.float(), lora_b.float(), lora_a.float()).to(self._dtype)

    def _counted(self, name: str, tensor: torch.Tensor) -> Named:
        self._hashes[name] = tensor_hash(tensor, self._dtype)
        return name, tensor


def _pair(matrices: dict[str, torch.Tensor], weight: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B of a weight, if both are there."""
    layer, _, kind = weight.rpartition(".")
    names = [f"{layer}{ending}" for ending in ADAPTER_ENDINGS]
    if kind != "weight" or not all(name in matrices for name in names):
        return None
    return matrices[names[0]], matrices[names[1]]
