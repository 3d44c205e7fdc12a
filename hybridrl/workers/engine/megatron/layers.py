"""Megatron's transformer layers on torch's own kernels: any device, no Transformer Engine, no apex.

megatron-core's own layers without Transformer Engine refuse sequence parallelism, packed sequences and context
parallelism. A layer's submodules are a public choice of megatron-core (a spec), so two ordinary classes suffice and its
code stays unchanged.

Shapes: s tokens of this process, b rows, S = s * (context-parallel peers) tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from hybridrl.workers.engine.attention.spans import AttentionTree, SequenceSpan
from hybridrl.workers.engine.attention.tree_attention import attend_tree

if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16 tests it for None, but binds it only with Transformer Engine.
    moe_utils.te_general_gemm = None


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, with the spans that `TorchAttention` needs.

    Attributes:
        spans: Adjacent sequences of similar length, attended together. Empty with context parallelism.
        tree: Of a row with shared prefixes, which is one sequence for Megatron.
    """

    spans: tuple[SequenceSpan, ...] = ()
    tree: AttentionTree | None = None


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron then sums the weight's gradient over tensor-parallel peers.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class TorchAttention(MegatronModule):
    """Causal attention by `scaled_dot_product_attention`: grouped heads, packed sequences, context parallelism.

    With context parallelism each process has two of 2 * peers chunks of every sequence, one early and one late. It
    gathers all keys and values; the gradient of that gather is a reduce-scatter.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])).cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> torch.Tensor:
        """Return (s, b, heads * d), or (s, heads * d) of a packed row.

        Args:
            query, key, value: (s, b, heads, d), or (s, heads, d) of a packed row.
        """
        if packed_seq_params is None:
            return self._attend_rows(query, key, value)
        if packed_seq_params.tree is not None:
            q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
            return attend_tree(q, k, v, packed_seq_params.tree, scale=self.scale)[0].transpose(0, 1).flatten(1)
        if self.cp.size() == 1:
            return self._attend_spans(query, key, value, packed_seq_params.spans)
        whole = packed_seq_params.cu_seqlens_q.tolist()
        return self._attend_across_ranks(query[:, None], key[:, None], value[:, None], whole).squeeze(1)

    def _attend_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.cp.size() > 1:
            return self._attend_across_ranks(query, key, value, [0, query.size(0) * self.cp.size()])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._sdpa(q, k, v, None).permute(2, 0, 1, 3).flatten(2)

    def _attend_spans(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: tuple[SequenceSpan, ...]
    ) -> torch.Tensor:
        parts = []
        for span in spans:
            q, k, v = (
                t.index_select(0, span.tokens).unflatten(0, (-1, span.width)).transpose(1, 2)
                for t in (query, key, value)
            )
            parts.append(self._sdpa(q, k, v, None).transpose(1, 2).flatten(0, 1).index_select(0, span.cells))
        return torch.cat(parts).flatten(1)

    def _attend_across_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int]
    ) -> torch.Tensor:
        """Attend from this process's tokens to those of all context-parallel peers.

        Args:
            ends: Limits of the sequences, counted over all processes.
        """
        sequence, position = (t.to(query.device) for t in _token_positions(ends, self.cp.size()))
        own = self.cp.rank()
        mask = (sequence[own][:, None] == sequence.flatten()) & (position[own][:, None] >= position.flatten())
        key, value = (gather_from_sequence_parallel_region(t.contiguous(), group=self.cp) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._sdpa(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


def _token_positions(ends: list[int], peers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sequence, position in it) of every process's tokens: two int64 tensors (peers, s)."""
    sequences, positions = [], []
    for rank in range(peers):
        chunks = [zigzag_chunks(end - start, rank, peers) for start, end in zip(ends[:-1], ends[1:], strict=True)]
        positions.append(torch.cat(chunks))
        sequences.append(torch.cat([torch.full_like(part, number) for number, part in enumerate(chunks)]))
    return torch.stack(sequences), torch.stack(positions)


def zigzag_chunks(length: int, rank: int, peers: int) -> torch.Tensor:
    """Return the positions of a sequence that a context-parallel process holds.

    These are chunks `rank` and `2 * peers - 1 - rank` of 2 * peers. An early chunk attends to few tokens and a late one
    to many, so all processes do equal work. A single peer holds everything.
    """
    if peers == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * peers)
    return torch.cat([chunks[rank], chunks[2 * peers - 1 - rank]])


def layer_spec(config: TransformerConfig, *, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one part of the pipeline."""
    layer = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = TorchAttention
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    # megatron-core stores norms under the names of Transformer Engine's fused layers; these are not fused.
    parts.sharded_state_dict_keys_map = {}
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
