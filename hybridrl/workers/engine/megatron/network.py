"""The model of one pipeline part: megatron-core's GPTModel with a selective head.

The head computes only the states whose outputs are needed, and statistics of tokens instead of logits.

Shapes: s tokens, b rows, H hidden size, N needed states, K statistics.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn import functional as F

from hybridrl.algos.token_stats.from_states import VocabularyShard, token_stats_of_states
from hybridrl.workers.engine.megatron.architecture import rotary
from hybridrl.workers.engine.megatron.layers import layer_spec


@dataclass(frozen=True)
class WantedStats:
    """What the head of a causal model computes of the wanted states instead of logits.

    Attributes:
        labels: (N,) int64, the tokens after the states.
        names: Of "log_probs", "entropy" and "sum_pi_squared", in this order.
        temperature: Logits are divided by it.
        chunk: See `token_stats_of_states`.
    """

    labels: torch.Tensor
    names: tuple[str, ...]
    temperature: float
    chunk: int | None


class Network(GPTModel):
    """GPTModel whose head computes only `wanted_states`, flat indices over (b, s).

    The engine sets them before each forward, with `wanted_stats`, and `positions` (T,) of a row with shared prefixes,
    whose positions are not those of adjacent sequences. Kind "causal_lm": the wanted statistics (1, N, K) float32,
    equal on all tensor-parallel peers; without `wanted_stats`, logits (1, N, vocabulary / peers). Other kinds:
    (1, N, 1) float32, from a head that every peer holds in full.
    """

    def __init__(self, config: TransformerConfig, model: Any, *, kind: str, vp_stage: int | None):
        peers = config.tensor_model_parallel_size
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        super().__init__(
            config,
            layer_spec(config, vp_stage=vp_stage),
            vocab_size=model.vocab_size + -model.vocab_size % peers,
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=last,
            share_embeddings_and_output_weights=kind == "causal_lm" and model.tie_word_embeddings,
            position_embedding_type="rope",
            parallel_output=True,
            vp_stage=vp_stage,
            **rotary(model),
        )
        self.vocab, self.init_std = model.vocab_size, model.initializer_range
        self.wanted_states: torch.Tensor | None = None
        self.wanted_stats: WantedStats | None = None
        self.positions: torch.Tensor | None = None
        self.rotary_pos_emb.register_forward_hook(self._select_positions)
        self._padding_id = model.pad_token_id
        if self.pre_process and self._padding_id is not None:
            self.embedding.register_forward_hook(self._detach_padding, with_kwargs=True)
        if self.pre_process and config.recompute_granularity is not None:
            self.embedding.register_forward_hook(_require_gradient)
        if last and kind != "causal_lm":
            self.output_layer: Any = ScalarHead(config.hidden_size, 1, bias=kind == "value", dtype=config.params_dtype)
        elif last:
            self.output_layer.__class__ = StatsLayer
            self.output_layer.stats_of = self._stats_of
        if last:
            self.output_layer.register_forward_pre_hook(self._select_states)
            self._gather = config.sequence_parallel
            self.output_layer.sequence_parallel = False  # `_select_states` gathers states before it selects some
            self.output_layer.allreduce_dgrad = peers > 1

    def _detach_padding(
        self, embedding: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        """Give the padding token's input embedding no gradient, also where a text contains that token.

        transformers' models do not train it either.
        """
        ids = kwargs["input_ids"].t()
        if self.config.sequence_parallel:
            ids = ids.chunk(self.config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
        # Pipelines send only contiguous tensors, and the transposed mask makes the result non-contiguous.
        return torch.where((ids == self._padding_id)[:, :, None], output.detach(), output).contiguous()

    def _select_positions(self, rotary: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """Return the rotary angles of every token of a row with shared prefixes: (positions,1,1,d) -> (T,1,1,d)."""
        return output if self.positions is None else output.index_select(0, self.positions.to(output.device))

    def _select_states(self, head: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        states = args[0]
        assert self.wanted_states is not None, "the engine sets them before each forward"
        if self._gather:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        return (states.transpose(0, 1).flatten(0, 1).index_select(0, self.wanted_states)[:, None],)

    def _stats_of(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the wanted statistics (N, K) of states (N, H), or None if logits are wanted. Collective."""
        if (wanted := self.wanted_stats) is None:
            return None
        found = token_stats_of_states(
            states,
            weight,
            wanted.labels,
            temperature=wanted.temperature,
            with_entropy="entropy" in wanted.names,
            with_sum_pi_squared="sum_pi_squared" in wanted.names,
            chunk=wanted.chunk,
            shard=VocabularyShard(parallel_state.get_tensor_model_parallel_group(), self.vocab),
        ).by_name()
        return torch.stack([found[name] for name in wanted.names], dim=-1)


class StatsLayer(ColumnParallelLinear):
    """Head of a causal model that returns what `stats_of` makes of states and weight, or else logits.

    `stats_of` sums the gradient of the states over peers, as this layer does for logits.
    """

    stats_of: Any

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ((N, 1, K), None) or ((N, 1, vocabulary / peers), None) from states (N, 1, H)."""
        found = self.stats_of(input_[:, 0], self.weight if weight is None else weight)
        return super().forward(input_, weight, runtime_gather_output) if found is None else (found[:, None], None)


def _require_gradient(embedding: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """Let a frozen embedding's output require a gradient.

    Megatron's recomputation runs a block's backward only if an input of the block requires a gradient.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


class ScalarHead(nn.Linear):
    """Linear head with one float32 output per state.

    It computes in float32 in every model dtype, and is called like a Megatron output layer. Its parameters have the
    model's dtype: megatron-core cannot save its optimizers' states of float32 parameters among bfloat16 ones.
    """

    def forward(  # type: ignore[override]  # megatron-core calls its output layers so
        self, states: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return ((N, 1, 1), None) from states (N, 1, H)."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(states.float(), self.weight.float(), bias), None
