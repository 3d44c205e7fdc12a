"""Runs with pictures on Ray: every placement and mode trains as one process does, also after losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.end_to_end.failing_runs import ROOT, SAME, fault, hits
from tests.support.end_to_end.pictures import save_model_and_rows
from tests.support.end_to_end.runs import assert_none_is_left, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLLOUT = "actor_rollout_ref.rollout."
SEPARATE = {"trainer.n_gpus_per_node": 1, f"{ROLLOUT}n_gpus_per_node": 1}
ASYNC = {f"{ROLLOUT}mode": "async"}
RAY = {"trainer.backend": "ray", "trainer.n_gpus_per_node": 1}
PLANTED = {
    "trainer.middleware": f"[{ROOT / 'tests/support/chaos/faults.py'}:plant]",
    "actor_rollout_ref.model.external_lib": f"[{ROOT / 'tests/support/chaos/victim.py'}]",
}
PLACES = {
    "one process": RAY | {"trainer.n_gpus_per_node": 2},
    "agents": RAY | ASYNC,
    "separate": RAY | SEPARATE,
    "separate agents": RAY | SEPARATE | ASYNC,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model_and_rows(tmp_path_factory.mktemp("pictures"))


def run(folder: Path, path: Path, *faults: dict, **changes: object) -> list[list[float]]:
    """Run a program of its own, and return the metrics of each step that do not depend on the clock."""
    path.mkdir(exist_ok=True)
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 3,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.calculate_old_log_probs": True,
        f"{ROLLOUT}name": "hf",
        f"{ROLLOUT}n": 4,
        "custom_reward_function.path": ROOT / "examples" / "vision" / "make_data.py",
        "trainer.backend": "local",
        "trainer.master": False,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 3,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.save_freq": 3,
        "trainer.logger": ["jsonl"],
        "trainer.default_local_dir": path / "run",
    } | changes
    environment = os.environ | {"FAULTS": json.dumps(faults), "FAULTS_LOG": str(path / "log.jsonl")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hybridrl.main_ppo", *(f"{name}={value}" for name, value in values.items())]
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_none_is_left(f"FAULTS_LOG={path}/")
    rows = [row for row in metrics(path / "run") if "actor/grad_norm" in row]
    assert len(rows) == 3
    if "trainer.lag" not in changes:
        assert all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    return [[row.get(name, 0.0) for name in SAME] for row in rows]  # without a critic there is no loss of it


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory) -> list[list[float]]:
    return run(folder, tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_one_process_does(folder, local, tmp_path, place):
    for found, wanted in zip(run(folder, tmp_path, **PLACES[place]), local, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_a_rollout_and_the_driver_are_lost_and_the_run_ends_as_without(folder, tmp_path):
    """A batch with pictures is generated ahead meanwhile: it is in the snapshot from which the next driver resumes."""
    ahead = RAY | SEPARATE | ASYNC | PLANTED | {"trainer.lag": 1, "trainer.master": True}
    faults = [fault(2, "reward", "rollout"), fault(3, "update_actor", "trainer")]
    well, hit = run(folder, tmp_path / "well", **ahead), run(folder, tmp_path / "hit", *faults, **ahead)
    assert len(hits(tmp_path / "hit")) == 2
    assert hit == well
