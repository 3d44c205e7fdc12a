"""Killed in the middle of a refill, a run with dynamic sampling ends with the parameters of the uninterrupted one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.failing_runs import fault, hits, run_with
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
SAME = ("critic/score/mean", "actor/grad_norm", "train/num_gen_batches", "async/age_mean", "training/epoch")
REFILLS = {
    "algorithm__filter_groups__enable": True,
    "data__gen_batch_size": 3,  # less than data.train_batch_size=4: every step needs several
    "trainer__test_freq": -1,
}
MODES = {
    "synchronous": {},
    "lag, selected samples": {
        "trainer__lag": 2,
        "algorithm__select_samples__k": 2,
        "algorithm__select_samples__method": "random",
        "algorithm__use_pf_ppo": True,
        "algorithm__pf_ppo__reweight_method": "max_random",
    },
    "kept groups, shortest first": {
        "trainer__staleness": 2,
        "data__gen_batch_size": 2,
        "data__train_batch_size": 3,
        "algorithm__filter_groups__order": "shortest",
    },
    "agent loops, partial": {
        "actor_rollout_ref__rollout__mode": "async",
        "trainer__lag": 2,
        "trainer__partial_rollout": True,
    },
}


def coin(folder: Path) -> Path:
    """Write a reward that is 1 for a quarter of the responses: of groups of 3, about 44 % are equal."""
    folder.mkdir(exist_ok=True)
    path = folder / "coin.py"
    path.write_text(
        "import zlib\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(zlib.crc32(solution_str.encode()) % 4 == 0)\n"
    )
    return path


def arguments(folder: Path, model: Path, **changes) -> list[str]:
    reward = {"custom_reward_function__path": coin(folder), "trainer__total_training_steps": 4}
    return settings(folder, model, **REFILLS | reward | changes)


def run_and_die(folder: Path, model: Path, **changes) -> int:
    """Run in a process of its own, which kills itself in the refill of step 3.

    Return its exit code.
    """
    variables = {"KILL_STEP": "3", "KILL_BEFORE": "refill", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.chaos.killed_trainer", *arguments(folder, model, **changes)]
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, timeout=1000, capture_output=True)
    return done.returncode


def assert_same_end(found: Path, wanted: Path, *, num_repeated: int) -> None:
    policies = [weights(folder / "run/global_step_4", folder / "hf") for folder in (found, wanted)]
    assert largest_difference(*policies) == 0
    rows = [[[row.get(name) for name in SAME] for row in metrics(folder / "run")] for folder in (found, wanted)]
    assert rows[0] == rows[1]
    ledgers = [audit(read_ledger(str(folder / "run" / FILE))) for folder in (found, wanted)]
    assert [ledger.problems() for ledger in ledgers] == [[], []] and ledgers[0].num_repeated == num_repeated
    drawn = [[entry["drawn"] for entry in ledger.steps.values()] for ledger in ledgers]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 4


@pytest.mark.parametrize("mode", MODES)
def test_killed_in_the_middle_of_a_refill_and_resumed(tmp_path, tiny_qwen2, mode):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main_ppo.main(arguments(whole, tiny_qwen2, **MODES[mode])) == 0
    assert run_and_die(parts, tiny_qwen2, **MODES[mode]) == -signal.SIGKILL
    assert sorted(p.name for p in (parts / "run").glob("global_step_?")) == ["global_step_1", "global_step_2"]
    assert main_ppo.main(arguments(parts, tiny_qwen2, **MODES[mode])) == 0
    assert_same_end(parts, whole, num_repeated=0)


def test_a_worker_that_is_lost_in_a_refill_is_replaced_and_the_step_runs_again(tmp_path, tiny_qwen2):
    changes = REFILLS | {"trainer__total_training_steps": 4, "trainer__save_freq": 4, "trainer__snapshot_freq": 1}
    faults = {"well": [], "hit": [fault(3, "filter_groups", "actor_rollout", 1, method="generate_sequences")]}
    for name, planted in faults.items():
        reward = {"custom_reward_function__path": coin(tmp_path / name)}
        done = run_with(tmp_path / name, tiny_qwen2, *planted, timeout_s=500, **changes | reward)
        assert done.returncode == 0, done.stderr
    assert len(hits(tmp_path / "hit")) == 1
    assert_same_end(tmp_path / "hit", tmp_path / "well", num_repeated=0)
