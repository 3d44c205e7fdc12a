"""Tiny models of the families that the Megatron engine knows, and starting the processes of its tests. Not a test file."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.workers.engine_cases import VOCAB, save_tiny_qwen2

ROOT = Path(__file__).parents[2]
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
    """Write the named models into directories of their names."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

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


def run_ranks(module: str, num_ranks: int, *words: object, log: Path, timeout_s: float) -> None:
    """Run `python -m module RANK NUM_RANKS words...` once per rank; raises AssertionError with what they wrote if one fails."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    with open(log, "w+") as file:
        running = [
            subprocess.Popen([*command, str(rank), str(num_ranks), *map(str, words)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
            for rank in range(num_ranks)
        ]
        try:
            for process in running:
                process.wait(timeout=timeout_s)
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0] * num_ranks, log.read_text()[-4000:]
