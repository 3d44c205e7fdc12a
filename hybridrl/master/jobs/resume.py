"""`resume_job`: starts a submitted job again from its journal alone, also on another cluster."""

import os
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.job_handle import ResumePoint
from hybridrl.master.jobs.submit import RunningJob, connection, submit
from hybridrl.master.plan.spec import JobSpec
from hybridrl.master.service.journal import history, replay
from hybridrl.master.service.run_journals import JOURNAL_ROOT
from hybridrl.master.state.events import JobStarted
from hybridrl.master.state.reducer import JobState
from hybridrl.master.state.tables import JOB_ENDS, JobPhase
from hybridrl.single_controller.cluster import find_actor, master_name


def resume_job(journal_dir_or_run: str, *, blocking: bool = True, address: str | None = None) -> int | RunningJob:
    """Start a job again as a new run, from the last commit that its journal has.

    The trainer finds its progress in `JobHandle.resume_point`, as after a restart. The new run's journal is beside the
    old one.

    Args:
        journal_dir_or_run: The journal's directory, also as a URL; the directory that was given as
            `submit(journal=...)`, if it has one run; or the name of a run whose journal is at the default place.
        blocking: See `submit`.
        address: The cluster's, from the command line. None: see `submit`.

    Returns:
        As `submit`.

    Raises:
        ConfigError: If there is no such journal, the job was not submitted, has succeeded, or still runs.
    """
    journal = find_journal(journal_dir_or_run)
    spec, state = read_job(journal)
    if state.state == JobPhase.SUCCEEDED:
        raise ConfigError(f"{journal}: the run {state.run} has succeeded; submit the job again to repeat it")
    with connection(blocking=blocking, address=address):
        if state.state not in JOB_ENDS and find_actor(master_name(state.run)) is not None:
            raise ConfigError(
                f"{journal}: the run {state.run} still runs on this cluster; end it first: "
                f"`hybridrl job stop {state.run}`"
            )
        resume_point = ResumePoint(step=state.step, commit=state.commit, commit_step=state.commit_step)
        return submit(spec, state.job, blocking=blocking, journal=os.path.dirname(journal), resume_point=resume_point)


def read_job(journal: str) -> tuple[JobSpec, JobState]:
    """Return the spec of a submitted job, and its state after the last event of its journal.

    Raises:
        ConfigError: If the journal has no spec.
    """
    state, _ = replay(journal)
    started = next((entry.event for entry in history(journal) if isinstance(entry.event, JobStarted)), None)
    if started is None or not started.spec:
        raise ConfigError(
            f"{journal}: this journal has no spec of a job, so its run was not started by submit(); resume a run of "
            "main_ppo by its run directory, `hybridrl job resume RUN_DIR`, or submit the job again"
        )
    return JobSpec.model_validate_json(started.spec), state


def find_journals(journal_dir_or_run: str) -> list[str]:
    """Return the directories of all journals that the argument of `resume_job` may mean."""
    if "://" in journal_dir_or_run:
        return [journal_dir_or_run.rstrip("/")]
    for place in (Path(journal_dir_or_run), Path(JOURNAL_ROOT, journal_dir_or_run)):
        found = {events.parent for pattern in ("", "*/") for events in place.glob(f"{pattern}events-*.jsonl")}
        if found:
            return sorted(str(path.resolve()) for path in found)
    return []


def find_journal(journal_dir_or_run: str) -> str:
    """Return the directory of a journal; the argument is that of `resume_job`."""
    found = find_journals(journal_dir_or_run)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{journal_dir_or_run}: there are the journals of {len(found)} runs; name one of "
            f"{', '.join(Path(path).name for path in found)}"
        )
    raise ConfigError(
        f"{journal_dir_or_run}: there is no journal in this directory, and none of a run of this name in "
        f"{JOURNAL_ROOT}; name the directory that was given to submit(journal=...)"
    )
