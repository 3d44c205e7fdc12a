"""A lost worker's step is run again from the snapshot, as often as the limits allow."""

import json
import re
from dataclasses import asdict

import pytest

from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.failure_policy import RULES, FailureKind
from hybridrl.master.state.events import RecoveryCompleted, decode
from hybridrl.single_controller.monitoring.process import PROCESS, PartTimes
from hybridrl.trainer.recovery.policies import ResumeState, RetryPolicy
from hybridrl.trainer.recovery.step_retry import FILE, StepRetry
from hybridrl.view.readers.failures import recoveries

MAX_LOSSES = RULES[FailureKind.WORKER_LOST].limit


class Drawn:
    """A stateful part: how much was drawn."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state


class Processes:
    classes = ("actor", "critic")  # two roles share the processes
    times: PartTimes

    def split_model_time(self) -> None:
        self.times.split("model", {"group": 0.0})


class Group:
    world_size = 1

    def __init__(self, processes: Processes, log: list[str]):
        self.processes, self.log = processes, log

    def rebuild(self) -> None:
        self.log.append("rebuild")
        with self.processes.times.part("kill"):
            pass


class Counter:
    """The smallest recoverable trainer: it counts steps, and its workers hold nothing."""

    weight_channel = None

    def __init__(self) -> None:
        self.log: list[str] = []
        processes = Processes()
        self.groups = {role: Group(processes, self.log) for role in processes.classes}
        self.global_steps, self.drawn = 0, Drawn()
        self.context = RunContext()

    @property
    def stateful(self) -> dict:
        return {"drawn": self.drawn}

    def trained_groups(self) -> dict:
        return {}

    def init_role(self, role: str) -> None:
        self.log.append(f"init {role}")

    def disconnect(self, reason: str) -> None:
        self.log.append("disconnect")

    def reconnect(self) -> None:
        self.log.append(f"reconnect at {self.global_steps}")


def lost(role: str = "actor") -> WorkerLost:
    return WorkerLost(role, 0, "update_actor", "killed by SIGKILL")


class Run:
    def __init__(self, folder, *, snapshot_freq: int = 1):
        self.trainer = Counter()
        self.retry = StepRetry(self.trainer, ResumeState("run"), snapshot_freq=snapshot_freq, directory=str(folder))
        self.retry.take_snapshot(force=True)

    def train(self, errors: dict[int, list[Exception]], *, until: int = 3) -> None:
        """Run steps up to `until`; a step raises its errors first, one per attempt."""

        def work() -> None:
            while self.trainer.global_steps < until:
                self.trainer.global_steps += 1
                self.trainer.drawn.count += 10
                if errors.get(self.trainer.global_steps):
                    raise errors[self.trainer.global_steps].pop(0)
                self.retry.take_snapshot()

        self.retry.run_with_retry(work)


def test_a_step_is_run_again_from_the_state_of_the_step_before(tmp_path):
    run = Run(tmp_path)
    run.train({2: [lost(), lost("critic")]})
    assert (run.trainer.global_steps, run.trainer.drawn.count) == (3, 30)
    once = ["disconnect", "rebuild", "init actor", "init critic", "reconnect at 1"]  # shared processes are rebuilt once
    assert run.trainer.log == once * 2
    entries = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(entry["lost"], entry["step"], entry["back_at_step"]) for entry in entries] == [
        (["actor-0"], 2, 1),
        (["critic-0"], 2, 1),
    ]
    assert run.retry.metrics()["failover/recoveries"] == 2


def test_the_limit_is_per_completed_step(tmp_path):
    Run(tmp_path).train({step: [lost() for _ in range(MAX_LOSSES)] for step in (1, 2, 3)})
    with pytest.raises(WorkerLost):
        Run(tmp_path).train({1: [lost() for _ in range(MAX_LOSSES + 1)]})


def test_a_second_timeout_and_an_exception_in_user_code_end_the_run(tmp_path):
    def timeout() -> CallTimeout:
        return CallTimeout("no answer in 5 s", role="actor", ranks=[1], method="update_actor")

    with pytest.raises(CallTimeout):
        Run(tmp_path).train({1: [timeout(), timeout()]})
    with pytest.raises(ZeroDivisionError):
        Run(tmp_path).train({1: [ZeroDivisionError()]})


def test_without_snapshots_a_lost_worker_ends_the_run():
    attempts = []

    def work() -> None:
        attempts.append(1)
        raise lost()

    with pytest.raises(WorkerLost):
        RetryPolicy().run_with_retry(work)
    assert attempts == [1]


class Master:
    """A connection to a master that knows which process blocks a call."""

    def __init__(self, blocking: tuple[str, int, str] | None) -> None:
        self.blocking = blocking
        self.sent: list[dict] = []
        self.asked: list[tuple] = []

    def send(self, data: dict) -> None:
        self.sent.append(dict(data))

    def ask(self, method: str, *args: str, timeout_s: float) -> tuple[str, int, str] | None:
        self.asked.append((method, *args))
        return self.blocking

    def stop(self) -> None:
        pass


@pytest.fixture
def connected(monkeypatch):
    def connect(blocking: tuple[str, int, str] | None = None) -> Master:
        master = Master(blocking)
        monkeypatch.setattr(PROCESS, "master", master)
        return master

    return connect


def events_of(master: Master, name: str) -> list[dict]:
    return [one for one in master.sent if one["event"] == name]


def test_after_a_timeout_the_process_that_blocks_the_call_is_the_one_that_is_replaced(tmp_path, connected):
    master = connected(("actor+critic", 1, "it is at data.py:7, while actor+critic-0 are in a collective"))
    overdue = CallTimeout("no answer in 5 s", role="actor", ranks=[0, 1], method="update_actor")
    run = Run(tmp_path)
    run.train({2: [overdue]})
    assert master.asked == [("find_blocking", "actor.update_actor")]
    [back] = events_of(master, "RecoveryCompleted")
    assert back["lost"] == ("actor+critic-1",)
    assert run.trainer.log.count("rebuild") == 1
    timeout, loss = (one["text"] for one in events_of(master, "RecoveryDecided"))
    assert "actor+critic-1 blocks it: it is at data.py:7" in timeout
    assert loss.startswith("actor+critic-1 was lost in update_actor of step 2")


def test_after_a_timeout_every_role_that_has_not_answered_is_replaced(tmp_path, connected):
    master = connected(("critic", 1, "it is at data.py:7"))
    overdue = CallTimeout("no answer in 5 s", role="actor", ranks=[0], method="receive", others={"critic": [0, 1]})
    run = Run(tmp_path)
    run.trainer.groups["critic"].processes = Processes()  # of its own
    run.train({2: [overdue]})
    [back] = events_of(master, "RecoveryCompleted")
    assert back["lost"] == ("actor-0", "critic-1") and run.trainer.log.count("rebuild") == 2


@pytest.mark.parametrize("has_master", [True, False])
def test_without_an_answer_of_a_master_the_called_process_is_replaced(tmp_path, connected, has_master):
    master = connected(None) if has_master else None
    Run(tmp_path).train({2: [CallTimeout("no answer in 5 s", role="actor", ranks=[1], method="update_actor")]})
    found = events_of(master, "RecoveryCompleted") if master else recoveries(str(tmp_path))
    assert [list(one["lost"]) for one in found] == [["actor-1"]]


def test_a_recovery_is_written_once(tmp_path, connected):
    Run(tmp_path).train({2: [lost()]})
    [back] = recoveries(str(tmp_path))
    (tmp_path / FILE).unlink()
    master = connected()
    Run(tmp_path).train({2: [lost()]})
    assert not (tmp_path / FILE).exists()  # the master's journal has it
    event = decode(events_of(master, "RecoveryCompleted")[0])
    assert isinstance(event, RecoveryCompleted)
    assert asdict(event).keys() == back.keys()
    assert re.fullmatch(r"recovered: all roles are at the end of step 1 \(.* s: .*\); retrying step 2", str(event))


def test_the_seconds_of_a_recovery_are_recorded_by_part_and_start_again_at_zero(tmp_path):
    run = Run(tmp_path)
    run.train({2: [lost()], 3: [lost("critic")]})
    entries = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    for entry in entries:
        assert list(entry["parts"]) == ["disconnect", "kill", "group", "model", "snapshot", "push"]
        assert 0 <= sum(entry["parts"].values()) <= entry["seconds"]
    assert len(entries) == 2
