"""`ShardedEngine`: what the two built-in engines do alike, on any number of ranks.

It schedules the learning rate, skips updates that are not finite, offloads, and saves only finite state. How a model
is sharded, and how gradients are reduced, is in `fsdp/` and `megatron/`. It runs in worker processes.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.config.schema.workers import OptimConfig
from hybridrl.errors import NonFiniteError
from hybridrl.protocol import DataProto
from hybridrl.workers import engine
from hybridrl.workers.engine.base import EngineSetup, MeshPosition, MicroBatching, StateTensors, StepOptions
from hybridrl.workers.engine.batching.layout import TokenLayout

if TYPE_CHECKING:  # only runs that replay routes load it
    from hybridrl.workers.engine.routing.replay import RouteReplay

logger = logging.getLogger(__name__)

Stats = dict[str, torch.Tensor | float]


class ShardedEngine(ABC):
    """Common part of the built-in engines. Methods without a docstring are those of `Engine`.

    `setup` of a subclass first calls `_choose_device`, and at the end `_offload`. Before that it sets `_models` and
    `_optimizers`, this process's parts of the model and their optimizers, none if the engine does not train.
    """

    mesh_position: MeshPosition
    num_updates: int
    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    def __init__(self, config: EngineSetup):
        self.config = config
        self._computed: Counter[str] = Counter()
        self._replay: RouteReplay | None = None  # `setup` sets it
        self._recorded: dict[int, np.ndarray] | None = None  # row -> routes, while they are recorded

    def forward_with_routes(
        self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]
    ) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """See `RoutingEngine`."""
        self._recorded = {}
        try:
            found = self.forward(batch, micro, outputs=outputs)
            return found, engine.column_of([self._recorded[row] for row in range(len(batch))])
        finally:
            self._recorded = None

    def _record_routes(self, rows: list[int]) -> None:
        """Keep the routes of the rows of the last pass, if they are asked for."""
        if self._recorded is not None and self._replay is not None:
            self._recorded.update(zip(rows, self._replay.recorded(), strict=bool(rows)))

    def _routing_counts(self) -> dict[str, float]:
        return {} if self._replay is None else self._replay.counts()

    @abstractmethod
    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """See `Engine`."""

    def _count(self, layout: TokenLayout) -> TokenLayout:
        """Add what the model computes for rows that share prefixes to what `take_computed` returns."""
        if layout.tree is not None:
            self._computed.update(layout.computed())
        return layout

    def take_computed(self) -> dict[str, float]:
        """See `PrefixEngine`."""
        taken, self._computed = self._computed, Counter()
        return {name: float(number) for name, number in taken.items()}

    @abstractmethod
    def _reduced_norm(self) -> float:
        """Reduce the gradients over ranks and return their global norm. Collective."""

    @abstractmethod
    def _save_state(self, directory: str) -> None: ...

    @abstractmethod
    def _load_state(self, directory: str) -> int:
        """Load what `_save_state` wrote, and return the number of updates."""

    def _apply_gradients(self, norm: float) -> None:
        """Update the parameters with gradients of this norm."""
        for optimizer in self._optimizers:
            optimizer.step()

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _move_parameters(self, target: torch.device) -> None:
        for model in self._models:
            model.to(target)

    def _move_optimizers(self, target: torch.device) -> None:
        for state in (state for inner in self._optimizers for state in inner.state.values()):
            state |= {name: value.to(target) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def _choose_device(self) -> None:
        """Set the device of this process, where everything is at first, and join a process group if there is none."""
        cuda = self.config.device == "cuda"
        if not dist.is_initialized():
            # One rank: a store in this process's memory needs no port.
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._params_on = self._optimizer_on = self._device

    def _offload(self) -> None:
        """Move to host memory what the settings say."""
        self.to("cpu", params=self.config.settings.param_offload, optimizer=self.config.settings.optimizer_offload)

    def adapters_off(self) -> AbstractContextManager[None]:
        return engine.adapters_off(self._models)

    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        optim = self._require_optimizer()
        self._load_to_device(params=True, optimizer=True)
        lr = learning_rate(optim, self.num_updates, total_steps=self.config.total_steps)
        norm = self._reduced_norm()
        skipped = skip or not math.isfinite(norm)
        if skipped:
            logger.warning(
                "Skipped the optimizer step after update %d: the loss or the gradient is not finite (norm %s), or no "
                "token is left to train on. Parameters are unchanged.",
                self.num_updates,
                norm,
            )
        else:
            self._set_options({"lr": lr})
            self._apply_gradients(norm)
            self.num_updates += 1
        self._drop_gradients()
        return {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def use_step_options(self, options: StepOptions) -> None:
        """Take the next steps with these options instead of those of the settings, without a schedule."""
        optim = OptimConfig(lr=options.lr, betas=options.betas, weight_decay=options.weight_decay)
        self.config = replace(self.config, optim=optim, grad_clip=options.grad_clip or math.inf)
        self._set_options({**adam_options(optim), "eps": options.eps})

    def save(self, directory: str) -> None:
        self._load_to_device(params=True, optimizer=True)
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        check_finite([*parameters, *tensors], self._device)
        self._save_state(directory)

    def load(self, directory: str) -> None:
        self._load_to_device(params=True, optimizer=True)
        self.num_updates = self._load_state(directory)
        if self.config.optim is not None:  # configured hyperparameters override those of the checkpoint
            self._set_options(adam_options(self.config.optim))

    def state_tensors(self) -> StateTensors:
        for optimizer in self._optimizers:
            create_adam_state(optimizer)
        self._move_optimizers(self._optimizer_on)  # new moments are where the parameters are
        return StateTensors(self._models, self._optimizers)

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        target = self._device if device == self._device.type else torch.device(device)
        if params:
            self._move_parameters(target)
            self._params_on = target
        if optimizer:
            self._move_optimizers(target)
            self._optimizer_on = target

    def _load_to_device(self, *, params: bool = False, optimizer: bool = False) -> None:
        self.to(
            self._device.type,
            params=params and self._params_on != self._device,
            optimizer=optimizer and self._optimizer_on != self._device,
        )

    def _require_optimizer(self) -> OptimConfig:
        assert self.config.optim is not None, "an engine without an optimizer does not train"
        return self.config.optim

    def _set_options(self, options: Mapping[str, Any]) -> None:
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group.update(options)


def adam_options(optim: OptimConfig) -> dict[str, Any]:
    """Return the options of Adam that stay the same during a run."""
    return {"betas": tuple(optim.betas), "weight_decay": optim.weight_decay}


def create_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam's first step would, where a parameter has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                device = parameter.device if group.get("fused") else None
                optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}


def loss_of_no_rows(results: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return 0 with a gradient: a rank without rows takes part in the backward passes of the others."""
    return torch.cat([result.flatten() for result in results.values()]).sum() * 0.0


