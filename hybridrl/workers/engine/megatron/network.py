"""The model of one pipeline part: megatron-core's GPTModel, with a head that is shown only the states whose outputs are
needed.

Shapes: s tokens, b rows, H hidden size, N states wanted.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import nn

from hybridrl.workers.engine.megatron.architecture import rotary
from hybridrl.workers.engine.megatron.layers import layer_spec


class Network(GPTModel):
    """GPTModel whose head computes `wanted` states only, flat indices over (b, s) row by row, set before each forward.

    kind "causal_lm": logits (1, N, vocabulary / tensor-parallel peers). Others: (1, N, 1) float32, of a head that every
    peer has whole.
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
        self.wanted: torch.Tensor | None = None
        self._padding_id = model.pad_token_id
        if self.pre_process and self._padding_id is not None:
            self.embedding.register_forward_hook(self._leave_padding_untrained, with_kwargs=True)
        if last and kind != "causal_lm":
            self.output_layer = NumberHead(config.hidden_size, bias=kind == "value")
        if last:
            self.output_layer.register_forward_pre_hook(self._show_wanted)
            self._gather = config.sequence_parallel
            self.output_layer.sequence_parallel = False  # states are gathered here, before they are chosen
            self.output_layer.allreduce_dgrad = peers > 1

    def _leave_padding_untrained(
        self, embedding: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        """Give the padding token's input embedding no gradient, also where a text has that token: transformers' models
        do not.
        """
        ids = kwargs["input_ids"].t()
        if self.config.sequence_parallel:
            ids = ids.chunk(self.config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
        # Contiguous, as it came: pipelines send nothing else, and the mask is the transpose of what lies in memory.
        return torch.where((ids == self._padding_id)[:, :, None], output.detach(), output).contiguous()

    def _show_wanted(self, head: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        states = args[0]
        if self._gather:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        return (states.transpose(0, 1).flatten(0, 1).index_select(0, self.wanted)[:, None],)


class NumberHead(nn.Linear):
    """One float32 number per state, whatever the model's dtype, called as Megatron calls an output layer."""

    def __init__(self, hidden_size: int, *, bias: bool):
        super().__init__(hidden_size, 1, bias=bias, dtype=torch.float32)

    def forward(
        self, states: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return ((N, 1, 1), None) from states (N, 1, H)."""
        return super().forward(states.float()), None
