"""A lost worker's step is run again from the snapshot, as often as the limits allow."""

import json

import pytest

from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.failure_policy import RULES, FailureKind
from hybridrl.single_controller.monitoring.process import PartTimes
from hybridrl.trainer.recovery.step_retry import FILE, StepRetry
from hybridrl.trainer.recovery.step_snapshot import ResumeState

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
    def parts(self) -> dict:
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


def test_without_snapshots_a_lost_worker_ends_the_run(tmp_path):
    run = Run(tmp_path, snapshot_freq=0)
    with pytest.raises(WorkerLost):
        run.train({1: [lost()]})
    assert run.trainer.log == []


def test_the_seconds_of_a_recovery_are_recorded_by_part_and_start_again_at_zero(tmp_path):
    run = Run(tmp_path)
    run.train({2: [lost()], 3: [lost("critic")]})
    entries = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    for entry in entries:
        assert list(entry["parts"]) == ["disconnect", "kill", "group", "model", "snapshot", "push"]
        assert 0 <= sum(entry["parts"].values()) <= entry["seconds"]
    assert len(entries) == 2
