"""Megatron-core engine: tensor, pipeline, context, expert and data parallelism, on gloo or nccl.

As with FSDP2, gradients are *summed* over processes and micro-batches, since losses are already divided by global
counts. They are reduced once, before the optimizer step. Peers of a data-parallel rank get the same rows and compute
the same loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.workers import engine
from hybridrl.workers.engine import attention
from hybridrl.workers.engine.attention.tree_attention import log_obstacle
from hybridrl.workers.engine.base import LossFn, MicroBatching, StateTensors, TokenTerm
from hybridrl.workers.engine.batching.micro_batches import layout_of, split_micro_batches
from hybridrl.workers.engine.batching.outputs import OUTPUTS, check_outputs, token_columns
from hybridrl.workers.engine.hf_model import empty_model, hf_config
from hybridrl.workers.engine.megatron.adapters import add_adapters, gather_weights
from hybridrl.workers.engine.megatron.architecture import transformer_config
from hybridrl.workers.engine.megatron.checkpoint import load_state, prepare_torch_adam, save_state
from hybridrl.workers.engine.megatron.hf_weights import (
    HFCheckpointReader,
    fuse_experts,
    gather_full_tensors,
    named_megatron_parameters,
    read_weights,
    shard_of,
)
from hybridrl.workers.engine.megatron.local_tokens import LocalTokens, TokenSharding, local_tokens, local_tree_tokens
from hybridrl.workers.engine.megatron.network import Network, WantedStats
from hybridrl.workers.engine.megatron.parallel_groups import init_model_parallel, mesh_position
from hybridrl.workers.engine.megatron.sharded_log_probs import sharded_token_stats
from hybridrl.workers.engine.peft_format import read_adapter
from hybridrl.workers.engine.routing.routes import RoutingShape
from hybridrl.workers.engine.sharded_engine import ShardedEngine, as_numbers, loss_of_no_rows, without_gradient

Outputs = dict[str, torch.Tensor]


class MegatronEngine(ShardedEngine):
    """An `Engine` on megatron-core.

    `setup` creates `chunks`, this process's parts of the model. There are several if the pipeline is interleaved.
    """

    Config = MegatronConfig

    def setup(self) -> None:
        """Create the process groups, build and load this process's part, and build the optimizer.

        Offloads what the settings name.
        """
        config = self.config
        # What may be offloaded is a rule of the settings (`config/checks`), not of the process groups.
        layout = config.settings.with_offload(params=False, optimizer=False)
        self._choose_device()
        sizes = init_model_parallel(layout, device=config.device, seed=config.seed)
        if config.token_terms and sizes.pipeline > 1:
            raise ConfigError("pipeline_model_parallel_size: must be 1 for an engine with token terms")
        self.mesh_position = mesh_position()
        model = hf_config(config)
        settings = transformer_config(config, model, sizes)
        self._tied = config.kind == "causal_lm" and model.tie_word_embeddings
        stages = [None] if sizes.virtual_pipeline is None else list(range(sizes.virtual_pipeline))
        self.chunks = [Network(settings, model, kind=config.kind, vp_stage=stage).to(self._device) for stage in stages]
        self._load_weights(model)
        self._sharding = TokenSharding(
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=sizes.context,
            sp_size=sizes.tensor if settings.sequence_parallel else 1,
        )
        self._shares_prefixes = config.share_prefixes and sizes.context == 1
        if config.share_prefixes and not self._shares_prefixes:
            log_obstacle(f"context_parallel_size={sizes.context} cuts every row into parts")
        if config.replays_routes:
            self._replay = self._route_replay(model, sizes, sequence_parallel=settings.sequence_parallel)
        self._num_micro_multiple = sizes.pipeline if sizes.virtual_pipeline else 1
        self._make_optimizer()
        self._offload()

    def _route_replay(self, model: Any, sizes: Any, *, sequence_parallel: bool) -> "engine.RouteReplay":
        shape = RoutingShape(model.num_hidden_layers, model.num_experts_per_tok, model.num_experts)
        self._routers = engine.MegatronRouters(
            self.chunks,
            shape,
            sequence_peers=parallel_state.get_tensor_model_parallel_group() if sequence_parallel else None,
            context_peers=parallel_state.get_context_parallel_group() if sizes.context > 1 else None,
            stages=parallel_state.get_pipeline_model_parallel_group() if sizes.pipeline > 1 else None,
        )
        return engine.RouteReplay(self._routers)

    def _begin_routes(self, tokens: LocalTokens) -> None:
        """Give the routes of a micro-batch to the routers."""
        if self._replay is not None:
            self._routers.arrange(tokens.source, tokens.layout.input_ids.numel())
            self._replay.begin(self._routed, tokens.rows, tokens.layout)

    def _keep_routes(self, tokens: LocalTokens) -> None:
        """Keep what the routers chose in a pass of a micro-batch through a part of the model."""
        if self._replay is not None:
            self._routers.keep(id(tokens))

    def _read_routes(self, micro_batch_tokens: list[LocalTokens]) -> Iterator[LocalTokens]:
        """Yield each micro-batch while its routes can be read. Collective."""
        for tokens in micro_batch_tokens if self._replay is not None else ():
            self._begin_routes(tokens)
            self._routers.recall(id(tokens))
            yield tokens

    def _load_weights(self, model: Any) -> None:
        """Load this process's part of the model, and add its shards of the adapters."""
        config = self.config
        # Scores of an untrained head would be noise, as in `hf_model.load_model`.
        new_head = config.kind == "value" or (config.kind == "score" and config.optim is not None)
        tensors = HFCheckpointReader(config.path)
        read_weights(self.chunks, tensors, kind=config.kind, tied=self._tied, seed=config.seed, new_head=new_head)
        if config.lora is not None:
            saved = None if config.lora.path is None else read_adapter(config.lora.path)
            whole = empty_model(config, model, dtype=torch.float32)
            add_adapters(self.chunks, whole, config.lora, seed=config.seed, saved=saved)

    def _make_optimizer(self) -> None:
        config = self.config
        self._optimizer: MegatronOptimizer | None = None
        self._models, self._optimizers, self.num_updates = [*self.chunks], [], 0
        if config.optim is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            self._modules: list[Any] = list(self.chunks)
            return
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.settings.use_distributed_optimizer,
            check_for_nan_in_grad=False,
        )
        self._modules = [
            DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        settings = OptimizerConfig(
            optimizer="adam",
            bf16=config.compute_dtype == torch.bfloat16,
            params_dtype=config.compute_dtype,
            use_distributed_optimizer=config.settings.use_distributed_optimizer,
            clip_grad=config.grad_clip,
            lr=config.optim.lr,
            weight_decay=config.optim.weight_decay,
            adam_beta1=config.optim.betas[0],
            adam_beta2=config.optim.betas[1],
            adam_eps=1e-8,
        )
        # No overrides: weight decay applies to every parameter, norms and biases included, as in verl and with FSDP2.
        self._optimizer = get_megatron_optimizer(
            settings, self._modules, config_overrides={}, use_gloo_process_groups=False
        )
        self._optimizers = [inner.optimizer for inner in self._optimizer.chained_optimizers]

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> Outputs:
        check_outputs(outputs, kind=self.config.kind, terms=self.config.token_terms)
        self._load_to_device(params=True)
        with torch.no_grad():
            micro_batch_tokens = self._local_micro_batches(batch, micro)
            found = self._run_pipeline(
                micro_batch_tokens,
                partial(self._read_outputs, batch=batch, outputs=outputs),
                forward_only=True,
                stats=self._stats_of_head(outputs),
            )
        for tokens in self._read_routes(micro_batch_tokens):
            self._record_routes(tokens.rows)
        return self._in_row_order(batch, micro_batch_tokens, found, outputs)

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        self._require_optimizer()
        check_outputs(outputs, kind=self.config.kind, terms=self.config.token_terms)
        self._load_to_device(params=True)

        def loss_of(tokens: LocalTokens, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict | None]:
            results = self._read_outputs(tokens, head, batch=batch, outputs=outputs)
            no_tokens = torch.zeros((), dtype=torch.int)
            if not tokens.rows:
                return loss_of_no_rows(results), no_tokens, None
            loss, stats = loss_fn(results, batch.select_idxs(tokens.rows).to(self._device))
            tree = tokens.packed_params and tokens.packed_params.tree
            # Megatron's schedule may change the loss in place.
            return loss, no_tokens, without_gradient({**stats, **(tree.token_counts() if tree else {})})

        micro_batch_tokens = self._local_micro_batches(batch, micro)
        found = self._run_pipeline(micro_batch_tokens, loss_of, forward_only=False, stats=self._stats_of_head(outputs))
        counts = [self._routing_counts() for _ in self._read_routes(micro_batch_tokens)]
        for stats, more in zip(found, counts, strict=False):  # both may be empty
            if stats is not None:
                stats.update(more)
        return as_numbers(stats for stats in found if stats is not None and self.mesh_position.is_output_rank)

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        self._load_to_device(params=True)
        if (adapters := self.config.lora) is None:
            found = gather_full_tensors(self.chunks, kind=self.config.kind, tied=self._tied)
        else:
            found = gather_weights(self.chunks, lora=lora, scale=adapters.alpha / adapters.rank, tied=self._tied)
        return fuse_experts(found, self.chunks[0].config.num_moe_experts)

    def full_tensors(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole tensors under Hugging Face names of parts under the names of `state_tensors`. Collective.

        The parts have the shapes of the parameters: weights, or moments of an optimizer.
        """
        of_parameter = {parameter: parts[name] for name, parameter in self.chunks[0].named_parameters()}
        found = gather_full_tensors(
            self.chunks, kind=self.config.kind, tied=self._tied, value_of=lambda parameter: of_parameter[parameter]
        )
        return {name: tensor.clone() for name, tensor in found}

    def own_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this process's parts of whole tensors; inverts `full_tensors`."""
        [chunk] = self.chunks
        return {
            name: shard_of(name, chunk, tensors, kind=self.config.kind, tied=self._tied).clone()
            for name, _ in named_megatron_parameters(chunk)
        }

    def state_tensors(self) -> StateTensors:
        if self._optimizer is not None:
            prepare_torch_adam(self._optimizer)
        return super().state_tensors()

    def _reduced_norm(self) -> float:
        assert self._optimizer is not None
        finalize_model_grads(self._modules, None)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _apply_gradients(self, norm: float) -> None:
        assert self._optimizer is not None
        # Experts have an optimizer of their own, but the norm is global.
        for inner in self._optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(inner.get_parameters(), self.config.grad_clip, norm)
        self._optimizer.step_with_ready_grads()

    def _drop_gradients(self) -> None:
        assert self._optimizer is not None
        for module in self._modules:
            module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _move_parameters(self, target: torch.device) -> None:
        for chunk in self.chunks:
            for tensor in [*chunk.parameters(), *chunk.buffers()]:
                tensor.data = tensor.data.to(target)

    def _move_optimizers(self, target: torch.device) -> None:
        super()._move_optimizers(target)
        for inner in self._optimizer.chained_optimizers if self._optimizer is not None else ():
            for master in (master for group in getattr(inner, "fp32_from_float16_groups", ()) for master in group):
                master.data = master.data.to(target)

    def _save_state(self, directory: str) -> None:
        save_state(directory, chunks=self.chunks, optimizer=self._optimizer, step=self.num_updates)

    def _load_state(self, directory: str) -> int:
        return load_state(directory, chunks=self.chunks, optimizer=self._optimizer)

    def _run_pipeline(
        self,
        micro_batch_tokens: list[LocalTokens],
        read_fn: Callable[[LocalTokens, torch.Tensor], Any],
        *,
        forward_only: bool,
        stats: tuple[str, ...] = (),
    ) -> list[Any]:
        """Run micro-batches through the pipeline.

        Args:
            micro_batch_tokens: This process's tokens of each.
            read_fn: Called on the last stage.
            forward_only: Do not compute gradients.
            stats: Statistics that the head of a causal model computes; without any, it computes logits.

        Returns:
            `read_fn(tokens, output of the head)` of each micro-batch on the last stage; an empty list on other stages.
        """

        def forward_step(data: Iterator[LocalTokens], module: Any) -> tuple[torch.Tensor, Callable]:
            tokens = next(data)
            network = module.module if isinstance(module, DistributedDataParallel) else module
            self._begin_routes(tokens)
            network.positions = tokens.position_ids[0] if self._shares_prefixes else None
            network.wanted_states = tokens.last if self.config.kind == "score" else tokens.state
            network.wanted_stats = (
                WantedStats(tokens.labels, stats, self.config.temperature, self.config.logits_chunk) if stats else None
            )
            output = module(tokens.input_ids, tokens.position_ids, None, packed_seq_params=tokens.packed_params)
            self._keep_routes(tokens)
            return output, lambda head, non_loss_data=False: read_fn(tokens, head)

        if self._replay is not None:
            self._routers.restart()
        iterators = [iter(micro_batch_tokens) for _ in self._modules]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._modules if len(iterators) > 1 else self._modules[0],
            num_microbatches=len(micro_batch_tokens),
            seq_length=1,  # unused: variable_seq_lengths is set
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _stats_of_head(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the outputs that the head computes itself: those of a causal model, unless whole logits are wanted."""
        names = OUTPUTS["causal_lm"]
        is_own = self.config.kind == "causal_lm" and not (self.config.whole_logits or self.config.token_terms)
        return tuple(name for name in names if name in outputs) if is_own else ()

    def _read_outputs(
        self, tokens: LocalTokens, head: torch.Tensor, *, batch: DataProto, outputs: tuple[str, ...]
    ) -> Outputs:
        """Return the named outputs of a micro-batch's rows, equal on all peers.

        Args:
            head: Output of the head for this process's tokens, (1,N,...).
        """
        b, R = tokens.shape
        size: tuple[int, ...]
        if names := self._stats_of_head(outputs):
            found, size, cell = dict(zip(names, head[0].unbind(-1), strict=True)), (b, R), tokens.cell
        elif terms := {name: term for name, term in self.config.token_terms.items() if name in outputs}:
            assert len(terms) == len(outputs), "nobody wants terms together with other outputs"
            found, size, cell = self._terms_of(tokens, head[0], terms, batch), (b, R), tokens.cell
        elif self.config.kind == "causal_lm":
            stats = sharded_token_stats(
                head[0],
                tokens.labels,
                temperature=self.config.temperature,
                vocab_size=self.chunks[-1].vocab,
                group=parallel_state.get_tensor_model_parallel_group(),
                with_sum_pi_squared="sum_pi_squared" in outputs,
            )
            found, size, cell = stats.by_name(), (b, R), tokens.cell
        elif self.config.kind == "value":
            found, size, cell = {"values": head.flatten()}, (b, R), tokens.cell
        else:
            found, size, cell = {"scores": head.flatten()}, (b,), tokens.last_row
        return {name: self._cells(found[name], cell, size) for name in outputs}

    def _terms_of(
        self, tokens: LocalTokens, logits_Nv: torch.Tensor, terms: dict[str, TokenTerm], batch: DataProto
    ) -> Outputs:
        """Return token terms (N,) or (N,K) from the whole vocabulary's logits, which tensor-parallel peers gather."""
        whole_NV = gather_from_tensor_model_parallel_region(logits_Nv)[:, : self.chunks[-1].vocab]
        log_probs_NV = (whole_NV.float() / self.config.temperature).log_softmax(-1)
        columns = token_columns(batch, tokens.rows, tokens.cell, terms)
        return {name: term.fn(log_probs_NV, *(columns[one] for one in term.columns)) for name, term in terms.items()}

    def _cells(self, values: torch.Tensor, cell: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        flat = values.new_zeros(math.prod(size), *values.shape[1:], dtype=torch.float32)
        cells = flat.index_copy(0, cell, values.float()).view(*size, *values.shape[1:])
        return (
            attention.SumOverPeers.apply(cells, parallel_state.get_context_parallel_group())
            if self._sharding.cp_size > 1
            else cells
        )

    def _local_micro_batches(self, batch: DataProto, micro: MicroBatching) -> list[LocalTokens]:
        """Return this process's tokens of each micro-batch, equally many on all processes. Collective.

        Ranks with fewer micro-batches add placeholders without rows.

        Raises:
            DataError: Some rank's rows cannot be split. Raised on every rank, so that none waits for another.
        """
        how: dict[str, Any] = {"packed": self.config.packed, "shared": self._shares_prefixes}
        self._routed = batch
        grid, groups, num_passes = split_micro_batches(batch, micro, **how, device=self._device, replay=self._replay)
        multiple = self._num_micro_multiple
        groups += [[]] * (-(-max(1, num_passes) // multiple) * multiple - len(groups))
        take: Callable[..., LocalTokens] = (
            local_tree_tokens if self._shares_prefixes else partial(local_tokens, packed=self.config.packed)
        )
        layouts = [self._count(layout_of(grid, rows, **how)) for rows in groups]
        return [
            take(layout, rows, self._sharding).to(self._device) for layout, rows in zip(layouts, groups, strict=True)
        ]

    def _in_row_order(
        self, batch: DataProto, micro_batch_tokens: list[LocalTokens], found: list[Outputs], outputs: tuple[str, ...]
    ) -> Outputs:
        """Concatenate micro-batch results on the CPU and undo the sorting of rows.

        The last pipeline stage broadcasts them to the other stages.
        """
        shape = (len(batch),) if self.config.kind == "score" else (len(batch), batch.batch["response_mask"].size(1))
        more = {name: found[0][name].shape[len(shape) :] if found else () for name in outputs}  # K of a term
        joined = {name: torch.zeros(*shape, *more[name], device=self._device) for name in outputs}
        for tokens, results in zip(micro_batch_tokens, found, strict=False):  # empty before the last stage
            for name in outputs:
                if tokens.rows:
                    joined[name][tokens.rows] = results[name]
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() > 1:
            for name in outputs:
                dist.broadcast(joined[name], src=parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
        return {name: tensor.cpu() for name, tensor in joined.items()}
