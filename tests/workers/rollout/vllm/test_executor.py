"""Weights of a vLLM engine over two processes: every element counts once in the fingerprint of a push."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.end_to_end.ports import free_port
from tests.support.ranks import run_ranks
from tests.support.workers.expert_cases import save_experts
from tests.support.workers.routing_cases import save_mixture

WIDE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
LATENT = {"moe_intermediate_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # sizes of vLLM's kernels
DENSE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
LIMIT_S = 200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]


def save_wide_heads(path: Path) -> None:
    """Write a model whose only key-value head is on both ranks.

    Its heads are two blocks of fp8.
    """
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.2}
    config = Qwen3Config(**sizes, **DENSE, max_position_embeddings=256, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("shards")
    save_experts(folder / "qwen3_moe")
    save_mixture(folder / "gpt_oss", "GptOss", **WIDE, head_dim=32)
    save_mixture(folder / "deepseek_v3", "DeepseekV3", **WIDE, **LATENT)
    save_wide_heads(folder / "fp8")
    module, names = "tests.support.workers.vllm_shards_rank", ("qwen3_moe", "gpt_oss", "deepseek_v3", "fp8")
    run_ranks(module, 2, folder, free_port(), *names, log=folder / "log", timeout_s=LIMIT_S)
    return torch.load(folder / "shards.pt")


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "deepseek_v3", "fp8"])
def test_a_push_to_two_ranks_is_accepted_and_computed_with(found, model):
    assert found[model] < 1e-4
