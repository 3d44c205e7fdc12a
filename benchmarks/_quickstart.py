"""Shared by benchmarks of whole runs: the quick start's GRPO with changed settings."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from hybridrl import main_ppo
from hybridrl.trainer.run.report import merge_steps
from hybridrl.trainer.run.tracking import read_metrics


def sft_model(quickstart: Path) -> Path:
    """Return the SFT model that GRPO starts from. quickstart: output directory of `make train`."""
    return quickstart / "sft/global_step_500/huggingface"


def run_grpo(quickstart: Path, folder: Path, *, steps: int, changes: dict[str, Any]) -> list[dict]:
    """Run it without output and return its metrics, one dict per step. It writes to `folder`."""
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": quickstart / "data/train.parquet",
        "data.val_files": quickstart / "data/test.parquet",
        "data.train_batch_size": 32,
        "data.max_prompt_length": 64,
        "data.max_response_length": 26,
        "actor_rollout_ref.model.path": sft_model(quickstart),
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.optim.betas": "[0.9,0.95]",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 8,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder,
    } | changes
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        code = main_ppo.main([f"{key}={value}" for key, value in settings.items()])
    if code:
        sys.exit("the run failed")
    return merge_steps(read_metrics(folder / "metrics.jsonl"))
