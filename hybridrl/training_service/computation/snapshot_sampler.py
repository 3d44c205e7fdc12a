"""Sample from several versions of a model with one copy of its weights.

The base model is one of them.

A sampling worker owns it. The copy is an `hf` rollout with adapters that are not merged, so that
another version costs only the copy of its adapters. Without LoRA all weights are copied. Each version has a request
engine of its own: requests of one version are generated together, those of others wait for their turn.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybridrl.training_service.computation.adapter_slots import ALPHA, TrainedLayers
from hybridrl.workers import rollout as rollouts
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.lora import LoRALinear, add_adapters
from hybridrl.workers.rollout.base import RolloutSetup
from hybridrl.workers.rollout.hf import HFRollout
from hybridrl.workers.rollout.request_engine import RequestEngine
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores, score_logits

BASE = "base"
MAX_VERSIONS = 16  # in memory; others are read from their directories again

Version = tuple[TrainedLayers, dict[str, torch.Tensor]]


class AdapterRollout(HFRollout):
    """An `hf` rollout whose adapters can be exchanged. `max_rank` 0: all weights are exchanged."""

    engine_name = "hf"

    def __init__(self, setup: RolloutSetup, *, max_rank: int):
        super().__init__(setup)
        self._model: nn.Module
        if max_rank:
            add_adapters(self._model, LoRA(max_rank, ALPHA, head=True), seed=0)
        self._layers = {name: layer for name, layer in self._model.named_modules() if isinstance(layer, LoRALinear)}
        self._base = {} if max_rank else {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    @torch.no_grad()
    def use(self, version: Version | None) -> None:
        """Compute with a version from now on; None: with the base model."""
        for layer in self._layers.values():
            layer.enabled = version is not None
        if self._base:
            self.replace_weights(self._base.items() if version is None else version[1].items())
        elif version is not None:
            self._copy_adapters(*version)

    def _copy_adapters(self, adapter: TrainedLayers, tensors: dict[str, torch.Tensor]) -> None:
        for name, layer in self._layers.items():
            layer.enabled = f"{name}.lora_A" in tensors
            if layer.enabled:
                layer.scale = ALPHA / adapter.rank
                layer.lora_A.zero_()[: adapter.rank] = tensors[f"{name}.lora_A"]
                layer.lora_B.zero_()[:, : adapter.rank] = tensors[f"{name}.lora_B"]

    @torch.inference_mode()
    def scores(self, wanted: ScoreRequest) -> TokenScores:
        """Return what the model predicts for given tokens."""
        ids = torch.tensor([wanted.tokens], device=self._device)
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
        return score_logits(logits, wanted)


class SnapshotSampler:
    """The versions that can be sampled.

    Args:
        rollout: What generates: a `Rollout` that also has `use` and `scores`, as `AdapterRollout`.
        read: Returns the version of a name from the disk.
    """

    def __init__(self, rollout: Any, *, read: Callable[[str], Version]):
        self._rollout, self._read = rollout, read
        self._versions: OrderedDict[str, Version] = OrderedDict()
        self._engines: dict[str, RequestEngine] = {}
        self._active: str | None = None
        self._use(BASE)

    def forget(self, name: str) -> None:
        """Read a version from the disk again before its next use."""
        self._versions.pop(name, None)
        self._active = None if self._active == name else self._active

    def drop(self, name: str) -> None:
        """Forget a version and its open requests."""
        self.forget(name)
        self._engines.pop(name, None)

    def _use(self, name: str) -> None:
        if name == self._active:
            return
        if name != BASE and name not in self._versions:
            self._versions[name] = self._read(name)
            if len(self._versions) > MAX_VERSIONS:
                self._versions.popitem(last=False)
        if name != BASE:
            self._versions.move_to_end(name)
        self._active = None
        self._rollout.use(None if name == BASE else self._versions[name])
        self._active = name

    def serve(self, name: str, requests: list[Request], *, slice_s: float) -> list[TokenOutput]:
        """Add requests to a version, generate for it for one time slice, and return what finished."""
        self._use(name)
        engine = self._engines.setdefault(name, rollouts.BatchedRequestEngine(self._rollout))
        try:
            return engine.serve(requests, [], slice_s=slice_s)
        except Exception:
            del self._engines[name]  # its open requests have failed with this one
            raise
        finally:
            if name in self._engines and not engine.num_open():
                del self._engines[name]

    def scores(self, name: str, wanted: ScoreRequest) -> TokenScores:
        """Return what a version predicts for given tokens."""
        self._use(name)
        return self._rollout.scores(wanted)
