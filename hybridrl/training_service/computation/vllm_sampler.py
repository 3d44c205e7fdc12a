"""Sample versions of a model with vLLM.

A sampling worker starts it. Adapters are in vLLM's own layers where vLLM has such for all of them: versions then share
the base weights and the steps of the engine (`AdapterSampler`). Otherwise, and without adapters, a version's weights
replace those of another one, merged (`MergedRollout` under a `SnapshotSampler`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch

from hybridrl.config.schema.workers import FSDPConfig
from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.training_service.computation.adapter_slots import ALPHA
from hybridrl.training_service.computation.snapshot_sampler import BASE, MAX_VERSIONS, SnapshotSampler, Version
from hybridrl.workers import rollout as rollouts
from hybridrl.workers.engine.base import EngineSetup, LoRA
from hybridrl.workers.engine.hf_model import empty_model, hf_config, load_model
from hybridrl.workers.engine.lora import chosen_layers
from hybridrl.workers.rollout.base import AdapterSlots, RolloutSetup
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, WeightNames

CACHE_MB = 512  # of vLLM's keys and values on the CPU
Read = Callable[[str], Version]


def make_vllm_sampler(
    setup: RolloutSetup, *, max_rank: int, read: Read
) -> "tuple[AdapterSampler | SnapshotSampler, str | None]":
    """Return what samples versions with vLLM, and why it merges adapters, if it does.

    Raises:
        ConfigError: vLLM does not run the model, or its cache is too small.
    """
    reason = None
    setup = replace(setup, config=replace(setup.config, kv_cache_memory_mb=CACHE_MB))
    if max_rank:
        try:
            return AdapterSampler(_rollout_with_slots(setup, max_rank), read=read), None
        except (ConfigError, StaleWeightsError) as error:
            reason = str(error)
    try:
        return SnapshotSampler(MergedRollout(setup), read=read), reason
    except ConfigError as error:
        raise ConfigError(
            f"--engine=vllm --max-length={setup.max_length}: {error}; lower --max-length if it is the cache, else use "
            "--engine hf"
        ) from error


def _rollout_with_slots(setup: RolloutSetup, max_rank: int) -> rollouts.VLLMRollout:
    """Return a rollout whose requests name adapters.

    Raises:
        ConfigError: vLLM has no adapters for this model.
        StaleWeightsError: It has none for some of the layers that the trainers adapt.
    """
    of_model = _engine_setup(setup)
    found = hf_config(of_model)
    if getattr(found.get_text_config(), "kv_lora_rank", None):
        raise ConfigError("vLLM computes latent attention from products of weights, without their adapters")
    layers = chosen_layers(empty_model(of_model, found, dtype=torch.float32), LoRA(1, ALPHA, head=True), None)
    slots = AdapterSlots(max_rank, tuple(sorted({name.rpartition(".")[2] for name in layers})))
    rollout, probe = rollouts.VLLMRollout(replace(setup, slots=slots)), dict[str, torch.Tensor]()
    for name, layer in layers.items():
        probe |= {
            f"{name}.lora_A": torch.ones(1, layer.in_features),
            f"{name}.lora_B": torch.ones(layer.out_features, 1),
        }
    rollout.add_adapter(1, probe, 1.0)
    rollout.drop_adapter(1)
    return rollout


def _engine_setup(setup: RolloutSetup) -> EngineSetup:
    return EngineSetup(
        kind="causal_lm", path=setup.model_path, settings=FSDPConfig(), trust_remote_code=setup.trust_remote_code
    )


class AdapterSampler:
    """The versions of one vLLM engine whose requests name their adapters.

    Its calls are those of `SnapshotSampler`.

    Requests of all versions are generated together, so a call for one version can finish requests of others. Their
    outputs wait for the next call for their version.
    """

    def __init__(self, rollout: rollouts.VLLMRollout, *, read: Read):
        self._rollout, self._read = rollout, read
        self._engine = rollout.request_engine()
        self._numbers: OrderedDict[str, int] = OrderedDict()  # of the adapters of versions, by their last use
        self._held: set[int] = set()  # also those of versions that were written anew, while requests name them
        self._last = 1  # 1 was the probe's
        self._open: dict[str, tuple[str, int]] = {}  # request id -> version and adapter
        self._done: dict[str, list[TokenOutput]] = {}

    def forget(self, name: str) -> None:
        """Read a version from the disk again before its next use, but for open requests."""
        self._numbers.pop(name, None)
        self._drop_unused()

    def drop(self, name: str) -> None:
        """Forget a version and its open requests."""
        of_version = [request_id for request_id, (version, _) in self._open.items() if version == name]
        if of_version:
            self._file(self._engine.serve([], of_version, slice_s=0))
        self._done.pop(name, None)
        self.forget(name)

    def serve(self, name: str, requests: list[Request], *, slice_s: float) -> list[TokenOutput]:
        """Add requests to a version, generate for a time slice, and return what finished."""
        number = self._number(name)
        self._open |= {request.request_id: (name, number) for request in requests}
        if any(version == name for version, _ in self._open.values()):
            try:
                added = [replace(request, adapter=number) for request in requests]
                self._file(self._engine.serve(added, [], slice_s=slice_s))
            except Exception as error:
                self._fail_all(error)
        return self._done.pop(name, [])

    def scores(self, name: str, wanted: ScoreRequest) -> TokenScores:
        """Return what a version predicts for given tokens."""
        found, finished = self._engine.score(replace(wanted, adapter=self._number(name)))
        self._file(finished)
        return found

    def _number(self, name: str) -> int:
        """Return a version's adapter, which is in vLLM then; 0 for the base model."""
        if name == BASE:
            return 0
        if name not in self._numbers:
            adapter, tensors = self._read(name)
            self._last += 1
            self._rollout.add_adapter(self._last, tensors, ALPHA / adapter.rank)
            self._held.add(self._last)
            self._numbers[name] = self._last
            if len(self._numbers) > MAX_VERSIONS:
                self._numbers.popitem(last=False)
            self._drop_unused()
        self._numbers.move_to_end(name)
        return self._numbers[name]

    def _file(self, outputs: list[TokenOutput]) -> None:
        """Keep outputs for the next call of their version."""
        for output in outputs:
            version, _ = self._open.pop(output.request_id)
            self._done.setdefault(version, []).append(output)
        if outputs:
            self._drop_unused()

    def _drop_unused(self) -> None:
        unused = self._held - {*self._numbers.values()} - {number for _, number in self._open.values()}
        for number in unused:
            self._rollout.drop_adapter(number)
        self._held -= unused

    def _fail_all(self, error: Exception) -> None:
        """Answer all open requests with an error, and read all versions again."""
        for request_id in self._open:
            self._engine.abort(request_id)
        self._file([TokenOutput.of_error(request_id, error) for request_id in self._open])
        self._engine = self._rollout.request_engine()
        self._numbers.clear()
        self._drop_unused()


class MergedRollout(rollouts.VLLMRollout):
    """A vLLM rollout that computes with one version at a time, each exchange verified."""

    engine_name = "vllm"
    _number = 0  # of exchanges

    def use(self, version: Version | None) -> None:
        """Compute with a version, None: the base model. No request is open."""
        self._number += 1
        self.load_weights(self._number, self._weights(version))

    @cached_property
    def _base(self) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """The base model's weights, and the second names of some."""
        of_model = _engine_setup(self.setup)
        model = load_model(of_model, hf_config(of_model), dtype=torch.float32)
        return dict(model.state_dict()), WeightNames.of(model).tied

    def _weights(self, version: Version | None) -> Iterator[NamedTensor]:
        adapter, tensors = version or (None, {})
        weights, tied = self._base
        for name, weight in weights.items():
            A, B = (tensors.get(f"{name.removesuffix('.weight')}.{part}") for part in ("lora_A", "lora_B"))
            if adapter is None or A is None or B is None:
                yield name, tensors.get(name, weight)
            elif name in tied:
                raise ConfigError(
                    f"vLLM merges adapters here, and {name} is the input embedding, too: create models with "
                    "train_unembed=false, or start the server with --engine hf"
                )
            else:
                yield name, torch.addmm(weight, B.float(), A.float(), alpha=ALPHA / adapter.rank)

    def scores(self, wanted: ScoreRequest) -> TokenScores:
        """Return what the model predicts for given tokens."""
        return self.request_engine().score(wanted)[0]
