"""vLLM's own LoRA layers generate with an adapter of `hybridrl export --adapter` what the merged export generates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.cli import export_checkpoint
from tests.support.end_to_end.runs import train

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
RANK = 8


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(LIMIT_S + 200)
def test_vllm_generates_with_an_exported_adapter_as_with_the_merged_model(tmp_path, tiny_qwen2, tiny_tokenizer):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"  # large weights, so that the likeliest token is clear of the second
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_qwen2, initializer_range=0.3)).save_pretrained(
        model
    )
    tiny_tokenizer.save_pretrained(model)
    lora = {"actor_rollout_ref__model__lora_rank": RANK, "actor_rollout_ref__model__lora_alpha": 12}
    fast = {"actor_rollout_ref__actor__optim__lr": 0.05, "trainer__test_freq": -1, "trainer__val_before_train": False}
    train(tmp_path / "run", model, **lora, **fast)
    step = tmp_path / "run/run/global_step_2"
    export_checkpoint(str(step), str(tmp_path / "adapter"), adapter=True)
    export_checkpoint(str(step), str(tmp_path / "merged"))

    script = [sys.executable, "-m", "tests.support.end_to_end.vllm_lora"]
    words = [str(model), str(tmp_path / "adapter"), str(tmp_path / "merged"), str(tmp_path / "found.json")]
    done = subprocess.run([*script, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["adapter"]["tokens"] == found["merged"]["tokens"]
    assert found["base"]["tokens"] != found["merged"]["tokens"]  # the adapter matters
    ours, expected = (sum(found[name]["log_probs"], []) for name in ("adapter", "merged"))
    assert ours == pytest.approx(expected, abs=1e-4)
