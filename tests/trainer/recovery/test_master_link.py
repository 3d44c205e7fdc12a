"""A supervisor that gives up leaves its decision and the end of the job in the journal."""

import pytest

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind
from hybridrl.master.service.client import MasterClient
from hybridrl.master.service.journal import JournaledState, history, replay
from hybridrl.master.state.events import JobEnded, JobStarted, RecoveryDecided
from hybridrl.master.state.tables import JobPhase
from hybridrl.trainer.recovery.master_link import journal_root, report_final_decision
from tests.support.master.monitored_process import wait_until_gone


@pytest.fixture
def config(tmp_path) -> TrainerConfig:
    return TrainerConfig(experiment_name="gsm8k", default_local_dir=str(tmp_path))


def spent() -> Decision:
    budgets = Budgets(step=4)
    failure = Failure(FailureKind.DRIVER_LOST, "the driver (attempt 4) was lost after step 4", target="the driver")
    return [budgets.spend(failure) for _ in range(4)][-1]


def test_without_a_master_the_journal_of_the_newest_job_is_written(config, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for run in ("gsm8k-a1b2c3", "gsm8k-a1b2c3.3", "gsm8k-other9"):
        journal = JournaledState(f"{journal_root(config)}/{run}")
        journal.apply(JobStarted("gsm8k", run, restarts_driver=True))
        journal.close()
    report_final_decision(config, "a1b2c3", spent())
    state, _ = replay(f"{journal_root(config)}/gsm8k-a1b2c3.3")
    assert (state.state, state.reason) == (JobPhase.FAILED, str(spent()))
    assert "the limit is 3 losses" in state.decisions[0] and "so the program ends" in state.decisions[0]
    assert [replay(f"{journal_root(config)}/{run}")[1] for run in ("gsm8k-a1b2c3", "gsm8k-other9")] == [1, 1]


def test_a_job_that_has_ended_keeps_its_outcome_and_gets_the_decision(config, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    journal = JournaledState(f"{journal_root(config)}/gsm8k-a1b2c3")
    journal.apply(JobStarted("gsm8k", "gsm8k-a1b2c3"))
    journal.apply(JobEnded(False, "WorkerLost: actor-0"))
    journal.close()
    report_final_decision(config, "a1b2c3", spent())
    state, _ = replay(f"{journal_root(config)}/gsm8k-a1b2c3")
    assert state.reason == "WorkerLost: actor-0" and len(state.decisions) == 1


def test_before_the_first_job_there_is_nothing_to_report_to(config, tmp_path):
    report_final_decision(config, "a1b2c3", spent())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ray_cluster")
def test_a_master_that_still_runs_writes_it(config):
    run = "gsm8k-d4e5f6"
    journal = f"{journal_root(config)}/{run}"
    lost = MasterClient(job="gsm8k", run=run, journal=journal, restarts_driver=True)
    lost.report_step(4)
    assert lost._heartbeats.drain(10)
    lost.close()  # as a driver that has ended
    report_final_decision(config, "d4e5f6", spent())
    wait_until_gone(run)
    events = [type(one.event) for one in history(journal)]
    assert events[-2:] == [RecoveryDecided, JobEnded]
    state, _ = replay(journal)
    assert state.state == JobPhase.FAILED and state.decisions == (f"step 4: {spent()}",)
