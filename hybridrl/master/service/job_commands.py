"""The commands `hybridrl job ls|status|logs|stop`.

They read from a job's master, or from its journal.
"""

import os
import time
from dataclasses import asdict
from typing import Any

from hybridrl.driver.cluster import ray_cluster
from hybridrl.driver.cluster.ray_cluster import AUTO
from hybridrl.driver.text_table import text_table
from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.master.service import run_journals
from hybridrl.master.service.client import list_masters
from hybridrl.master.service.journal import JournalEntry, history, replay
from hybridrl.master.service.process_output import joined_process, printed_by
from hybridrl.master.service.run_journals import journals_in, journals_of
from hybridrl.master.state.events import DRIVERS
from hybridrl.master.state.reducer import to_json
from hybridrl.master.state.tables import JOB_ENDS
from hybridrl.single_controller.cluster import get_value

ANSWER_TIMEOUT_S = 20.0
HIDDEN_FIELDS = ("machine", "stdout", "stderr", "spec", "plan")  # of events, in the history: too long for a line


def connect(address: str | None) -> str:
    """Connect to a Ray cluster: `address`, else RAY_ADDRESS, else the only one of this machine; return its address.

    Raises:
        ConfigError: If there is none, or several.
    """
    import ray

    if ray.is_initialized():
        return _cluster()
    set_here = os.environ.get("RAY_ADDRESS")
    if not address and not set_here:
        ray_cluster.check_only_cluster()
    return ray_cluster.connect(
        address or set_here or AUTO,
        setting="RAY_ADDRESS" if set_here and not address else "--address",
        hint="give --address HOST:PORT of the job's cluster, or the run's directory in place of the job",
        log_to_driver=False,
    )


def list_jobs() -> str:
    """Return a table of the jobs that run on the connected cluster, below its address."""
    described = _describe_all(list_masters())
    if not described:
        return f"no job runs on the Ray cluster at {_cluster()}\n"
    rows = []
    for run, description in sorted(described.items()):
        alive = sum(worker["state"] == "alive" for worker in description["workers"].values())
        minutes = f"{(time.time() - description['started']) / 60:.0f} min"
        about = [str(description[name]) for name in ("job", "state", "step")]
        rows.append([run, *about, f"{alive}/{len(description['workers'])} alive", minutes])
    table = text_table(("RUN", "JOB", "STATE", "STEP", "PROCESSES", "FOR"), rows, is_ruled=False)
    return "\n".join([f"Ray cluster at {_cluster()}", *table]) + "\n"


def status(job: str, address: str | None) -> str:
    """Return the status of a job as text.

    Args:
        job: A run, a job's name, or the directory of a run. For a directory its journal is read, also for a job that no
            longer runs, if its journal is on this machine.
        address: See `connect`.
    """
    master, journals = _find(job, address)
    if master is not None:
        return _status_text(_describe(master), live=True)
    state, _ = replay(journals[0])
    text = _status_text(
        {**to_json(state), "beats": {}, "activities": {}, "journal": journals[0], "is_durable": True}, live=False
    )
    others = "".join(f"  {path}\n" for path in journals[1:])
    return f"{text}this is the newest run; earlier ones have journals here:\n{others}" if others else text


def logs(job: str, address: str | None) -> str:
    """Return the job's history, a line per event. Arguments: see `status`."""
    return "".join(f"{_line(entry)}\n" for entry in _history(job, address))


def process_logs(job: str, process: str, address: str | None, *, lines: int) -> str:
    """Return what a process of the job has printed.

    Args:
        job: See `status`.
        process: See `joined_process`.
        address: See `connect`.
        lines: See `printed_by`.
    """
    if lines < 1:
        raise ConfigError(f"--lines {lines}: must be 1 or more")
    event = joined_process(_history(job, address), process)
    return printed_by(event, lines=lines, connect=lambda: connect(address))


def stop(job: str, address: str | None, *, timeout_s: float) -> str:
    """Stop a job's trainer, as SIGTERM would, and wait until the job is gone.

    Raises:
        CallTimeout: If the job still runs after `timeout_s`.
    """
    connect(address)
    run, master = find_job(job)
    _get(master.stop.remote("`hybridrl job stop`"))
    until = time.monotonic() + timeout_s
    while run in list_masters():
        if time.monotonic() > until:
            raise CallTimeout(
                f"{run} still runs {timeout_s:g} s after the request to stop; its trainer may be committing a "
                "checkpoint: wait, or raise --timeout"
            )
        time.sleep(0.1)
    return f"{run} has ended\n"


