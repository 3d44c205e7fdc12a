"""Rollouts that hold the pushed weights, by every fingerprint, and compute with others.

Each fault begins with push number `FROM_PUSH`, counted from 0.
"""

import os
from collections.abc import Iterable, Iterator

import torch

from hybridrl.workers.rollout import HFRollout
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor


class MisreadingRollout(HFRollout):
    """Computes with weights that `damage` has changed, and fingerprints those that arrived."""

    engine_name = "misreading"
    FROM_PUSH = 0
    pushes = 0
    arrived: int

    @torch.no_grad()
    def replace_weights(self, weights: Iterable[NamedTensor]) -> None:
        before = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        super().replace_weights(weights)
        self.arrived = super()._engine_fingerprint()
        if self.pushes >= self.FROM_PUSH:
            self.damage(before)
        self.pushes += 1

    def _engine_fingerprint(self, changed=None) -> int:
        return self.arrived

    def _named(self, part: str) -> Iterator[tuple[str, torch.Tensor]]:
        found = [(name, tensor) for name, tensor in self._model.state_dict().items() if part in name]
        assert found, f"the model has no {part}"
        return iter(found)

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


class SwappedExperts(MisreadingRollout):
    """Reads the experts in reverse order.

    The fingerprint is a sum, so that of its own tensors is right.
    """

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        for _, tensor in self._named("experts."):
            tensor.copy_(tensor.flip(0))
        assert HFRollout._engine_fingerprint(self) == self.arrived


class DroppedSinks(MisreadingRollout):
    """Runs a kernel without attention sinks."""

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        for _, tensor in self._named("sinks"):
            tensor.fill_(-1e4)


class CastBias(MisreadingRollout):
    """Holds biases in bfloat16."""

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        for _, tensor in self._named("_proj.bias"):
            tensor.copy_(tensor.bfloat16().float())


class StaleLayer(MisreadingRollout):
    """Keeps the weights that one layer had before the push."""

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._named("layers.1."):
            tensor.copy_(before[name])


class StaleLayerOfRankOne(StaleLayer):
    """The same in one of several processes."""

    def damage(self, before: dict[str, torch.Tensor]) -> None:
        if os.environ["RANK"] == "1":
            super().damage(before)
