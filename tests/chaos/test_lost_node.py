"""A node is lost: how soon that is detected, and what continues. Each test has a cluster of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.view.readers.failures import recoveries
from tests.support.chaos.machines import can_simulate
from tests.support.end_to_end.runs import metrics

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
needs_machines = pytest.mark.skipif(not can_simulate(), reason="simulated machines need root and iproute2")


def run(module, *words, timeout_s=500):
    command = [sys.executable, "-m", f"tests.support.chaos.{module}", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, said


def observe(tmp_path, *words):
    done, said = run("lost_node_workers", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    print(*said, sep="\n")
    return {one["source"]: one for one in said}


def test_a_lost_node_is_reported_in_six_seconds_and_its_workers_move_without_its_objects(tmp_path):
    seen = observe(tmp_path, "room")
    assert seen["driver"]["seconds"] < 6 and seen["master"]["seconds"] < 6
    assert (
        " was lost while running doze(): its node " in seen["driver"]["text"]
        and " is gone; in holder.doze for " in seen["driver"]["text"]
    )
    assert all(account.startswith("its node ") for account in seen["master"]["accounts"])
    assert len(set(seen["rebuilt"]["nodes"])) == 1
    assert "was in the memory of a node that is gone; restart the run" in seen["object"]["text"]
    assert seen["object"]["seconds"] < 60  # when Ray has detected it: it asks the lost node after 10 s, and 20 s later
    assert seen["new"]["sizes"] == [2_000_000, 2_000_000]


def test_without_another_node_the_error_names_what_is_missing(tmp_path):
    seen = observe(tmp_path, "none")
    assert (
        "no node can hold 2 worker processes" in seen["placement"]["text"]
        and "2 CPU missing" in seen["placement"]["text"]
    )


STEPS = 40  # the loss is in step 3, and Ray notices it a second later


def trained(tmp_path, model, role, how="removed", room="room"):
    changes = {
        "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
    }
    return run("lost_node", tmp_path, model, role, how, room, *(f"{key}={value}" for key, value in changes.items()))


@pytest.mark.parametrize("how", ["removed", pytest.param("silent", marks=needs_machines)])
def test_a_run_continues_without_the_node_of_its_rollout(tmp_path, tiny_qwen2, how):
    done, said = trained(tmp_path, tiny_qwen2, "rollout", how)
    assert done.returncode == 0, done.stderr
    failed = next(one for one in said if "failures" in one)
    [back] = recoveries(str(tmp_path / "run"))
    lost_at = next(one["at"] for one in said if "lost" in one)
    master_s, trainer_s = failed["at"] - lost_at, back["detected_at"] - lost_at
    print(
        f"\n{how}: the master reported it after {master_s:.1f} s, the trainer after {trainer_s:.1f} s, and was back "
        f"{back['seconds']:.1f} s later"
    )
    assert re.match(r"rollout-0 at step \d+: its node \S+ is gone", failed["failures"][0])
    assert master_s < 6 and trainer_s < 6
    rows = [row for row in metrics(tmp_path / "run") if "actor/grad_norm" in row]
    assert [row["training/global_step"] for row in rows] == [*range(1, STEPS + 1)]


def test_a_run_that_lost_the_node_of_its_actor_ends_with_the_reason_and_keeps_its_checkpoint(tmp_path, tiny_qwen2):
    done, said = trained(tmp_path, tiny_qwen2, "actor")
    print(*said, done.stderr, sep="\n")
    assert done.returncode != 0
    assert "was in the memory of a node that is gone" in done.stderr
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]
