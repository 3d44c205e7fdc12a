"""Whatever process is killed, whatever it is doing: the run goes on, and ends with the parameters of the undisturbed one, bit for bit.

`pytest -m chaos -s tests/chaos/test_failover.py` prints a line per case; `benchmarks/recovery.py` makes a table of the same faults.
"""

import json
import random

import pytest

from hybridrl.trainer.ledger import account, read_ledger
from tests.end_to_end.failing_runs import SAME, fault, hits, run_with
from tests.end_to_end.runs import largest_difference, metrics, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
ALL_ROLES = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "trainer__colocate": "device",
    "trainer__n_gpus_per_node": 2,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
}
CASES = [
    ("idle", "next_batch", "actor", 0, 0.0),
    ("idle", "next_batch", "rollout", 0, 0.0),
    ("mid-generation", "gen", "rollout", 0, 0.02),
    ("mid-generation", "gen", "actor", 1, 0.02),
    ("log-probs", "old_log_prob", "actor", 0, 0.0),
    ("log-probs", "ref", "ref", 1, 0.0),
    ("mid-update", "update_critic", "critic", 1, 0.02),
    ("mid-update", "update_actor", "actor", 0, 0.02),
    ("mid-update", "update_actor", "actor", 1, 0.02),
    ("mid-push", "update_weights", "rollout", 0, 0.005),
    ("mid-push", "update_weights", "actor", 0, 0.005),
    ("mid-checkpoint", "save_checkpoint", "actor", 1, 0.02),
    ("mid-checkpoint", "save_checkpoint", "critic", 0, 0.02),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_with(folder, tiny_qwen2, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    return folder


def check_ended_the_same(folder, undisturbed, *, step):
    found, wanted = (weights(f / f"run/global_step_{step}", f / f"hf{random.random()}") for f in (folder, undisturbed))
    assert largest_difference(found, wanted) == 0
    rows, expected = ([[row.get(name) for name in SAME] for row in metrics(f / "run")] for f in (folder, undisturbed))
    assert rows == expected
    ledger = account(read_ledger(str(folder / "run/ledger.jsonl")))
    assert not ledger.problems() and len(ledger.steps) == step


def tell(folder, what):
    failures = [json.loads(line) for line in (folder / "run/failures.jsonl").read_text().splitlines()]
    for hit, failure in zip(hits(folder), failures, strict=False):
        print(f"\n{what}: told after {failure['told_at'] - hit['at']:.2f} s, back after {failure['seconds']:.1f} s more", end="")
    return failures


@pytest.mark.parametrize(("moment", "stage", "role", "rank", "after_s"), CASES)
def test_a_killed_process_costs_time_and_nothing_else(tmp_path, tiny_qwen2, undisturbed, moment, stage, role, rank, after_s):
    one = fault(3 if stage == "save_checkpoint" else 2, stage, role, rank, after_s=after_s)
    done = run_with(tmp_path, tiny_qwen2, one, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    failures = tell(tmp_path, f"{role}-{rank} {moment}")
    assert f"{role}-{rank}" in failures[0]["lost"]
    check_ended_the_same(tmp_path, undisturbed, step=3)


def test_a_process_killed_while_another_is_brought_back_is_brought_back_too(tmp_path, tiny_qwen2, undisturbed):
    faults = [fault(2, "update_critic", "critic", 0), fault(2, "update_critic", "actor", 1, after_s=4.0)]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    tell(tmp_path, "two at once")
    check_ended_the_same(tmp_path, undisturbed, step=3)


def test_what_dies_again_and_again_ends_the_run_and_keeps_its_commits(tmp_path, tiny_qwen2):
    faults = [fault(3, "update_actor", "actor_rollout", 0) for _ in range(4)]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, trainer__save_freq=2)
    assert done.returncode != 0 and "what comes so often is no accident" in done.stderr
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]


def test_two_hundred_steps_with_twenty_faults_end_as_without(tmp_path, tiny_qwen2):
    dice, many = random.Random(0), {"trainer__total_training_steps": 200, "trainer__save_freq": 50, "trainer__n_gpus_per_node": 2}
    stages = ("next_batch", "gen", "old_log_prob", "update_actor", "update_weights", "save_checkpoint")
    steps = sorted(dice.sample(range(2, 200), 20))
    faults = [fault(step, dice.choice(stages), "actor_rollout", dice.randrange(2), after_s=dice.choice((0.0, 0.01))) for step in steps]
    for name, planted in (("calm", []), ("stormy", faults)):
        done = run_with(tmp_path / name, tiny_qwen2, *planted, timeout_s=1500, **many)
        assert done.returncode == 0, done.stderr
    assert len(hits(tmp_path / "stormy")) == 20
    tell(tmp_path / "stormy", "random")
    check_ended_the_same(tmp_path / "stormy", tmp_path / "calm", step=200)
