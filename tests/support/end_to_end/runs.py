"""Run the real command-line programs on the tiny model, and read the files of a run."""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from hybridrl import main_ppo
from hybridrl.cli import export_checkpoint

WORDS = ["pens", "boxes", "dollars", "coins"]


def write_prompts(path: Path, num_rows: int) -> str:
    """Write a parquet file in verl's row format; ground truth is a small number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Tom buys {i} boxes of {i % 7} {WORDS[i % 4]}. How many?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_reward(path: Path) -> str:
    """Write a reward function with a signal for a random model: the share of digits in the response."""
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
    )
    return str(path)


def settings(folder: Path, model: Path, **changes: object) -> list[str]:
    """Return the command line of a small GRPO run in one process; `changes` use __ for dots."""
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": write_prompts(folder / "train.parquet", 10),
        "data.val_files": write_prompts(folder / "val.parquet", 5),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 48,
        "data.max_response_length": 12,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 3,
        "custom_reward_function.path": write_reward(folder / "reward.py"),
        "reward_model.num_processes": 1,  # by default a process per core, which takes CPU to start
        "trainer.backend": "local",
        "trainer.master": False,  # saves a process for every run on Ray; tests of the master turn it on
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 2,
        "trainer.logger": "[console,jsonl]",
        "trainer.default_local_dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def train(folder: Path, model: Path, **changes: object) -> list[dict]:
    """Run `main_ppo`, expect success, and return its metrics, one dict per logged step."""
    folder.mkdir(exist_ok=True)
    assert main_ppo.main(settings(folder, model, **changes)) == 0
    return metrics(folder / "run")


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def processes_with(text: str) -> list[int]:
    """Return the processes of this machine with this text in their environment: driver, Ray, workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def assert_none_is_left(text: str, *, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while left := processes_with(text):
        assert time.monotonic() < until, f"processes {left} are left {within_s:g} s after the end"
        time.sleep(0.2)


def weights(checkpoint: Path, export_to: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's policy as Hugging Face tensors."""
    export_checkpoint(str(checkpoint), str(export_to), trust_remote_code=True)  # of code in the test's own settings
    return load_file(export_to / "model.safetensors")


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
