"""verl's published command for geometry3k, whole: rows of `data_preprocess`, a tiny model, the rollout it names.

The command keeps all words but files, sizes, machines and loggers.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from data_preprocess import geometry3k
from examples.vision.build_model import build_model
from tests.support.verl_commands import COMMANDS, command_words

ROOT = Path(__file__).parents[2]
PROBLEMS = ("<image>Find x.", "<image>In the triangle, find the side y.", "<image>Find the area.")
SIZES = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 160,
    "data.max_response_length": 6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.kv_cache_memory_mb": 64,
    "actor_rollout_ref.rollout.max_num_seqs": 8,
    "actor_rollout_ref.actor.calculate_old_log_probs": "true",
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[console,jsonl]",
    "trainer.total_epochs": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": 2,
}


def write_problems(folder: Path, split: str, number: int) -> Path:
    """Write rows in the columns of geometry3k, each with a drawn triangle."""
    lines = []
    for i in range(number):
        figure = Image.new("RGB", (64, 48), "white")
        ImageDraw.Draw(figure).polygon([(4, 44), (60 - 4 * i, 44), (30, 4 + 3 * i)], outline="black")
        figure.save(folder / f"{split}{i}.png")
        lines.append({"problem": PROBLEMS[i % 3], "answer": str(i + 1), "images": [f"{split}{i}.png"]})
    source = folder / f"geo3k_{split}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rollout", ["vllm", "hf"])
def test_verls_command_for_geometry3k_runs_whole_and_trains_what_it_sampled(tmp_path, rollout):
    if rollout == "vllm" and find_spec("torchvision") is None:
        pytest.skip("vLLM needs torchvision for images")
    for split, number in (("train", 8), ("test", 3)):
        source = write_problems(tmp_path, split, number)
        assert geometry3k.main(["--local_dir", str(tmp_path / "data"), "--data_source", str(source)]) == 0
    texts = ["user assistant", *PROBLEMS, geometry3k.INSTRUCTION, "0 1 2 3 4 5 6 7 8 9"]
    model = build_model(tmp_path / "model", texts=texts, family="qwen2_5_vl", hidden=64, head=32)
    [command] = [entry for entry in COMMANDS if entry["script"].endswith("run_qwen2_5_vl_7b_fsdp.sh")]
    files = {f"/data/geo3k/{split}.parquet": str(tmp_path / "data" / f"{split}.parquet") for split in ("train", "test")}
    words = command_words(command, **files, **{"Qwen/Qwen2.5-VL-7B-Instruct": str(model), "vllm": rollout})
    run = tmp_path / "run"
    own = SIZES | {"trainer.default_local_dir": run}
    kept = [word for word in words if word.partition("=")[0].lstrip("+") not in own]
    given = [*kept, *(f"{name}={value}" for name, value in own.items())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    called = [sys.executable, "-m", "hybridrl.main_ppo", *given]
    done = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2 and any(any("hiyouga/geometry3k" in name for name in row) for row in rows)
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in steps)
    assert all(torch.tensor(row["actor/grad_norm"]).isfinite() for row in steps)
