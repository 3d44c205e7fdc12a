"""The driver is lost in any stage: the next one reattaches to the workers, and the run ends bit-equal.

`pytest -m chaos -s tests/chaos/test_driver_lost.py` prints a line per case.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import read_ledger
from hybridrl.view.readers.failures import recoveries
from tests.support.end_to_end.failing_runs import ON_RAY, ROOT, SAME
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
STEPS = 4
ROLLOUT = "actor_rollout_ref__rollout__"
CASES = [
    ("SIGKILL", "next_batch", 0.0),
    ("SIGKILL", "gen", 0.02),
    ("SIGKILL", "old_log_prob", 0.0),
    ("SIGKILL", "update_actor", 0.02),
    ("SIGKILL", "update_weights", 0.005),
    ("SIGKILL", "save_checkpoint", 0.02),
    ("SIGSTOP", "update_actor", 0.02),
    ("exit", "gen", 0.02),
]
POOLS = {"actor_rollout_ref__rollout__n_gpus_per_node": 1, "trainer__total_training_steps": 6}
ASYNC = {"actor_rollout_ref__rollout__mode": "async"}
AHEAD = {
    "one batch": POOLS | {"trainer__lag": 1},
    "agent loops": POOLS | ASYNC | {"trainer__lag": 1},
    "chunks": POOLS | ASYNC | {"trainer__lag": 2, "trainer__partial_rollout": True},
}


def run_with(folder, model, *faults, **changes):
    folder.mkdir(exist_ok=True)
    wanted = {
        "trainer__total_training_steps": STEPS,
        "trainer__save_freq": 2,
        "trainer__master": True,
        "trainer__middleware": f"[{ROOT / 'tests/support/chaos/driver_faults.py'}:plant]",
    }
    environment = os.environ | {
        "DRIVER_FAULTS": json.dumps(faults),
        "DRIVER_FAULTS_LOG": str(folder / "hits.jsonl"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    values = ON_RAY | wanted | changes
    del values[
        "actor_rollout_ref__model__external_lib"
    ]  # it starts a thread at import, so the program could not be forked
    command = [sys.executable, "-m", "hybridrl.main_ppo", *settings(folder, model, **values)]
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=600, capture_output=True, text=True)
    print(done.stderr)
    return done


def fault(how, stage, after_s, *, step=2, **more):
    return {"step": step, "stage": stage, "after_s": after_s, "how": how, **more}


def hits(folder):
    return [json.loads(line) for line in (folder / "hits.jsonl").read_text().splitlines()]


def seconds_back(done):
    return [float(found) for found in re.findall(r"resumed at the end of step \d+ after ([\d.]+) s", done.stderr)]


def print_seconds(folder, what):
    """Print the seconds from each fault until the next driver has resumed."""
    failures = [one for one in recoveries(str(folder / "run")) if one["lost"] == ["trainer"]]
    for hit, failure in zip(hits(folder), failures, strict=False):
        print(
            f"\n{what}: the next driver resumed after {failure['detected_at'] + failure['seconds'] - hit['at']:.1f} s"
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_with(folder, tiny_qwen2).returncode == 0
    return folder


@pytest.fixture(scope="module")
def ahead(tmp_path_factory, tiny_qwen2):
    """The undisturbed run of each of `AHEAD`, made once."""
    folder, done = tmp_path_factory.mktemp("ahead"), set()

    def undisturbed_run(name):
        if name not in done:
            assert run_with(folder / name, tiny_qwen2, **AHEAD[name]).returncode == 0
            done.add(name)
        return folder / name

    return undisturbed_run


def check_ended_the_same(folder, undisturbed, *, step=STEPS):
    found, wanted = (
        weights(f / f"run/global_step_{step}", f / f"hf-{time.monotonic_ns()}") for f in (folder, undisturbed)
    )
    assert largest_difference(found, wanted) == 0
    rows, expected = ([[row.get(name) for name in SAME] for row in metrics(f / "run")] for f in (folder, undisturbed))
    assert rows == expected
    ledger = audit(read_ledger(str(folder / "run/ledger.jsonl")))
    assert not ledger.problems() and len(ledger.steps) == step


@pytest.mark.parametrize(("how", "stage", "after_s"), CASES)
def test_a_lost_driver_costs_time_and_nothing_else(tmp_path, tiny_qwen2, undisturbed, how, stage, after_s):
    done = run_with(tmp_path, tiny_qwen2, fault(how, stage, after_s))
    assert done.returncode == 0
    assert len(seconds_back(done)) == 1 and "is started anew" not in done.stderr
    assert "starting new processes" not in done.stderr
    [journal] = (tmp_path / "run/master").iterdir()
    decision, recovered = replay(str(journal))[0].decisions
    assert re.search(r"the supervisor restarts the driver from the snapshot of step \d \(1 of 3 losses\)", decision)
    assert "recovered: all roles" in recovered
    print_seconds(tmp_path, f"{how} in {stage}")
    check_ended_the_same(tmp_path, undisturbed)


@pytest.mark.parametrize("lost", ["driver", "rollout"])
@pytest.mark.parametrize("name", AHEAD)
def test_tokens_generated_ahead_are_those_of_the_undisturbed_run(tmp_path, tiny_qwen2, ahead, name, lost):
    if lost == "driver":
        done = run_with(tmp_path, tiny_qwen2, fault("SIGKILL", "next_batch", 0.0, step=4), **AHEAD[name])
        assert len(seconds_back(done)) == 1
    else:
        where = fault("worker", "update_actor", 0.0, step=4, role="rollout", before_s=0.0)
        done = run_with(tmp_path, tiny_qwen2, where, **AHEAD[name])
    assert done.returncode == 0 and hits(tmp_path)
    check_ended_the_same(tmp_path, ahead(name), step=AHEAD[name]["trainer__total_training_steps"])


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005])
def test_no_process_waits_for_the_other_half_of_a_push(tmp_path, tiny_qwen2, after_s):
    separated = {"actor_rollout_ref__rollout__n_gpus_per_node": 1}
    done = run_with(tmp_path, tiny_qwen2, fault("SIGKILL", "update_weights", after_s), **separated)
    assert done.returncode == 0 and len(seconds_back(done)) == 1
    print_seconds(tmp_path, f"SIGKILL {after_s} s into a push to processes of their own")
    [hit], [failure] = hits(tmp_path), recoveries(str(tmp_path / "run"))
    # A driver that dies between two ranks' calls costs their processes, too. A wait would last until a call's deadline.
    assert failure["detected_at"] - hit["at"] < 60
    assert not audit(read_ledger(str(tmp_path / "run/ledger.jsonl"))).problems()


def test_workers_outlive_their_driver_more_than_once(tmp_path, tiny_qwen2, undisturbed):
    faults = [
        fault("SIGKILL", "update_actor", 0.02),
        fault("SIGKILL", "gen", 0.0, step=3),
        fault("exit", "next_batch", 0.0, step=4),
    ]
    done = run_with(tmp_path, tiny_qwen2, *faults)
    assert done.returncode == 0 and len(seconds_back(done)) == 3
    assert len({tuple(hit["pids"]) for hit in hits(tmp_path)}) == 1
    check_ended_the_same(tmp_path, undisturbed)


@pytest.mark.parametrize(
    "before_s", [0.0, 1.5, 4.0]
)  # together; while the worker's role is restarted; while it loads its model
def test_a_lost_driver_and_a_lost_worker_are_both_replaced(tmp_path, tiny_qwen2, undisturbed, before_s):
    done = run_with(
        tmp_path, tiny_qwen2, fault("SIGKILL", "update_actor", 0.02, role="actor_rollout", before_s=before_s)
    )
    assert done.returncode == 0 and len(seconds_back(done)) == 1
    check_ended_the_same(tmp_path, undisturbed)


def test_a_job_whose_cluster_is_lost_restarts_on_a_new_one_from_its_last_checkpoint(tmp_path, tiny_qwen2, undisturbed):
    done = run_with(tmp_path, tiny_qwen2, fault("cluster", "gen", 0.0, step=4))
    assert done.returncode == 0 and "starting a new job" in done.stderr and "global_step_2, step 2 of 4" in done.stderr
    check_ended_the_same(tmp_path, undisturbed)


def test_a_driver_lost_before_its_first_step_is_restarted(tmp_path, tiny_qwen2, undisturbed):
    done = run_with(tmp_path, tiny_qwen2, fault("SIGKILL", "next_batch", 0.0, step=1))
    assert done.returncode == 0
    check_ended_the_same(tmp_path, undisturbed)


def test_a_driver_that_is_lost_four_times_in_a_step_ends_the_run_and_the_journal_says_why(tmp_path, tiny_qwen2):
    stages = "gen", "reward", "old_log_prob", "adv", "update_actor"
    done = run_with(tmp_path, tiny_qwen2, *(fault("SIGKILL", stage, 0.0) for stage in stages))
    assert done.returncode == 128 + signal.SIGKILL
    [journal] = (tmp_path / "run/master").iterdir()
    state, _ = replay(str(journal))
    assert state.state == JobPhase.FAILED and state.reason in state.decisions[-1]
    losses = [decision for decision in state.decisions if "was lost" in decision]
    restarts = ["restarts the driver" in decision for decision in losses]
    before = "after step 0" in losses[0]  # the snapshot of step 1 was not complete: a loss of step 1
    assert restarts == [True] * (3 + before) + [False]
    assert "the limit is 3 losses" in state.decisions[-1] and "so the program ends" in state.decisions[-1]