def without_gradient(stats: Mapping[str, torch.Tensor | float]) -> Stats:
    """Return copies of the statistics of a loss, which may be the loss itself."""
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in stats.items()}


def as_numbers(stats: Iterable[Stats]) -> list[dict[str, float]]:
    """Return statistics of micro-batches as numbers.

    An engine reads them after its last micro-batch, because each time it waits for the GPU.
    """
    return [{name: float(value) for name, value in one.items()} for one in stats]


def check_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raise NonFiniteError on every rank if any rank's shard of any tensor is not finite. Collective."""
    own: Iterator[torch.Tensor] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = torch.tensor(int(any(not bool(tensor.isfinite().all()) for tensor in own)), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if found:
        raise NonFiniteError(
            "the model's parameters or its optimizer's state are not finite, although every applied gradient was "
            "finite; no checkpoint is written. Lower the learning rate and resume from the newest checkpoint"
        )


def learning_rate(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of a run of `total_steps`."""
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    return optim.lr * lr_factor(
        step,
        shape=optim.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )


def lr_factor(step: int, *, shape: str, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> float:
    """Return the learning rate of optimizer step `step` (from 0) as a fraction of the peak.

    Warm-up: (step + 1) / warmup_steps, so that no step runs at 0 and the last warm-up step has the peak. After it, with
    x = (step - warmup_steps) / (total_steps - warmup_steps) and m = min_lr_ratio:

        constant  1
        linear    m + (1 - m) (1 - x)
        cosine    m + (1 - m) (1 + cos(pi x)) / 2

    x stays 1 after `total_steps`, so a longer run keeps the smallest rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    x = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    decay = {"linear": 1.0 - x, "cosine": (1.0 + math.cos(math.pi * x)) / 2}[shape]
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay
