"""Tiny mixtures of experts, one for each rule of routing; not a test file.

The same mixtures are written by hand beside them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from hybridrl.protocol import DataProto
from hybridrl.workers.engine.routing.routes import column_of

VOCAB, EXPERTS, TOP_K = 64, 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# One model for each rule: softmax before top-k, softmax after it, sigmoid with a bias and groups. The last one begins
# with a dense layer, so that a layer with experts has another number among all layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 2},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 2},
    "DeepseekV3": {
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
LAYERS = 2  # with experts, of each model


def save_mixture(folder: Path, family: str, *, norm_topk_prob: bool = True, tokenizer: Any = None, **sizes: Any) -> str:
    """Write a tiny model of a family; biases and sinks are not 0."""
    import transformers

    own = FAMILIES[family] | ({} if family == "GptOss" else {"norm_topk_prob": norm_topk_prob}) | sizes
    if tokenizer is not None:
        own |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        own |= {"pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{family}Config")(**COMMON | own)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.3)
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def random_routes(lengths: list[int], seed: int = 0, *, layers: int = LAYERS) -> np.ndarray:
    """Return a column of routes at random, two different experts for each token but the last."""
    draw = np.random.default_rng(seed)
    entries = [
        np.argsort(draw.random((length - 1, layers, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
        for length in lengths
    ]
    return column_of(entries)


def real_lengths(batch: DataProto) -> list[int]:
    return batch.batch["attention_mask"].sum(-1).tolist()


def with_routes(batch: DataProto, column: np.ndarray) -> DataProto:
    more = batch.select()
    more.non_tensor_batch = {"routed_experts": column}
    return more


class HandWritten:
    """A model whose layers with experts compute all experts.

    It adds them with weights that are worked out here.

    It has one row at a time, and `routes` (N, L, K) of its tokens; the routes of the last token are the model's own.
    """

    def __init__(self, path: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self.routes: torch.Tensor | None = None
        blocks = [module for module in self.model.modules() if hasattr(module, "experts")]
        for layer, block in enumerate(blocks):
            block.forward = partial(self._mixture, block, layer)

    def _mixture(self, block: Any, layer: int, states: torch.Tensor) -> Any:
        router = block.router if hasattr(block, "router") else block.gate
        flat = states.reshape(-1, states.shape[-1])
        logits, _, own = router(flat)
        chosen = own.clone()
        if self.routes is not None:
            chosen[: len(self.routes)] = self.routes[:, layer]
        share = torch.zeros_like(logits).scatter(1, chosen, weights_by_hand(router, logits, chosen))
        every = [block.experts(flat, torch.full_like(own[:, :1], e), torch.ones_like(logits[:, :1])) for e in range(8)]
        mixed = torch.einsum("te,eth->th", share, torch.stack(every)).reshape(states.shape)
        if hasattr(block, "router"):
            return mixed, share
        return mixed + block.shared_experts(states) if hasattr(block, "shared_experts") else mixed

    def log_probs(self, ids: torch.Tensor, routes: torch.Tensor | None) -> torch.Tensor:
        """Return the log-probs (N - 1,) of a row's tokens after the first."""
        self.routes = routes
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


def weights_by_hand(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    if hasattr(router, "e_score_correction_bias"):
        scores = 1 / (1 + torch.exp(-logits))
        picked = scores.gather(1, chosen)
        return picked / picked.sum(1, keepdim=True) * router.routed_scaling_factor
    if not hasattr(router, "norm_topk_prob"):
        return F.softmax(logits.gather(1, chosen), dim=1)
    picked = (logits.exp() / logits.exp().sum(1, keepdim=True)).gather(1, chosen)
    return picked / picked.sum(1, keepdim=True) if router.norm_topk_prob else picked
