"""Runs with pictures by the real program, up to an exported model.

Learning and Ray are slow.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from examples.vision.build_model import build_model
from examples.vision.make_data import make_rows, swapped
from hybridrl import main_ppo
from hybridrl.cli import export_checkpoint
from hybridrl.trainer.data.row_files import prompt_table, write_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    build_model(path / "model", family="qwen2_5_vl")
    rows = make_rows(12, seed=1, kinds=("colour", "count"))
    del rows[3]["images"]
    rows[3]["prompt"] = [{"role": "user", "content": "Which colour ?"}]  # a row without a picture among the others
    write_table(prompt_table(rows), str(path / "train.parquet"))
    return path


def words(folder: Path, run: Path, **changes: object) -> list[str]:
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 3,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.use_prefix_grouper": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 4,
        "custom_reward_function.path": ROOT / "examples" / "vision" / "make_data.py",
        "trainer.backend": "local",
        "trainer.master": False,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 2,
        "trainer.logger": ["jsonl"],
        "trainer.default_local_dir": run,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_grpo_with_pictures_trains_what_it_sampled_and_exports_a_model_that_loads(folder, tmp_path):
    changes = {"actor_rollout_ref__actor__calculate_old_log_probs": True, "algorithm__use_kl_in_reward": True}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["actor/shared_prefix_ratio"] > 0.3 for row in rows)
    export_checkpoint(str(tmp_path / "run" / "global_step_2"), str(tmp_path / "hf"))
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (folder / "model", tmp_path / "hf")
    )
    assert before.keys() == after.keys() and not torch.equal(
        *(s["model.visual.patch_embed.proj.weight"] for s in (before, after))
    )
    assert AutoImageProcessor.from_pretrained(tmp_path / "hf").patch_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__adv_estimator": "gae"}, "which has a critic: it does not run with .*, which reads images"),
        ({"actor_rollout_ref__rollout__name": "vllm"}, "rollout.name=vllm: it does not run with"),
        (
            {"actor_rollout_ref__actor__strategy": "megatron"},
            "strategy=megatron supports the model types .* not qwen2_5_vl",
        ),
        ({"actor_rollout_ref__model__lora_rank": 4}, "lora_adapter_path: it does not run with"),
        ({"actor_rollout_ref__rollout__mode": "async"}, "rollout.mode=async: prompts with images"),
    ],
)
def test_what_does_not_run_with_images_is_refused_by_name(folder, tmp_path, capsys, caplog, changes, message):
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) != 0
    assert re.search(message, capsys.readouterr().err + caplog.text)


def test_a_model_of_text_has_no_tower_to_freeze(tiny_qwen2, folder, tmp_path, capsys, caplog):
    changes = {"actor_rollout_ref__actor__freeze_vision_tower": True, "actor_rollout_ref__model__path": tiny_qwen2}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) != 0
    assert "freeze_vision_tower=true" in capsys.readouterr().err + caplog.text


def test_swapped_rows_keep_their_questions_and_have_pictures_of_other_rows():
    rows = make_rows(8, seed=2, kinds=("colour", "count"))
    for row, other in zip(rows, swapped(rows), strict=True):
        assert row["prompt"] == other["prompt"] and row["ground_truth"] == other["ground_truth"]
        assert row["images"] != other["images"]


@pytest.mark.slow
def test_the_example_learns_what_only_the_pictures_say_and_nothing_from_pictures_of_other_rows(tmp_path):
    command = ["bash", str(ROOT / "examples" / "vision" / "run.sh"), str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    last = [row for row in metrics(tmp_path / "grpo") if "val-core/shapes/colour/reward/mean@1" in row][-1]
    for kind in ("colour", "count"):
        assert last[f"val-core/shapes/{kind}/reward/mean@1"] > 0.9
        assert last[f"val-core/shapes/{kind}, swapped/reward/mean@1"] < 0.4


@pytest.mark.slow
def test_a_run_on_ray_is_that_of_one_process(folder, tmp_path, ray_cluster):
    for backend in ("local", "ray"):
        assert main_ppo.main(words(folder, tmp_path / backend, trainer__backend=backend)) == 0
    one, other = (
        [row["actor/loss"] for row in metrics(tmp_path / backend) if "actor/loss" in row]
        for backend in ("local", "ray")
    )
    assert one == pytest.approx(other, abs=1e-6)
