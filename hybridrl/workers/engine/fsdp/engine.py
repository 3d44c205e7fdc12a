"""FSDP2 engine: `fully_shard` shards parameters, gradients and optimizer state over all ranks, on gloo or nccl.

Blocks are gathered one at a time as they run. Gradients are *summed* over ranks and micro-batches, since losses are
already divided by global counts. They are reduced after every micro-batch. Reducing only after the last one would save
a reduce-scatter per micro-batch but cost every rank a full model's float32 gradients. One rank runs the same code in a
process group of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridrl.config.schema.workers import FSDPConfig
from hybridrl.errors import CheckpointError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.monitoring.work_done import report_work
from hybridrl.workers import engine
from hybridrl.workers.engine import attention, hf_model, sharded_engine
from hybridrl.workers.engine.attention.layer_kinds import check_packable
from hybridrl.workers.engine.attention.packed_attention import use_packed_layout
from hybridrl.workers.engine.base import EngineSetup, LossFn, MeshPosition, MicroBatching, StateTensors
from hybridrl.workers.engine.batching.layout import TokenLayout
from hybridrl.workers.engine.batching.micro_batches import layout_of, split_micro_batches
from hybridrl.workers.engine.batching.outputs import OutputReader, check_outputs, token_columns
from hybridrl.workers.engine.fsdp.checkpoint import load_state, save_state


class FSDPEngine(sharded_engine.ShardedEngine):
    """An `Engine` on `torch.distributed.fsdp.fully_shard`.

    `setup` creates `model`, the sharded module. It stays in eval mode: without dropout, PPO's ratio starts at 1.
    """

    Config = FSDPConfig

    def setup(self) -> None:
        """Load and shard the model, build the optimizer, and offload what the settings name."""
        config = self.config
        self._choose_device()
        rank, size = dist.get_rank(), config.settings.ulysses_sequence_parallel_size
        self._part = attention.sequence_part(size) if size > 1 else None
        self.mesh_position = MeshPosition(rank // size, dist.get_world_size() // size, is_output_rank=not rank % size)
        self.model = _sharded_model(config, self._device)
        self._blank = engine.prepare_images(self.model) if hf_model.reads_images(self.model.config) else None
        self._shares_prefixes = config.share_prefixes and attention.use_tree_attention(self.model)
        self._reader = OutputReader(
            self.model,
            kind=config.kind,
            temperature=config.temperature,
            passed=self._attention_inputs(),
            terms=config.token_terms,
            whole_logits=config.whole_logits,
            chunk=config.logits_chunk,
        )
        if config.replays_routes:
            peers = [self._part.group] if self._part and self._part.group else []
            self._replay = engine.RouteReplay(engine.RouterHooks(self.model, peers=peers))
        self._optimizer, self.num_updates = _adamw(config, self.model), 0
        self._models, self._optimizers = [self.model], [self._optimizer] if self._optimizer else []
        self._offload()

    @property
    def attention(self) -> str:
        """The attention implementation, for messages."""
        model: Any = self.model
        return model.config.get_text_config()._attn_implementation

    def _attention_inputs(self) -> tuple[str, ...]:
        own: tuple[str, ...] = ("tree",)
        if not self._shares_prefixes:
            own = ("spans",) if self.config.packed and use_packed_layout(self.model) else ()
        if self._part is None:
            return own
        attention.use_sequence_parallel(self.model, self._part.size)
        return ("spans", "tree", "part")

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        check_outputs(outputs, kind=self.config.kind, terms=self.config.token_terms)
        self._load_to_device(params=True)
        found: list[dict[str, torch.Tensor]] = []
        order: list[int] = []
        width = () if self.config.kind == "score" else (batch.batch["response_mask"].size(1),)
        empty: dict[str, tuple[int, ...]] = dict.fromkeys(outputs, (0, *width))
        with torch.no_grad():
            for rows, layout in self._micro_batch_layouts(batch, micro):
                results = self._read(batch, rows, layout, outputs)
                self._record_routes(rows)
                if rows:
                    # What terms return may be as wide as the vocabulary.
                    found.append(
                        {name: r.cpu() if name in self.config.token_terms else r for name, r in results.items()}
                    )
                    order += rows
                else:
                    empty = {name: (0, *width, *result.shape[2:]) for name, result in results.items()}
        self._reshard()
        return {
            name: _in_row_order([results[name] for results in found], order, empty_shape=empty[name])
            for name in outputs
        }

    def _read(
        self, batch: DataProto, rows: list[int], layout: TokenLayout, outputs: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of some rows of the batch; without rows, those of the layout's placeholder."""
        own = (layout if self._part is None else attention.part_of_layout(layout, self._part)).to(self._device)
        self._begin_routes(batch, rows, layout)
        terms = {name: term for name, term in self.config.token_terms.items() if name in outputs}
        found = self._reader(own, outputs=outputs, columns=token_columns(batch, rows, own.cell, terms))
        if self._part is None:
            return found
        return {name: attention.SumOverPeers.apply(cells, self._part.group) for name, cells in found.items()}

    def _begin_routes(self, batch: DataProto, rows: list[int], layout: TokenLayout) -> None:
        """Give the routes of a micro-batch, whose whole layout this is, to the routers."""
        if self._replay is None:
            return
        if self._part is not None:
            places = attention.places_of_part(layout, self._part).to(self._device)
            self._replay.routers.arrange(places, layout.input_ids.numel())
        self._replay.begin(batch, rows, layout.to(self._device))

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        self._require_optimizer()
        check_outputs(outputs, kind=self.config.kind, terms=self.config.token_terms)
        self._load_to_device(params=True)
        stats: list[sharded_engine.Stats] = []
        for rows, layout in self._micro_batch_layouts(batch, micro):
            results = self._read(batch, rows, layout, outputs)
            if rows:
                loss, values = loss_fn(results, batch.select_idxs(rows).to(self._device))
                counts = {**(layout.tree.token_counts() if layout.tree else {}), **self._routing_counts()}
                stats.append(sharded_engine.without_gradient({**values, **counts}))
            else:
                loss = sharded_engine.loss_of_no_rows(results)
            loss.backward()  # FSDP2 reduce-scatters the gradients in here
        self._reshard()
        return sharded_engine.as_numbers(stats) if self.mesh_position.is_output_rank else []

    @cached_property
    def _saved_names(self) -> frozenset[str]:
        return frozenset(self.model.state_dict())

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        self._load_to_device(params=True)
        if self.config.lora is not None:
            yield from engine.WEIGHTS[lora](self.model, _full_tensor)
            return
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name in self._saved_names:
                yield name, _full_tensor(tensor)

    def state_tensors(self) -> StateTensors:
        self._reshard()
        return super().state_tensors()

    def _reduced_norm(self) -> float:
        """Return the norm before the gradients, which the backward passes have reduced, are clipped here."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _save_state(self, directory: str) -> None:
        save_state(directory, model=self.model, optimizer=self._optimizer, step=self.num_updates)

    def _load_state(self, directory: str) -> int:
        return load_state(directory, model=self.model, optimizer=self._optimizer)

    def _reshard(self) -> None:
        """Free gathered parameters, which the next optimizer step would make stale."""
        for module in _sharded_modules(self.model):
            module.reshard()

    def _micro_batch_layouts(self, batch: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], TokenLayout]]:
        """Yield (row indices, layout on the CPU), equally often on every rank.

        Ranks with fewer micro-batches add placeholders without rows. Peers share the tokens of each micro-batch, whose
        whole layout this is.
        """
        if self._part is not None and micro.max_tokens is not None:
            micro = replace(micro, max_tokens=micro.max_tokens * self._part.size)
        how = {"packed": self.config.packed, "shared": self._shares_prefixes}
        grid, groups, num_passes = split_micro_batches(
            batch, micro, **how, device=self._device, replay=self._replay, blank=self._blank
        )
        num_rows = sum(map(len, groups))
        for number in range(num_passes):
            rows = groups[number] if number < len(groups) else []
            report_work(sum(map(len, groups[:number])), num_rows, "rows")
            yield rows, self._count(layout_of(grid, rows, **how))


def _sharded_model(config: EngineSetup, device: torch.device) -> nn.Module:
    """Return the loaded, sharded model on the device.

    Only rank 0 ever holds the full model, in host memory.
    """
    settings = hf_model.hf_config(config)
    dtype = config.compute_dtype if config.optim is None else torch.float32
    if dist.get_world_size() == 1:
        return _shard(_adapted(hf_model.load_model(config, settings, dtype=dtype), config), config)
    whole = _load_on_rank_zero(config, settings, dtype=dtype)
    model = _shard(_adapted(hf_model.empty_model(config, settings, dtype=dtype), config), config).to_empty(
        device=device
    )
    state = {} if whole is None else whole.state_dict()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # The meta device skips buffers computed at construction (rotary frequencies), which no checkpoint holds.
    source = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        if name in source:
            buffer.copy_(source[name])
        dist.broadcast(buffer, src=0)
    return model


def _adapted(model: nn.Module, config: EngineSetup) -> nn.Module:
    if config.lora is not None:
        engine.add_adapters(model, config.lora, seed=config.seed)
    return model


def _load_on_rank_zero(config: EngineSetup, settings: Any, *, dtype: torch.dtype) -> nn.Module | None:
    """Return the full model on rank 0 and None elsewhere.

    If rank 0 fails, every rank raises.
    """
    model, problem = None, None
    if dist.get_rank() == 0:
        try:
            model = _adapted(hf_model.load_model(config, settings, dtype=dtype), config)
        except Exception as error:  # raised below, on every rank
            problem = error
    errors = [problem and f"{type(problem).__name__}: {problem}"]
    dist.broadcast_object_list(errors, src=0)
    if problem is not None:
        raise problem
    if errors[0] is not None:
        raise CheckpointError(f"rank 0 could not load {config.path}: {errors[0]}")
    return model


def _shard(model: nn.Module, config: EngineSetup) -> nn.Module:
    if config.packed:
        check_packable(model)
    blocks = hf_model.decoder_blocks(model)
    if config.gradient_checkpointing:
        hf_model.recompute_activations(blocks)
    if config.optim is None:
        model.requires_grad_(False)
    if config.freeze_vision_tower:
        engine.vision_tower(model).requires_grad_(False)
    settings = {
        "mesh": init_device_mesh(config.device, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=config.compute_dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": config.settings.reshard_after_forward,
    }
    for head in hf_model.scalar_heads(model, kind=config.kind):
        fully_shard(
            head,
            **settings | {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)},
        )
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a factor alone uses PREMUL_SUM, which gloo lacks
        module.set_reshard_after_backward(config.settings.reshard_after_forward, recurse=False)
    return model


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _adamw(config: EngineSetup, model: nn.Module) -> torch.optim.AdamW | None:
    """Return AdamW over all trained parameters.

    Weight decay applies to every parameter, norms and biases included, as in verl.
    """
    if config.optim is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.optim.lr, **sharded_engine.adam_options(config.optim), fused=True)


@torch.no_grad()
def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):  # of one rank: a gather would copy it
        tensor = tensor.full_tensor() if tensor.device_mesh.size() > 1 else tensor.to_local()
    return tensor.detach()


def _in_row_order(parts: list[torch.Tensor], order: list[int], *, empty_shape: tuple[int, ...]) -> torch.Tensor:
    """Concatenate micro-batch results on the CPU and undo the sorting of rows."""
    if not parts:
        return torch.zeros(empty_shape)
    return torch.cat(parts).float().cpu()[torch.tensor(order).argsort()]
