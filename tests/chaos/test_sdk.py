"""examples/openrlhf_ppo loses or freezes a process at step 3, and ends with the bits of an undisturbed run."""

import json
import signal

import pytest
import torch

from examples.openrlhf_ppo import main
from hybridrl.master.jobs.builder import RLJob
from hybridrl.master.service.journal import replay
from hybridrl.system.process_stat import read_process_stat
from tests.master.jobs.test_submit import left_of, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(400)]
STEPS, FAULT_STEP, UPDATES_PER_STEP = 5, 3, 4  # 2 epochs of 2 mini-batches
SMALL = ["--num_steps", STEPS, "--rollout_batch_size", 32, "--train_batch_size", 16, "--hidden_size", 32]
VICTIMS = ["rollout-0", "actor-1", "trainer-0", "supervisor", "master"]


def run(folder, **fault):
    """Run the job to its end; return actor and critic as they are in the last checkpoint."""
    watch = folder / "watch"
    watch.mkdir(parents=True)
    args = main.parse_args([*map(str, SMALL), "--save_path", str(folder / "run")])
    args.watch, args.fault = str(watch), fault
    job = main.build(args)
    trainer = job.spec.model_dump_json().replace(
        "examples.openrlhf_ppo.ppo_trainer:PPOTrainerActor", "tests.support.sdk.watched_trainer:WatchedTrainer"
    )
    assert RLJob.model_validate_json(trainer).submit("sdk-chaos", journal=str(folder / "journal")) == 0
    end = folder / "run" / f"global_step_{STEPS}"
    return {role: torch.load(end / role / "rank_0.pt") for role in ("actor", "critic")}


def events(folder, what):
    lines = (folder / "watch" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["what"] == what]


def running(pids):
    return [pid for pid in pids if read_process_stat(pid).state]


def assert_equal_bits(left, right, where="state"):
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for name in left:
            assert_equal_bits(left[name], right[name], f"{where}.{name}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for number, pair in enumerate(zip(left, right, strict=True)):
            assert_equal_bits(*pair, f"{where}[{number}]")
    else:
        assert left == right, where


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_job_that_loses_a_process_ends_as_if_it_had_not(tmp_path, undisturbed, victim, number):
    end = run(tmp_path, victim=victim, signal=int(number), step=FAULT_STEP)
    assert [end[role]["num_updates"] for role in ("actor", "critic")] == 2 * [STEPS * UPDATES_PER_STEP]
    assert_equal_bits(end, undisturbed)

    [hit] = events(tmp_path, "hit")
    completed = [event["at"] for event in events(tmp_path, "step") if event["step"] >= FAULT_STEP]
    print(f"{number.name} of {victim}: the step was completed {min(completed) - hit['at']:.1f} s after it")

    last = events(tmp_path, "trainer")[-1]["pid"]
    num_futures, num_done = json.loads((tmp_path / "watch" / f"futures-{last}.json").read_text())
    assert num_futures == num_done > 0

    before = json.loads((tmp_path / "watch" / "hit").read_text())
    [journal] = (tmp_path / "journal").glob("sdk-chaos-*")
    after = {slot: worker.pid for slot, worker in replay(str(journal))[0].workers.items()}
    if victim != "master":
        assert after[victim] != before[victim]  # it was replaced
    wait_until(lambda: not left_of("sdk-chaos-"))
    wait_until(lambda: not running({*before.values(), *after.values()}), timeout_s=30)
