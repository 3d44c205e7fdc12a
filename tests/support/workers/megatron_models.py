"""Tiny models, layouts and process starting for the Megatron engine tests; imports no megatron-core.

Not a test file.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hybridrl.config.schema.workers import ActorConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.critic import critic_loss
from hybridrl.workers.engine.base import LossFn, MicroBatching
from hybridrl.workers.losses import GlobalCounts, actor_loss
from tests.support.workers.engine_cases import VOCAB, save_tiny_qwen2

NEEDS_MEGATRON = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install -e '.[megatron]'"
)
POLICY = ("log_probs", "entropy")
STEPS = 3
PPO_EPOCHS = 2
TP, PP, EP = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
CP = {"context_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}

# name: (processes, model, Megatron's layout or None for the FSDP engine, other engine settings)
CASES = {
    "FSDP, one process": (1, "qwen2", None, {}),
    "FSDP, DP2": (2, "qwen2", None, {}),
    "FSDP, DP2, packed, recomputed": (2, "untied", None, {"packed": True, "gradient_checkpointing": True}),
    "one process": (1, "qwen2", {}, {}),
    "one process, padded vocabulary aside": (1, "odd", {}, {}),
    "DP2": (2, "qwen2", {}, {}),
    "DP2, plain optimizer": (2, "qwen2", PLAIN, {}),
    "TP2": (2, "qwen2", TP, {}),
    "TP2, untied": (2, "untied", TP, {}),
    "TP2, vocabulary of 65": (2, "odd", TP, {}),
    "TP2+SP, packed, recomputed": (2, "untied", SP, {"packed": True, "gradient_checkpointing": True}),
    "PP2": (2, "qwen2", PP, {}),
    "PP2, untied, packed": (2, "untied", PP | PLAIN, {"packed": True}),
    "PP2, interleaved": (2, "four layers", VPP, {}),
    "CP2": (2, "qwen2", CP, {}),
    "CP2, packed": (2, "qwen2", CP, {"packed": True}),
    "TP2 x PP2": (4, "qwen2", TP | PP, {}),
    "TP2 x DP2": (4, "qwen2", SP, {"packed": True}),
    "PP2 x DP2": (4, "qwen2", PP, {}),
    "TP2 x CP2": (4, "qwen2", SP | CP, {}),
    "PP2 x CP2, packed": (4, "qwen2", PP | CP, {"packed": True}),
    "CP2 x DP2": (4, "qwen2", CP, {}),
    "FSDP, DP2, shared prefixes": (2, "qwen2", None, {"share_prefixes": True, "gradient_checkpointing": True}),
    "one process, shared prefixes": (1, "llama", {}, {"share_prefixes": True}),
    "TP2+SP, shared prefixes": (2, "qwen2", SP, {"share_prefixes": True, "gradient_checkpointing": True}),
    "PP2, shared prefixes": (2, "untied", PP | PLAIN, {"share_prefixes": True}),
    "CP2, shared prefixes, which are computed apart": (2, "qwen2", CP, {"share_prefixes": True}),
    "qwen3_moe, EP2, shared prefixes": (2, "qwen3_moe", EP, {"share_prefixes": True}),
    "qwen3, TP2": (2, "qwen3", TP, {}),
    "llama, TP2": (2, "llama", TP, {}),
    "mistral, PP2": (2, "mistral", PP, {}),
    "qwen3_moe, one process": (1, "qwen3_moe", {}, {}),
    "qwen3_moe, EP2": (2, "qwen3_moe", EP, {}),
    "qwen3_moe, EP2 x TP2": (4, "qwen3_moe", EP | SP, {}),
    "qwen3_moe, CP2": (2, "qwen3_moe", CP, {}),
    "qwen3_moe, PP2": (2, "qwen3_moe", PP, {"packed": True}),
    "qwen3_moe, EP2 x CP2": (2, "qwen3_moe", EP | CP, {}),
}
MICRO = MicroBatching(max_rows=5)
# name: (layout that saves, layout that continues)
MOVES = {
    "TP2 to PP2": (TP, PP),
    "PP2 to DP2": (PP, {}),
    "DP2 to TP2": ({}, SP),
    "PP2 to interleaved": (PP | PLAIN, VPP | PLAIN),
    "interleaved to TP2": (VPP, TP),
    "CP2 to TP2, plain optimizer": (CP | PLAIN, TP | PLAIN),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}


def save_models(folder: Path, names: Sequence[str]) -> None:
    """Write the named models into directories of their names.

    For each, write a critic with the same body into `NAME critic`.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForTokenClassification,
        LlamaConfig,
        MistralConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    qwen2 = {
        "qwen2": {},
        "untied": {"tied": False, "pad_token_id": 3},
        "odd": {"vocab_size": VOCAB + 1},
        "four layers": {"num_hidden_layers": 4},
    }
    others = {
        "llama": lambda: LlamaConfig(**SIZES),
        "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
        "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
        "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    }
    for name in names:
        if name in qwen2:
            save_tiny_qwen2(folder / name, **qwen2[name])
        else:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(others[name]()).save_pretrained(folder / name)
        torch.manual_seed(2)
        AutoModelForTokenClassification.from_pretrained(folder / name, num_labels=1).save_pretrained(
            folder / f"{name} critic"
        )


def save_two_groups(model: Path, path: Path) -> Path:
    """Write a model of these sizes with two key-value heads, which two processes can share, and the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path


def value_loss(outputs, rows):
    loss = ((outputs["values"] - rows.batch["advantages"]) ** 2 * rows.batch["response_mask"]).sum() / 100
    return loss, {"loss": loss}


def all_tokens_as_response(batch: DataProto) -> DataProto:
    """Return the batch with every token except a row's first as response, (B, L - 1)."""
    real = batch.batch["attention_mask"]
    columns = {
        "input_ids": batch.batch["input_ids"],
        "attention_mask": real,
        "response_mask": real[:, 1:] * real[:, :-1],
    }
    return DataProto.from_single_dict(columns)


def ppo_losses(rows: DataProto, start: dict[str, torch.Tensor], *, num_tokens: float) -> tuple[LossFn, LossFn]:
    """Return the actor and critic losses of a PPO step on these rows, and add their columns to the rows.

    Args:
        start: "log_probs" and "values" of the rows before the step. Advantages stay; a return is advantage plus value.
    """
    rows.batch["old_log_probs"] = rows.batch["ref_log_prob"] = start["log_probs"]
    rows.batch["values"], rows.batch["returns"] = start["values"], rows.batch["advantages"] + start["values"]
    counts = GlobalCounts(num_tokens=num_tokens, num_seqs=len(rows))  # token means: sequences are not counted
    return actor_loss(ActorConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01), counts), critic_loss(
        0.5, counts
    )
