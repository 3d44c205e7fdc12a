"""Megatron's transformer layers with torch's own kernels: no Transformer Engine, no apex, any device.

megatron-core's own layers without Transformer Engine refuse sequence parallelism, packed sequences and context
parallelism. What a layer is made of is a public choice of megatron-core (a spec), so these are two ordinary classes and
no change of its code.

Shapes: s tokens of this process's part, b rows, S = s * (context-parallel peers) tokens.
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

from hybridrl.workers.engine.batching.packed_attention import Run

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = (
        None  # megatron-core 0.16 asks whether it is None, and binds it only with Transformer Engine
    )


@dataclass
class Pack(PackedSeqParams):
    """Megatron's description of a packed row, and what `TorchAttention` needs besides.

    runs: sequences of similar length, attended together; only without context parallelism.
    """

    runs: tuple[Run, ...] = ()


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, made as Megatron makes norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = (
            config.sequence_parallel
        )  # its gradient is then summed over tensor-parallel peers


class TorchAttention(MegatronModule):
    """Causal attention by `scaled_dot_product_attention`: grouped heads, packed sequences, context parallelism.

    With context parallelism each process has two of 2 * peers chunks of every sequence, one early and one late, and
    gathers all keys and values; the gradient of the gathering is a reduce-scatter.
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
        packed_seq_params: Pack | None = None,
    ) -> torch.Tensor:
        """Return (s, b, heads * d), or (s, heads * d) of a pack, from query, key, value (s, b, heads, d) or (s, heads,
        d).
        """
        if packed_seq_params is None:
            return self._rows(query, key, value)
        if self.cp.size() == 1:
            return self._runs(query, key, value, packed_seq_params.runs)
        whole = packed_seq_params.cu_seqlens_q.tolist()
        return self._cut(query[:, None], key[:, None], value[:, None], whole).squeeze(1)

    def _rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.cp.size() > 1:
            return self._cut(query, key, value, [0, query.size(0) * self.cp.size()])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._sdpa(q, k, v, None).permute(2, 0, 1, 3).flatten(2)

    def _runs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
        parts = []
        for run in runs:
            q, k, v = (
                t.index_select(0, run.tokens).unflatten(0, (-1, run.width)).transpose(1, 2) for t in (query, key, value)
            )
            parts.append(self._sdpa(q, k, v, None).transpose(1, 2).flatten(0, 1).index_select(0, run.cells))
        return torch.cat(parts).flatten(1)

    def _cut(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """Attention of this process's tokens to everyone's; `ends` are the limits of the sequences, counted over all
        processes.
        """
        sequence, position = (t.to(query.device) for t in _whose(ends, self.cp.size()))
        mine = self.cp.rank()
        mask = (sequence[mine][:, None] == sequence.flatten()) & (position[mine][:, None] >= position.flatten())
        key, value = (gather_from_sequence_parallel_region(t.contiguous(), group=self.cp) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._sdpa(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


def _whose(ends: list[int], peers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sequence, position in it) of every process's tokens, two int64 tensors (peers, s)."""
    sequences, positions = [], []
    for rank in range(peers):
        held = [two_chunks(end - start, rank, peers) for start, end in zip(ends[:-1], ends[1:], strict=True)]
        positions.append(torch.cat(held))
        sequences.append(torch.cat([torch.full_like(part, number) for number, part in enumerate(held)]))
    return torch.stack(sequences), torch.stack(positions)


def two_chunks(length: int, rank: int, peers: int) -> torch.Tensor:
    """Return which positions of a sequence a context-parallel process has: chunks `rank` and `2 * peers - 1 - rank` of
    2 * peers.

    An early chunk attends to little and a late one to much, so that all processes have the same work. One peer has
    everything.
    """
    if peers == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * peers)
    return torch.cat([chunks[rank], chunks[2 * peers - 1 - rank]])


def layer_spec(config: TransformerConfig, *, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return what the layers of one part of the pipeline are made of."""
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
    # megatron-core stores its norms under the names that Transformer Engine's fused layers have; these are not fused.
    parts.sharded_state_dict_keys_map = {}
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
