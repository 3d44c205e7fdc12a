"""A submitted job is started again from its journal alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.resume import find_journal, resume_job
from hybridrl.master.service.journal import JournaledState, replay
from hybridrl.master.state.events import CheckpointCommitted, JobEnded, JobStarted, StepCompleted
from hybridrl.master.state.tables import JOB_ENDS, JobPhase
from tests.master.jobs.test_submit import left_of, wait_until

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_job_whose_cluster_is_gone_goes_on_at_its_commit_on_another_one(tmp_path):
    driver = [sys.executable, "-m", "tests.support.master.abandoned_job", str(tmp_path)]
    subprocess.run(driver, cwd=ROOT, timeout=150, check=True)
    (tmp_path / "gate").write_text("")
    [journal] = (tmp_path / "journals").iterdir()
    assert resume_job(str(journal)) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["0 0 - 0", "0 7 global_step_6 6"]
    [resumed] = set((tmp_path / "journals").iterdir()) - {journal}
    state, _ = replay(str(resumed))
    assert (state.state, state.job, state.commit, state.commit_step) == (
        JobPhase.SUCCEEDED,
        "abandoned",
        "global_step_6",
        6,
    )
    with pytest.raises(ConfigError, match="has succeeded; submit the job again"):
        resume_job(str(resumed))
    wait_until(lambda: not left_of("abandoned-"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hybridrl_job_resume_goes_on_after_every_process_of_the_cluster_was_killed(tmp_path):
    driver = [sys.executable, "-m", "tests.support.master.abandoned_job", str(tmp_path), "kill"]
    assert subprocess.run(driver, cwd=ROOT, timeout=190).returncode == -signal.SIGKILL
    (tmp_path / "gate").write_text("")
    [journal] = (tmp_path / "journals").iterdir()
    command = [sys.executable, "-m", "hybridrl.cli", "job", "resume", str(journal)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    resumed = subprocess.run(command, cwd=ROOT, env=environment, timeout=190, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert (tmp_path / "out").read_text().splitlines() == ["0 0 - 0", "0 7 global_step_6 6"]
    again = subprocess.run(command[:-1] + [str(tmp_path / "journals")], cwd=ROOT, timeout=60, capture_output=True)
    assert again.returncode == 2 and b"there are the journals of 2 runs; name one of" in again.stderr


def test_the_step_of_a_commit_is_kept_beside_the_step_that_had_begun(tmp_path):
    journal = JournaledState(str(tmp_path))
    for event in (JobStarted("j", "j-1"), StepCompleted(40), CheckpointCommitted(40, "c40"), StepCompleted(41)):
        journal.apply(event)
    journal.close()
    state, _ = replay(str(tmp_path))
    assert (state.step, state.commit, state.commit_step) == (41, "c40", 40)


def test_a_journal_without_a_spec_or_without_events_is_refused_with_the_way_out(tmp_path):
    for run in ("a-1", "a-2"):
        journal = JournaledState(str(tmp_path / run))
        journal.apply(JobStarted("a", run))
        journal.apply(JobEnded(False, "failed"))
        journal.close()
    assert replay(str(tmp_path / "a-1"))[0].state in JOB_ENDS
    with pytest.raises(ConfigError, match="a-1: .*no spec of a job.*`hybridrl job resume"):
        resume_job(str(tmp_path / "a-1"))
    with pytest.raises(ConfigError, match="2 runs; name one of a-1, a-2"):
        find_journal(str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere: there is no journal in this directory"):
        resume_job(str(tmp_path / "nowhere"))