def find_job(job: str) -> tuple[str, Any]:
    """Return (run, master) for a run, or for a job that has exactly one run.

    Raises:
        ConfigError: If there is none, or several. The message lists the runs.
    """
    found = list_masters()
    if job in found:
        return job, found[job]
    runs = [run for run, description in _describe_all(found).items() if description["job"] == job]
    if len(runs) == 1:
        return runs[0], found[runs[0]]
    if runs:
        raise ConfigError(f"{job}: the job runs {len(runs)} times here; name one of {', '.join(sorted(runs))}")
    raise ConfigError(
        f"{job}: no such job runs on the Ray cluster at {_cluster()}; there are {', '.join(sorted(found)) or 'none'}"
    )


def _find(job: str, address: str | None) -> tuple[Any, list[str]]:
    """Return the job's master and no journal, or None and its journals on this machine, newest first."""
    if os.path.isdir(job) or "://" in job:
        journals = [job.rstrip("/")] if "://" in job else journals_in(job)
        if not journals:
            raise ConfigError(f"{job}: there is no journal of a master below this directory")
        return None, journals
    try:
        connect(address)
        return find_job(job)[1], []
    except ConfigError as error:
        if journals := journals_of(job):
            return None, journals
        raise ConfigError(
            f"{error}. No journal of it is in {run_journals.JOURNAL_ROOT}, either; if submit(journal=DIR) was given "
            "another directory, name DIR in place of the job"
        ) from error


def _history(job: str, address: str | None) -> list[JournalEntry]:
    master, journals = _find(job, address)
    if master is None:
        return history(journals[0])
    return _get(master.history.remote())


def _cluster() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def _describe_all(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import ray

    described = {}
    for run, master in found.items():
        try:
            described[run] = _describe(master)
        except (ray.exceptions.RayError, CallTimeout):  # the master ends, or is being restarted
            continue
    return described


def _describe(master: Any) -> dict[str, Any]:
    return _get(master.describe.remote())


def _get(reference: Any) -> Any:
    hint = "; Ray may be restarting the master, try again"
    return get_value(reference, what="the master's answer", timeout_s=ANSWER_TIMEOUT_S, hint=hint)


def _status_text(description: dict[str, Any], *, live: bool) -> str:
    lines = [
        f"{description['run']} ({description['job']}) is {description['state']}, at step {description['step']}"
        + (f": {description['reason']}" if description["reason"] else "")
    ]
    if not live and description["state"] not in JOB_ENDS:
        lines.append(
            "this is the last entry of its journal; `hybridrl job status RUN` asks the cluster whether it still runs"
        )
    at_step = f" (step {description['commit_step']})" if description["commit"] else ""
    lines.append(f"last commit: {description['commit'] or 'none'}{at_step}")
    if description["metrics"]:
        lines.append("metrics: " + ", ".join(f"{name} {value:g}" for name, value in description["metrics"].items()))
    rows = []
    for slot, worker in sorted(description["workers"].items(), key=lambda item: (item[0] not in DRIVERS, item[0])):
        beat, activity = description["beats"].get(slot, {}), description["activities"].get(slot)
        memory = f"{beat['memory'] / 2**30:.2f} GiB" if "memory" in beat else "-"
        does = worker["exit_reason"] or (
            "-" if activity is None else f"{activity['method'] or 'idle'} for {activity['elapsed_s']:.0f} s"
        )
        rows.append((slot, worker["state"], str(worker["pid"]), str(worker["incarnation"]), memory, does))
    lines += text_table(("PROCESS", "STATE", "PID", "INCARNATION", "MEMORY", "DOES"), rows, is_ruled=False)
    for name, listed in (("failure", "failures"), ("decision", "decisions"), ("warning", "warnings")):
        lines += [f"{name}: {text}" for text in description[listed]]
    if not description["is_durable"]:
        lines.append(
            f"the journal {description['journal']} cannot be written; the master keeps the events in memory and retries"
        )
    return "\n".join(lines) + "\n"


def _line(entry: JournalEntry) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
    words = ", ".join(
        f"{name}={value}"
        for name, value in asdict(entry.event).items()
        if value not in ("", (), {}) and name not in HIDDEN_FIELDS
    )
    return f"{when}  {type(entry.event).__name__:<19} {words}"
