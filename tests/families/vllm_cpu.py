"""Run a family through the `vllm` rollout, and print one line of JSON. Not a test file.

    python -m tests.families.vllm_cpu FAMILY CASE

`python -m tests.families --vllm` runs it for every family, each in a process of its own with a deadline, and writes the
results to vllm_cpu.json, from which the page is printed. vLLM's kernels need heads of 32 and more, so the models are
wider than those of the page's first table.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import ConfigError, StaleWeightsError
from tests.families import configurations
from tests.families.configurations import FAMILIES

RESULTS = Path(__file__).with_name("vllm_cpu.json")
DEADLINE_S = 900
CASES = {"float32": ("float32", False), "bfloat16": ("bfloat16", False), "replayed": ("bfloat16", True)}
"""The rollout's dtype, and whether the engine replays its routes."""
WITH_EXPERTS = ("Qwen3-MoE", "DeepSeek-V3", "GLM-4-MoE", "gpt-oss")
WIDER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
# Sizes of kernels, and entries that published models have in config.json and vLLM reads.
MORE: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"num_key_value_heads": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "Bamba": {"mamba_n_heads": 16},
    "LFM2": {"conv_dim": 64, "block_dim": 64, "tie_word_embeddings": True},
    "Gemma 2": {"tie_word_embeddings": True},
}


def widen(family: str) -> None:
    """Make this process's configuration of a family one whose sizes vLLM's kernels take."""
    name, own = FAMILIES[family]
    has = configurations.SIZES | own
    FAMILIES[family] = name, own | {key: size for key, size in WIDER.items() if key in has} | MORE.get(family, {})


def measure(family: str, case: str) -> dict[str, str]:
    from tests.families.measure import FAST, family_batch, measure_rollout, train
    from tests.support.workers.engine_cases import make_engine

    widen(family)
    dtype, replays = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        path = configurations.save_family(family, Path(folder, "model"))
        engine = make_engine(path, optim=FAST, replays_routes=replays)
        train(engine, family_batch())
        try:
            cell = measure_rollout(path, engine, name="vllm", dtype=dtype, replays=replays)
        except (StaleWeightsError, ConfigError) as error:
            return {"refused": str(error).replace(path, "the model")}
        if cell.refusal:
            return {"refused": cell.refusal.replace(path, "the model")}
        return {"difference": f"{cell.log_probs:.0e}"}


def measure_apart(family: str, case: str) -> dict[str, str]:
    """Return what `measure` does, in a process of its own."""
    command = [sys.executable, "-m", "tests.families.vllm_cpu", family, case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {DEADLINE_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"failed": f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing printed'])[-1]}"}


def measure_all() -> None:
    """Write the results of all families and cases."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for family in FAMILIES:
        cases = [case for case in CASES if case != "replayed" or family in WITH_EXPERTS]
        found[family] = {case: measure_apart(family, case) for case in cases}
        print(family, found[family], file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(*sys.argv[1:3])), flush=True)
    os._exit(0)  # vLLM's threads may wait for each other at the end
