"""The FSDP2 engine: parameters, gradients and optimizer state sharded over all ranks by `fully_shard`, on gloo or nccl.

Blocks are gathered one at a time when they run. Gradients are *summed* over ranks and micro-batches, since losses come
divided by global counts, and reduced with every micro-batch: holding them back until the last would save a
reduce-scatter per micro-batch, and cost every rank a whole model's float32 gradients. A world of one runs the same code
in a process group of its own.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridrl.algos.partition import micro_batches
from hybridrl.config.schema.workers import OptimConfig
from hybridrl.errors import CheckpointError, DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import Durable, EngineConfig, LossFn, MicroBatching, Place
from hybridrl.workers.engine.batching.layout import Layout, TokenGrid, lay_out, placeholder_grid, token_grid
from hybridrl.workers.engine.batching.outputs import Reader, check_outputs
from hybridrl.workers.engine.batching.packed_attention import use_packed_sdpa
from hybridrl.workers.engine.collective_errors import check_finite, log_skipped, tensors_of
from hybridrl.workers.engine.fsdp.checkpoint import load_state, save_state
from hybridrl.workers.engine.hf_model import (
    check_packable,
    decoder_blocks,
    empty_model,
    hf_config,
    load_model,
    number_heads,
    recompute_activations,
)
from hybridrl.workers.engine.lora import WEIGHTS, add_adapters
from hybridrl.workers.engine.lr_schedule import learning_rate


class FSDPEngine:
    """An `Engine` on `torch.distributed.fsdp.fully_shard`.

    `model` is the sharded module, there after `setup`. It stays in eval mode: no dropout, so that PPO's ratio starts at
    1.
    """

    def __init__(self, config: EngineConfig):
        self.config = config

    def setup(self) -> None:
        """Load, shard, make the optimizer; offload what the settings say."""
        config = self.config
        _join_process_group(config.device)
        self.place = Place(dp_rank=dist.get_rank(), dp_size=dist.get_world_size(), answers=True)
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
        )
        self._params_on = self._optimizer_on = self._device
        self.model = _sharded_model(config, self._device)
        self._read = Reader(
            self.model,
            kind=config.kind,
            temperature=config.temperature,
            pass_runs=config.packed and use_packed_sdpa(self.model),
        )
        self._optimizer, self.num_updates = _adamw(config, self.model), 0
        self.to("cpu", params=config.param_offload, optimizer=config.optimizer_offload)

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        check_outputs(outputs, kind=self.config.kind)
        self._bring_back(params=True)
        found: list[dict[str, torch.Tensor]] = []
        order: list[int] = []
        with torch.no_grad():
            for rows, layout in self._layouts(batch, micro):
                results = self._read(layout, outputs=outputs)
                if rows:
                    found.append(results)
                    order += rows
        self._reshard()
        empty = (0,) if self.config.kind == "score" else (0, batch.batch["response_mask"].size(1))
        return {name: _in_row_order([results[name] for results in found], order, empty_shape=empty) for name in outputs}

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        assert self._optimizer is not None, "an engine without an optimizer does not train"
        check_outputs(outputs, kind=self.config.kind)
        self._bring_back(params=True)
        stats: list[dict[str, torch.Tensor | float]] = []
        for rows, layout in self._layouts(batch, micro):
            results = self._read(layout, outputs=outputs)
            if rows:
                loss, values = loss_fn(results, batch.select_idxs(rows).to(self._device))
                stats.append(
                    {
                        name: value.detach() if isinstance(value, torch.Tensor) else value
                        for name, value in values.items()
                    }
                )
            else:
                loss = sum(result.sum() for result in results.values()) * 0.0
            loss.backward()
        self._reshard()
        # Numbers are read only here, so that a GPU is never waited for between micro-batches.
        return [{name: float(value) for name, value in values.items()} for values in stats]

    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        assert self._optimizer is not None, "an engine without an optimizer does not train"
        self._bring_back(params=True, optimizer=True)
        lr = learning_rate(self.config.optim, self.num_updates, total_steps=self.config.total_steps)
        norm = _clip(self.model, max_norm=self.config.grad_clip)
        skipped = skip or not math.isfinite(norm)
        if skipped:
            log_skipped(self.num_updates, norm)
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.num_updates += 1
        self._optimizer.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        self._bring_back(params=True)
        yield from WEIGHTS[lora](self.model, _whole)

    def save(self, directory: str) -> None:
        self._bring_back(params=True, optimizer=True)
        check_finite([*self.model.parameters(), *tensors_of(self._optimizer)], self._device)
        save_state(directory, model=self.model, optimizer=self._optimizer, step=self.num_updates)

    def load(self, directory: str) -> None:
        self._bring_back(params=True, optimizer=True)
        self.num_updates = load_state(directory, model=self.model, optimizer=self._optimizer)
        if self._optimizer is not None:  # the checkpoint brings its own, but what runs is what is configured
            for group in self._optimizer.param_groups:
                group.update(_hyperparameters(self.config.optim))

    def durable(self) -> Durable:
        self._reshard()
        if self._optimizer is None:
            return Durable([self.model], [])
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            if not self._optimizer.state[parameter]:  # what the first step would make
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        return Durable([self.model], [self._optimizer])

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        target = self._device if device == self._device.type else torch.device(device)
        if params:
            self.model.to(target)
            self._params_on = target
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update(
                    {name: value.to(target) for name, value in state.items() if isinstance(value, torch.Tensor)}
                )
            self._optimizer_on = target

    def _reshard(self) -> None:
        """Free gathered parameters: kept over the next optimizer step they would be stale."""
        for module in _sharded_modules(self.model):
            module.reshard()

    def _bring_back(self, *, params: bool = False, optimizer: bool = False) -> None:
        self.to(
            self._device.type,
            params=params and self._params_on != self._device,
            optimizer=optimizer and self._optimizer_on != self._device,
        )

    def _layouts(self, batch: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], Layout]]:
        """Yield (row indices, layout on the device), equally often on every rank: placeholders without rows fill up."""
        grid, groups, num_passes = self._cut(batch, micro)
        for number in range(num_passes):
            rows = groups[number] if number < len(groups) else []
            layout = lay_out(grid if rows else placeholder_grid(), rows or [0], packed=self.config.packed)
            yield rows, layout.to(self._device)

    def _cut(self, batch: DataProto, micro: MicroBatching) -> tuple[TokenGrid | None, list[list[int]], int]:
        """Return the batch's tokens, its micro-batches, and the largest number of micro-batches of any rank.
        Collective.

        Raises DataError on every rank if any rank's rows cannot be cut: a rank on its own would leave the others
        waiting.
        """
        grid, groups, problem = None, [], None
        try:
            grid = token_grid(batch)
            groups = micro_batches(
                grid.lengths.clamp(min=1),
                max_rows=micro.max_rows,
                max_tokens=micro.max_tokens,
                packed=self.config.packed,
            )
        except DataError as error:
            problem = error
        num_passes, failed = _max_over_ranks([len(groups), int(problem is not None)], self._device)
        if failed:
            raise problem or DataError("another rank's rows cannot be cut into micro-batches; its own error says why")
        return grid, groups, num_passes


def _join_process_group(device: str) -> None:
    if not dist.is_initialized():
        # Collectives of a world of one: a store in this process's memory, so no port.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )


def _max_over_ranks(numbers: list[int], device: torch.device) -> list[int]:
    if dist.get_world_size() == 1:
        return numbers
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _sharded_model(config: EngineConfig, device: torch.device) -> nn.Module:
    """Return the loaded model, sharded, on the device. Only rank 0 ever holds a whole model, in host memory."""
    settings = hf_config(config)
    dtype = config.compute_dtype if config.optim is None else torch.float32
    if dist.get_world_size() == 1:
        return _shard(_adapted(load_model(config, settings, dtype=dtype), config), config)
    whole = _load_on_rank_zero(config, settings, dtype=dtype)
    model = _shard(_adapted(empty_model(config, settings, dtype=dtype), config), config).to_empty(device=device)
    state = {} if whole is None else whole.state_dict()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Buffers that no checkpoint holds (rotary frequencies) are computed at construction, which the meta device skipped.
    source = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        if name in source:
            buffer.copy_(source[name])
        dist.broadcast(buffer, src=0)
    return model


def _adapted(model: nn.Module, config: EngineConfig) -> nn.Module:
    if config.lora is not None:
        add_adapters(model, config.lora, seed=config.seed)
    return model


def _load_on_rank_zero(config: EngineConfig, settings: Any, *, dtype: torch.dtype) -> nn.Module | None:
    """Return the whole model on rank 0 and None elsewhere.

    If rank 0 fails, every rank raises instead of waiting for it.
    """
    model, problem = None, None
    if dist.get_rank() == 0:
        try:
            model = _adapted(load_model(config, settings, dtype=dtype), config)
        except Exception as error:  # whatever it is, it is raised below
            problem = error
    said = [problem and f"{type(problem).__name__}: {problem}"]
    dist.broadcast_object_list(said, src=0)
    if problem is not None:
        raise problem
    if said[0] is not None:
        raise CheckpointError(f"rank 0 could not load {config.path}: {said[0]}")
    return model


def _shard(model: nn.Module, config: EngineConfig) -> nn.Module:
    if config.packed:
        check_packable(model)
    blocks = decoder_blocks(model)
    if config.gradient_checkpointing:
        recompute_activations(blocks)
    if config.optim is None:
        model.requires_grad_(False)
    settings = {
        "mesh": init_device_mesh(config.device, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=config.compute_dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for head in number_heads(model, kind=config.kind):
        fully_shard(
            head,
            **settings | {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)},
        )
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a factor alone asks for PREMUL_SUM, which gloo does not have
        module.set_reshard_after_backward(config.reshard_after_forward, recurse=False)
    return model


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _adamw(config: EngineConfig, model: nn.Module) -> torch.optim.AdamW | None:
    """Return AdamW over all parameters that are trained; weight decay applies to every one, norms and biases too, as in
    verl.
    """
    if config.optim is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.optim.lr, **_hyperparameters(config.optim), fused=True)


def _hyperparameters(optim: OptimConfig) -> dict[str, Any]:
    return {"betas": tuple(optim.betas), "weight_decay": optim.weight_decay}


def _clip(model: nn.Module, *, max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`. Returns the norm before. Collective."""
    return float(_whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _in_row_order(parts: list[torch.Tensor], order: list[int], *, empty_shape: tuple[int, ...]) -> torch.Tensor:
    """Join micro-batches' results on the CPU and undo the sorting of rows."""
    if not parts:
        return torch.zeros(empty_shape)
    joined = torch.cat(parts).float().cpu()
    result = torch.empty_like(joined)
    result[order] = joined
    return result
