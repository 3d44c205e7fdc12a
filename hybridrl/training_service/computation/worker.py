"""The workers of the training service, of which `Computation` has two groups.

`TrainingServiceWorker` is a rank of the trainers: an engine with a table of slots. The ranks share the data of
each pass. `SamplingWorker` is a replica: a rollout that samples versions of the weights, which it reads from their
directories. Neither knows sessions, sequence numbers or keys.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import FSDPConfig, MegatronConfig, OptimConfig
from hybridrl.errors import ConfigError, NonFiniteError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.training_service.computation import adapter_slots
from hybridrl.training_service.computation.losses import LOSSES, TARGETS, check_data, checked_config
from hybridrl.training_service.computation.rows import (
    LOG_PROBS,
    ROW,
    TERMS,
    TOP,
    TOP_IDS,
    TOP_LOG_PROBS,
    arrays_of,
    rows_of,
)
from hybridrl.training_service.computation.snapshot_sampler import AdapterRollout, SnapshotSampler, Version
from hybridrl.training_service.computation.vllm_sampler import AdapterSampler, make_vllm_sampler
from hybridrl.training_service.computation.weight_files import SavedModel, new_directory, read_model, write_model
from hybridrl.training_service.wire import Datum, Pass
from hybridrl.workers.engine.base import EngineSetup, LoRA, LossFn, MicroBatching, StepOptions
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.engine.peft_format import write_adapter
from hybridrl.workers.engine_worker import make_engine
from hybridrl.workers.process_setup import init_worker_process
from hybridrl.workers.rollout.base import RolloutSetup, load_special_tokens
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores

NOTE = "note"  # file beside the weights, with what the service wants to know about them
MAX_SEQUENCES = 64  # generated together
ONE_ROW = MicroBatching(max_rows=1)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """What the service's options hand on to its workers.

    Attributes:
        engine: What replicas sample with: "hf" or "vllm".
        strategy: The trainers' engine: "fsdp", or "megatron", whose trainers are tensor-parallel and train all weights.
        max_rank: Highest rank of adapters; 0: all weights are trained.
        micro_batch_tokens: Tokens that are computed together.
        device: "auto", "cpu" or "cuda".
        num_threads: See `init_worker_process`.
        trust_remote_code: Run Python code that comes with the model.
    """

    engine: str = "hf"
    strategy: str = "fsdp"
    max_rank: int = 32
    micro_batch_tokens: int = 16384
    device: str = "auto"
    num_threads: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class WorkerSettings(ComputeOptions):
    """What a worker computes with.

    Attributes:
        path: Directory of the base model.
        num_trainers: How many trainers there are.
        max_length: Tokens of a sequence.
    """

    path: str
    num_trainers: int = 1
    max_length: int = 4096


class TrainingServiceWorker(Worker):
    """A rank of the trainers, see above. All methods are collective."""

    def __init__(self, settings: WorkerSettings):
        self.settings = settings

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model."""
        device = init_worker_process(device=self.settings.device, num_threads=self.settings.num_threads)
        settings = self.settings
        self._engine: Any = make_engine(settings.strategy, self._engine_setup(device))
        try:
            self._engine.setup()
        except ConfigError as error:  # in the words of a run's settings
            raise ConfigError(re.sub(r"(model\.)?lora_rank", "--max-rank", str(error))) from error
        table = {"fsdp": adapter_slots.SlotTable, "megatron": adapter_slots.MegatronSlotTable}[settings.strategy]
        self._slots = table(self._engine, max_rank=settings.max_rank)
        config = overridden_config(settings.path, {}, trust_remote_code=settings.trust_remote_code)
        self._vocabulary = int(config.get_text_config().vocab_size)

    @register(Dispatch.ONE_TO_ALL)
    def vocabulary(self) -> int:
        """Return how many tokens the model has."""
        return self._vocabulary

    def _engine_setup(self, device: str) -> EngineSetup:
        settings = self.settings
        return EngineSetup(
            kind="causal_lm",
            path=settings.path,
            settings=FSDPConfig(reshard_after_forward=False)
            if settings.strategy == "fsdp"
            else MegatronConfig(
                tensor_model_parallel_size=settings.num_trainers, use_distributed_optimizer=False, dtype="float32"
            ),
            trust_remote_code=settings.trust_remote_code,
            device=device,
            optim=OptimConfig(),
            lora=LoRA(settings.max_rank, adapter_slots.ALPHA, head=True) if settings.max_rank else None,
            whole_logits=True,
            token_terms=TERMS,
        )

    # -- models

    @register(Dispatch.ONE_TO_ALL)
    def create(self, model: str, adapter: adapter_slots.TrainedLayers) -> None:
        """Make a new model."""
        self._slots.create(model, adapter)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, model: str, directory: str, *, with_optimizer: bool) -> adapter_slots.TrainedLayers:
        """Make a model of saved weights and return what it trains."""
        saved, tensors = read_model(Path(directory))
        if with_optimizer and not saved.has_optimizer:
            raise ConfigError("these weights were saved without an optimizer; load them with optimizer=false")
        kept = tensors if with_optimizer else adapter_slots.without_optimizer(tensors)
        self._slots.load(model, saved.adapter, kept, num_updates=saved.num_updates if with_optimizer else 0)
        return saved.adapter

    @register(Dispatch.ONE_TO_ALL)
    def drop(self, model: str) -> None:
        """Forget a model."""
        self._slots.drop(model)

    @register(Dispatch.ONE_TO_ALL)
    def save(self, model: str, directory: str, *, with_optimizer: bool, note: str | None = None) -> None:
        """Write a model's weights, and Adam's state if wanted, into a new directory, from rank 0.

        Args:
            model: The model.
            directory: Appears by a rename.
            with_optimizer: Whether training can continue from it as if it had not stopped.
            note: Text for a file `note` beside the weights.
        """
        tensors, num_updates = self._slots.state(model)
        if not with_optimizer:
            tensors = adapter_slots.without_optimizer(tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise NonFiniteError("the model's weights are not finite; nothing is saved. Load earlier weights")
        if dist.get_rank():
            return
        saved = SavedModel(self._slots.adapter(model), num_updates, with_optimizer, self.settings.path)
        with new_directory(Path(directory)) as partial:
            write_model(partial, saved, tensors)
            if note is not None:
                (partial / NOTE).write_text(note, encoding="utf-8")

    @register(Dispatch.ONE_TO_ALL)
    def export(self, model: str, directory: str, *, note: str) -> None:
        """Write a model's adapters in peft's format. Raises ConfigError for a model without adapters."""
        adapter = self._slots.adapter(model)
        if not adapter.rank:
            raise ConfigError("save_weights_external writes adapters in peft's format, and this model has none")
        tensors = {name: tensor.cpu() for name, tensor in self._slots.trained(model).items()}
        if dist.get_rank():
            return
        with new_directory(Path(directory)) as partial:
            write_adapter(tensors, str(partial), lora=LoRA(adapter.rank, adapter_slots.ALPHA), base=self.settings.path)
            (partial / NOTE).write_text(note, encoding="utf-8")

    # -- training

    @register(Dispatch.ONE_TO_ALL)
    def run_pass(self, model: str, request: Pass) -> dict[int, tuple[np.ndarray, float]]:
        """Run a forward or forward_backward; return log-probs and loss of this rank's data, by their numbers.

        Every rank gets the whole pass, and computes a part of its data.

        Raises:
            DataError: The request cannot be computed. No gradient was added.
        """
        config = checked_config(request)
        check_data(request, vocabulary=self._vocabulary, max_length=self.settings.max_length)
        slot, position = self._slots.use(model), self._engine.mesh_position
        numbers = range(len(request.data))[position.dp_rank :: position.dp_size]
        data = [request.data[number] for number in numbers]
        rows, longest = rows_of(data, request.loss_fn), max(len(datum.tokens) for datum in request.data) + 1
        micro = MicroBatching(max_tokens=max(longest, self.settings.micro_batch_tokens))
        found, losses = torch.zeros(rows.batch[TARGETS].shape), dict[int, float]()
        loss_fn = _loss_of(request, config, found, losses)
        if request.forward_only:
            outputs = self._engine.forward(rows, micro, outputs=(LOG_PROBS,))
            if data:
                loss_fn(outputs, rows)
        else:
            self._engine.forward_backward(rows, micro, loss_fn, outputs=(LOG_PROBS,))
            slot.has_gradients = True
        arrays = arrays_of(found, data)
        return {number: (arrays[row], losses[row]) for row, number in enumerate(numbers)}

    @register(Dispatch.ONE_TO_ALL)
    def scores(self, model: str, asked: ScoreRequest) -> TokenScores:
        """Return what a model predicts for given tokens at temperature 1. Every rank computes all."""
        self._slots.use(model)
        ids, num_top, targets = np.asarray(asked.tokens, np.int64), asked.num_top, asked.targets
        wanted = ids[1:, None] if targets is None else np.concatenate([ids[1:, None], targets.clip(min=0)], axis=1)
        rows = rows_of([Datum(ids[:-1], {TARGETS: wanted})], "cross_entropy")
        outputs: tuple[str, ...] = (LOG_PROBS,)
        if num_top:
            rows.batch[TOP] = torch.zeros(1, len(ids) - 1, min(num_top, self._vocabulary))
            outputs += (TOP_IDS, TOP_LOG_PROBS)
        found = {name: value[0].numpy() for name, value in self._engine.forward(rows, ONE_ROW, outputs=outputs).items()}
        top = (found[TOP_IDS].astype(np.int64), found[TOP_LOG_PROBS]) if num_top else None
        given = None if targets is None else np.where(targets >= 0, found[LOG_PROBS][:, 1:], np.float32(0))
        return TokenScores(found[LOG_PROBS][:, 0], top, given)

    @register(Dispatch.ONE_TO_ALL)
    def optimizer_step(self, model: str, options: StepOptions) -> dict[str, float]:
        """Update a model with its gradients; return metrics. Without gradients nothing changes."""
        slot, report = self._slots.use(model), {"grad_norm": 0.0, "skipped": 0.0}
        if slot.has_gradients:
            self._engine.use_step_options(options)
            report, slot.has_gradients = self._engine.optimizer_step(), False
        else:
            self._engine.num_updates += 1
        slot.num_updates = self._engine.num_updates
        return {
            "grad_norm:mean": report["grad_norm"] if math.isfinite(report["grad_norm"]) else -1.0,
            "skipped:max": report["skipped"],
            "num_updates:max": float(slot.num_updates),
        }


class SamplingWorker(Worker):
    """A replica, see above. It communicates with no other."""

    _sampler: AdapterSampler | SnapshotSampler

    def __init__(self, settings: WorkerSettings):
        self.settings = settings

    @classmethod
    def num_peers(cls, *args: Any, **kwargs: Any) -> int:
        return 1

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> str | None:
        """Load the model; return why vLLM merges adapters, if it does."""
        settings = self.settings
        device = init_worker_process(device=settings.device, num_threads=settings.num_threads, single_process=True)
        tokens = load_special_tokens(settings.path, trust_remote_code=settings.trust_remote_code)
        setup = RolloutSetup(
            settings.path,
            RolloutConfig(name=settings.engine, max_num_seqs=MAX_SEQUENCES),
            tokens.eos_ids,
            tokens.pad_id,
            max_prompt_length=1,
            max_response_length=settings.max_length - 1,
            device=device,
            trust_remote_code=settings.trust_remote_code,
        )
        note = None
        if settings.engine == "vllm":
            self._sampler, note = make_vllm_sampler(setup, max_rank=settings.max_rank, read=_read_version)
        else:
            self._sampler = SnapshotSampler(AdapterRollout(setup, max_rank=settings.max_rank), read=_read_version)
        return note

    @register(Dispatch.ONE_TO_ALL)
    def forget(self, version: str) -> None:
        """Read a version again before its next use."""
        self._sampler.forget(version)

    @register(Dispatch.ONE_TO_ALL)
    def retire(self, version: str) -> None:
        """Forget a version and its open requests."""
        self._sampler.drop(version)

    @register(Dispatch.ONE_TO_ALL)
    def sample(self, version: str, requests: list[Request], slice_s: float) -> list[TokenOutput]:
        """Generate with a version for one time slice, see `SnapshotSampler.serve`."""
        return self._sampler.serve(version, requests, slice_s=slice_s)

    @register(Dispatch.ONE_TO_ALL)
    def scores(self, version: str, wanted: ScoreRequest) -> TokenScores:
        """Return what a version predicts for given tokens."""
        return self._sampler.scores(version, wanted)


def _loss_of(request: Pass, config: dict[str, float], found_BTK: torch.Tensor, losses: dict[int, float]) -> LossFn:
    """Return the loss of a pass. It stores the log-probs and the loss of each row, too."""
    loss = LOSSES[request.loss_fn]

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, mask = outputs[LOG_PROBS], rows.batch["response_mask"][..., None].bool()
        columns = {name: rows.batch[name] for name in loss.inputs}
        losses_bTK = torch.where(mask, loss.fn(log_probs, columns, config), 0.0)
        found_BTK[rows.batch[ROW].cpu()] = log_probs.detach().cpu()
        per_row = losses_bTK.detach().double().sum((1, 2)).cpu().tolist()
        losses.update(zip(rows.batch[ROW].tolist(), per_row, strict=True))
        return losses_bTK.sum(), {}

    return loss_fn


def _read_version(directory: str) -> Version:
    saved, tensors = read_model(Path(directory))
    return saved.adapter, tensors
