"""Killed with SIGKILL at any stage and resumed, a run ends with the parameters of the uninterrupted one, bit for bit.

Every stage of a step is a case, and the middle of a commit. The run is killed in step 3 of 4; steps 1 and 2 are
committed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
CHANGES = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "actor_rollout_ref__actor__shuffle": True,
    "critic__optim__lr": 1e-3,
    "trainer__total_training_steps": 4,
}
STAGES = [
    "next_batch",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
    "log",
    "save_checkpoint",
    "commit",
]


def start(folder: Path, model: Path, *, kill_before: str = "", **changes) -> int:
    environment = os.environ | {
        "KILL_STEP": "3",
        "KILL_BEFORE": kill_before,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "tests.support.chaos.killed_trainer",
        *settings(folder, model, **(CHANGES | changes)),
    ]
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=300, capture_output=True).returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder, tiny_qwen2) == 0
    return weights(folder / "run/global_step_4", folder / "hf"), metrics(folder / "run")


@pytest.mark.parametrize("stage", STAGES)
def test_killed_before_a_stage_and_resumed(tmp_path, tiny_qwen2, uninterrupted, stage):
    assert start(tmp_path, tiny_qwen2, kill_before=stage) == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "run").glob("global_step_?")) == ["global_step_1", "global_step_2"]
    assert start(tmp_path, tiny_qwen2) == 0
    parameters, rows = uninterrupted
    assert largest_difference(weights(tmp_path / "run/global_step_4", tmp_path / "hf"), parameters) == 0
    same = ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty_coeff")
    assert [[row.get(n) for n in same] for row in metrics(tmp_path / "run")] == [
        [row.get(n) for n in same] for row in rows
    ]
    result = audit(read_ledger(str(tmp_path / "run" / FILE)))
    assert result.problems() == [] and sorted(result.steps) == [1, 2, 3, 4]  # updates per committed step: 1
    assert result.num_repeated == (stage == "commit")  # step 3 was complete, but not committed


def test_a_driver_on_ray_is_killed_and_the_resumed_run_ends_the_same(tmp_path, tiny_qwen2):
    ray = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert start(tmp_path / "whole", tiny_qwen2, **ray) == 0
    assert start(tmp_path / "parts", tiny_qwen2, kill_before="update_actor", **ray) == -signal.SIGKILL
    assert start(tmp_path / "parts", tiny_qwen2, **ray) == 0
    whole, parts = (weights(tmp_path / n / "run/global_step_4", tmp_path / f"hf_{n}") for n in ("whole", "parts"))
    assert largest_difference(whole, parts) == 0
